"""work_clock.py: what a second is on a machine whose pace changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from work_clock import PacedClock, SliceClock


class Thread:
    """Works when told to; slow: how much longer everything takes now."""

    def __init__(self) -> None:
        self.computed_s = 100.0
        self.slow = 1.0
        self.probes = 0
        self.clock = PacedClock(lambda: self.computed_s, every_s=1.0, mean_of=3)

    def work(self, seconds: float) -> None:
        self.computed_s += seconds * self.slow

    def probe(self) -> None:
        self.probes += 1
        self.work(0.05)


def test_without_a_probe_it_is_the_threads_time_and_what_was_skipped() -> None:
    thread = Thread()
    start_s = thread.clock.now()
    thread.work(2.0)
    thread.clock.keep_pace()
    thread.clock.advance(3.0)
    assert thread.clock.now() - start_s == pytest.approx(5.0)


def test_probes_take_no_time_and_come_only_so_often() -> None:
    thread = Thread()
    thread.clock.pace_by(thread.probe, 0.05)
    start_s = thread.clock.now()
    for _ in range(20):
        thread.work(0.3)
        thread.clock.keep_pace()
    # Every fourth time 1.2 s have passed since the one before.
    assert (thread.clock.now() - start_s, thread.probes) == (pytest.approx(6.0), 3 + 5)


def test_the_same_work_takes_as_long_on_a_machine_that_has_become_slower() -> None:
    thread = Thread()
    thread.clock.pace_by(thread.probe, 0.05)
    thread.slow = 1.25
    for _ in range(3):  # until most of the newest probes have seen it
        thread.work(1.0)
        thread.clock.keep_pace()
    start_s = thread.clock.now()
    for _ in range(5):
        thread.work(1.0)
        thread.clock.keep_pace()
    assert (thread.clock.now() - start_s, min(thread.clock.paces)) == pytest.approx((5.0, 0.8))


def test_one_slow_probe_changes_nothing() -> None:
    thread = Thread()
    thread.clock.pace_by(thread.probe, 0.05)
    for number in range(9):
        thread.work(1.0)
        thread.slow = 3.0 if number == 4 else 1.0
        thread.clock.keep_pace()
        thread.slow = 1.0
    assert thread.clock.paces == pytest.approx([1.0] * 10)


def test_it_never_goes_back() -> None:
    thread = Thread()
    thread.clock.pace_by(thread.probe, 0.05)
    seen = []
    for number in range(40):
        thread.slow = (1.0, 2.0, 0.5)[number % 3]
        thread.work(0.7)
        seen.append(thread.clock.now())
        thread.clock.keep_pace()
        seen.append(thread.clock.now())
    assert seen == sorted(seen)


def test_a_slow_machines_seconds_are_shorter() -> None:
    thread = Thread()
    thread.slow = 2.0
    thread.clock.pace_by(thread.probe, 0.05)
    start_s = thread.clock.now()
    thread.work(1.0)
    assert thread.clock.now() - start_s == pytest.approx(1.0)


def test_a_slice_clock_counts_its_own_slices_and_what_was_skipped() -> None:
    computed_s = 100.0
    clock = SliceClock(lambda: computed_s)
    start_s = clock.now()
    with clock.counting():
        computed_s += 2.0
        assert clock.now() - start_s == pytest.approx(2.0)
        clock.advance(3.0)
    computed_s += 50.0
    assert clock.now() - start_s == pytest.approx(5.0)
    with pytest.raises(ValueError), clock.counting():
        computed_s += 1.0
        raise ValueError
    computed_s += 50.0
    assert clock.now() - start_s == pytest.approx(6.0)
