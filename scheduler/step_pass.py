"""One ranked pass: walks running and waiting sequences in rank order and places what fits into the step's tokens, seats and
blocks. Nothing is placed twice and nothing placed is ever evicted, so there is nothing to undo.

    rank order   R1   W1   R2   R3   W2   R4          R running, W waiting, merged lazily
                 placed ──────────► │ ◄────── victims come from here, last first
                                    current
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from fairlane.blockmgr.manager import PrefixHit
from fairlane.scheduler.events import PreemptionKind, PreemptionReason, Started
from fairlane.scheduler.output import BlockAppend, NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.policies.base import BatchView, Rank
from fairlane.scheduler.request import Payer, SamplingParams, Sequence, SequenceStatus

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler

# A paused sequence is reported once its stall has lasted this long; shorter ones are not felt.
ANNOUNCE_STALL_S = 0.25
# Guard on policy evictions: after this many a sequence is immune.
MAX_EVICTIONS = 3
_SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))


class StepPass:
    """Builds one step. Use once: run(), then output()."""

    def __init__(self, scheduler: Scheduler, now_s: float) -> None:
        self._scheduler = scheduler
        self._policy = scheduler.policy
        self._blocks = scheduler.blocks
        self._limits = scheduler.limits
        self._now_s = now_s
        self._order = scheduler.running.in_order(self._policy.rank, ranks_change=self._policy.ranks_change)
        self._plan = self._policy.plan(self._view())
        self._budget = self._plan.token_budget
        self._seats = self._limits.max_num_seqs
        self._lower_cap = self._plan.lower_prefill_cap
        self._protected_chunk = False
        self._passed_over = 0
        self._held_back = 0  # free blocks kept for a head that was passed over too often
        self._evicted: set[Sequence] = set()
        self._next = 0
        self._decodes_ahead = sum(1 for s in self._order if self._may_decode(s) and not self._may_pause(s))
        self._pausable_decodes = sum(1 for s in self._order if self._may_decode(s) and self._may_pause(s))
        self.cost = 0
        self.entries: list[ScheduledSequence] = []
        self.sequences: list[Sequence] = []
        self._new: list[NewSequence] = []
        self._appends: list[BlockAppend] = []
        self._copies: list[tuple[int, int]] = []

    def run(self) -> None:
        """Places what fits, then notes who was left out and who was made to pause."""
        self._walk()
        placed = set(self.sequences)
        for sequence in self._order:
            if sequence in placed or sequence.status is not SequenceStatus.RUNNING or not self._is_due(sequence):
                continue
            self._policy.on_unserved(sequence)
            if self._protected_chunk and self._may_decode(sequence) and self._may_pause(sequence):
                self._pause(sequence)

    def _walk(self) -> None:
        """Goes on until tokens, seats or sequences run out. The head is looked up again only after something happened to it:
        a rank is fixed within a step, so charges of this step do not bring another one forward."""
        policy = self._policy
        head, head_rank = policy.peek(), None
        while self._budget > 0 and self._seats > 0:
            running = self._next_running()
            if running is None and head is None:
                return
            if head is not None and head_rank is None:
                head_rank = policy.rank(head)
            if running is not None and (head is None or head_rank is None or policy.rank(running) < head_rank):
                self._next += 1
                self._place_running(running)
            elif head is not None:
                self._consider_waiting(head)
                head, head_rank = policy.peek(), None

    def output(self, step_id: int, released_slots: list[int]) -> ScheduleOutput:
        return ScheduleOutput(step_id, list(released_slots), self._new, self._appends, self._copies, self.entries)

    def _view(self) -> BatchView:
        prefilling: dict[str, int] = {}
        for sequence in self._order:
            if sequence.num_pending_tokens > 1:
                tier = sequence.request.tier
                prefilling[tier] = prefilling.get(tier, 0) + 1
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

    def _pause(self, sequence: Sequence) -> None:
        """Keeps its blocks and skips this step."""
        if sequence.stalled_since_s is None:
            sequence.stalled_since_s = self._now_s
        elif not sequence.stall_announced and self._now_s - sequence.stalled_since_s >= ANNOUNCE_STALL_S:
            sequence.stall_announced = True
            self._scheduler.delta(sequence).preempted = (PreemptionKind.PAUSED, PreemptionReason.HIGHER_RANK)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room for the tokens it is about to write; False leaves it with its KV and out of this step."""
        total = sequence.num_computed_tokens + num_tokens
        needed = self._blocks.num_new_blocks(sequence.request_id, total, sequence.num_computed_tokens)
        missing = needed - self._blocks.num_free_blocks
        if needed and missing > 0:
            candidates = [s for s in self._unplaced() if self._policy.may_take(sequence, s)]
            victims = self._victims(candidates, missing)
            if victims is None:
                return False
            self._evict(victims, PreemptionReason.KV_CAPACITY, sequence)
        growth = self._blocks.grow(sequence.request_id, total, sequence.num_computed_tokens)
        if growth:
            self._appends.append(BlockAppend(_slot(sequence), growth.block_ids))
            self._copies.extend(growth.copies)
        return True

    # -- waiting sequences ---------------------------------------------------------------------------------------------

    def _consider_waiting(self, sequence: Sequence) -> None:
        """Admits the waiting head or passes it over."""
        if sequence.steps_in_flight or sequence in self._evicted:
            # Evicted with a step still out: its tokens must be back before it is sent in full. Evicted in this very step:
            # others were placed on the strength of it.
            self._policy.skip(sequence)
            return
        hit = self._lookup(sequence)
        if self._chunk(sequence, sequence.num_tokens - _length(hit)) <= 0:
            self._policy.close(sequence)  # the step has no tokens left for its band, nor for those below
        elif not self._make_room(sequence, hit):
            self._pass_over(sequence)
        else:
            # Evictions may have put blocks of the prefix onto the free list; look again, there is room for the worst case.
            self._admit(sequence, self._lookup(sequence))

    def _lookup(self, sequence: Sequence) -> PrefixHit | None:
        if not sequence.request.cache_mode.reads:
            return None
        sequence.chain.extend(sequence.token_ids)
        return self._blocks.lookup(sequence.chain, sequence.num_tokens)

    def _pass_over(self, sequence: Sequence) -> None:
        """Backfill: others may go first, up to `lookahead` of them a step. Once it was passed over too often, nobody of its
        band overtakes it any more, and the blocks that are free now are kept for it: a higher band must bring its own."""
        sequence.num_skips += 1
        self._passed_over += 1
        if sequence.num_skips > self._limits.max_skips:
            self._held_back = self._blocks.num_free_blocks
            self._policy.close(sequence)
        elif self._passed_over >= self._limits.lookahead:
            self._passed_over = 0
            self._policy.close(sequence)
        else:
            self._policy.skip(sequence)

    def _make_room(self, sequence: Sequence, hit: PrefixHit | None) -> bool:
        """Sees to blocks for all its tokens, a watermark and a slot, evicting where the policy agrees and it suffices.

        For evictions the hit counts for nothing: its blocks may be the victims' own.
        """
        free = self._blocks.num_free_blocks - self._held_back
        watermark = max(1, int(self._limits.watermark * self._blocks.num_usable_blocks)) if len(self._scheduler.running) else 0
        slots_missing = 0 if self._scheduler.running.has_free_slot else 1
        needed = self._blocks.num_blocks_to_allocate(sequence.num_tokens, hit)
        if needed + watermark <= free and not slots_missing:
            return True
        evictable = [s for s in self._unplaced() if self._may_evict(sequence, s)]
        if len(evictable) == len(self._scheduler.running):
            watermark = 0  # nobody would be left to grow
        victims = self._victims(evictable, self._blocks.blocks_for(sequence.num_tokens) + watermark - free, slots_missing)
        if victims is None:
            return False
        self._evict(victims, PreemptionReason.HIGHER_RANK, sequence)
        return True

    def _may_evict(self, candidate: Sequence, victim: Sequence) -> bool:
        """The policy's word and the engine's guards: immune after three evictions, no eviction before some progress."""
        if victim.num_evictions >= MAX_EVICTIONS or victim.num_chunks == 0:
            return False
        return self._policy.may_preempt(candidate, victim)

    def _admit(self, sequence: Sequence, hit: PrefixHit | None) -> None:
        num_cached = _length(hit)
        num_tokens = self._chunk(sequence, sequence.num_tokens - num_cached)
        self._blocks.allocate(sequence.request_id, sequence.request.cache_domain, sequence.num_tokens, hit)
        self._scheduler.admit(sequence)
        sequence.num_computed_tokens = sequence.num_retired_tokens = num_cached
        sequence.num_chunks = sequence.num_skips = 0
        self._announce_start(sequence, num_cached)
        self._new.append(self._in_full(sequence))
        self._charge(sequence.payer, self._scheduler.cost.chunk(0, num_cached))
        self._place(sequence, num_tokens)

    def _announce_start(self, sequence: Sequence, num_cached: int) -> None:
        if not sequence.started:
            sequence.started = True
            sequence.queue_s = self._now_s - sequence.request.arrival_s
            sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
            self._scheduler.delta(sequence).started = Started(sequence.num_cached_tokens, sequence.queue_s)
        sequence.num_recomputed_tokens += max(0, sequence.recompute_until - num_cached)
        self._scheduler.num_recomputed_tokens += max(0, sequence.recompute_until - num_cached)

    def _in_full(self, sequence: Sequence) -> NewSequence:
        sampling = sequence.request.sampling
        return NewSequence(
            slot=_slot(sequence),
            token_ids=list(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            block_tables=[self._blocks.block_table(sequence.request_id, g) for g in range(len(self._blocks.groups))],
            sampling={name: getattr(sampling, name) for name in _SAMPLING_FIELDS},
        )

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
        start = sequence.num_computed_tokens
        is_chunk = sequence.num_pending_tokens > 1
        sample = num_tokens == sequence.num_pending_tokens
        self.entries.append(ScheduledSequence(_slot(sequence), start, num_tokens, sample))
        self.sequences.append(sequence)
        self._budget -= num_tokens
        self._seats -= 1
        sequence.num_computed_tokens = start + num_tokens
        sequence.num_in_flight += sample
        sequence.steps_in_flight += 1
        sequence.num_chunks += 1
        self._end_stall(sequence)
        if is_chunk:
            self._charge_chunk(sequence, start, num_tokens)
            self._take_shares(sequence, num_tokens)
        else:
            self._charge(sequence.payer, self._scheduler.cost.decodes(1))

    def _charge_chunk(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        """Recompute goes on the account of whoever evicted it, new work on its own."""
        recomputed = min(num_tokens, max(0, sequence.recompute_until - start))
        cost = self._scheduler.cost
        if recomputed and sequence.evicted_by is not None:
            self._charge(sequence.evicted_by, cost.chunk(recomputed, 0))
            num_tokens -= recomputed
        if num_tokens:
            self._charge(sequence.payer, cost.chunk(num_tokens, 0))

    def _charge(self, payer: Payer, cost: int) -> None:
        self.cost += cost
        self._policy.on_charge(payer, cost)

    def _take_shares(self, sequence: Sequence, num_tokens: int) -> None:
        if self._is_protected(sequence):
            self._protected_chunk = True
        if self._lower_cap is not None:
            self._lower_cap = max(0, self._lower_cap - num_tokens)

    def _end_stall(self, sequence: Sequence) -> None:
        if sequence.stalled_since_s is None:
            return
        if sequence.stall_announced:
            self._scheduler.delta(sequence).resumed_after_s = self._now_s - sequence.stalled_since_s
        sequence.stalled_since_s = None
        sequence.stall_announced = False

    # -- victims -------------------------------------------------------------------------------------------------------

    def _unplaced(self) -> list[Sequence]:
        """Running sequences that rank after the current one; those it passed earlier keep what they hold."""
        return [s for s in self._order[self._next :] if s.status is SequenceStatus.RUNNING]

    def _victims(self, candidates: list[Sequence], missing: int, slots_missing: int = 0) -> list[Sequence] | None:
        """Fewest of the lowest-ranked whose blocks suffice, least recompute per block first; None if all would not do."""
        victims: list[Sequence] = []
        held: dict[int, int] = {}
        for victim in sorted(candidates, key=self._eviction_order):
            if missing <= 0 and len(victims) >= slots_missing:
                break
            victims.append(victim)
            missing -= self._blocks.freed_with(victim.request_id, held)
        enough = missing <= 0 and len(victims) >= slots_missing
        return victims if enough else None

    def _eviction_order(self, sequence: Sequence) -> tuple[Rank, float, int]:
        freed = self._blocks.freed_by(sequence.request_id)
        per_block = sequence.num_computed_tokens / freed if freed else float("inf")
        return (self._policy.victim_key(sequence), per_block, -sequence.arrival_index)

    def _evict(self, victims: list[Sequence], reason: PreemptionReason, gainer: Sequence) -> None:
        for victim in victims:
            self._evicted.add(victim)
            victim.evicted_by = gainer.payer
            victim.num_evictions += reason is PreemptionReason.HIGHER_RANK
            if self._may_decode(victim):
                if self._may_pause(victim):
                    self._pausable_decodes -= 1
                else:
                    self._decodes_ahead -= 1
            if victim.stalled_since_s is None:
                victim.stalled_since_s = self._now_s
            victim.stall_announced = True
            self._scheduler.requeue(victim)
            self._scheduler.delta(victim).preempted = (PreemptionKind.RECOMPUTED, reason)


def _length(hit: PrefixHit | None) -> int:
    return 0 if hit is None else hit.num_tokens


def _slot(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise ValueError(f"{sequence!r} has no slot")
    return sequence.slot
