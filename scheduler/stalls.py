"""When a request starts and when it stands still, and what it is told: at once when it loses its blocks, after a while when it
only pauses, and how long it was when it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from fairlane.scheduler.events import Delta, PreemptionKind, PreemptionReason, Started
from fairlane.scheduler.request import Sequence

# A paused sequence is reported once its stall has lasted this long; shorter ones are not felt.
ANNOUNCE_STALL_S = 0.25

DeltaOf = Callable[[Sequence], Delta]


def started(sequence: Sequence, num_cached: int, now_s: float, delta: DeltaOf) -> int:
    """It is admitted, with so many of its tokens in the prefix cache; told the first time. Returns how many it computes again."""
    if not sequence.started:
        sequence.started = True
        sequence.queue_s = now_s - sequence.request.arrival_s
        sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
        delta(sequence).started = Started(sequence.num_cached_tokens, sequence.queue_s)
    recomputed = max(0, sequence.recompute_until - num_cached)
    sequence.num_recomputed_tokens += recomputed
    return recomputed


def pause(sequence: Sequence, reason: PreemptionReason, now_s: float, delta: DeltaOf) -> None:
    """It keeps its blocks and skips a step: for those of higher rank, or because its ceil binds."""
    if sequence.stalled_since_s is None:
        sequence.stalled_since_s = now_s
    elif not sequence.stall_announced and now_s - sequence.stalled_since_s >= ANNOUNCE_STALL_S:
        sequence.stall_announced = True
        delta(sequence).preempted = (PreemptionKind.PAUSED, reason)


def next_announcement_s(running: Iterable[Sequence]) -> float:
    """When the first of those that stand still, and were not told so, is told if it still does; inf: nobody is."""
    untold = (one.stalled_since_s for one in running if one.stalled_since_s is not None and not one.stall_announced)
    return min(untold, default=inf) + ANNOUNCE_STALL_S


def evicted(sequence: Sequence, kind: PreemptionKind, reason: PreemptionReason, now_s: float, delta: DeltaOf) -> None:
    """It has lost its blocks."""
    if sequence.stalled_since_s is None:
        sequence.stalled_since_s = now_s
    sequence.stall_announced = True
    delta(sequence).preempted = (kind, reason)


def end_stall(sequence: Sequence, now_s: float, delta: DeltaOf) -> None:
    """It has been placed."""
    if sequence.stalled_since_s is None:
        return
    if sequence.stall_announced:
        delta(sequence).resumed_after_s = now_s - sequence.stalled_since_s
    sequence.stalled_since_s = None
    sequence.stall_announced = False
