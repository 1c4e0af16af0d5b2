"""The policies' promises, in the simulator: each check by its id, over several seeds, measured against required. The worst seed
counts for what must always hold, the mean over seeds for what holds on average; the worst seed then stands beside it.

    python benchmarks/bench_policies.py [--json FILE] [--seeds 5] [--only F1,V]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import bench_scheduler
from ceil_runs import ceil
from charge_runs import CHARGES_WORK, f9
from deadline_runs import d1, d2, d3
from kv_runs import kv
from locality_runs import l1
from mix_runs import FAIR_ON, VIP_ON, mix
from policy_runs import ADVERSARIES, Numbers
from policy_runs import RUNS as POLICY_RUNS
from report import console, print_checks, print_rows, write_json
from rich.progress import track

from fairlane.bench.results import Check


class Promise(NamedTuple):
    """numbers: of the run; all of them must keep the bound. always: for every seed, else on average."""

    id: str
    what: str
    run: str
    numbers: tuple[str, ...]
    most: float | None = None
    least: float | None = None
    always: bool = False


def _of(kind: str, workloads: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{kind} {name}" for name in workloads)


RUNS = {**POLICY_RUNS, "MIX": mix, "F9": f9, "D1": d1, "D2": d2, "D3": d3, "KV": kv, "L1": l1, "CEIL": ceil}
_ALL = ("W1", "W5", "W6")
# W5 and W6 are in the rows only: their clients' tokens cost different times, so that another mix is another rate at equal
# efficiency. MIX has them at equal mix.
_EVEN = ("W2", "W8", "W9")
_GAINS = tuple(f"gain {name}" for name in ("idle", "idle gap", "W12", "W12 gap"))
_WAITS = ("wait best_effort, 1 below", "wait standard, 2 below", "wait best_effort, 2 below")
_WORK = tuple(f"off {cost.value}" for cost in CHARGES_WORK)
_CEILINGS = tuple(f"{name} {share}" for name in ("tier", "node", "tier fcfs") for share in ("20%", "60%"))
_TIGHT = tuple(f"{name} tight" for name in _ALL)
PROMISES = (
    Promise("F1", "FAIR: interval gap / 2U", "F1", _ALL, most=1.0, always=True),
    Promise(
        "F2",
        "FAIR with a gap: interval gap / 2(theta + c_step)",
        "F2",
        (*_ALL, *_TIGHT),
        most=1.0,
        always=True,
    ),
    Promise("F3", "weights 1:2:3:4: Jain of 60-s windows", "F3", ("jain",), least=0.999, always=True),
    Promise("F3-gap", "weights 1:2:3:4: W/w apart / F1's 2U", "F3", ("apart",), most=1.0, always=True),
    Promise("F4-max", "Arena: service difference / FCFS, max", "F4", ("max",), most=0.5),
    Promise("F4-avg", "Arena: service difference / FCFS, mean", "F4", ("avg",), most=0.6),
    Promise("F4-var", "Arena: service difference / FCFS, variance", "F4", ("var",), most=0.21),
    Promise("F5-p50", "Arena: small clients' TTFT p50 / FCFS", "F4", ("p50",), most=0.05),
    Promise("F5-p99", "Arena: small clients' TTFT p99 / FCFS", "F4", ("p99",), most=0.2),
    Promise("F6-gain", "what who comes back gets beyond who stayed / U; with a gap / theta", "F6", _GAINS, most=1.0, always=True),
    Promise("F6-ttft", "a steady client's TTFT p99 after a return / if nobody was silent", "F6", ("ttft",), most=1.2),
    Promise("F7", "org B's service when org A grows by 100 users", "F7", ("change",), most=0.01),
    Promise("A1", "an adversary's charges by roofline / an honest organisation's", "A1", ADVERSARIES, most=1.05),
    Promise("F9", "charged for work less what steps cost, every cost", "F9", _WORK, most=0, always=True),
    Promise("F9-roofline", "worker time charged / busy, off by", "F9", ("busy",), most=0.01, always=True),
    Promise("V1-gentle", "VIP TTFT p99 / alone, gentle", "V", ("gentle ttft",), most=1.3),
    Promise("V1-gentle-rate", "tokens/s / FCFS, gentle", "V", ("gentle rate",), least=0.98),
    Promise("V1-balanced", "VIP TTFT p99 / alone, balanced", "V", ("balanced ttft",), most=1.15),
    Promise("V1-balanced-rate", "tokens/s / FCFS, balanced", "V", ("balanced rate",), least=0.94),
    Promise("V1-strict", "VIP TTFT p99 / alone, strict", "V", ("strict ttft",), most=1.1),
    Promise("V1-strict-rate", "tokens/s / FCFS, strict", "V", ("strict rate",), least=0.65),
    Promise("V2-balanced", "VIP TPOT p99 / alone, balanced", "V", ("balanced tpot",), most=1.6),
    Promise("V2-strict", "VIP TPOT p99 / alone, strict", "V", ("strict tpot",), most=1.3),
    Promise("V3", "VIP to its first chunk, p99 / (2 steps + 5 ms)", "V", ("first chunk",), most=1.0),
    Promise("V4", "lower tier started while a VIP waits", "V", ("inversions",), most=0, always=True),
    Promise("S1", "wait under ageing / (patience a band above + a VIP's)", "S1", _WAITS, most=1.0, always=True),
    Promise("S2", "share in any 10 s / min", "S2", ("min 5%", "min 10%"), least=0.95, always=True),
    Promise("S3", "policy evictions of one request", "C", ("evictions",), most=3, always=True),
    Promise("C1-fair", "FAIR tokens/s / FCFS, KV ample", "C", tuple(f"fair ample {w}" for w in _EVEN), least=0.98),
    Promise("C1-vip", "VIP tokens/s / FCFS, KV ample", "C", tuple(f"vip ample {w}" for w in _EVEN), least=0.98),
    Promise("C2-fair", "FAIR tokens/s / FCFS, KV tight", "C", tuple(f"fair tight {w}" for w in _EVEN), least=0.95),
    Promise("C2-vip", "VIP tokens/s / FCFS, KV tight", "C", tuple(f"vip tight {w}" for w in _EVEN), least=0.95),
    Promise("C1-fair-mix", "FCFS's time for the same requests / FAIR's, KV ample", "MIX", _of("fair ample", FAIR_ON), least=0.98),
    Promise("C1-vip-mix", "FCFS's time for the same requests / VIP's, KV ample", "MIX", _of("vip ample", VIP_ON), least=0.98),
    Promise("C2-fair-mix", "FCFS's time for the same requests / FAIR's, KV tight", "MIX", _of("fair tight", FAIR_ON), least=0.95),
    Promise("C2-vip-mix", "FCFS's time for the same requests / VIP's, KV tight", "MIX", _of("vip tight", VIP_ON), least=0.95),
    Promise("C3", "seconds with work and no step", "C", ("stalled",), most=0, always=True),
    Promise("D1", "requests that keep their targets at 1.0x load / FCFS", "D1", ("goodput",), least=1.2),
    Promise("C1-deadline", "DEADLINE tokens/s / FCFS, KV ample", "D1", ("rate",), least=0.98),
    Promise("D1-top", "top tier's misses at 2x load", "D1", ("chat missed at 2x",), most=0.01),
    Promise("D2", "misses of sets of jobs that EDF can do", "D2", ("misses",), most=0, always=True),
    Promise("D3", "wait estimate's error, p50 of queued, FCFS and FAIR", "D3", ("fcfs", "fair"), most=0.3),
    Promise("D3-vip", "the same under VIP", "D3", ("vip",), most=0.3),
    Promise("L1-hits", "prompt tokens found cached / longest prefix first", "L1", ("hits W11", "hits documents"), least=0.9),
    Promise("L1-rate", "tokens/s / longest prefix first", "L1", ("rate W11", "rate documents"), least=0.95),
    Promise("L1-gap", "interval gap / 2(max(theta, R) + c_step + Q)", "L1", ("gap W11", "gap documents"), most=1.0, always=True),
    Promise("P1", "recompute tax of W9, KV ample", "C", ("tax ample",), most=0.03),
    Promise("P1-tight", "recompute tax of W9, KV tight", "C", ("tax tight",), most=0.08),
    Promise("P1-vllm", "the same / with vLLM's rules: LIFO victims, 1 % left free", "C", ("tax over vllm",), most=0.75),
    Promise("P1-lifo", "the same / with LIFO victims, all else equal", "C", ("tax over lifo",), most=0.75),
    Promise("KV-limit", "blocks of a hoarder above its kv_limit", "KV", ("above",), most=0, always=True),
    Promise(
        "CEIL",
        "worker time in any 10 s / (1.04 ceil and two steps), rest idle or not",
        "CEIL",
        tuple(f"{name} {most}" for name in _CEILINGS for most in ("most", "most beside")),
        most=1.0,
        always=True,
    ),
    Promise("CEIL-wait", "TTFT p99 beside a ceil that binds, KV tight / alone", "CEIL", ("fair wait", "fcfs wait"), most=3.0),
    Promise("CEIL-used", "worker time of who wants more / its ceil", "CEIL", tuple(f"{n} used" for n in _CEILINGS), least=0.97),
    Promise(
        "CEIL-rest",
        "worker time of all, beside one without a ceil",
        "CEIL",
        tuple(f"{n} busy beside" for n in _CEILINGS),
        least=0.99,
    ),
    Promise("KV-guarantee", "steps in a row a kv_guarantee is denied, VIPs in the way", "KV", ("denied",), most=2, always=True),
)
# What bench_scheduler.py times, once, after everything else, and its checks.
TIMES = "T"
TIMED = ("T1-10k", "T1-churn", "T1-100k", "T2-arrival", "T2-cancel")
NAMES = (*RUNS, TIMES)
# With their reasons.
LEFT_OUT = {
    "F8": "needs several gateways that share counters",
}


def judge(promise: Promise, seeds: list[Numbers]) -> Check:
    pick = max if promise.most is not None else min
    worst = pick(numbers[name] for numbers in seeds for name in promise.numbers)
    measured = worst if promise.always else pick(mean(numbers[name] for numbers in seeds) for name in promise.numbers)
    required = f"<= {promise.most:g}" if promise.most is not None else f">= {promise.least:g}"
    passed = measured <= promise.most if promise.most is not None else measured >= (promise.least or 0)
    how = "worst seed" if promise.always else "mean"
    return Check(promise.id, f"{promise.what} ({how})", measured, required, "", passed, None if promise.always else worst)


def runs_of(asked: Sequence[str]) -> list[str]:
    """The runs by these names, or that checks of these ids (whole, or without what follows the dash) come from. ValueError."""
    found = dict[str, None]()
    for name in asked:
        runs = [name] if name in NAMES else [p.run for p in PROMISES if name in (p.id, p.id.partition("-")[0])]
        if any(name in (check, check.partition("-")[0]) for check in TIMED):
            runs = [TIMES]
        if not runs:
            raise ValueError(f"no run and no check is called {name!r}: some of the runs {', '.join(NAMES)}, or ids of checks")
        found |= dict.fromkeys(runs)
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    parser.add_argument("--seeds", type=int, default=5, help="how many (default 5)")
    parser.add_argument("--only", metavar="LIST", help=f"some of the runs {','.join(NAMES)}, or those of checks: F5,V1-gentle")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds {arguments.seeds}: at least 1 is needed")
    try:
        names = list(NAMES) if arguments.only is None else runs_of(arguments.only.split(","))
    except ValueError as error:
        parser.error(f"--only: {error}")
    found: dict[str, dict[int, Numbers]] = {name: {} for name in names if name != TIMES}
    with ProcessPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        jobs = {pool.submit(RUNS[name], seed): (name, seed) for name in found for seed in range(arguments.seeds)}
        for job in track(as_completed(jobs), "simulating", total=len(jobs), console=console):
            name, seed = jobs[job]
            found[name][seed] = job.result()
    rows = [
        {"run": name, "number": number, "mean": mean(s[number] for s in seeds.values()),
         "least": min(s[number] for s in seeds.values()), "most": max(s[number] for s in seeds.values())}
        for name, seeds in found.items() for number in seeds[0]
    ]  # fmt: skip
    print_rows(f"{arguments.seeds} seeds", rows)
    checks = [judge(promise, list(found[promise.run].values())) for promise in PROMISES if promise.run in found]
    if TIMES in names:
        times = bench_scheduler.measured(quick=True)
        rows += [{"run": TIMES, **row} for row in times]
        checks += bench_scheduler.checks_of(times)
    print_checks(checks)
    console.print("left out: " + "; ".join(f"{ids}: {why}" for ids, why in LEFT_OUT.items()))
    write_json(arguments.json, checks, rows)


if __name__ == "__main__":
    main()
