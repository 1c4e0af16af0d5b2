"""The decode lane only saves work: whoever is placed, admitted, evicted or paused in a step is the same as if every sequence
were looked at in every step. The oracle is the same engine with nobody allowed into the lane."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import BATCH, GOLD, STANDARD, request, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.engine import Abort
from fairlane.scheduler.fake_executor import StepTime
from fairlane.scheduler.lane import DecodeLane
from fairlane.scheduler.output import ScheduleOutput
from fairlane.scheduler.request import Request
from fairlane.scheduler.tenancy import Tier, TiersPolicy, WithinTier

PLAIN_TIERS = (GOLD, Tier("standard", 50, patience_s=0.4), Tier("batch", 10, patience_s=1.0))


@st.composite
def arrivals(draw: st.DrawFn) -> list[Request]:
    """Long enough outputs that most steps are decodes only, in waves, so that the queue is full at times and empty at others."""
    asked = []
    for number in range(1, draw(st.integers(2, 14)) + 1):
        prompt = tuple((number * 7919 + i) % 50_000 for i in range(draw(st.integers(1, 50))))
        asked.append(
            request(
                number,
                draw(st.sampled_from(PLAIN_TIERS)).name,
                prompt=prompt,
                max_tokens=draw(st.integers(1, 60)),
                arrival_s=draw(st.sampled_from([0.0, 0.1, 0.3])) + draw(st.floats(0, 0.02)),
                tenant=draw(st.sampled_from(["a/x", "a/y"])),
            )
        )
    return asked


def steps_of(driver: EngineDriver, asked: list[Request], aborts: dict[int, float]) -> list[set[tuple[int, int]]]:
    """(slot, tokens) of everything placed, step by step, until all have ended."""
    steps: list[set[tuple[int, int]]] = []
    executor = driver.engine._executor
    launch = executor.launch

    def record(output: ScheduleOutput) -> object:
        entries = {(entry.slot, entry.num_tokens) for entry in output.scheduled}
        steps.append(entries | {(slot, 1) for slot in output.decode_slots})
        return launch(output)

    executor.launch = record  # type: ignore[method-assign]
    driver.add_at_arrival(asked)
    for number, time_s in aborts.items():
        if number <= len(asked):
            driver.at(time_s, Abort(asked[number - 1].request_id))
    driver.run_until_idle(20_000)
    return steps


def outcome(driver: EngineDriver) -> dict[int, object]:
    return {number: (t.token_ids, t.first_token_s, t.ended_s, t.ended) for number, t in driver.transcripts.items()}


@settings(max_examples=120, deadline=None)
@given(
    asked=arrivals(),
    aborts=st.dictionaries(st.integers(1, 14), st.floats(0, 0.6), max_size=3),
    policy=st.sampled_from([TiersPolicy.FCFS, TiersPolicy.VIP]),
    depth=st.sampled_from([0, 1, 2]),
    num_blocks=st.integers(16, 60),
    budget=st.integers(8, 64),
    max_num_seqs=st.integers(1, 6),
    max_resident=st.integers(1, 8),
)
def test_steps_are_the_same_with_the_lane_and_without(
    asked: list[Request],
    aborts: dict[int, float],
    policy: TiersPolicy,
    depth: int,
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    max_resident: int,
) -> None:
    def run() -> tuple[list[set[tuple[int, int]]], dict[int, object], int]:
        driver = world(
            policy=policy,
            tiers=PLAIN_TIERS,
            depth=depth,
            num_blocks=num_blocks,
            block_size=8,
            budget=budget,
            max_num_seqs=max_num_seqs,
            max_resident=max_resident,
            prefix_caching=False,  # else blocks are taken in another order, and other prefixes survive
            step_time=StepTime(fixed_s=0.01),
        )
        return steps_of(driver, asked, aborts), outcome(driver), driver.scheduler.num_preemptions

    with_lane = run()
    with patch.object(DecodeLane, "may_join", return_value=False):
        without = run()
    assert with_lane == without


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", list(TiersPolicy))
def test_fair_shares_and_minimums_are_charged_the_same_in_the_lane(policy: TiersPolicy, depth: int) -> None:
    def shares() -> dict[str, float]:
        driver = world(
            policy=policy, tiers=(GOLD, STANDARD, BATCH), within=WithinTier.FAIR, depth=depth, num_blocks=200, max_num_seqs=4
        )
        number = 0
        for tenant in ("a/x", "a/y", "b/z"):
            for tier in ("gold", "standard", "batch"):
                for _ in range(6):
                    number += 1
                    driver.add(request(number, tier, prompt=9, max_tokens=40, tenant=tenant))
        for _ in range(400):
            driver.turn()
        served: dict[str, float] = {}
        for key, transcript in driver.transcripts.items():
            tier = ("gold", "standard", "batch")[(key - 1) // 6 % 3]
            served[tier] = served.get(tier, 0) + len(transcript.token_ids)
        return served

    with_lane = shares()
    with patch.object(DecodeLane, "may_join", return_value=False):
        without = shares()
    assert with_lane == pytest.approx(without, rel=0.05, abs=40)
