"""What a step produced, taken in: tokens, stops, lengths reached, errors of single sequences. Most of it is the decode lane's
column, which is looked through for stop tokens as a whole and kept as it is; whatever else there is to tell goes sequence by
sequence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from fairlane.scheduler.ceilings import StepParts
from fairlane.scheduler.events import DecodedTokens, EndReason
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.scheduler.request import RequestId, Sequence, SequenceStatus

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler


class LaunchedStep(NamedTuple):
    """What is to be known of a step when it returns: entry i of the output belongs to sequences[i], decode_slots[i] to lane[i];
    swapped: whom it swaps out; brought: whom it swaps in and computes nothing for; work_cost: what was charged for it;
    held_cost: for the time before it; parts: what it does for whom, where somebody has a `ceil`."""

    output: ScheduleOutput
    sequences: list[Sequence]
    lane: list[Sequence]
    swapped: list[Sequence]
    brought: list[Sequence]
    work_cost: int
    held_cost: int
    parts: StepParts | None = None

    def everybody(self) -> Iterator[Sequence]:
        """Whom its outcome concerns, once for each thing it does."""
        return chain(self.sequences, self.lane, self.swapped, self.brought)


def take_results(scheduler: Scheduler, step: LaunchedStep, result: StepResult) -> None:
    """A step succeeded, but for the sequences in result.errors."""
    entries = zip(step.sequences, step.output.scheduled, result.tokens, strict=True)
    for index, (sequence, entry, tokens) in enumerate(entries):
        if _goes_on(scheduler, sequence, entry.sample, result.errors.get(index)):
            if sequence.status is SequenceStatus.RUNNING:
                _retire(scheduler, sequence, entry.start + entry.num_tokens)
            if tokens:
                _append(scheduler, sequence, tokens)
    if step.lane:
        _take_column(scheduler, step.lane, result, len(step.sequences))
    for sequence in (*step.swapped, *step.brought):
        sequence.steps_in_flight -= 1


def fail_results(scheduler: Scheduler, step: LaunchedStep, message: str) -> None:
    """A step failed as a whole."""
    scheduler.lane.settle()
    placed = [(sequence, entry.sample) for sequence, entry in zip(step.sequences, step.output.scheduled, strict=True)]
    scheduler.lane.leave([*step.sequences, *step.lane], scheduler.policy)  # all at once: each takes a walk over the lane
    brought = [(sequence, False) for sequence in step.brought]
    for sequence, sampled in [*placed, *brought, *((sequence, True) for sequence in step.lane)]:
        sequence.steps_in_flight -= 1
        sequence.num_in_flight -= sampled
        if sequence.status is not SequenceStatus.FINISHED:
            scheduler.forget(sequence)
            scheduler.finish(sequence, EndReason.FAILED, error=("STEP_FAILED", message))
    for sequence in step.swapped:
        sequence.steps_in_flight -= 1
        scheduler.swaps.lose(sequence)


def _take_column(scheduler: Scheduler, members: list[Sequence], result: StepResult, num_entries: int) -> None:
    """members: the lane as it was when the step was launched."""
    lane, deltas, tokens = scheduler.lane, scheduler.deltas, result.decode_tokens
    lane.let_go(scheduler.policy)  # of those whose last step this may be
    as_placed = members is lane.members
    nobody_stops = not lane.stop_ids or lane.stop_ids.isdisjoint(tokens)
    if as_placed and not result.errors and nobody_stops and lane.has_no_part_in(deltas):
        lane.retire(tokens)
        scheduler.decoded.append(DecodedTokens(lane.request_ids, tokens))
        return
    lane.settle()
    if not nobody_stops:
        stopped = [one for one, token in zip(members, tokens, strict=True) if token in one.request.stop_token_ids]
        lane.leave(stopped, scheduler.policy)  # all at once: each takes a walk over the lane
    stop_ids, errors = lane.stop_ids, result.errors
    ids: list[RequestId] = []
    kept: list[int] = []
    for index, (sequence, token) in enumerate(zip(members, tokens, strict=True), num_entries):
        request_id = sequence.request_id
        if sequence.steady_until and token not in stop_ids and index not in errors and request_id not in deltas:
            sequence.steps_in_flight -= 1
            sequence.num_in_flight -= 1
            sequence.num_retired_tokens += 1
            sequence.token_ids.append(token)
            ids.append(request_id)
            kept.append(token)
        elif _goes_on(scheduler, sequence, True, errors.get(index)):
            if sequence.status is SequenceStatus.RUNNING:
                sequence.num_retired_tokens += 1
            _append(scheduler, sequence, [token])
    if ids:
        scheduler.decoded.append(DecodedTokens(ids, kept))


def _goes_on(scheduler: Scheduler, sequence: Sequence, sampled: bool, error: str | None) -> bool:
    """A step of the sequence has returned. False if that is all, because it has ended, or fails now."""
    sequence.steps_in_flight -= 1
    sequence.num_in_flight -= sampled
    if sequence.status is SequenceStatus.FINISHED:
        return False
    if error is not None:
        scheduler.forget(sequence)
        scheduler.finish(sequence, EndReason.FAILED, error=("NUMERICAL_ERROR", error))
    return error is None


def _retire(scheduler: Scheduler, sequence: Sequence, num_tokens: int) -> None:
    block_size = scheduler.blocks.block_size
    fills_block = num_tokens // block_size > sequence.num_retired_tokens // block_size
    sequence.num_retired_tokens = num_tokens
    if fills_block:
        scheduler.commit(sequence)


def _append(scheduler: Scheduler, sequence: Sequence, tokens: list[int]) -> None:
    delivered = scheduler.delta(sequence).token_ids
    for token in tokens:
        sequence.token_ids.append(token)
        delivered.append(token)
        if token in sequence.request.stop_token_ids:
            scheduler.finish(sequence, EndReason.STOP, stop_token_id=token)
            return
        if sequence.num_output_tokens >= sequence.request.max_tokens:
            scheduler.finish(sequence, EndReason.LENGTH)
            return
