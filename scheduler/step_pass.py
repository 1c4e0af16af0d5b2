"""One ranked pass: walks running and waiting sequences in rank order and places what fits into the step's tokens, seats and
blocks. Nothing is placed twice and nothing placed is ever evicted, so there is nothing to undo.

    rank order   R1   W1   R2   R3   W2   R4          R running, W waiting, merged lazily
                 placed ──────────► │ ◄────── victims come from here, last first
                                    current

The decode lane is placed as a whole, at the end: its seats, tokens and blocks are set aside, and as long as everybody else fits
into the rest, its members' ranks do not matter. When somebody does not, the lane is dissolved and its members take their
places in the order; those that may have to pause do so as soon as there is a reason to.
"""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING

from fairlane.blockmgr.manager import PrefixHit
from fairlane.scheduler.events import PreemptionKind, PreemptionReason
from fairlane.scheduler.placement import Placement
from fairlane.scheduler.policies.base import BatchView, Rank
from fairlane.scheduler.request import Sequence, SequenceStatus
from fairlane.scheduler.settlement import Settlement, Shortage
from fairlane.scheduler.stalls import end_stall, evicted, pause, started

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler

# Guard on policy evictions: after this many a sequence is immune.
MAX_EVICTIONS = 3


class StepPass:
    """Builds one step. Use once: run(), then `placement` and settlement()."""

    def __init__(self, scheduler: Scheduler, now_s: float) -> None:
        self._scheduler = scheduler
        self._policy = scheduler.policy
        self._blocks = scheduler.blocks
        self._limits = scheduler.limits
        self._now_s = now_s
        known = scheduler.settlement
        self._known = known if known is not None and known.holds(scheduler.step_id, now_s) else None
        self._look_again = False
        self._lane = scheduler.lane
        self.places_lane = len(self._lane) > 0
        self._order = self._running_in_order()
        self._plan = self._policy.plan(self._view())
        self._lane_may_pause = self._plan.pause_lower
        self._budget = self._plan.token_budget
        self._seats = self._limits.max_num_seqs
        self._lower_cap = self._plan.lower_prefill_cap
        self._protected_chunk = False
        self._num_passed_over = 0
        self._passed_over: list[Sequence] = []  # since the last admission
        self._held_back = 0  # free blocks kept for a head that was passed over too often
        self._evicted: set[Sequence] = set()
        self._stuck: list[Sequence] = []  # had to grow and could not
        self._harmless = -inf  # heads of this priority or less have nobody to evict
        self._settled = True  # nothing happened that the next step might see differently
        self._next = 0
        self._decodes_ahead = self._pausable_decodes = 0
        self._count_decodes()
        self.placement = Placement(self._policy, self._blocks, scheduler.cost)

    def run(self) -> None:
        """Places what fits, then notes who was left out and who was made to pause."""
        if self.places_lane:
            self._set_lane_aside()
        self._walk()
        placed = set(self.placement.sequences)
        for sequence in self._order:
            if sequence in placed or sequence.status is not SequenceStatus.RUNNING or not self._is_due(sequence):
                continue
            self._settled = False
            self._policy.on_unserved(sequence)
            if self._protected_chunk and self._may_decode(sequence) and self._may_pause(sequence):
                pause(sequence, self._now_s, self._scheduler.delta)

    def settlement(self) -> Settlement | None:
        """What this step found out about admission, for the next ones; None while things are moving."""
        scheduler = self._scheduler
        if not self._settled or self._lane.has_done:
            return None
        if self._known is not None:
            return self._known
        if not self._policy.num_waiting():
            shortage = Shortage.REQUESTS
        else:
            shortage = Shortage.ROOM if scheduler.running.has_free_slot else Shortage.SLOTS
        self._lane.settle()  # leases are counted in tokens computed
        return Settlement.after(scheduler.step_id, shortage, self._policy, scheduler.census, scheduler.running.shortest_lease())

    def _walk(self) -> None:
        """Goes on until tokens, seats or sequences run out. The head is looked up again only after something happened to it:
        a rank is fixed within a step, so charges of this step do not bring another one forward."""
        policy = self._policy
        head, head_rank = self._peek(), None
        while True:
            if self._look_again:
                self._look_again, head, head_rank = False, self._peek(), None
            running = self._next_running()
            if running is None and head is None:
                return
            if head is not None and head_rank is None:
                head_rank = policy.rank(head)
            if self._budget <= 0 or self._seats <= 0:
                if not self.places_lane or (running is None and not self._may_displace(head, head_rank)):
                    return
                self._dissolve_lane()
                continue
            if running is not None and (head is None or head_rank is None or policy.rank(running) < head_rank):
                self._next += 1
                self._place_running(running)
            elif head is not None:
                self._consider_waiting(head)
                head, head_rank = self._peek(), None

    def _peek(self) -> Sequence | None:
        """The waiting head; None where it is known that none gets in."""
        return None if self._known is not None else self._policy.peek()

    def _ask_again(self) -> None:
        """Something is given back: heads that were passed over come before whoever would get what they could use now."""
        self._look_again, self._known, self._num_passed_over, self._held_back = True, None, 0, 0
        self._passed_over.clear()
        self._policy.end_step()

    # -- the decode lane -----------------------------------------------------------------------------------------------

    def _running_in_order(self) -> list[Sequence]:
        running, rank = self._scheduler.running, self._policy.rank
        if self.places_lane:
            return running.unsteady_in_order(rank)
        return running.in_order(rank, ranks_change=self._policy.ranks_change)

    def _set_lane_aside(self) -> None:
        """Its seats and tokens; its blocks are not counted as free."""
        size = len(self._lane)
        fits = size <= min(self._seats, self._budget) and self._lane.num_new_blocks() <= self._blocks.num_free_blocks
        self._seats -= size
        self._budget -= size
        if not fits:
            self._dissolve_lane()

    def _dissolve_lane(self) -> None:
        self._take_out(self._lane.members)
        self.places_lane = False

    def _take_out(self, members: list[Sequence]) -> None:
        """They are placed one by one, by rank, like everybody else who was not placed yet."""
        self._lane.leave(members, self._policy)
        self._budget += len(members)
        self._seats += len(members)
        placed = set(self.placement.sequences)
        self._order = [sequence for sequence in self._running_in_order() if sequence not in placed]
        self._next = 0
        self._count_decodes()

    def _release_pausable(self, sequence: Sequence) -> bool:
        """Before a protected sequence gets a chunk: those in the lane that must pause then leave it. Whether there were any."""
        if not (self.places_lane and self._lane_may_pause and self._is_protected(sequence)):
            return False
        self._lane_may_pause = False  # from here on nobody in it
        pausable = [member for member in self._lane.members if self._may_pause(member)]
        if pausable:
            self._take_out(pausable)
            self.places_lane = len(self._lane) > 0
        return bool(pausable)

    def _may_displace(self, head: Sequence | None, rank: Rank | None) -> bool:
        """Whether a waiting head could take the place of a member of the lane, by rank or by right."""
        if head is None or rank is None:
            return False
        worst = self._lane.worst_rank
        outranks = worst is None or rank < worst
        return (outranks and self._scheduler.running.has_free_slot) or self._has_victims(head)

    def _lane_is_in_the_way(self, head: Sequence, hit: PrefixHit | None) -> bool:
        """Whether the head does not fit beside the lane, but might with its members' blocks."""
        return not self._fits(head, hit, self._num_free_blocks()) and (
            self._fits(head, hit, self._blocks.num_free_blocks) or self._has_victims(head)
        )

    def _has_victims(self, head: Sequence) -> bool:
        """Whether there is anybody at all, in the lane or not, whom a waiting head may evict."""
        priority = self._policy.priority(head)
        if priority <= self._harmless or not self._policy.could_preempt(
            head.request.tier, self._scheduler.census.running_by_tier
        ):
            return False
        self._lane.settle()
        found = any(self._may_evict(head, other) for other in (*self._lane.members, *self._unplaced()))
        if not found and not self._policy.leads_evict:
            self._harmless = priority
        return found

    def _num_free_blocks(self) -> int:
        return self._blocks.num_free_blocks - (self._lane.num_new_blocks() if self.places_lane else 0)

    def _count_decodes(self) -> None:
        may_decode = [sequence for sequence in self._order if self._may_decode(sequence)]
        self._pausable_decodes = sum(1 for sequence in may_decode if self._may_pause(sequence))
        self._decodes_ahead = len(may_decode) - self._pausable_decodes

    def _view(self) -> BatchView:
        prefilling = Counter(sequence.request.tier for sequence in self._order if sequence.num_pending_tokens > 1)
        return BatchView(self._limits.max_num_batched_tokens, self._scheduler.running.by_tier, prefilling)

    # -- running sequences ---------------------------------------------------------------------------------------------

    def _next_running(self) -> Sequence | None:
        while self._next < len(self._order):
            sequence = self._order[self._next]
            if sequence.status is SequenceStatus.RUNNING and sequence not in self._evicted and self._is_due(sequence):
                return sequence
            self._next += 1
        return None

    def _is_due(self, sequence: Sequence) -> bool:
        """Whether it has anything to compute: not when its last tokens are in flight already."""
        if sequence.num_computed_tokens < sequence.num_tokens - 1 or not sequence.num_in_flight:
            return sequence.num_pending_tokens > 0
        return sequence.num_output_tokens + sequence.num_in_flight < sequence.request.max_tokens

    def _may_decode(self, sequence: Sequence) -> bool:
        return sequence.num_pending_tokens == 1 and self._is_due(sequence)

    def _may_pause(self, sequence: Sequence) -> bool:
        protected = self._plan.protected_priority
        if not self._plan.pause_lower or protected is None or self._policy.priority(sequence) >= protected:
            return False
        return not self._policy.is_owed(sequence)

    def _place_running(self, sequence: Sequence) -> None:
        if sequence.num_pending_tokens == 1:
            self._place_decode(sequence)
            return
        if self._release_pausable(sequence):
            return
        num_tokens = self._chunk(sequence, sequence.num_pending_tokens)
        if num_tokens > 0 and self._grow(sequence, num_tokens):
            self._place(sequence, num_tokens)

    def _place_decode(self, sequence: Sequence) -> None:
        if self._may_pause(sequence):
            self._pausable_decodes -= 1
            if self._protected_chunk:
                return
        else:
            self._decodes_ahead -= 1
        if self._grow(sequence, 1):
            self._place(sequence, 1)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for the tokens it is about to write; False leaves it with its KV and out of this step."""
        total = sequence.num_computed_tokens + num_tokens
        needed = self._blocks.num_new_blocks(sequence.request_id, total, sequence.num_computed_tokens)
        if self.places_lane and needed > self._num_free_blocks():
            self._dissolve_lane()
            return False
        missing = needed - self._blocks.num_free_blocks
        if needed and missing > 0:
            victims = self._victims(self._yielding_to(sequence), missing)
            if victims is None:
                self._stuck.append(sequence)
                return False
            self._evict(victims, PreemptionReason.KV_CAPACITY, sequence)
        self.placement.grow(sequence, self._blocks.grow(sequence.request_id, total, sequence.num_computed_tokens))
        return True

    def _yielding_to(self, grower: Sequence) -> list[Sequence]:
        """Those that rank after it, and those before it that are stuck because they may not take its own blocks in turn (a
        minimum share is owed to them), or neither would ever get on."""
        may_take = self._policy.may_take
        stuck = [s for s in self._stuck if s.status is SequenceStatus.RUNNING and not may_take(s, grower)]
        return [s for s in self._unplaced() + stuck if may_take(grower, s)]

    # -- waiting sequences ---------------------------------------------------------------------------------------------

    def _consider_waiting(self, sequence: Sequence) -> None:
        """Admits the waiting head or passes it over."""
        if sequence.steps_in_flight or sequence in self._evicted:
            # Evicted with a step still out: its tokens, and what that step swaps, must be back before it is sent in full.
            # Evicted in this very step: others were placed on the strength of it.
            self._settled = False
            self._policy.skip(sequence)
            return
        if self._release_pausable(sequence):
            return
        hit = self._lookup(sequence)
        if self._chunk(sequence, sequence.num_tokens - _present(sequence, hit)) <= 0:
            self._policy.close(sequence)  # the step has no tokens left for its band, nor for those below
        elif self.places_lane and self._lane_is_in_the_way(sequence, hit):
            self._dissolve_lane()
        elif not self._make_room(sequence, hit):
            self._pass_over(sequence)
        else:
            # Evictions may have put blocks of the prefix onto the free list; look again, there is room for the worst case.
            self._admit(sequence, self._lookup(sequence))

    def _lookup(self, sequence: Sequence) -> PrefixHit | None:
        if not (self._blocks.enable_prefix_caching and sequence.request.cache_mode.reads):
            return None  # hashing costs more than a lookup
        if sequence.num_computed_tokens:
            return None  # swapped out: all it had comes back, bit by bit
        sequence.chain.extend(sequence.token_ids)
        return self._blocks.lookup(sequence.chain, sequence.num_tokens)

    def _pass_over(self, sequence: Sequence) -> None:
        """Backfill: others may go first, up to `lookahead` of them a step. Once it was passed over too often, nobody of its
        band overtakes it any more, and the blocks that are free now are kept for it: a higher band must bring its own."""
        self._num_passed_over += 1
        if sequence.num_skips >= self._limits.max_skips:
            self._held_back = self._blocks.num_free_blocks
            self._policy.close(sequence)
        elif self._num_passed_over >= self._limits.lookahead:
            self._num_passed_over = 0
            self._policy.close(sequence)
        else:
            self._passed_over.append(sequence)
            self._policy.skip(sequence)

    def _fits(self, sequence: Sequence, hit: PrefixHit | None, num_free_blocks: int) -> bool:
        """Whether there is a slot, and blocks for all its tokens and what is kept free."""
        needed = self._blocks.num_blocks_to_allocate(sequence.num_tokens, hit)
        running = self._scheduler.running
        kept = self._scheduler.room.kept_from(sequence.request.tier, self._policy, len(running))
        return needed + kept <= num_free_blocks - self._held_back and running.has_free_slot

    def _make_room(self, sequence: Sequence, hit: PrefixHit | None) -> bool:
        """Sees to what it takes to fit, evicting where the policy agrees and it suffices.

        For evictions the hit counts for nothing: its blocks may be the victims' own.
        """
        if self._fits(sequence, hit, self._num_free_blocks()):
            return True
        slots_missing = 0 if self._scheduler.running.has_free_slot else 1
        evictable = [s for s in self._unplaced() if self._may_evict(sequence, s)]
        # With everybody else gone, nobody would be left to grow.
        kept = self._scheduler.room.least(len(self._scheduler.running) - len(evictable))
        missing = self._blocks.blocks_for(sequence.num_tokens) + kept + self._held_back - self._num_free_blocks()
        victims = self._victims(evictable, missing, slots_missing) if evictable else None
        if victims:  # else what is kept free is enough
            self._evict(victims, PreemptionReason.HIGHER_RANK, sequence)
        return victims is not None

    def _may_evict(self, candidate: Sequence, victim: Sequence) -> bool:
        """The policy's word and the engine's guards: immune after three evictions, no eviction before some progress."""
        if victim.num_evictions >= MAX_EVICTIONS or victim.num_chunks == 0:
            return False
        return self._policy.may_preempt(candidate, victim)

    def _admit(self, sequence: Sequence, hit: PrefixHit | None) -> None:
        self._settled = False
        for overtaken in self._passed_over:
            overtaken.num_skips += 1
        self._passed_over.clear()
        num_cached = 0 if hit is None else hit.num_tokens
        num_tokens = self._chunk(sequence, sequence.num_tokens - _present(sequence, hit))
        if not self._scheduler.swaps.bring_back(sequence):
            self._blocks.allocate(sequence.request_id, sequence.request.cache_domain, sequence.num_tokens, hit)
            sequence.num_computed_tokens = sequence.num_retired_tokens = num_cached
            self._scheduler.num_recomputed_tokens += started(sequence, num_cached, self._now_s, self._scheduler.delta)
        self._scheduler.room.admitted(sequence.request.tier, self._blocks.blocks_for(sequence.num_tokens))
        self._scheduler.admit(sequence, num_cached)
        sequence.num_chunks = sequence.num_skips = 0
        self.placement.admit(sequence, num_cached)
        self._place(sequence, num_tokens)

    # -- placing -------------------------------------------------------------------------------------------------------

    def _chunk(self, sequence: Sequence, num_pending: int) -> int:
        """Most prefill tokens it may take now, of num_pending. A token stays reserved for every decode still to come, as
        far as seats go; pausable decodes count only while no protected chunk makes them pause."""
        waiting_decodes = self._decodes_ahead
        if not self._protected_chunk and not self._is_protected(sequence):
            waiting_decodes += self._pausable_decodes
        free = self._budget - min(waiting_decodes, self._seats - 1)
        if self._may_be_capped(sequence) and self._lower_cap is not None:
            free = min(free, self._lower_cap)
        if self._limits.max_prefill_chunk:
            free = min(free, self._limits.max_prefill_chunk)
        return min(num_pending, free)

    def _is_protected(self, sequence: Sequence) -> bool:
        protected = self._plan.protected_priority
        return protected is not None and self._policy.priority(sequence) >= protected

    def _may_be_capped(self, sequence: Sequence) -> bool:
        return self._plan.protected_priority is not None and not self._is_protected(sequence)

    def _place(self, sequence: Sequence, num_tokens: int) -> None:
        is_chunk = self.placement.place(sequence, num_tokens)
        self._budget -= num_tokens
        self._seats -= 1
        end_stall(sequence, self._now_s, self._scheduler.delta)
        if is_chunk or not self._is_due(sequence):  # the next step has a seat more if this was its last token
            self._settled = False
        if is_chunk:
            self._take_shares(sequence, num_tokens)

    def _take_shares(self, sequence: Sequence, num_tokens: int) -> None:
        if self._is_protected(sequence):
            self._protected_chunk = True
        if self._lower_cap is not None:
            self._lower_cap = max(0, self._lower_cap - num_tokens)

    # -- victims -------------------------------------------------------------------------------------------------------

    def _unplaced(self) -> list[Sequence]:
        """Running sequences that rank after the current one; those it passed earlier keep what they hold."""
        return [s for s in self._order[self._next :] if s.status is SequenceStatus.RUNNING]

    def _victims(self, candidates: list[Sequence], num_blocks: int, num_slots: int = 0) -> list[Sequence] | None:
        """Those of the candidates that give so many blocks and slots; None if all would not do."""
        cost_s = self._scheduler.swaps.cost_s
        return self._scheduler.pick_victims(candidates, num_blocks, num_slots, self._policy, self._blocks, cost_s)

    def _evict(self, victims: list[Sequence], reason: PreemptionReason, gainer: Sequence) -> None:
        self._settled = False
        self._ask_again()
        for victim in victims:
            self._evicted.add(victim)
            victim.num_evictions += reason is PreemptionReason.HIGHER_RANK
            if self._may_decode(victim):
                if self._may_pause(victim):
                    self._pausable_decodes -= 1
                else:
                    self._decodes_ahead -= 1
            kind = self._scheduler.requeue(victim)
            # One that is swapped in the middle of a recompute still owes that to whoever caused it.
            if kind is PreemptionKind.RECOMPUTED or victim.num_computed_tokens >= victim.recompute_until:
                victim.evicted_by = gainer.payer
            evicted(victim, kind, reason, self._now_s, self._scheduler.delta)
            self._scheduler.decisions.evicted(victim, kind, reason, self._now_s)


def _present(sequence: Sequence, hit: PrefixHit | None) -> int:
    """Tokens of a waiting sequence that need not be computed: swapped out, or in the prefix cache."""
    return sequence.num_computed_tokens if hit is None else hit.num_tokens
