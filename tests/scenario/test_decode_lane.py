"""The decode lane only saves work: whoever is placed, admitted, evicted or paused in a step is the same as if every sequence
were looked at in every step. The oracle is the same engine with nobody allowed into the lane and nothing about admission
remembered from one step to the next."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import BATCH, GOLD, STANDARD, expected_tokens, request, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.engine import Abort, ApplyPolicy
from fairlane.scheduler.events import EndReason
from fairlane.scheduler.fake_executor import StepTime
from fairlane.scheduler.lane import DecodeLane
from fairlane.scheduler.output import ScheduleOutput
from fairlane.scheduler.policies.bands import BandPolicy
from fairlane.scheduler.request import Request
from fairlane.scheduler.settlement import Settlement
from fairlane.scheduler.tenancy import NodeShare, PolicySnapshot, Tier, TiersPolicy, WithinTenant, WithinTier

PLAIN_TIERS = (
    replace(GOLD, ttft_target_s=0.1),
    Tier("standard", 50, patience_s=0.4, ttft_target_s=0.3, tpot_target_s=0.012),
    Tier("batch", 10, patience_s=1.0),
)


@contextmanager
def every_step_looks() -> Iterator[None]:
    with patch.object(DecodeLane, "may_join", return_value=False), patch.object(Settlement, "holds", return_value=False):
        yield


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
                order=draw(st.sampled_from([0, 0, 1])),
            )
        )
    return [with_stop(one, draw(st.integers(0, 80))) for one in asked]


def with_stop(asked: Request, index: int) -> Request:
    """The same, ending at the output token of that index; not so if there is none."""
    tokens = expected_tokens(asked)
    return replace(asked, stop_token_ids=frozenset([tokens[index]])) if index < len(tokens) else asked


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
    within_tenant=st.sampled_from(WithinTenant),
    depth=st.sampled_from([0, 1, 2]),
    num_blocks=st.integers(16, 60),
    budget=st.integers(8, 64),
    max_num_seqs=st.integers(1, 6),
    max_resident=st.integers(1, 8),
    cap=st.sampled_from([None, None, 1, 2]),
    lease_tokens=st.sampled_from([256, 60, 50]),
    fails=st.sampled_from([(), (), (9,), (4, 20)]),
    swap_s=st.sampled_from([None, None, 0.15]),
    num_host_blocks=st.sampled_from([0, 8, 40]),
    check=st.booleans(),  # a check writes back what the lane owes its members
)
def test_steps_are_the_same_with_the_lane_and_without(
    asked: list[Request],
    aborts: dict[int, float],
    policy: TiersPolicy,
    within_tenant: WithinTenant,
    depth: int,
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    max_resident: int,
    cap: int | None,
    lease_tokens: int,
    fails: tuple[int, ...],
    swap_s: float | None,
    num_host_blocks: int,
    check: bool,
) -> None:
    nodes = (NodeShare("a/x", max_running=cap),)

    def run() -> tuple[list[set[tuple[int, int]]], dict[int, object], int]:
        driver = world(
            policy=policy,
            tiers=PLAIN_TIERS,
            within_tenant=within_tenant,
            depth=depth,
            num_blocks=num_blocks,
            block_size=8,
            budget=budget,
            max_num_seqs=max_num_seqs,
            max_resident=max_resident,
            prefix_caching=False,  # else blocks are taken in another order, and other prefixes survive
            step_time=StepTime(fixed_s=0.01),
            nodes=nodes,
            num_host_blocks=num_host_blocks,
            min_swap_tokens=9,
            fail_steps=frozenset(fails[:1]),
            fail_launches=frozenset(fails[1:]),
            check=check,
        )
        if swap_s is not None:
            swapped = PolicySnapshot(2, "1" * 64, TiersPolicy.VIP, PLAIN_TIERS, nodes=nodes)
            driver.at(swap_s, ApplyPolicy(swapped, lambda refusal: None))
        return steps_of(driver, asked, aborts), outcome(driver), driver.scheduler.num_preemptions

    with patch.dict(BandPolicy.__init__.__kwdefaults__, lease_tokens=lease_tokens):
        with_lane = run()
        with every_step_looks():
            without = run()
    assert with_lane == without


@settings(max_examples=60, deadline=None)
@given(
    asked=arrivals(),
    aborts=st.dictionaries(st.integers(1, 14), st.floats(0, 0.6), max_size=3),
    depth=st.sampled_from([0, 1, 2]),
    max_resident=st.integers(1, 5),
    mins=st.tuples(*[st.sampled_from([0.0, 0.1, 0.3])] * 3),
    check=st.booleans(),
)
def test_minimum_shares_let_in_the_same_with_the_lane_and_without(
    asked: list[Request], aborts: dict[int, float], depth: int, max_resident: int, mins: tuple[float, ...], check: bool
) -> None:
    """Slots alone are short: while blocks are, or where tiers may evict, who is owed may be noticed up to 16 steps later."""
    tiers = tuple(Tier(tier.name, 50, min_share=share) for tier, share in zip(PLAIN_TIERS, mins, strict=True))

    def run() -> tuple[list[set[tuple[int, int]]], dict[int, object]]:
        seats = {"max_num_seqs": max_resident, "max_resident": max_resident}
        driver = world(tiers=tiers, depth=depth, num_blocks=400, check=check, **seats)
        return steps_of(driver, asked, aborts), outcome(driver)

    with_lane = run()
    with every_step_looks():
        without = run()
    assert with_lane == without


@settings(max_examples=80, deadline=None)
@given(
    asked=arrivals(),
    shared=st.lists(st.integers(0, 40), min_size=14, max_size=14),
    aborts=st.dictionaries(st.integers(1, 14), st.floats(0, 0.6), max_size=3),
    policy=st.sampled_from([TiersPolicy.VIP, TiersPolicy.FAIR]),
    gap_ms=st.sampled_from([None, 20.0, 100.0]),
    depth=st.sampled_from([0, 1, 2]),
    num_blocks=st.integers(16, 60),
    budget=st.integers(8, 64),
    max_num_seqs=st.integers(1, 6),
    max_resident=st.integers(1, 8),
    cap=st.sampled_from([None, 1, 2]),
    num_host_blocks=st.sampled_from([0, 8, 40]),
    check=st.booleans(),
)
def test_with_fair_shares_caps_and_a_prefix_cache_everybody_gets_their_own_tokens_in_good_time(
    asked: list[Request],
    shared: list[int],
    aborts: dict[int, float],
    policy: TiersPolicy,
    gap_ms: float | None,
    depth: int,
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    max_resident: int,
    cap: int | None,
    num_host_blocks: int,
    check: bool,
) -> None:
    prefix = tuple(range(1000, 1040))
    asked = [
        replace(one, prompt_token_ids=prefix[:length] + one.prompt_token_ids, stop_token_ids=frozenset())
        for one, length in zip(asked, shared, strict=False)
    ]
    driver = world(
        policy=policy,
        tiers=(GOLD, STANDARD, BATCH),
        within=WithinTier.FAIR,
        nodes=(NodeShare("a/x", 3.0, max_running=cap, min_share=0.1),),
        gap_ms=gap_ms,
        depth=depth,
        num_blocks=num_blocks,
        block_size=8,
        budget=budget,
        max_num_seqs=max_num_seqs,
        max_resident=max_resident,
        num_host_blocks=num_host_blocks,
        check=check,
    )
    steps_of(driver, asked, aborts)  # a bound on turns
    driver.scheduler.check_integrity()
    for one in asked:
        transcript, whole = driver.transcripts[one.request_id], expected_tokens(one)
        assert transcript.ended is not None
        complete = transcript.ended.reason is EndReason.LENGTH
        assert complete or transcript.ended.reason in (EndReason.ABORTED, EndReason.FAILED)
        assert transcript.token_ids == (whole if complete else whole[: len(transcript.token_ids)])
        refused = transcript.ended.error_reason == "KV_CAPACITY_EXCEEDED"
        assert complete or refused or one.request_id in aborts
    held = driver.blocks.num_used_blocks, driver.blocks.host.num_used_blocks, driver.scheduler.num_unfinished
    assert held == (0, 0, 0)


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
    with every_step_looks():
        without = shares()
    assert with_lane == pytest.approx(without, rel=0.05, abs=40)


def test_a_head_that_ranks_before_a_grower_gains_nothing_by_not_being_asked_for() -> None:
    """Request 2 takes the tenant's earliest place; in the step in which 4 takes the blocks of 8, it ranks before 4."""
    shapes = [
        (1, 1, 1, 0.0, 0), (2, 1, 1, 0.315625, 1), (3, 1, 19, 0.0, 0), (4, 7, 19, 0.1, 0), (5, 47, 4, 0.1, 0), (6, 1, 1, 0.0, 0),
        (7, 1, 1, 0.0, 0), (8, 23, 4, 0.3, 0), (9, 44, 32, 0.0, 0), (10, 1, 1, 0.0, 0), (11, 1, 1, 0.0, 0),
    ]  # fmt: skip
    asked = [
        request(number, "gold", prompt=prompt, max_tokens=tokens, arrival_s=arrival_s, order=order, tenant="a/x")
        for number, prompt, tokens, arrival_s, order in shapes
    ]

    def run() -> list[set[tuple[int, int]]]:
        driver = world(
            policy=TiersPolicy.FCFS, tiers=PLAIN_TIERS, within_tenant=WithinTenant.DEADLINE, num_blocks=17, block_size=8,
            budget=16, max_num_seqs=3, max_resident=3, prefix_caching=False, step_time=StepTime(fixed_s=0.01), check=False,
        )  # fmt: skip
        return steps_of(driver, asked, {})

    with_lane = run()
    with every_step_looks():
        without = run()
    assert with_lane == without
