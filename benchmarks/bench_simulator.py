"""How fast the simulator is: worker-steps a second at 64 sequences on one core, and one large run, 64 workers with 1000 tenants
for 60 simulated seconds. Steps a second are of CPU time, so that others on the machine disturb little.

    python benchmarks/bench_simulator.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from report import console, print_checks, print_rows, write_json
from rich.progress import track

from fairlane.bench.results import Check
from fairlane.scheduler.simulator.catalogue import WORKLOADS
from fairlane.scheduler.simulator.scene import Scene
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import Simulation
from fairlane.scheduler.simulator.workload import Workload
from fairlane.scheduler.tenancy import NodeShare, PolicySnapshot, Shaping, Tier, TiersPolicy, WithinTier

SHAPE = WorkerShape(max_num_seqs=64)


def snapshot(workload: Workload, policy: TiersPolicy) -> PolicySnapshot:
    tiers = [
        Tier(name, 100 - place, shaping=Shaping.OFF if place else Shaping.BALANCED) for place, name in enumerate(workload.tiers)
    ]
    nodes = tuple(NodeShare(node) for node in workload.nodes if node.count("/") == 1)
    return PolicySnapshot(1, "", policy, tuple(tiers), WithinTier.FAIR, nodes)


def timed(name: str, policy: TiersPolicy, duration_s: float, workers: int) -> dict[str, Any]:
    start_s = time.perf_counter()
    workload = WORKLOADS[name](Scene(1, duration_s, SHAPE, workers))
    built_s = time.perf_counter() - start_s
    simulation = Simulation(workload, snapshot(workload, policy), SHAPE, num_workers=workers)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    result = simulation.run()
    took_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    return {
        "workload": name, "policy": policy.value, "workers": workers, "requests": len(workload.requests),
        "steps": result.num_steps, "build s": built_s, "run s": took_s, "steps/s": result.num_steps / cpu_s,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    parser.add_argument("--quick", action="store_true", help="without the large run")
    arguments = parser.parse_args()
    cases = [(name, policy, 30.0, 1) for name in ("W1", "W5", "W8", "W9") for policy in TiersPolicy]
    if not arguments.quick:
        cases.append(("W10", TiersPolicy.VIP, 60.0, 64))
    rows = [timed(*case) for case in track(cases, "simulating", console=console)]
    print_rows("worker-steps a second, 64 sequences", rows)
    one = [row for row in rows if row["workers"] == 1]
    steady = min(row["steps/s"] for row in one if row["workload"] != "W9")
    prefill = min(row["steps/s"] for row in one if row["workload"] == "W9")
    checks = [
        Check("SIM-1", "worker-steps/s, worst of W1, W5, W8 and the policies", steady, ">= 3000", "/s", steady >= 3000),
        Check("SIM-1-prefill", "the same of W9, whose steps are full of prompts", prefill, ">= 3000", "/s", prefill >= 3000),
    ]
    for row in rows:
        if row["workers"] == 64:
            took_s = row["run s"] + row["build s"]
            checks.append(Check("SIM-64", "64 workers x 1000 tenants x 60 s", took_s, "<= 120", "s", took_s <= 120))
    print_checks(checks)
    write_json(arguments.json, checks, rows)


if __name__ == "__main__":
    main()
