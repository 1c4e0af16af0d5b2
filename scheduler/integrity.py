"""Whether blocks, slots, sequences and steps in flight agree. For idle moments and tests; it walks everything."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fairlane.scheduler.request import SequenceStatus

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler


def check_integrity(scheduler: Scheduler) -> None:
    """Raises RuntimeError where they do not."""
    scheduler.lane.settle()
    scheduler.lane.update_tables()
    scheduler.blocks.check_integrity()
    scheduler.running.check_integrity()
    for sequence in scheduler.sequences():
        holds = scheduler.blocks.has(sequence.request_id)
        if holds != (sequence.status is SequenceStatus.RUNNING):
            raise RuntimeError(f"{sequence!r} {'holds' if holds else 'lacks'} blocks")
        kept = scheduler.blocks.host.holds(sequence.request_id)
        if kept != (sequence.status is SequenceStatus.WAITING and sequence.num_computed_tokens > 0):
            raise RuntimeError(f"{sequence!r} {'is' if kept else 'is not'} swapped out")
    _check_steps_in_flight(scheduler)
    scheduler.lane.check_integrity(scheduler.running)


def _check_steps_in_flight(scheduler: Scheduler) -> None:
    out = Counter(sequence for step in scheduler.launched for sequence in step.everybody())
    out.update(scheduler.swaps.leaving)
    for sequence in scheduler.sequences():
        if sequence.steps_in_flight != out[sequence] or not 0 <= sequence.num_in_flight <= sequence.steps_in_flight:
            raise RuntimeError(f"{sequence!r} counts {sequence.steps_in_flight} steps in flight, there are {out[sequence]}")
