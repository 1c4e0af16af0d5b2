"""What evictions cost, as learned from steps, and who is taken by it."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_world import request, snapshot, world
from fairlane.scheduler.kv_quotas import Losses
from fairlane.scheduler.policies import make_policy
from fairlane.scheduler.relief_costs import ReliefCosts
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.tenancy import KVAmount, NodeShare
from fairlane.scheduler.victims import cheapest

STEP = 500


def learned(block_s: float, token_s: float = 1e-4, fixed_s: float = 5e-3) -> ReliefCosts:
    costs = ReliefCosts(STEP)
    for turn in range(300):
        tokens = 50 + 100 * (turn % 3)
        costs.observe(tokens, 0, fixed_s + token_s * tokens)
        costs.observe(tokens, 20, fixed_s + token_s * tokens + 20 * block_s)
    return costs


def test_a_tokens_time_and_a_copys_are_told_apart() -> None:
    costs = learned(block_s=3e-4)
    # A full step takes 5 ms + 500 * 0.1 ms, a five hundredth of it 0.11 ms.
    assert (costs.token_s, costs.block_s) == (pytest.approx(1.1e-4, rel=0.01), pytest.approx(3e-4, rel=0.01))


def test_copies_that_run_beside_the_step_cost_nothing_although_steps_differ() -> None:
    costs = learned(block_s=0.0)
    for turn in range(50):  # a millisecond more, a millisecond less
        costs.observe(50, 20, 5e-3 + 50e-4 + (1e-3 if turn % 2 else -1e-3))
    assert costs.block_s == pytest.approx(0.0, abs=1e-5)


def test_where_a_step_takes_as_long_whatever_is_in_it_a_token_costs_its_part_of_it() -> None:
    assert learned(0.0, token_s=0.0, fixed_s=10e-3).token_s == pytest.approx(10e-3 / STEP, rel=0.01)


def test_copies_are_tried_before_they_are_known_and_again_some_time_after_they_were_dear() -> None:
    costs, found = ReliefCosts(STEP), []
    for _ in range(20):
        costs.observe(100, 0, 10e-3)
    found.append(costs.swap_s(10) < costs.recompute_s(0, 160))
    costs.observe(100, 10, 1.0)  # a stall
    found.append(costs.swap_s(10) < costs.recompute_s(0, 160))
    for _ in range(80):
        costs.recomputes()
    found.append(costs.swap_s(10) < costs.recompute_s(0, 160))
    assert found == [True, False, True]


def test_a_longer_context_costs_more_per_token() -> None:
    costs = ReliefCosts(STEP)
    assert costs.recompute_s(8000, 100) > 1.2 * costs.recompute_s(0, 100)


def test_the_choice_follows_the_measured_costs() -> None:
    driver = world(num_blocks=40, budget=128, num_host_blocks=12, prefix_caching=False)
    driver.add(request(1, prompt=70, max_tokens=30))
    driver.turn()
    driver.turn()
    [sequence] = driver.scheduler.running
    driver.scheduler.lane.settle()
    swaps, found = driver.scheduler.swaps, []
    for block_s in (1e-6, 1e-1):
        swaps.costs = learned(block_s)
        found.append((swaps.is_worth_it(sequence), swaps.cost_s(sequence)))
    computed = swaps.costs.recompute_s(0, sequence.num_computed_tokens)
    assert [worth for worth, _ in found] == [True, False] and found[0][1] < found[1][1] == pytest.approx(computed)


def running(prompts: list[int]) -> tuple[list[Sequence], object]:
    driver = world(num_blocks=200, budget=512, max_num_seqs=16, prefix_caching=False)
    for number, prompt in enumerate(prompts, 1):
        driver.add(request(number, "batch", prompt=prompt, max_tokens=8))
    for _ in range(6):
        driver.turn()
    driver.scheduler.lane.settle()
    return list(driver.scheduler.running), driver


@given(prompts=st.lists(st.integers(1, 300), min_size=1, max_size=6), missing=st.integers(0, 60), slots=st.integers(0, 3))
def test_victims_suffice_and_none_of_them_is_superfluous(prompts: list[int], missing: int, slots: int) -> None:
    candidates, driver = running(prompts)
    blocks, policy = driver.blocks, make_policy(snapshot())  # type: ignore[attr-defined]
    found = cheapest(candidates, missing, slots, policy, blocks, lambda one: float(one.num_computed_tokens))

    def suffices(some: list[Sequence]) -> bool:
        return sum(blocks.freed_by(one.request_id) for one in some) >= missing and len(some) >= slots

    fewer = [] if not found else combinations(found, len(found) - 1)
    assert (found is not None) == suffices(candidates)
    assert found is None or (suffices(found) and not any(suffices(list(some)) for some in fewer))


def test_blocks_that_nobody_asked_for_make_nobody_a_better_victim() -> None:
    # One block is missing. The long one gives more for its cost in all, but costs more.
    candidates, driver = running([250, 40])
    policy, blocks = make_policy(snapshot()), driver.blocks  # type: ignore[attr-defined]
    found = cheapest(candidates, 1, 0, policy, blocks, lambda one: one.num_computed_tokens**0.5)
    assert found is not None and [one.num_prompt_tokens for one in found] == [40]


def test_whoever_makes_room_by_a_full_limit_is_not_superfluous() -> None:
    # The pool lacks nothing; the limit of "org/batch" is 4 blocks short, so its sequences go, the cheapest that suffices, and not
    # the other tenant's, which would be cheaper.
    nodes = (NodeShare("org/batch", kv_limit=KVAmount(tokens=16 * 30)),)
    driver = world(num_blocks=200, budget=512, max_num_seqs=16, prefix_caching=False, nodes=nodes)
    asked = [(1, 250, "org/batch"), (2, 60, "org/batch"), (3, 40, "org/other"), (4, 40, "org/batch")]
    for number, prompt, tenant in asked:
        driver.add(request(number, "batch", prompt=prompt, max_tokens=8, tenant=tenant))
    for _ in range(6):
        driver.turn()
    driver.scheduler.lane.settle()
    candidates, blocks, quotas = list(driver.scheduler.running), driver.blocks, driver.scheduler.census.quotas
    assert quotas is not None
    room = min(account.room for account in quotas.lineage(candidates[0]))
    cost_of, found = {1: 9.0, 2: 2.0, 3: 0.1, 4: 1.0}, []
    for short in (1, 4, 6):
        losses = Losses(quotas, candidates[0], room + short)
        victims = cheapest(candidates, -50, 0, make_policy(snapshot()), blocks, lambda one: cost_of[one.request_id], losses)
        found.append([one.request_id for one in victims or []])
    assert found == [[4], [2], [4, 2]]
