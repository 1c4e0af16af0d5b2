"""What became of each request, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass

from fairlane.scheduler.events import Ended, EndReason
from fairlane.scheduler.simulator.plan import Planned


@dataclass(slots=True)
class Outcome:
    """Times are seconds from the start of the run, at the gateway; None: not by the end of it. worker: -1: none as yet.
    preemptions: how often it lost its KV; evictions: those for somebody of higher rank. estimated_wait_s: what the worker said
    when it was queued."""

    planned: Planned
    worker: int = -1
    queue_s: float | None = None
    estimated_wait_s: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    evictions: int = 0
    first_token_s: float | None = None
    ended_s: float | None = None
    ended: Ended | None = None

    @property
    def finished(self) -> bool:
        """Whether it got all its tokens."""
        return self.ended is not None and self.ended.reason in (EndReason.STOP, EndReason.LENGTH)

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.planned.asked.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first, of one that got all its tokens."""
        if not self.finished or self.ended_s is None or self.first_token_s is None or self.planned.output_tokens < 2:
            return None
        return (self.ended_s - self.first_token_s) / (self.planned.output_tokens - 1)
