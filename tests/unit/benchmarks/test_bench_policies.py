"""How bench_policies.py judges: the worst seed where a promise must always hold, the mean elsewhere, and every number of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import Simulation
from fairlane.scheduler.simulator.workload import SimRequest, Workload
from fairlane.scheduler.tenancy import PolicySnapshot, Tier, TiersPolicy

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from bench_policies import PROMISES, RUNS, Promise, judge, runs_of
from locality_runs import all_wait
from mix_runs import evened
from policy_ledger import run_with_ledger

SEEDS = [{"a": 0.5, "b": 0.7}, {"a": 1.1, "b": 0.7}]


@pytest.mark.parametrize(
    ("promise", "measured", "worst", "passed"),
    [
        (Promise("X", "", "r", ("a", "b"), most=1.0, always=True), 1.1, None, False),
        (Promise("X", "", "r", ("a", "b"), most=1.0), 0.8, 1.1, True),
        (Promise("X", "", "r", ("a", "b"), least=0.6, always=True), 0.5, None, False),
        (Promise("X", "", "r", ("a", "b"), least=0.6), 0.7, 0.5, True),
    ],
)
def test_the_worst_number_decides_and_beside_a_mean_stands_the_worst_seed(
    promise: Promise, measured: float, worst: float | None, passed: bool
) -> None:
    check = judge(promise, SEEDS)
    assert (check.measured, check.worst, check.passed) == (pytest.approx(measured), worst, passed)


def test_every_promise_has_one_bound_and_a_run() -> None:
    wrong = [p.id for p in PROMISES if (p.most is None) == (p.least is None) or p.run not in RUNS]
    assert (wrong, len({promise.id for promise in PROMISES})) == ([], len(PROMISES))


@pytest.mark.parametrize(
    ("asked", "runs"),
    [
        (["F5"], ["F4"]),
        (["V1-strict", "V2", "F1"], ["V", "F1"]),
        (["C"], ["C"]),
        (["C1"], ["C", "MIX", "D1"]),
        (["T1", "T2-cancel"], ["T"]),
    ],
)
def test_a_run_is_found_by_the_ids_of_its_checks(asked: list[str], runs: list[str]) -> None:
    assert runs_of(asked) == runs


@pytest.mark.parametrize("asked", ["", "F", "V1-", "T1-", "nothing"])
def test_what_no_check_is_called_is_an_error(asked: str) -> None:
    with pytest.raises(ValueError, match=f"called '{asked}': some of"):
        runs_of(["F1", asked])


def test_without_evictions_the_policy_charges_what_was_served() -> None:
    requests = tuple(SimRequest(k / 50, f"o/t{k % 3}", "x", 100, 5 + k) for k in range(60))
    snapshot = PolicySnapshot(1, "", TiersPolicy.FAIR, (Tier("x", 1),))
    simulation = Simulation(Workload("w", requests, ("x",), 60.0), snapshot, WorkerShape(max_num_seqs=64))
    result = run_with_ledger(simulation)
    # The first output token comes out of the prompt's last chunk and is not charged beside it.
    expected = {account: counts.service - 2 * 20 for account, counts in result.counts.items()}
    assert result.samples[-1].service == expected


def test_evened_clients_ask_for_the_same_by_weight_in_the_same_time() -> None:
    requests = tuple(SimRequest(k / 10, f"o/{'ab'[k % 2]}", "x", 100, 50 + 200 * (k % 2)) for k in range(200))
    workload = evened(Workload("w", requests, ("x",), 20.0, {"o/a": 1.0, "o/b": 1.5}))
    own = {node: [r for r in workload.requests if r.node == node] for node in workload.nodes}
    asked = {node: sum(r.prompt_tokens + 2 * r.output_tokens for r in found) for node, found in own.items()}
    last = {node: found[-1].arrival_s for node, found in own.items()}
    assert asked["o/b"] / 1.5 == pytest.approx(asked["o/a"], rel=0.03)
    assert last["o/b"] == pytest.approx(last["o/a"], rel=0.03)


def test_only_the_time_counts_in_which_every_node_has_one_that_waits() -> None:
    # The second node's come at 5 s; two of all run at a time, so that both wait from then on until one's last has started.
    late = (SimRequest(5.0, "o/b", "x", 10, 500) for _ in range(6))
    requests = (*(SimRequest(0.0, "o/a", "x", 10, 500) for _ in range(9)), *late)
    snapshot = PolicySnapshot(1, "", TiersPolicy.FAIR, (Tier("x", 1),))
    result = Simulation(Workload("w", requests, ("x",), 300.0), snapshot, WorkerShape(max_num_seqs=2), sample_s=0.5).run()
    starts = {n: max(o.planned.asked.arrival_s + (o.queue_s or 0) for o in result.outcomes if o.planned.account.node == n)
              for n in ("o/a", "o/b")}  # fmt: skip
    times = [sample.time_s for sample in all_wait(result).samples]
    assert (times[0], times[-1]) == (pytest.approx(5.0, abs=0.51), pytest.approx(min(starts.values()), abs=0.51))
