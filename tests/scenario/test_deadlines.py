"""`within_tenant: deadline`: jobs that can all be on time are, under overload those that can still be on time go first, the late
ones wait at the end and are served, streams keep their pace. Oracle: an EDF timetable on paper, and FCFS on the same arrivals."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_world import expected_tokens, request, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.fake_executor import StepTime
from fairlane.scheduler.request import Request
from fairlane.scheduler.tenancy import Tier, TiersPolicy, WithinTenant, WithinTier

STEP_S = 0.01
UNIFORM = StepTime(STEP_S, 0.0, 0.0, 0.0)


def lateness(driver: EngineDriver, asked: Iterable[Request], targets: dict[str, float]) -> list[float]:
    """How long after its target each got its first token; negative: before."""
    firsts = [(one, driver.transcripts[one.request_id].first_token_s) for one in asked]
    return [(float("inf") if first is None else first) - one.arrival_s - targets[one.tier] for one, first in firsts]


class Job(NamedTuple):
    """A prompt of so many steps, there from step `arrival` on, whose first token is due at step `due`."""

    length: int
    arrival: int
    due: int


def edf_is_on_time(jobs: list[Job]) -> bool:
    """Whether one machine can do them all by working, in every step, on the one that is due first of those that are there. If
    anybody can, this does (Dertouzos 1974)."""
    left = {number: job.length for number, job in enumerate(jobs)}
    now = 0
    while left:
        there = [number for number in left if jobs[number].arrival <= now]
        now += 1
        if there:
            first = min(there, key=lambda number: (jobs[number].due, number))
            left[first] -= 1
            if not left[first]:
                del left[first]
                if now > jobs[first].due:
                    return False
    return True


SPARE_STEPS = 2.5  # a step is under way when a job comes, and one is launched ahead


@st.composite
def jobs_for_edf(draw: st.DrawFn, latest: int) -> list[Job]:
    """Jobs that cannot all be on time get later deadlines until they can: just."""
    each = st.builds(Job, st.integers(1, 12), st.integers(0, latest), st.integers(1, 60))
    jobs = draw(st.lists(each, min_size=2, max_size=10))
    while not edf_is_on_time(jobs):
        jobs = [job._replace(due=job.due + 1) for job in jobs]
    return jobs


def worst_lateness_s(jobs: list[Job], *, seats: int, depth: int) -> float:
    """Of one tenant's jobs, on a worker that has learned how long its steps take."""
    tiers = tuple(
        Tier(f"t{number}", 50, ttft_target_s=(job.due - job.arrival + SPARE_STEPS) * STEP_S) for number, job in enumerate(jobs)
    )
    driver = world(
        policy=TiersPolicy.FCFS, tiers=tiers, within_tenant=WithinTenant.DEADLINE, step_time=UNIFORM, budget=8,
        max_num_seqs=seats, max_resident=seats, num_blocks=200, prefix_caching=False, depth=depth,
    )  # fmt: skip
    driver.add(request(99, "t0", prompt=40, max_tokens=1, tenant="a/x"))
    driver.run_until_idle()
    start_s = driver.clock.now()
    asked = [
        request(
            number + 1, f"t{number}", prompt=8 * job.length, max_tokens=1, tenant="a/x", arrival_s=start_s + job.arrival * STEP_S
        )
        for number, job in enumerate(jobs)
    ]
    driver.add_at_arrival(asked)
    driver.run_until_idle()
    return max(lateness(driver, asked, {tier.name: tier.ttft_target_s or 0.0 for tier in tiers}))


@given(jobs=jobs_for_edf(latest=0))
def test_jobs_that_are_all_there_and_can_all_be_done_in_time_are_one_seat_at_a_time(jobs: list[Job]) -> None:
    assert worst_lateness_s(jobs, seats=1, depth=0) <= 1e-9


@given(jobs=jobs_for_edf(latest=40), depth=st.sampled_from([0, 1]))
def test_a_set_of_jobs_that_edf_can_do_is_done_without_a_miss(jobs: list[Job], depth: int) -> None:
    """D2. Whoever comes later and is due sooner goes before prompts that are half read."""
    assert worst_lateness_s(jobs, seats=8, depth=depth) <= 1e-9


def overload(load: float, seed: int) -> list[Request]:
    """30 s of arrivals at `load` times what the worker can prefill: 64 tokens a step of 10 ms. A fifth is gold."""
    draw, asked, now_s = random.Random(seed), [], 0.0
    while now_s < 30.0:
        prompt = draw.randint(20, 200)
        now_s += draw.expovariate(load * 64 / STEP_S / 110)
        tier = "gold" if draw.random() < 0.2 else "batch"
        asked.append(
            request(len(asked) + 1, tier, prompt=prompt, max_tokens=2, arrival_s=now_s, tenant=f"a/{draw.choice('xyz')}")
        )
    return asked


SLOS = {"gold": 0.5, "batch": 1.0}


def goodput(asked: list[Request], policy: TiersPolicy, within_tenant: WithinTenant) -> dict[str, float]:
    """The part of each tier's requests that had their first token in time."""
    tiers = (Tier("gold", 100, ttft_target_s=SLOS["gold"]), Tier("batch", 10, ttft_target_s=SLOS["batch"]))
    driver = world(
        policy=policy, tiers=tiers, within_tenant=within_tenant, step_time=UNIFORM, budget=64, num_blocks=2000, check=False,
        prefix_caching=False,
    )  # fmt: skip
    driver.add_at_arrival(asked)
    driver.run_until_idle()
    assert {len(t.token_ids) for t in driver.transcripts.values()} == {2}  # nobody is dropped
    late = lateness(driver, asked, SLOS)
    on_time = {tier: [x <= 0 for one, x in zip(asked, late, strict=True) if one.tier == tier] for tier in SLOS}
    return {tier: sum(marks) / len(marks) for tier, marks in on_time.items()} | {"all": sum(x <= 0 for x in late) / len(late)}


@pytest.mark.parametrize("seed", [1, 2])
def test_in_overload_more_are_on_time_than_by_arrival_and_the_top_tier_hardly_misses(seed: int) -> None:
    """D1."""
    asked = overload(2.0, seed)
    fcfs = goodput(asked, TiersPolicy.FCFS, WithinTenant.FCFS)
    deadline = goodput(asked, TiersPolicy.VIP, WithinTenant.DEADLINE)
    assert deadline["all"] >= 1.2 * fcfs["all"] and deadline["gold"] >= 0.99, (fcfs, deadline)


def test_a_request_that_is_too_late_lets_the_others_of_every_tenant_pass_and_is_served_after_them() -> None:
    tiers = (Tier("batch", 10, ttft_target_s=0.1),)
    driver = world(
        policy=TiersPolicy.FCFS, tiers=tiers, within_tenant=WithinTenant.DEADLINE, step_time=UNIFORM, budget=8, max_num_seqs=1,
        max_resident=1, num_blocks=100,
    )  # fmt: skip
    first = request(1, "batch", prompt=88, max_tokens=1, tenant="a/x")  # keeps the seat for 0.11 s
    late = request(2, "batch", prompt=8, max_tokens=1, tenant="a/x")
    fresh = request(3, "batch", prompt=8, max_tokens=1, tenant="b/y", arrival_s=0.095)
    driver.add_at_arrival([first, late, fresh])
    driver.run_until_idle()
    times = [driver.transcripts[one.request_id].first_token_s or 0.0 for one in (fresh, late)]
    assert times[0] < times[1] and driver.transcripts[late.request_id].token_ids == expected_tokens(late)


def test_an_rpc_deadline_counts_where_it_comes_before_the_target() -> None:
    driver = world(
        policy=TiersPolicy.FCFS, tiers=(Tier("batch", 10, ttft_target_s=9.0),), within_tenant=WithinTenant.DEADLINE,
        step_time=UNIFORM, max_num_seqs=1, max_resident=1,
    )  # fmt: skip
    relaxed = [request(i, "batch", prompt=8, max_tokens=5, tenant="a/x") for i in range(1, 6)]
    urgent = request(9, "batch", prompt=8, max_tokens=1, tenant="a/x", deadline_s=0.2)
    for one in [*relaxed, urgent]:
        driver.add(one)
    driver.run_until_idle()
    assert driver.transcripts[urgent.request_id].token_ids == expected_tokens(urgent)


def longest_gap_s(within_tenant: WithinTenant) -> float:
    """Between two tokens of a stream, while long prompts arrive."""
    tiers = (Tier("gold", 50, tpot_target_s=0.02), Tier("batch", 50))
    driver = world(
        tiers=tiers, within_tenant=within_tenant, budget=512, num_blocks=2000, step_time=StepTime(0.005, 0.0, 1e-4, 0.0)
    )
    stream = request(1, "gold", prompt=300, max_tokens=150)  # steps of two sizes, to learn from
    driver.add(stream)
    times: list[float] = []
    for number in range(400):
        seen = len(driver.transcripts[stream.request_id].token_ids)
        driver.turn()
        if len(driver.transcripts[stream.request_id].token_ids) > seen:
            times.append(driver.clock.now())
        if number in (20, 30, 40):
            driver.add(request(number, "batch", prompt=600, max_tokens=3))
    driver.run_until_idle()
    assert all(t.token_ids for t in driver.transcripts.values())
    return max(later - earlier for earlier, later in pairwise(times))


def test_a_step_is_no_longer_than_the_streams_in_it_allow() -> None:
    gaps = longest_gap_s(WithinTenant.FCFS), longest_gap_s(WithinTenant.DEADLINE)
    assert gaps[0] > 0.05 and gaps[1] <= 0.0205, gaps


def test_a_policy_without_deadlines_forgets_who_was_late() -> None:
    tiers = (Tier("batch", 10, ttft_target_s=0.02),)
    driver = world(
        policy=TiersPolicy.VIP, tiers=tiers, within=WithinTier.FAIR, within_tenant=WithinTenant.DEADLINE, step_time=UNIFORM,
        max_num_seqs=1, max_resident=1,
    )  # fmt: skip
    asked = [request(i, "batch", prompt=8, max_tokens=9, tenant=f"a/{i % 2}") for i in range(1, 6)]
    for one in asked:
        driver.add(one)
    for _ in range(12):  # the first ends meanwhile: somebody is looked for
        driver.turn()
    relegated = [s.relegated for s in driver.scheduler._sequences.values()]
    snapshot = driver.engine._snapshot
    assert snapshot is not None
    driver.apply(replace(snapshot, generation=2, sha256="1" * 64, within_tenant=WithinTenant.FCFS))
    driver.turn()
    forgotten = [s.relegated for s in driver.scheduler._sequences.values()]
    driver.run_until_idle()
    assert (sum(relegated), sum(forgotten)) == (4, 0)
    assert all(driver.transcripts[one.request_id].token_ids == expected_tokens(one) for one in asked)
