"""Figures of a run against sums done by hand."""

from __future__ import annotations

import pytest

from fairlane.scheduler.simulator.fairness import (
    Window,
    entitled,
    interval_gap,
    jain,
    relative_weights,
    service_differences,
)  # fmt: skip
from fairlane.scheduler.simulator.placement import PolicyTree, place
from fairlane.scheduler.simulator.report import Metric, percentile, report
from fairlane.scheduler.simulator.simulation import Simulation
from fairlane.scheduler.simulator.workload import SimRequest, Workload
from fairlane.scheduler.tenancy import PolicySnapshot, Tier, TiersPolicy


def test_jains_index_is_1_for_equals_and_1_over_n_for_a_monopoly() -> None:
    assert (jain([3, 3, 3]), jain([5, 0, 0, 0]), jain([1, 3])) == (pytest.approx(1), pytest.approx(0.25), pytest.approx(0.8))


def test_weights_are_parts_of_each_level() -> None:
    weights = {"a": 3.0, "a/x": 2.0, "b/z/m2": 4.0}
    parts = relative_weights(["a/x", "a/y", "b/z/m1", "b/z/m2"], weights)
    assert parts == {"a/x": 0.5, "a/y": 0.25, "b/z/m1": pytest.approx(0.05), "b/z/m2": pytest.approx(0.2)}


def test_what_a_small_client_leaves_is_shared_by_weight() -> None:
    given = entitled({"small": 10, "big": 1000, "huge": 1000}, {"small": 0.5, "big": 0.2, "huge": 0.3}, 110)
    assert given == {"small": 10, "big": pytest.approx(40), "huge": pytest.approx(60)}


def test_nobody_is_entitled_to_more_than_it_asked_for() -> None:
    assert entitled({"a": 10, "b": 20}, {"a": 0.5, "b": 0.5}, 100) == {"a": 10, "b": 20}


def test_the_service_difference_is_vtcs() -> None:
    # a is served most (100); b is 40 behind it and 30 behind its demand; c is 90 behind a but got all but 5 that it asked for.
    window = Window(10.0, {"a": 100, "b": 60, "c": 10}, {"a": 100, "b": 90, "c": 15})
    assert service_differences([window], {"a": 1, "b": 1, "c": 1}) == [pytest.approx((0 + 30 + 5) / 10)]


def test_the_interval_gap_is_the_largest_swing_of_the_lead() -> None:
    assert interval_gap([0, 10, 10, 20], [0, 0, 30, 35]) == 30


@pytest.mark.parametrize(("share", "expected"), [(0.5, 2), (0.99, 4), (0.25, 1)])
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: float) -> None:
    assert percentile([4, 1, 3, 2], share) == expected


def test_a_report_adds_up() -> None:
    requests = tuple(SimRequest(k / 10, f"o/t{k % 2}", "gold", 100, 20) for k in range(20))
    workload = Workload("sums", requests, ("gold",), 10.0)
    snapshot = PolicySnapshot(1, "", TiersPolicy.FCFS, (Tier("gold", 1),))
    found = report(Simulation(workload, snapshot).run(), {})
    node, overall = found.nodes["o/t0"], found.overall
    assert (node[Metric.SHARE], node[Metric.ENTITLED_SHARE], overall[Metric.JAIN], overall[Metric.TOKENS_PER_S]) == (
        0.5, 0.5, pytest.approx(1), pytest.approx(20 * 20 / 10),
    )  # fmt: skip
    times = [sum(figures[Metric.WORKER_TIME] for figures in part.values()) for part in (found.nodes, found.tiers)]
    assert times == [pytest.approx(overall[Metric.BUSY]), pytest.approx(overall[Metric.WORKER_TIME])]


TREE = PolicyTree(
    ["gold", "silver", "batch"],
    {"solo": ["gold", "batch"], "o/a": ["gold", "batch"], "o/b": ["batch"], "o/c": ["silver"]},
    frozenset({"o/c"}),
)


@pytest.mark.parametrize(
    ("node", "tier", "expected"),
    [
        ("o/a", "batch", ("o/a", "batch")),  # as the policy has it
        ("o/a", "vip", ("o/a", "gold")),  # the top of the workload's tiers is the top of the policy's
        ("o/b", "vip", ("o/b", "batch")),  # which that tenant may not use
        ("o/c/m1", "silver", ("o/c/m1", "silver")),  # a member
        ("o/a/m1", "gold", ("o/a", "gold")),  # of a tenant that has none
        ("solo", "gold", ("solo", "gold")),  # an organisation that sends requests of its own
        ("solo/x", "gold", ("o/a", "gold")),  # which is no tenant of it
        ("x/y", "low", ("o/a", "batch")),  # a stranger becomes a tenant that may use the lowest tier
    ],
)
def test_requests_are_dealt_to_the_policys_own(node: str, tier: str, expected: tuple[str, str]) -> None:
    workload = Workload("w", (SimRequest(0, node, tier, 1, 1),), ("vip", "low"), 1.0)
    placed = place(workload, TREE).workload.requests[0]
    assert (placed.node, placed.tier) == expected


def test_where_only_organisations_send_strangers_become_those() -> None:
    workload = Workload("w", (SimRequest(0, "x/y", "t", 1, 1),), ("t",), 1.0)
    placed = place(workload, PolicyTree(["t"], {"solo": ["t"]})).workload.requests[0]
    assert (placed.node, placed.tier) == ("solo", "t")
