"""The simulator against closed forms, sums and itself."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random

import pytest

from fairlane.scheduler.events import EndReason
from fairlane.scheduler.simulator.catalogue import WORKLOADS
from fairlane.scheduler.simulator.meter import Account
from fairlane.scheduler.simulator.scene import Scene
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import SimResult, Simulation
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order
from fairlane.scheduler.tenancy import NodeShare, PolicySnapshot, Shaping, Tier, TiersPolicy

TIERS = (Tier("gold", 100, shaping=Shaping.BALANCED), Tier("batch", 10, min_share=0.05))
NODES = tuple(NodeShare(f"o/t{k}") for k in range(4))
SMALL = WorkerShape(num_blocks=80, max_num_seqs=16, max_num_batched_tokens=64)


def snapshot(policy: TiersPolicy = TiersPolicy.FCFS, tiers: tuple[Tier, ...] = TIERS) -> PolicySnapshot:
    return PolicySnapshot(1, "", policy, tiers, nodes=NODES)


def mixed(count: int = 80, seed: int = 1, *, hidden: bool = False) -> Workload:
    """Requests of two tiers and four tenants, faster than SMALL can serve them; hidden: shorter than they asked for."""
    random = Random(seed)
    requests = [
        SimRequest(
            random.uniform(0, 3),
            f"o/t{number % 4}",
            ("gold", "batch")[number % 2],
            random.randint(1, 300),
            output := random.randint(1, 60),
            max_tokens=output + random.randint(0, 40) if hidden else None,
        )
        for number in range(count)
    ]
    return Workload("mixed", in_order(requests), ("gold", "batch"), 1e6)


def run(
    workload: Workload, policy: TiersPolicy, shape: WorkerShape = SMALL, workers: int = 1, *, check: bool = True
) -> SimResult:
    return Simulation(workload, snapshot(policy), shape, num_workers=workers, check=check).run()


def test_one_tenant_waits_as_long_as_in_an_m_d_1_queue() -> None:
    # One sequence a step, one step a request: Poisson arrivals, a fixed service time, one server (Pollaczek-Khinchine).
    service_s, load = 0.01, 0.7
    model = StepModel(fixed_s=service_s, sequence_s=0, weights_s=0, token_s=0, context_s=0, attention_s=0)
    shape = WorkerShape(step=model, max_num_seqs=1, depth=0, network_s=0)
    random, arrival_s, requests = Random(5), 0.0, []
    for _ in range(30_000):
        arrival_s += random.expovariate(load / service_s)
        requests.append(SimRequest(arrival_s, "o/t0", "batch", 10, 1))
    result = run(Workload("M/D/1", tuple(requests), ("batch",), 1e6), TiersPolicy.FCFS, shape, check=False)
    waited = [outcome.queue_s for outcome in result.outcomes if outcome.queue_s is not None]
    expected_s = load * service_s / (2 * (1 - load))
    assert (len(waited), sum(waited) / len(waited)) == (30_000, pytest.approx(expected_s, rel=0.05))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", TiersPolicy)
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("host", [0, 200])
def test_every_token_is_computed_once_for_its_owner(policy: TiersPolicy, depth: int, hidden: bool, host: int) -> None:
    workload = mixed(hidden=hidden)
    result = run(workload, policy, replace(SMALL, depth=depth, num_host_blocks=host))
    expected: dict[Account, tuple[int, int]] = {}
    for request in workload.requests:
        account = Account(request.node, request.tier)
        prompt, output = expected.get(account, (0, 0))
        expected[account] = (prompt + request.prompt_tokens, output + request.output_tokens)
    served = {account: (counts.prompt, counts.output) for account, counts in result.counts.items()}
    assert (served, all(outcome.finished for outcome in result.outcomes)) == (expected, True)


def test_recomputed_tokens_are_the_schedulers_own_count() -> None:
    # The scheduler counts at admission what is to be computed again, so only where nobody is evicted before that is done.
    result = run(mixed(), TiersPolicy.VIP, replace(SMALL, num_blocks=SMALL.num_blocks // 2))
    counted = sum(counts.recomputed for counts in result.counts.values())
    assert (counted > 0, counted) == (True, result.recomputed_tokens)


def test_with_room_in_host_memory_less_is_computed_again() -> None:
    without, swapped = (run(mixed(), TiersPolicy.VIP, replace(SMALL, num_host_blocks=blocks)) for blocks in (0, 600))
    assert (swapped.swaps_out > 0, swapped.recomputed_tokens < without.recomputed_tokens) == (True, True)


@pytest.mark.parametrize("name", ["W1", "W9", "W12"])
def test_the_same_seed_does_the_same_things_and_another_does_not(name: str) -> None:
    def digest(seed: int) -> str:
        workload = WORKLOADS[name](Scene(seed, 2.0, SMALL, 2))
        tiers = tuple(Tier(tier, 100 - place) for place, tier in enumerate(workload.tiers))
        shape = replace(SMALL, num_blocks=4000)
        return Simulation(workload, snapshot(TiersPolicy.VIP, tiers), shape, num_workers=2).run().digest

    assert (digest(1) == digest(1), digest(1) == digest(2)) == (True, False)


def test_first_come_first_served_starts_in_order_of_arrival() -> None:
    result = run(mixed(), TiersPolicy.FCFS, replace(SMALL, num_blocks=5000))
    starts = [outcome.planned.asked.arrival_s + (outcome.queue_s or 0) for outcome in result.outcomes]
    assert starts == sorted(starts)


def test_a_request_alone_takes_the_time_of_its_steps_and_the_way_there_and_back() -> None:
    model = StepModel(fixed_s=0.01, sequence_s=0, weights_s=0, token_s=0.001, context_s=0, attention_s=0)
    shape = WorkerShape(step=model, max_num_seqs=4, max_num_batched_tokens=50, network_s=0.002, depth=0)
    workload = Workload("one", (SimRequest(1.0, "o/t0", "gold", 80, 5),), ("gold",), 100.0)
    outcome = run(workload, TiersPolicy.FCFS, shape).outcomes[0]
    first_s = 0.002 + (0.01 + 0.05) + (0.01 + 0.03) + 0.002
    assert (outcome.ttft_s, outcome.tpot_s) == (pytest.approx(first_s), pytest.approx(0.011))


@pytest.mark.parametrize("depth", [0, 1])
def test_a_first_token_counts_when_one_token_of_the_prompt_was_left_for_the_last_step(depth: int) -> None:
    # That step looks like a decode, and its token comes as decodes' tokens do.
    model = StepModel(fixed_s=0.01, sequence_s=0, weights_s=0, token_s=0.001, context_s=0, attention_s=0)
    shape = WorkerShape(step=model, max_num_seqs=4, max_num_batched_tokens=50, network_s=0.002, depth=depth)
    workload = Workload("one", (SimRequest(1.0, "o/t0", "gold", 101, 5),), ("gold",), 100.0)
    outcome = run(workload, TiersPolicy.FCFS, shape).outcomes[0]
    assert (outcome.ttft_s, outcome.tpot_s) == (pytest.approx(0.002 + 2 * 0.06 + 0.011 + 0.002), pytest.approx(0.011))


def test_a_cancelled_request_ends_when_its_client_gives_up() -> None:
    workload = Workload("gone", (SimRequest(0.0, "o/t0", "gold", 16, 100_000, cancel_after_s=1.0),), ("gold",), 10.0)
    outcome = run(workload, TiersPolicy.FCFS, replace(SMALL, num_blocks=10_000)).outcomes[0]
    assert outcome.ended is not None
    assert (outcome.ended.reason, outcome.ended_s) == (EndReason.ABORTED, pytest.approx(1.0, abs=0.02))


def test_several_workers_share_the_work_and_none_stands_idle() -> None:
    result = run(mixed(400), TiersPolicy.FAIR, workers=4)
    used = {outcome.worker for outcome in result.outcomes}
    assert (used, all(outcome.finished for outcome in result.outcomes)) == ({0, 1, 2, 3}, True)


def test_a_shared_prefix_is_computed_once() -> None:
    asked = [SimRequest(float(number), "o/t0", "gold", 1040, 2, prefix=(4, 1 << 47)) for number in range(3)]
    counts = run(Workload("p", tuple(asked), ("gold",), 100.0), TiersPolicy.FCFS).counts[Account("o/t0", "gold")]
    assert (counts.prompt, counts.cached) == (1040 + 2 * 16, 2 * 1024)


@pytest.mark.parametrize("policy", list(TiersPolicy))
def test_requests_leave_no_cycles_so_that_nobody_has_to_look_for_them(policy: TiersPolicy) -> None:
    simulation = Simulation(mixed(500), snapshot(policy), replace(SMALL, num_host_blocks=50))
    while gc.collect():  # what other tests left; finalizers make more
        pass
    gc.disable()
    try:
        simulation.run()
        found = gc.collect()
    finally:
        gc.enable()
    assert found < 500  # the trees of the policies that were replaced


def test_no_collection_looks_through_a_run_when_it_is_over() -> None:
    simulation = Simulation(mixed(500), snapshot())
    begun: list[str] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        begun.append(phase)

    gc.callbacks.append(watch)
    try:
        kept = [simulation.run(), *([number] for number in range(100))]  # containers: enough to ask the collector
    finally:
        gc.callbacks.remove(watch)
    assert (len(kept), begun) == (101, [])


def test_what_was_frozen_before_a_run_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        Simulation(mixed(20), snapshot()).run()
        after = gc.get_freeze_count()
    finally:
        gc.unfreeze()
    assert (after > 0, frozen - after < 1000) == (True, True)


def test_nobody_counts_a_workers_tables_while_it_has_work() -> None:
    simulation = Simulation(mixed(80), snapshot())
    worker = simulation.workers[0]
    simulation.run(duration_s=2.0)
    counted_at, last = worker.engine.stats.step_id, worker.executor.num_steps
    assert (counted_at < 5, last > 50) == (True, True)


@pytest.mark.parametrize("caching", [False, True])
def test_an_evicted_request_finds_its_own_blocks_again_where_the_worker_caches(caching: bool) -> None:
    """Twenty blocks: the batch request holds eleven or so, gold needs thirteen. Seven stay as they were: 112 tokens of 160
    and what it had generated."""
    asked = (SimRequest(0.0, "o/t0", "batch", 160, 40), SimRequest(0.1, "o/t1", "gold", 200, 2))
    shape = replace(SMALL, num_blocks=20, prefix_caching=caching)
    result = run(Workload("two", asked, ("gold", "batch"), 100.0), TiersPolicy.VIP, shape)
    assert (result.preemptions, result.recomputed_tokens > 0, result.recomputed_tokens < 160) == (1, True, caching)
