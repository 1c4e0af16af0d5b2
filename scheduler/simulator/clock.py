"""A worker's clock: it stands still until its step ends or a request reaches it."""

from __future__ import annotations


class EventClock:
    """As FakeClock, but moved to times instead of by differences: adding up differences would miss an arrival by a rounding."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def move_to(self, time_s: float) -> None:
        """Raises ValueError for a time that has passed."""
        if time_s < self._now_s:
            raise ValueError(f"a clock at {self._now_s} s cannot go back to {time_s} s")
        self._now_s = time_s
