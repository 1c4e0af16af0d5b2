"""Where the time comes from. Everything that waits, ages or measures takes a `Clock`; only the process entry points make a
real one, so that tests and the simulator move time by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds; its zero means nothing."""

    def now(self) -> float: ...


class MonotonicClock:
    """The process's monotonic clock; unaffected by NTP steps."""

    def now(self) -> float:
        return time.monotonic()


class FakeClock:
    """A clock that stands still until told to move."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves time forward. Raises ValueError for a negative step: a monotonic clock never goes back."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now_s += seconds
