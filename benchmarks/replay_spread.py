"""How far the figures of bench_replay.py move by chance alone: its loads in the simulator, again and again, the worker's steps a
little different each time. A comparison with reality can hardly be closer than that, whatever the step model.

    python benchmarks/replay_spread.py [--json FILE] [--runs 12] [--steps 10%] [--machine 10%]

--steps: each step's time is off by so much, independently. --machine: a whole run's are, together, as on a machine that others
use. Both are the standard deviation of a log-normal factor. The worker is about what one thread of a server makes of SmolLM2.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from statistics import median

from replay_runs import POLICIES, candidate, figures, requests, served_in
from report import print_rows, write_json

from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order
from fairlane.scheduler.step_work import StepWork

LOADS = 3
TIERS = ("gold", "standard", "batch")


def worker(run: int, spread: float, machine: float) -> WorkerShape:
    """spread: of each step's factor; machine: of the one that all of a run's steps have."""
    random = Random(run)
    of_run = random.lognormvariate(0.0, machine)

    class NoisySteps(StepModel):
        def seconds(self, work: StepWork) -> float:
            return StepModel.seconds(self, work) * of_run * random.lognormvariate(0.0, spread)

    steps = NoisySteps(fixed_s=2e-3, sequence_s=1e-3, weights_s=30e-3, token_s=1.2e-3, context_s=2e-6, attention_s=2e-7)
    return WorkerShape(step=steps, num_blocks=170, max_num_seqs=16, max_num_batched_tokens=256, network_s=0.0)


def load_of(number: int) -> Workload:
    asked = [
        SimRequest(r.arrival_s, r.tenant, r.tier, len(r.prompt_token_ids), r.max_tokens) for r in requests(number, 0.0, 49_152)
    ]
    return Workload(f"load {number}", in_order(asked), TIERS, 60.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows there")
    parser.add_argument("--runs", type=int, default=12, help="how many (default 12)")
    parser.add_argument("--steps", type=float, default=0.1, help="deviation of a step's time (default 0.1)")
    parser.add_argument("--machine", type=float, default=0.1, help="deviation of a run's speed (default 0.1)")
    given = parser.parse_args()
    rows = []
    for name in POLICIES:
        found = [
            figures([one for load in range(LOADS) for one in served_in(load, load_of(load), candidate(name), shape)])
            for shape in (worker(run, given.steps, given.machine) for run in range(given.runs))
        ]
        for tier, figure in found[0]:
            values = sorted(one[tier, figure] for one in found)
            middle = median(values)
            off = sorted(abs(value / middle - 1) for value in values)
            rows.append(
                {"policy": name, "tier": tier, "figure": figure, "median": middle, "least": values[0], "most": values[-1],
                 "typically off": median(off), "at most off": off[-1]}
            )  # fmt: skip
    print_rows(f"{given.runs} runs in the simulator", rows)
    write_json(given.json, [], rows)


if __name__ == "__main__":
    main()
