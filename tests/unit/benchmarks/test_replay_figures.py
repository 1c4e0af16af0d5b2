"""replay_figures.py: what is pooled, and what chance is said to do."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from replay_figures import RATE, TTFT50, TTFT99, Key, Run, Served, compare, figures


def run_of(waits: Sequence[float], tier: str = "gold", tokens: int = 10) -> Run:
    """Requests that arrive at once and end ten seconds after they began."""
    return [Served(0, tier, 0.0, wait, wait + 10.0, tokens, 0) for wait in waits]


def test_a_quantile_is_of_all_requests_and_a_rate_is_the_runs_mean() -> None:
    runs = [run_of([1.0] * 60), run_of([2.0] * 39 + [30.0])]
    found = figures(runs)
    # 100 requests: the 50th is of the first run, the 99th of the second; a mean of quantiles would be 1.5 and 15.5.
    rates = (60 * 10 / 11, 40 * 10 / 40)
    expected = [1.0, 2.0, pytest.approx(sum(rates) / 2)]
    assert [found[Key("gold", name)] for name in (TTFT50, TTFT99, RATE)] == expected


def test_runs_that_are_alike_leave_nothing_to_chance() -> None:
    one = compare([run_of([1.0, 2.0, 4.0])] * 5, [[run_of([1.1, 2.2, 4.4])] * 3] * 5)[Key("gold", TTFT50)]
    assert (one.measured, one.simulated, one.off, one.low, one.high, one.noise) == pytest.approx((2, 2.2, 0.1, 0.1, 0.1, 0.0))


def test_a_figure_that_hangs_on_one_run_is_said_to_be_uncertain() -> None:
    """Of ten runs of ten, one has all that waited long: it is not drawn in 0.9^10 = 35 % of draws."""
    measured = [run_of([1.0] * 10)] * 9 + [run_of([5.0] * 10)]
    one = compare(measured, [[run] for run in [run_of([1.0] * 10)] * 9 + [run_of([4.0] * 10)]])[Key("gold", TTFT99)]
    assert (one.off, one.low, one.high, one.noise) == pytest.approx((-0.2, -0.2, 0.0, (5 - 1) / 2 / 5))


def test_both_sides_are_drawn_together() -> None:
    """Loads differ tenfold, and the simulator is right about each: chance moves both sides, and not what is between them."""
    loads = [run_of([float(2**number)] * 10) for number in range(5)]
    one = compare(loads, [[run, run] for run in loads])[Key("gold", TTFT50)]
    assert (one.off, one.low, one.high, one.noise > 0.5) == (0.0, 0.0, 0.0, True)


def test_every_run_needs_its_replays() -> None:
    with pytest.raises(ValueError, match="zip"):
        compare([run_of([1.0])] * 2, [[run_of([1.0])]])
