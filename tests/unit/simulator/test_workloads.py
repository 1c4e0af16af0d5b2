"""The made workloads: as much work as they say, the same for the same seed, another for another."""

from __future__ import annotations

import pytest

from fairlane.scheduler.simulator.capacity import requests_per_s
from fairlane.scheduler.simulator.catalogue import WORKLOADS
from fairlane.scheduler.simulator.scene import Scene
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import Simulation
from fairlane.scheduler.simulator.workload import SimRequest, Workload
from fairlane.scheduler.tenancy import PolicySnapshot, Tier, TiersPolicy

SHAPE = WorkerShape(max_num_seqs=64)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_is_one_workload_in_order_within_its_time(name: str) -> None:
    first, again, other = (WORKLOADS[name](Scene(seed, 20.0, SHAPE)) for seed in (1, 1, 2))
    arrivals = [request.arrival_s for request in first.requests]
    same = (first == again, first.requests == other.requests)
    assert (same, arrivals == sorted(arrivals), arrivals[0] >= 0, arrivals[-1] < 20.0) == ((True, False), True, True, True)


@pytest.mark.parametrize(("prompt", "output"), [(256, 256), (64, 64), (1500, 32), (32, 400)])
def test_the_estimate_of_capacity_is_what_a_full_worker_does(prompt: int, output: int) -> None:
    rate = requests_per_s(SHAPE, prompt, output)
    flood = tuple(SimRequest(0.0, "o/t", "x", prompt, output) for _ in range(int(rate * 60)))
    snapshot = PolicySnapshot(1, "", TiersPolicy.FCFS, (Tier("x", 1),))
    result = Simulation(Workload("flood", flood, ("x",), 30.0), snapshot, SHAPE).run()
    ended = sorted(outcome.ended_s for outcome in result.outcomes if outcome.ended_s is not None)
    measured = sum(at_s > 10 for at_s in ended) / 20  # after the ramp
    assert measured == pytest.approx(rate, rel=0.1)


def test_more_workers_get_more_of_the_same() -> None:
    one, four = (len(WORKLOADS["W1"](Scene(1, 30.0, SHAPE, workers)).requests) for workers in (1, 4))
    assert four / one == pytest.approx(4, rel=0.05)


def test_w9_is_a_fifth_of_vips_and_ten_times_capacity_of_the_rest() -> None:
    requests = WORKLOADS["W9"](Scene(1, 120.0, SHAPE)).requests
    vips = sum(request.tier == "vip" for request in requests)
    assert (len(requests) - vips) / vips == pytest.approx(50, rel=0.15)


def test_w10_has_a_thousand_tenants_most_of_them_best_effort() -> None:
    workload = WORKLOADS["W10"](Scene(1, 600.0, SHAPE, 16))
    tiers = {request.node: request.tier for request in workload.requests}
    count = {tier: list(tiers.values()).count(tier) for tier in workload.tiers}
    assert (len(tiers) > 900, count["vip"] <= 20, count["best_effort"] > 700) == (True, True, True)
