"""Clocks for measuring on a machine that others use too. What is measured by them must run on this thread alone: one torch
thread, pipeline depth 0."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

from fairlane.clock import FakeClock


class WorkClock(FakeClock):
    """The time that this thread computes, and not the time that it waits for a core; and what is skipped by advance(): nobody has
    to sleep until the next arrival. What others do to caches and memory bandwidth still shows."""

    def now(self) -> float:
        return super().now() + time.thread_time()


class SliceClock(FakeClock):
    """A WorkClock that stands still except inside counting(). Runs to be compared, each with its own, take turns of seconds: what
    slows the machine for a minute slows all of them alike."""

    def __init__(self, timer: Callable[[], float] = time.thread_time) -> None:
        """timer: of this thread's work."""
        super().__init__()
        self._timer = timer
        self._since_s: float | None = None

    def now(self) -> float:
        return super().now() + (0.0 if self._since_s is None else self._timer() - self._since_s)

    @contextmanager
    def counting(self) -> Iterator[None]:
        self._since_s = self._timer()
        try:
            yield
        finally:
            self.advance(self._timer() - self._since_s)
            self._since_s = None


class PacedClock(FakeClock):
    """A WorkClock without that, too: others slow everything down by a tenth for minutes, and a queue passes it on several times
    over. Now and then a probe, the same work each time, is timed, and is said to have taken so long: seconds are those of a
    machine on which that is true. Probes themselves take no time of this clock. paces: its seconds in one of the thread's, probe
    by probe."""

    def __init__(self, timer: Callable[[], float] = time.thread_time, *, every_s: float = 0.7, mean_of: int = 5) -> None:
        """timer: of this thread's work. every_s: of it, between probes. mean_of: newest probes whose median counts."""
        super().__init__()
        self.paces: list[float] = []
        self._timer = timer
        self._every_s = every_s
        self._newest = deque[float](maxlen=mean_of)
        self._probe: Callable[[], None] | None = None
        self._takes_s = 0.0
        self._pace = 1.0
        self._counted_s = 0.0
        self._since_s = timer()

    def now(self) -> float:
        return super().now() + self._counted_s + (self._timer() - self._since_s) * self._pace

    def pace_by(self, probe: Callable[[], None], takes_s: float) -> None:
        """takes_s: how long the probe takes by this clock."""
        self._count()
        self._probe, self._takes_s = probe, takes_s
        for _ in range(self._newest.maxlen or 1):
            self._newest.append(self._probed_s())
        self._set_pace()

    def keep_pace(self) -> None:
        """Probes if it is time to. Between two steps."""
        if self._probe is None or self._timer() - self._since_s < self._every_s:
            return
        self._count()
        self._newest.append(self._probed_s())
        self._set_pace()

    def _set_pace(self) -> None:
        self._pace = self._takes_s / median(self._newest)
        self.paces.append(self._pace)
        self._since_s = self._timer()

    def _count(self) -> None:
        self._counted_s += (self._timer() - self._since_s) * self._pace

    def _probed_s(self) -> float:
        if self._probe is None:
            raise RuntimeError("pace_by() says what the probe is")
        begin_s = self._timer()
        self._probe()
        return self._timer() - begin_s
