"""What deadlines are reckoned with: the two parts of a step's time, and nothing before they are known."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.scheduler.policies.pace import Pace


@given(fixed_s=st.floats(1e-4, 0.1), token_s=st.floats(1e-6, 1e-3), sizes=st.lists(st.integers(1, 4000), min_size=2, unique=True))
def test_it_finds_the_fixed_part_and_the_part_per_token(fixed_s: float, token_s: float, sizes: list[int]) -> None:
    pace = Pace()
    for _ in range(3):
        for size in (*sizes, 1, 5000):
            pace.observe(size, fixed_s + token_s * size)
    assert (pace.fixed_s, pace.token_s) == (pytest.approx(fixed_s, rel=1e-3, abs=1e-6), pytest.approx(token_s, rel=1e-3))


def test_before_it_has_seen_steps_of_two_sizes_tokens_cost_nothing_unless_a_shorter_step_is_asked_for() -> None:
    pace = Pace()
    before = pace.prefill_s(1000, 100), pace.tokens_within(0.001)
    for _ in range(20):
        pace.observe(8, 0.01)
    after = pace.prefill_s(1000, 100), pace.tokens_within(0.02), pace.tokens_within(0.005)
    assert (before, after) == ((0.0, inf), (pytest.approx(0.1), inf, pytest.approx(4)))  # ten steps at the least


def test_what_fits_into_a_time_takes_that_time() -> None:
    pace = Pace()
    for size in (1, 1000):
        pace.observe(size, 0.005 + 25e-6 * size)
    assert pace.tokens_within(0.03) == pytest.approx(1000)


@pytest.mark.parametrize("stall_at", [0, 5, 150])
def test_a_stall_does_not_stay_in_mind(stall_at: int) -> None:
    pace = Pace()
    for number in range(200):
        tokens = 1 + 100 * (number % 7)
        pace.observe(tokens, 30.0 if number == stall_at else 0.005 + 25e-6 * tokens)
    assert (pace.fixed_s, pace.token_s) == (pytest.approx(0.005, rel=0.5), pytest.approx(25e-6, rel=0.5))
