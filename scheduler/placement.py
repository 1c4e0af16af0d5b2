"""A step under construction: what has been placed in it so far, whose account that goes on, and what the runner must be told.
What is placed, and in which order, is the pass's to decide (step_pass.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from fairlane.blockmgr.manager import BlockManager, Growth
from fairlane.scheduler.ceilings import TimeMeter
from fairlane.scheduler.cost import Cost, Ledger
from fairlane.scheduler.events import Delta, PreemptionReason
from fairlane.scheduler.output import BlockAppend, NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.policies.base import Policy
from fairlane.scheduler.request import Payer, SamplingParams, Sequence
from fairlane.scheduler.stalls import pause

_SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))


class Placement:
    """Entry i of the output belongs to sequences[i]; cost: of all that was charged, in cost units. brought: admitted with what
    was swapped out, and with nothing to compute in this step. chunks: those placed with part of a prompt or recompute, and how
    many tokens; paused: decodes that yield to one of them, and whoever's `ceil` binds. meter: told of what is placed."""

    def __init__(self, policy: Policy, blocks: BlockManager, prices: Cost, meter: TimeMeter | None = None) -> None:
        self.sequences: list[Sequence] = []
        self.brought: list[Sequence] = []
        self.chunks: list[tuple[Sequence, int]] = []
        self.paused: list[Sequence] = []
        self.cost = 0
        self._policy = policy
        self._blocks = blocks
        self._prices = prices
        self._meter = meter
        self._entries: list[ScheduledSequence] = []
        self._new: list[NewSequence] = []
        self._appends: list[BlockAppend] = []
        self._copies: list[tuple[int, int]] = []

    def output(self, step_id: int) -> ScheduleOutput:
        """Without the lane's part and the released slots, which are the scheduler's to add."""
        return ScheduleOutput(step_id, [], self._new, self._appends, self._copies, self._entries)

    @property
    def is_empty(self) -> bool:
        """Whether the runner would be told nothing."""
        return not self.sequences and not self._new

    def admit(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """A sequence that the runner is sent in full, with so many of its tokens from the prefix cache."""
        sampling = sequence.request.sampling
        tables = [self._blocks.block_table(sequence.request_id, group) for group in range(len(self._blocks.groups))]
        values = {name: getattr(sampling, name) for name in _SAMPLING_FIELDS}
        self._new.append(NewSequence(sequence.held_slot, list(sequence.token_ids), sequence.num_prompt_tokens, tables, values))
        self._charge(sequence, sequence.payer, self._prices.cached(num_cached_tokens))

    def bring(self, sequence: Sequence) -> None:
        """It was admitted, is swapped in and computes nothing yet; the step must succeed all the same."""
        self.brought.append(sequence)
        sequence.steps_in_flight += 1

    def grow(self, sequence: Sequence, growth: Growth) -> None:
        """Its block tables have changed."""
        if growth:
            self._appends.append(BlockAppend(sequence.held_slot, growth.block_ids))
            self._copies.extend(growth.copies)

    def place(self, sequence: Sequence, num_tokens: int) -> bool:
        """The next num_tokens of a sequence. True if they are a chunk of its prompt or recompute, not a decode."""
        start = sequence.num_computed_tokens
        is_chunk = sequence.num_pending_tokens > 1
        sample = num_tokens == sequence.num_pending_tokens
        self._entries.append(ScheduledSequence(sequence.held_slot, start, num_tokens, sample))
        self.sequences.append(sequence)
        if self._meter is not None:
            self._meter.place(sequence, num_tokens, is_chunk=is_chunk)
        sequence.num_computed_tokens = start + num_tokens
        sequence.num_in_flight += sample
        sequence.steps_in_flight += 1
        sequence.num_chunks += 1
        if is_chunk:
            self.chunks.append((sequence, num_tokens))
            self._charge_chunk(sequence, start, num_tokens)
        else:
            self._charge(sequence, sequence.payer, self._prices.decode().of(start))
        return is_chunk

    def pause(self, sequence: Sequence, now_s: float, delta: Callable[[Sequence], Delta], reason: PreemptionReason) -> None:
        """It skips the step and keeps its blocks."""
        self.paused.append(sequence)
        pause(sequence, reason, now_s, delta)

    def _charge_chunk(self, sequence: Sequence, start: int, num_tokens: int) -> None:
        """Recompute goes on the account of whoever evicted it, new work on its own."""
        recomputed = min(num_tokens, max(0, sequence.recompute_until - start))
        if recomputed and sequence.evicted_by is not None:
            self._charge(sequence, sequence.evicted_by, self._prices.chunk(start, recomputed))
            start, num_tokens = start + recomputed, num_tokens - recomputed
        if num_tokens:
            self._charge(sequence, sequence.payer, self._prices.chunk(start, num_tokens))

    def _charge(self, sequence: Sequence, payer: Payer, cost: int) -> None:
        self.cost += cost
        if payer == sequence.payer:
            sequence.charged[Ledger.WORK] += cost
        else:
            self._policy.on_recompute(payer, cost)
        self._policy.on_charge(payer, cost, Ledger.WORK)
