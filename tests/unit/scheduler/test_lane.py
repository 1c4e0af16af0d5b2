"""Sequences in the decode lane: a step tells them nothing new, and whatever happens to one of them happens to it alone."""

from __future__ import annotations

import pytest

from engine_world import expected_tokens, request, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.events import EndReason
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.scheduler.request import RequestId
from fairlane.scheduler.tenancy import Tier, TiersPolicy


def launched(driver: EngineDriver) -> list[ScheduleOutput]:
    """What is launched from now on."""
    seen: list[ScheduleOutput] = []
    launch = driver.engine._executor.launch
    driver.engine._executor.launch = lambda output: (seen.append(output), launch(output))[1]  # type: ignore[method-assign]
    return seen


def test_a_steady_step_names_the_same_slots_and_nothing_else() -> None:
    driver = world(policy=TiersPolicy.FCFS, block_size=64)
    for number in (1, 2, 3):
        driver.add(request(number, prompt=8, max_tokens=40))
    driver.turn()
    seen = launched(driver)
    for _ in range(10):
        driver.turn()
    assert all(output.decode_slots is seen[0].decode_slots for output in seen)
    assert [(output.scheduled, output.new, output.appends, output.grown_slots) for output in seen] == [([], [], [], [])] * 10


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_token_ends_its_own_sequence_at_that_token(depth: int) -> None:
    driver = world(depth=depth)
    plain = [request(number, "gold", prompt=8, max_tokens=30) for number in (1, 2, 3)]
    stop = expected_tokens(plain[1])[11]
    asked = [plain[0], request(2, "gold", prompt=8, max_tokens=30, stop=[stop]), plain[2]]
    for one in asked:
        driver.add(one)
    driver.run_until_idle()
    ended = driver.transcripts[RequestId(2)].ended
    assert ended is not None and (ended.reason, ended.stop_token_id) == (EndReason.STOP, stop)
    assert [driver.transcripts[one.request_id].token_ids for one in asked] == [expected_tokens(one) for one in asked]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_error_of_one_sequence_fails_it_alone(depth: int) -> None:
    driver = world(depth=depth)
    asked = [request(number, "gold", prompt=8, max_tokens=30) for number in (1, 2, 3)]
    for one in asked:
        driver.add(one)
    result = driver.engine._executor.result

    def with_error(handle: int) -> StepResult:
        found = result(handle)
        if handle == 9:
            found.errors = {len(found.tokens) + 1: "not finite"}
        return found

    driver.engine._executor.result = with_error  # type: ignore[method-assign]
    driver.run_until_idle()
    ends = [driver.transcripts[one.request_id].ended for one in asked]
    assert [end is not None and end.error_reason for end in ends] == ["", "NUMERICAL_ERROR", ""]
    assert [driver.transcripts[one.request_id].token_ids for one in asked[::2]] == [expected_tokens(one) for one in asked[::2]]
    assert driver.transcripts[asked[1].request_id].token_ids == expected_tokens(asked[1])[:8]
    assert driver.blocks.num_used_blocks == 0


def test_while_nothing_can_change_nobody_is_asked() -> None:
    driver = world(policy=TiersPolicy.VIP, tiers=(Tier("gold", 100), Tier("batch", 10)), max_resident=2, max_num_seqs=2)
    for number in (1, 2, 3, 4):
        driver.add(request(number, "batch", prompt=8, max_tokens=60))
    for _ in range(6):
        driver.turn()
    policy, asked = driver.scheduler.policy, []
    driver.scheduler.policy.peek = lambda: asked.append("head")  # type: ignore[method-assign]
    for _ in range(5):
        driver.turn()
    driver.add(request(5, "batch", prompt=8, max_tokens=4))  # has no right to evict
    driver.turn()
    driver.turn()
    assert asked == []
    del policy.peek
    driver.add(request(6, "gold", prompt=8, max_tokens=4))
    driver.turn()
    assert driver.scheduler.census.running_by_tier.copy() == {"gold": 1, "batch": 1}


def test_blocks_filled_in_the_lane_are_found_once_their_sequence_has_ended() -> None:
    driver = world(block_size=8)
    first = request(1, "gold", prompt=16, max_tokens=24)
    driver.add(first)
    driver.run_until_idle()
    conversation = first.prompt_token_ids + tuple(expected_tokens(first)) + (7,)
    driver.add(request(2, "gold", prompt=conversation, max_tokens=2))
    driver.run_until_idle()
    started = next(delta.started for delta in driver.transcripts[RequestId(2)].deltas if delta.started)
    assert started.cached_tokens == 32  # of 16 + 24 the last token's KV was never computed: four whole blocks of 39


@pytest.mark.parametrize("policy", [TiersPolicy.FCFS, TiersPolicy.FAIR])
def test_a_step_whose_tokens_run_out_keeps_its_lane_while_seats_are_left(policy: TiersPolicy) -> None:
    """Members' tokens are theirs whoever goes first, so a prompt and a head that want more do not take the lane apart."""
    driver = world(policy=policy, budget=16, max_num_seqs=8, num_blocks=200, tiers=(Tier("batch", 10),))
    for number in (1, 2, 3):
        driver.add(request(number, prompt=4, max_tokens=200, tenant=f"org/t{number}"))
    for _ in range(3):
        driver.turn()
    driver.add(request(4, prompt=130, max_tokens=4, tenant="org/t4"))
    driver.add(request(5, prompt=130, max_tokens=4, tenant="org/t5"))
    seen = launched(driver)
    for _ in range(10):
        driver.turn()
    assert [(len(output.decode_slots), [e.num_tokens for e in output.scheduled]) for output in seen] == [(3, [13])] * 10
