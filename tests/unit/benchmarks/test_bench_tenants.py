"""H5: the loads are those the peers' figures were measured with, what a run comes to in figures, and the whole script in the
simulator and on a real engine, small."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import bench_tenants  # noqa: E402 - benchmarks/ is no package: its scripts run from their own folder
from tenant_figures import checks, first_workload, predictions, row_of  # noqa: E402
from tenant_loads import POLICIES, alone, candidate, flood, overload, shares  # noqa: E402
from tenant_runs import Got, Run  # noqa: E402

from fairlane.bench.calls import Call  # noqa: E402


def digest(calls: tuple[Call, ...]) -> str:
    rows = sorted((call.node.partition("/")[2], call.arrival_s, call.prompt, call.output) for call in calls)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def test_the_first_workloads_are_those_of_the_peers_figures() -> None:
    # Of the published arrival lists: (tenant, arrival, prompt tokens, output tokens), sorted.
    assert [digest(make(1).calls) for make in (alone, overload, flood)] == [
        "457c0c62796da2bb",
        "40c881c81077576a",
        "afeab8726223e28d",
    ]


def test_other_workloads_differ_in_arrivals_only() -> None:
    first, second = overload(1), overload(2)
    assert [c.arrival_s for c in first.calls] != [c.arrival_s for c in second.calls]
    assert sorted((c.node, c.prompt, c.output) for c in first.calls) == sorted((c.node, c.prompt, c.output) for c in second.calls)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_file_is_valid_and_has_no_key_without_effect(name: str) -> None:
    assert candidate(name).policy.warnings == ()


def run(workload: object, policy: str, ttft_s: float, tpot_s: float) -> Run:
    got = tuple(
        Got(c, c.arrival_s + ttft_s, c.arrival_s + ttft_s + tpot_s * (c.output - 1))
        for c in workload.calls  # type: ignore[attr-defined]
    )
    return Run(workload, policy, "engine", got, 3, 1000)  # type: ignore[arg-type]


def test_figures_and_checks_of_an_overload_are_of_vips_and_of_the_crowd() -> None:
    row = row_of([run(overload(number), "vip-balanced", 0.05, 0.008) for number in (1, 2)])
    found = {check.id: check.passed for check in checks([row])}
    crowd_ends_s = 0.05 + 0.008 * 399
    again = 2000 / (2000 + 2 * (300 * 1200 + 40 * 576))
    assert row["requests"] == 80
    assert (row["ttft_p50_ms"], row["ttft_p99_ms"], row["tpot_p99_ms"]) == pytest.approx((50, 50, 8))
    assert (row["many_tok_s"], row["recomputed"]) == pytest.approx((300 * 400 / crowd_ends_s, again))
    assert found == {"H5-TTFT-P50": False, "H5-TTFT-P99": True, "H5-TPOT": True, "H5-BE": True, "H5-SWAP": True}


def test_the_floods_rate_is_compared_over_the_same_arrivals() -> None:
    # FAIR's other workloads are served at another rate, which FCFS's only one says nothing about.
    fair = row_of([run(flood(number), "flood-fair", 0.05, 0.01 * number) for number in (1, 2, 3)])
    fcfs = row_of([run(flood(1), "flood-fcfs", 9.0, 0.01)])
    found = {check.id: check.measured for check in checks([fair, fcfs])}
    assert found["H5-LIGHT-FLOOD"] == pytest.approx((9.0 + 0.01 * 399) / (0.05 + 0.01 * 399))


def test_a_pooled_row_keeps_what_each_workload_had() -> None:
    row = row_of([run(overload(number), "vip-balanced", 0.05 * number, 0.008) for number in (1, 2)])
    assert [(one["workload"], one["requests"]) for one in row["by_workload"]] == [(1, 40), (2, 40)]
    assert (row["requests"], row["ttft_p99_ms"]) == (80, pytest.approx(100))
    assert (first_workload(row)["requests"], first_workload(row)["ttft_p99_ms"]) == (40, pytest.approx(50))


def test_every_row_is_held_against_what_was_predicted() -> None:
    measured = run(overload(1), "vip-strict", 0.05, 0.008)
    predicted = Run(measured.workload, measured.policy, "simulator", run(overload(1), "vip-strict", 0.04, 0.008).got)
    found = predictions([row_of([measured]), row_of([predicted])])
    assert [(row["load"], row["policy"], row["ttft_p99_ms"]) for row in found] == [("overload", "vip-strict", "-20.0%")]


def test_shares_are_counted_while_all_wait() -> None:
    """Each tenant reads a prompt every 1/weight s and streams it for 2 s: service by weight is the same."""
    workload = shares(100)
    began: dict[str, int] = {}
    got = []
    for call in workload.calls:
        number = began[call.node] = began.get(call.node, -1) + 1
        first_s = number / int(call.node[-1])
        got.append(Got(call, first_s, first_s + 2.0))
    row = row_of([Run(workload, "shares-fair", "engine", tuple(got))])
    assert (row["window_s"], row["apart"]) == (pytest.approx(0.8 * 99 / 4), pytest.approx(0.0, abs=0.06))
    assert (row["each"], row["to_s"] - row["from_s"]) == (100, pytest.approx(row["window_s"]))


def test_the_simulator_gives_every_row_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    asked = ["--simulate", "--scale", "0.05", "--workloads", "1", "--each", "40", "--json", str(out)]
    assert bench_tenants.main(asked) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [f"{row['load']}/{row['policy']}" for row in rows] == [part.name for part in bench_tenants.PARTS]


@pytest.mark.parametrize("flags", [["--only", "nothing"], ["--via", "paper"], ["--workloads", "0"]])
def test_what_cannot_be_asked_for_is_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        bench_tenants.main(flags)
    assert refused.value.code == 2
