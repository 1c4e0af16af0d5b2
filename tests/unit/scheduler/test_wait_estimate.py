"""What a newcomer is told of its wait: how many go before it in its line, times how long each took lately. Oracle: arithmetic,
and how long requests then really wait."""

from __future__ import annotations

from statistics import median

import pytest

from engine_world import request, world
from fairlane.blockmgr.hashing import HashChain
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.tenancy import Tier, TiersPolicy
from fairlane.scheduler.wait_estimate import WaitEstimate


def sequence(number: int, tenant: str = "o/a") -> Sequence:
    return Sequence(request(number, tenant=tenant), number, HashChain("", 16))


def moving(interval_s: float, admissions: int, tenant: str = "o/a") -> WaitEstimate:
    """A line in which somebody gets in every interval_s, while others wait."""
    waits, many = WaitEstimate(), [sequence(number, tenant) for number in range(admissions + 20)]
    for one in many:
        waits.enter(one, 0.0, 0)
    for number in range(admissions):
        waits.admit(many[number], (number + 1) * interval_s, number + 1)
    return waits


def test_it_is_the_place_in_the_line_times_the_time_between_admissions() -> None:
    waits = moving(0.5, 10)
    assert waits.wait_s(sequence(99).payer, 7, 100, now_s=5.0) == pytest.approx(8 * 0.5)


def test_a_line_that_nobody_knows_yet_goes_by_all_together() -> None:
    waits = moving(0.5, 10)
    assert waits.wait_s(sequence(99, "o/new").payer, 0, 3, now_s=5.0) == pytest.approx(4 * 0.5)


def test_who_gets_in_at_once_says_nothing_about_a_queue() -> None:
    waits = WaitEstimate()
    for number in range(50):
        one = sequence(number)
        waits.enter(one, float(number), number)
        waits.admit(one, number + 0.001, number)  # in the next step
    assert waits.wait_s(sequence(99).payer, 0, 0, now_s=50.0) is None


def test_a_line_that_has_stopped_is_thought_slower_the_longer_it_stands() -> None:
    waits = moving(0.5, 10)
    told = [waits.wait_s(sequence(99).payer, 0, 0, now_s=now_s) or 0.0 for now_s in (5.0, 5.2, 20.0, 60.0)]
    assert told[0] == told[1] < told[2] < told[3]


@pytest.mark.parametrize(("put_back", "slower"), [(0, 1.0), (16, 2.0), (32, 10.0)])
def test_a_line_moves_by_those_that_get_in_less_those_that_are_put_back(put_back: int, slower: float) -> None:
    """Of 32; where all are put back, it is not thought to stand for ever."""
    waits = moving(0.5, 32)
    for number in range(put_back):
        waits.enter(sequence(number), 16.0, 32, again=True)
    assert waits.wait_s(sequence(99).payer, 7, 100, now_s=16.0) == pytest.approx(8 * 0.5 * slower)


def test_what_was_put_back_long_ago_is_forgotten() -> None:
    waits = moving(0.5, 10)
    for number in range(5):
        waits.enter(sequence(number), 5.0, 10, again=True)
    for number in range(400):
        waits.enter(sequence(number), 5.0, 10)
        waits.admit(sequence(number), 5.5 + 0.5 * number, 11 + number)
    assert waits.wait_s(sequence(99).payer, 0, 100, now_s=205.0) == pytest.approx(0.5)


@pytest.mark.parametrize("policy", [TiersPolicy.FCFS, TiersPolicy.FAIR])
def test_half_of_those_who_queue_wait_as_long_as_they_are_told_within_a_third(policy: TiersPolicy) -> None:
    """D3, on a small engine at one and a half times what it can do."""
    driver = world(policy=policy, tiers=(Tier("batch", 10),), max_resident=4, max_num_seqs=4, num_blocks=200, check=False)
    asked = [
        request(
            number,
            prompt=20 + 13 * number % 40,
            max_tokens=5 + 7 * number % 30,
            arrival_s=0.02 * number,
            tenant=f"o/{number % 3}",
        )
        for number in range(1, 300)
    ]
    driver.add_at_arrival(asked)
    driver.run_until_idle()
    errors = []
    for one in asked:
        deltas = driver.transcripts[one.request_id].deltas
        told = next(delta.estimated_wait_s for delta in deltas if delta.queue_position is not None)
        waited = next(delta.started.queue_s for delta in deltas if delta.started is not None)
        if told is not None and waited > 0.1:
            errors.append(abs(told / waited - 1))
    assert len(errors) > 100 and median(errors) <= 0.3
