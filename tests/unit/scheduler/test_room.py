"""What an admission leaves free: learned from what ended and what came, never less than the least."""

from __future__ import annotations

import pytest

from engine_world import expected_tokens, request, snapshot, world
from fairlane.scheduler.policies import make_policy
from fairlane.scheduler.room import RESERVE, Room
from fairlane.scheduler.tenancy import TiersPolicy

VIP = make_policy(snapshot())
BLOCKS = 3300  # a hundredth is 33, an eleventh is 300


class Eviction:
    """part: what one costs of what recompute would. asked: about how many blocks."""

    def __init__(self, part: float) -> None:
        self.part = part
        self.asked = 0

    def part_of_recompute(self, num_blocks: int) -> float:
        self.asked = num_blocks
        return self.part


def room(part: float = 1.0) -> Room:
    return Room(BLOCKS, 16, 0.01, Eviction(part))


def test_before_anything_is_known_the_least_is_kept_and_nothing_where_nobody_runs() -> None:
    assert (room().kept_from("batch", VIP, 5), room().kept_from("batch", VIP, 0), room().least(0)) == (33, 0, 0)


def test_it_is_the_mean_growth_of_a_sequence_however_many_run() -> None:
    learned = room()
    for output in (160, 480):  # 320 on average: 20 blocks
        learned.ended(output)
    assert [learned.kept_from("batch", VIP, running) for running in (1, 64)] == [int(RESERVE * 20)] * 2


def test_lower_tiers_leave_what_higher_ones_take_per_admission_and_those_leave_nothing_for_lower_ones() -> None:
    learned = room()
    for _ in range(2):
        learned.admitted("gold", 60)
        learned.admitted("batch", 40)
    # Half of the admissions are gold's: 30 blocks per admission.
    assert [learned.kept_from(tier, VIP, 9) for tier in ("batch", "gold")] == [int(RESERVE * 30), 33]


@pytest.mark.parametrize("policy", [TiersPolicy.FCFS, TiersPolicy.FAIR])
def test_where_nobody_ranks_above_another_nothing_is_left_for_tiers(policy: TiersPolicy) -> None:
    learned = room()
    learned.admitted("gold", 100)
    assert learned.kept_from("batch", make_policy(snapshot(policy)), 9) == 33


def test_it_is_at_most_an_eleventh_of_all_blocks() -> None:
    learned = room()
    learned.ended(100_000)
    assert learned.kept_from("batch", VIP, 9) == BLOCKS // 11


def test_what_a_tier_took_long_ago_is_forgotten_with_time_and_at_once_with_its_policy() -> None:
    learned = room()
    learned.admitted("gold", 100)
    for _ in range(500):
        learned.admitted("batch", 10)
    faded = learned.kept_from("batch", VIP, 9)
    learned.admitted("gold", 3000)
    learned.forget_tiers()
    assert (faded, learned.kept_from("batch", VIP, 9)) == (33, 33)


@pytest.mark.parametrize(("part", "kept"), [(1.0, 90), (0.5, 45), (0.0, 33)])
def test_the_less_an_eviction_costs_of_recompute_the_less_is_left(part: float, kept: int) -> None:
    learned = room(part)
    learned.ended(320)  # 20 blocks, times RESERVE
    assert learned.kept_from("batch", VIP, 9) == kept


def test_with_host_memory_and_copies_that_cost_nothing_only_the_least_is_left() -> None:
    found = []
    for num_host_blocks in (0, 3, 40):
        driver = world(num_blocks=110, budget=512, num_host_blocks=num_host_blocks, prefix_caching=False)
        driver.scheduler.room.ended(48)  # three blocks; at most a tenth of all is left
        found.append(driver.scheduler.room.kept_from("batch", VIP, 9))
    assert found == [10, 10, 1]


def test_a_sequence_that_others_would_outgrow_is_not_let_in_and_nobody_is_evicted() -> None:
    # Of 44 blocks four are kept once an output of 48 tokens was seen (3 blocks, at most an eleventh). Two of 20 blocks leave 4;
    # the third waits instead of growing into its elders.
    driver = world(policy=TiersPolicy.FCFS, num_blocks=44, budget=512, prefix_caching=False)
    driver.add(request(1, prompt=16, max_tokens=48))
    driver.run_until_idle(200)
    asked = [request(number, prompt=304, max_tokens=32) for number in (2, 3, 4)]
    for one in asked:
        driver.add(one)
    driver.run_until_idle(500)
    tokens = [driver.transcripts[one.request_id].token_ids for one in asked]
    assert (driver.scheduler.num_preemptions, tokens) == (0, [expected_tokens(one) for one in asked])
