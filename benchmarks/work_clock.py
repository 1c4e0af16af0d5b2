"""A clock for measuring on a machine that others use too: the time that this thread computes, and not the time that it waits for
a core. What is measured by it must run on this thread alone: one torch thread, pipeline depth 0. What others do to caches and
memory bandwidth still shows."""

from __future__ import annotations

import time

from fairlane.clock import FakeClock


class WorkClock(FakeClock):
    """Thread CPU time, and what is skipped by advance(): nobody has to sleep until the next arrival."""

    def now(self) -> float:
        return super().now() + time.thread_time()
