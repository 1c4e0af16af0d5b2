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

from math import inf
from typing import TYPE_CHECKING

from fairlane.blockmgr.manager import PrefixHit
from fairlane.scheduler.events import PreemptionReason
from fairlane.scheduler.hits import lookup, num_present
from fairlane.scheduler.kv_quotas import Losses
from fairlane.scheduler.placement import Placement
from fairlane.scheduler.policies.base import BatchView, Rank
from fairlane.scheduler.reclaim import Reclaim, StepHooks
from fairlane.scheduler.request import Sequence, SequenceStatus
from fairlane.scheduler.settlement import Settlement
from fairlane.scheduler.shaping import DecodesAhead, StepShaping, may_decode
from fairlane.scheduler.stalls import end_stall, pause, started
from fairlane.scheduler.victims import evict, evictable_for, may_evict, resting

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler


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
        self._rests = scheduler.ceilings.rests
        self._order = self._running_in_order()
        most = self._limits.max_num_batched_tokens
        working, by_tier = scheduler.ceilings.without_resting(self._order, scheduler.running.by_tier)
        view = BatchView.of(working, by_tier, most, scheduler.cost, scheduler.step_id)
        plan = self._policy.plan(view)
        self._shaping = StepShaping(plan, self._policy)
        self._lane_may_pause = plan.pause_lower
        self._budget = plan.token_budget
        self._seats = self._limits.max_num_seqs
        self._num_passed_over = 0
        self._passed_over: list[Sequence] = []  # since the last admission
        self._turn: Sequence | None = None  # whose turn it is among those that wait; the head that is looked at may have taken it
        self._held_back = 0  # free blocks kept for a head that was passed over too often
        self._kept: dict[str, int] = {}  # what admissions of a tier leave free, until one is admitted or evicted
        self._evicted: set[Sequence] = set()
        self._given_back = 0  # tokens that had been set aside for decodes of those
        self._stuck: list[Sequence] = []  # had to grow and could not
        self._harmless = -inf  # heads of this priority or less have nobody to evict
        self._settled = True  # nothing happened that the next step might see differently
        self._next = 0
        self._ahead = DecodesAhead(working, self._shaping)
        self.placement = Placement(self._policy, self._blocks, scheduler.cost, scheduler.meter)
        self._passed_over_any = False
        self._quotas = scheduler.census.quotas
        self._reclaim = None if self._quotas is None else Reclaim(scheduler, self._quotas, self.placement, self._hooks())

    def run(self) -> None:
        """Places what fits, then notes who was left out and who was made to pause."""
        if self.places_lane:
            self._set_lane_aside()
        if self._reclaim is not None and self._reclaim.run():
            self._set_order()
        self._walk()
        placed, stuck = set(self.placement.sequences), set(self._stuck)
        if self._reclaim is not None:
            self._reclaim.done(self._reclaim.was_pressed if self._known is not None else self._passed_over_any)
            for sequence in self._reclaim.brought:
                if sequence not in placed:
                    self.placement.bring(sequence)
        for sequence in self._order:
            if sequence in placed or sequence.status is not SequenceStatus.RUNNING or not sequence.is_due:
                continue
            self._policy.on_unserved(sequence)
            if self._rests(sequence):  # until a ceil lets go, which unsettles
                self.placement.pause(sequence, self._now_s, self._scheduler.delta, PreemptionReason.CEIL)
                continue
            self._settled = False
            if self._shaping.protected_chunk and may_decode(sequence) and self._shaping.may_pause(sequence):
                self.placement.pause(sequence, self._now_s, self._scheduler.delta, PreemptionReason.HIGHER_RANK)
            elif sequence in stuck:  # no policy's pause, so none that a shadow is compared by
                pause(sequence, PreemptionReason.KV_CAPACITY, self._now_s, self._scheduler.delta)

    def settlement(self) -> Settlement | None:
        """What this step found out about admission, for the next ones; None while things are moving."""
        scheduler = self._scheduler
        if not self._settled or self._lane.has_done:
            return None
        if self._reclaim is not None and not self._reclaim.settles(self._passed_over_any):
            return None
        if self._known is not None:
            return self._known
        self._lane.settle()  # leases are counted in tokens computed
        return Settlement.after(scheduler.step_id, self._policy, scheduler.census, scheduler.running)

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
                if not self._lane_may_yield() or (running is None and not self._may_displace(head, head_rank)):
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
        """Who waits and goes next; None where it is known that none gets in."""
        self._turn = None if self._known is not None else self._policy.peek()
        if self._turn is None or self._budget <= 0 or not self._scheduler.running.has_free_slot:
            return self._turn  # nobody is looked up who would have to evict
        return self._scheduler.locality.choose(self._turn, self._policy)

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
        fits = size <= min(self._seats, self._budget) and self._lane.fits()
        self._seats -= size
        self._budget -= size
        if not fits:
            self._dissolve_lane()

    def _dissolve_lane(self) -> None:
        if self.places_lane:
            self.places_lane = False
            self._take_out(self._lane.members)

    def _take_out(self, members: list[Sequence]) -> None:
        """They are placed one by one, by rank, like everybody else who was not placed yet."""
        self._lane.leave(members, self._policy)
        self._budget += len(members)
        self._seats += len(members)
        self._set_order()
        if self._reclaim is not None:
            self._lane.set_aside()
            self._reclaim.grow_covered()

    def _set_order(self) -> None:
        """Anew, after others came to be placed one by one."""
        placed = set(self.placement.sequences)
        self._order = [sequence for sequence in self._running_in_order() if sequence not in placed]
        self._next = 0
        self._ahead = DecodesAhead([sequence for sequence in self._order if not self._rests(sequence)], self._shaping)

    def _release_pausable(self, sequence: Sequence) -> bool:
        """Before a protected sequence gets a chunk: those in the lane that must pause then leave it. Whether there were any."""
        if not (self.places_lane and self._lane_may_pause and self._shaping.is_protected(sequence)):
            return False
        self._lane_may_pause = False  # from here on nobody in it
        pausable = [member for member in self._lane.members if self._shaping.may_pause(member)]
        if pausable:
            self._take_out(pausable)
            self.places_lane = len(self._lane) > 0
        return bool(pausable)

    def _lane_may_yield(self) -> bool:
        """Whether members could give up their places for others. While seats are left nobody gets their tokens, which are
        reserved whoever goes first, but for those that pause."""
        return self.places_lane and (self._seats <= 0 or self._lane_may_pause)

    def _may_displace(self, head: Sequence | None, rank: Rank | None) -> bool:
        """Whether a waiting head could take the place of a member of the lane, by rank or by right."""
        if head is None or rank is None:
            return False
        worst = self._lane.worst_rank
        outranks = worst is None or rank < worst
        return (outranks and self._scheduler.running.has_free_slot) or self._has_victims(head)

    def _has_victims(self, head: Sequence) -> bool:
        """Whether there is anybody at all, in the lane or not, whom a waiting head may evict."""
        if not self._may_have_victims(head):
            return False
        self._lane.settle()
        found = any(may_evict(self._policy, self._quotas, head, other) for other in (*self._lane.members, *self._unplaced()))
        if not found and not self._policy.leads_evict:
            self._harmless = self._policy.priority(head)
        return found

    def _may_have_victims(self, head: Sequence) -> bool:
        """False where it takes no look at those that run."""
        policy, others = self._policy, self._scheduler.census.running_by_tier
        return policy.priority(head) > self._harmless and policy.could_preempt(head.request.tier, others)

    def _num_free_blocks(self) -> int:
        return self._blocks.num_free_blocks - (self._lane.num_new_blocks() if self.places_lane else 0)

    # -- running sequences ---------------------------------------------------------------------------------------------

    def _next_running(self) -> Sequence | None:
        while self._next < len(self._order):
            sequence = self._order[self._next]
            is_there = sequence.status is SequenceStatus.RUNNING and sequence not in self._evicted
            if is_there and sequence.is_due and not self._rests(sequence):
                return sequence
            self._next += 1
        return None

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
        self._ahead.pass_by(sequence)
        if self._shaping.protected_chunk and self._shaping.may_pause(sequence):
            return
        if self._grow(sequence, 1):
            self._place(sequence, 1)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for the tokens it is about to write; False leaves it with its KV and out of this step."""
        total = sequence.num_computed_tokens + num_tokens
        needed = self._blocks.num_new_blocks(sequence.request_id, total, sequence.num_computed_tokens)
        room = self._num_free_blocks() if self._quotas is None else min(self._num_free_blocks(), self._quotas.room(sequence))
        if self.places_lane and needed > room:
            self._dissolve_lane()
            return False
        if needed > max(0, room):
            missing = needed - self._blocks.num_free_blocks
            victims = self._victims(self._yielding_to(sequence), missing, self._losses(sequence, needed))
            if victims is None and self._reclaim is not None:
                victims = self._reclaim.yielding(sequence, needed)
            if victims is None:
                self._stuck.append(sequence)
                return False
            self._evict(victims, PreemptionReason.KV_CAPACITY, sequence)
        self.placement.grow(sequence, self._blocks.grow(sequence.request_id, total, sequence.num_computed_tokens))
        return True

    def _yielding_to(self, grower: Sequence) -> list[Sequence]:
        """Those that rank after it; of those before it, who rests, and who is stuck because it may not take its own blocks in
        turn (a minimum share is owed to it), or neither would ever get on."""
        may_take = self._policy.may_take
        stuck = [s for s in self._stuck if s.status is SequenceStatus.RUNNING and not may_take(s, grower)]
        stuck += resting(self._scheduler, grower, filter(self._may_lose, self._order[: self._next]))
        return [s for s in self._unplaced() + stuck if may_take(grower, s)]

    # -- waiting sequences ---------------------------------------------------------------------------------------------

    def _consider_waiting(self, sequence: Sequence) -> None:
        """Admits the waiting head or passes it over."""
        if sequence.steps_in_flight or sequence in self._evicted or self._rests(sequence):
            # Evicted with a step still out: its tokens, and what that step swaps, must be back before it is sent in full.
            # Evicted in this very step: others were placed on the strength of it. One that rests a policy need not have named.
            self._settled = False
            self._policy.skip(sequence)
            return
        if self._release_pausable(sequence):
            return
        hit = lookup(sequence, self._blocks)
        if self._chunk(sequence, sequence.num_tokens - num_present(sequence, hit)) <= 0:
            self._policy.close(sequence)  # the step has no tokens left for its band, nor for those below
        elif self._fits(sequence, hit, self._num_free_blocks()):
            self._admit(sequence, hit)
        elif self.places_lane and (self._fits(sequence, hit, self._blocks.num_free_blocks) or self._has_victims(sequence)):
            self._dissolve_lane()  # with its members' blocks it might fit
        elif self._evict_for(sequence):
            # That may have put blocks of the prefix onto the free list; look again, there is room for the worst case.
            self._admit(sequence, lookup(sequence, self._blocks))
        else:
            self._pass_over(sequence, hit)

    def _pass_over(self, sequence: Sequence, hit: PrefixHit | None = None) -> None:
        """Backfill: others may go first, up to `lookahead` of them a step. Once it was passed over too often, nobody of its
        band overtakes it any more, and the blocks that are free now are kept for it: a higher band must bring its own."""
        if self._quotas is not None:
            needed = self._blocks.num_blocks_to_allocate(sequence.num_tokens, hit)
            if self._quotas.hold_if_full(sequence, needed, self._policy):
                return
        self._num_passed_over += 1
        self._passed_over_any = True
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
        if not self._scheduler.running.has_free_slot:
            return False
        needed, tier = self._blocks.num_blocks_to_allocate(sequence.num_tokens, hit), sequence.request.tier
        if tier not in self._kept:
            self._kept[tier] = self._scheduler.room.kept_from(tier, self._policy, len(self._scheduler.running))
        return needed + self._kept[tier] <= num_free_blocks - self._held_back and (
            self._quotas is None or not self._quotas.full_for(sequence, needed)
        )

    def _evict_for(self, sequence: Sequence) -> bool:
        """Makes room for one that does not fit, where the policy agrees and that suffices. What is found in the prefix cache
        counts for nothing: its blocks may be the victims' own."""
        if not self._may_have_victims(sequence) and not self._scheduler.ceilings.shut:
            return False
        if self._given_back and self._budget - self._ahead.num_before(sequence) <= self._given_back:
            return False  # for what only evictions gave back, a token each, every decode there is would be evicted
        slots_missing = 0 if self._scheduler.running.has_free_slot else 1
        evictable = evictable_for(self._scheduler, sequence, self._unplaced(), filter(self._may_lose, self._order))
        # With everybody else gone, nobody would be left to grow.
        kept = self._scheduler.room.least(len(self._scheduler.running) - len(evictable))
        needed = self._blocks.blocks_for(sequence.num_tokens)
        missing = needed + kept + self._held_back - self._num_free_blocks()
        losses = self._losses(sequence, needed, with_margin=True)
        victims = self._victims(evictable, missing, losses, slots_missing) if evictable else None
        if victims:  # else what is kept free is enough
            self._evict(victims, PreemptionReason.HIGHER_RANK, sequence)
        return victims is not None

    def _admit(self, sequence: Sequence, hit: PrefixHit | None) -> None:
        num_tokens = self._chunk(sequence, sequence.num_tokens - num_present(sequence, hit))
        self._let_in(sequence, hit)
        self._place(sequence, num_tokens)

    def _let_in(self, sequence: Sequence, hit: PrefixHit | None) -> bool:
        """It runs, with its blocks and without tokens of the step. Whether it is swapped in."""
        self._settled = False
        self._kept.clear()
        for overtaken in self._passed_over:
            overtaken.num_skips += 1
        self._passed_over.clear()
        self._scheduler.locality.admitted(sequence, self._turn)
        num_cached = 0 if hit is None else hit.num_tokens
        is_brought = self._scheduler.swaps.bring_back(sequence)
        if not is_brought:
            self._blocks.allocate(sequence.request_id, sequence.request.cache_domain, sequence.num_tokens, hit)
            sequence.num_computed_tokens = sequence.num_retired_tokens = num_cached
            self._scheduler.num_recomputed_tokens += started(sequence, num_cached, self._now_s, self._scheduler.delta)
        self._scheduler.room.admitted(sequence.request.tier, self._blocks.blocks_for(sequence.num_tokens))
        self._scheduler.admit(sequence, num_cached)
        sequence.num_chunks = sequence.num_skips = 0
        self.placement.admit(sequence, num_cached)
        return is_brought

    # -- placing -------------------------------------------------------------------------------------------------------

    def _chunk(self, sequence: Sequence, num_pending: int) -> int:
        """Most prefill tokens it may take now, of num_pending. A token stays reserved for every decode still to come, as
        far as seats go."""
        free = self._budget - min(self._ahead.num_before(sequence), self._seats - 1)
        free = self._shaping.cap(sequence, free)
        if self._limits.max_prefill_chunk:
            free = min(free, self._limits.max_prefill_chunk)
        return min(num_pending, free)

    def _place(self, sequence: Sequence, num_tokens: int) -> None:
        is_chunk = self.placement.place(sequence, num_tokens)
        self._budget -= num_tokens
        self._seats -= 1
        end_stall(sequence, self._now_s, self._scheduler.delta)
        if is_chunk or not sequence.is_due:  # the next step has a seat more if this was its last token
            self._settled = False
        if is_chunk:
            self._shaping.take(sequence, num_tokens)

    # -- KV quotas, victims --------------------------------------------------------------------------------------------

    def _hooks(self) -> StepHooks:
        return StepHooks(
            unplaced=self._unplaced,
            dissolve_lane=self._dissolve_lane,
            free_blocks=self._num_free_blocks,
            fits=lambda sequence, hit: self._fits(sequence, hit, self._num_free_blocks()),
            evict=self._evict,
            let_in=self._let_in,
        )

    def _losses(self, gainer: Sequence, needed: int, *, with_margin: bool = False) -> Losses | None:
        return None if self._quotas is None else Losses(self._quotas, gainer, needed, with_margin=with_margin)

    def _unplaced(self) -> list[Sequence]:
        """Running sequences that rank after the current one; those it passed earlier keep what they hold."""
        return [s for s in self._order[self._next :] if self._may_lose(s)]

    def _may_lose(self, sequence: Sequence) -> bool:
        """Whether it runs, and got no blocks in this step for a guarantee."""
        return sequence.status is SequenceStatus.RUNNING and (self._reclaim is None or sequence not in self._reclaim.kept)

    def _victims(
        self, candidates: list[Sequence], num_blocks: int, losses: Losses | None, num_slots: int = 0
    ) -> list[Sequence] | None:
        """Those of the candidates that give so many blocks and slots, and room by every limit; None if all would not do."""
        cost_s = self._scheduler.swaps.cost_s
        return self._scheduler.pick_victims(candidates, num_blocks, num_slots, self._policy, self._blocks, cost_s, losses)

    def _evict(self, victims: list[Sequence], reason: PreemptionReason, gainer: Sequence) -> None:
        self._settled = False
        self._kept.clear()
        self._ask_again()
        ahead = set(self._order[self._next :])  # others are counted no more
        for victim in victims:
            self._evicted.add(victim)
            if may_decode(victim) and not self._rests(victim):
                self._given_back += 1
                if victim in ahead:
                    self._ahead.pass_by(victim)
            evict(self._scheduler, victim, gainer, reason, self._now_s, ranks_after=victim in ahead)
