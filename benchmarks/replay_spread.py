"""How far the figures of bench_replay.py move by chance alone: its loads in the simulator, again and again, the worker's steps a
little different each time. A comparison with reality can hardly be closer than that, whatever the step model.

    python benchmarks/replay_spread.py [--json FILE] [--draws 12] [--steps 0.06] [--machine 0.02]

A draw is what bench_replay.py pools, each load as often as there. --steps: each step's time is off by so much, independently.
--machine: all of a run's are, together, as on a machine that others use. Both are the standard deviation of a log-normal factor.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from statistics import median

from replay_figures import Key, figures
from replay_runs import NUM_BLOCKS, POLICIES, WORKER, candidate, independent, requests, scattered, served_in
from report import print_rows, write_json

from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order

LOADS, REPEATS = 20, 2
TIERS = ("gold", "standard", "batch")


# About what one thread of a server makes of SmolLM2.
STEPS = StepModel(fixed_s=18e-3, sequence_s=6e-4, weights_s=4e-3, token_s=1.05e-3, context_s=6e-6, attention_s=9e-7)


def worker(run: str, spread: float, machine: float) -> WorkerShape:
    """Another one for every run. spread: of each step's factor; machine: of the one that all of a run's steps have."""
    return WorkerShape(
        step=scattered(STEPS, independent(spread, run, Random(f"machine {run}").lognormvariate(0.0, machine))),
        num_blocks=NUM_BLOCKS - 1,
        max_num_seqs=WORKER.max_num_seqs,
        max_num_batched_tokens=WORKER.max_num_batched_tokens,
        max_num_resident=WORKER.max_num_resident,
        depth=WORKER.pipeline_depth,
        network_s=0.0,
    )


def load_of(number: int) -> Workload:
    asked = [
        SimRequest(r.arrival_s, r.tenant, r.tier, len(r.prompt_token_ids), r.max_tokens) for r in requests(number, 0.0, 49_152)
    ]
    return Workload(f"load {number}", in_order(asked), TIERS, 60.0)


def drawn(policy: str, draw: int, spread: float, machine: float) -> dict[Key, float]:
    """The figures of all loads and repeats together."""
    runs = [(load, f"{draw} {load} {repeat}") for load in range(LOADS) for repeat in range(REPEATS)]
    return figures([served_in(load, load_of(load), candidate(policy), worker(run, spread, machine)) for load, run in runs])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows there")
    parser.add_argument("--draws", type=int, default=12, help="how many (default 12)")
    parser.add_argument("--steps", type=float, default=0.06, help="deviation of a step's time (default 0.06)")
    parser.add_argument("--machine", type=float, default=0.02, help="deviation of a run's speed (default 0.02)")
    given = parser.parse_args()
    rows = []
    for name in POLICIES:
        found = [drawn(name, draw, given.steps, given.machine) for draw in range(given.draws)]
        for key in found[0]:
            values = sorted(one[key] for one in found)
            middle = median(values)
            off = sorted(abs(value / middle - 1) for value in values)
            rows.append(
                {"policy": name, "tier": key.tier, "figure": key.figure, "median": middle, "least": values[0], "most": values[-1],
                 "typically off": median(off), "at most off": off[-1]}
            )  # fmt: skip
    print_rows(f"{given.draws} draws of {LOADS} loads x {REPEATS} in the simulator", rows)
    write_json(given.json, [], rows)


if __name__ == "__main__":
    main()
