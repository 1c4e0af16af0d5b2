"""The simulator against reality: the real CPU worker with SmolLM2 serves a load of three tiers under FCFS, VIP and FAIR; what the
recorder writes of a run under FCFS is replayed in the simulator under the same policies. Its worker is fitted to this machine in
both of `fairlane calibrate`'s ways: by a sweep, in slices between the runs, and from recorded steps, those of the first repeat,
which is then compared with the others only. Several loads, each served several times; a figure is of all their requests together.

    python benchmarks/bench_replay.py [--json FILE] [--loads 3] [--repeats 2] [--clock work|wall]

By default time is what the worker's one thread computes (work_clock.py), so that others on the machine disturb little;
--clock wall is for a machine of one's own. The noise column is how far a figure differs between repeats, the same runs each:
(most - least) / median. A figure of the simulator can hardly come closer to the median than that.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from replay_runs import POLICIES, Served, candidate, exported, figures, serve, simulate
from report import console, print_checks, print_rows, write_json
from rich.progress import track
from work_clock import WorkClock

from fairlane.bench.results import Check
from fairlane.calibrate.grid import points_for
from fairlane.calibrate.sweep import Sweep
from fairlane.clock import Clock, MonotonicClock
from fairlane.embedded import resolve
from fairlane.scheduler.executor import Executor
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.scheduler.simulator.fit import MAPE_LIMIT, WORST_LIMIT, Fit, cells_of, fit
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.step_work import StepWork, WorkCounter
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executor import LocalExecutor
from fairlane.worker.shape import shape_of

REQUIRED = 0.15
NAMES = ("TTFT p50", "TTFT p99", "tokens/s")
Figures = dict[tuple[str, str], float]


class Watched:
    """The executor of a run, whose steps are kept as (work, seconds since the step before)."""

    def __init__(self, inner: Executor, clock: Clock) -> None:
        self.info = inner.info
        self.steps: list[tuple[StepWork, float]] = []
        self._inner = inner
        self._clock = clock
        self._counter = WorkCounter()
        self._began_s = clock.now()

    def launch(self, output: ScheduleOutput) -> Any:
        self._began_s = self._clock.now()
        return self._inner.launch(output), self._counter.of(output)

    def result(self, handle: Any) -> StepResult:
        result = self._inner.result(handle[0])
        self.steps.append((handle[1], self._clock.now() - self._began_s))
        return result

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True)
class Measured:
    """real: figures by policy, one a repeat. recordings: of a run of each load. sweep: its fit. steps: of the first repeat."""

    shape: WorkerShape
    sweep: Fit
    real: dict[str, list[Figures]]
    recordings: list[list[str]]
    steps: list[tuple[StepWork, float]]


def measure(given: argparse.Namespace) -> Measured:
    clock: Clock = WorkClock() if given.clock == "work" else MonotonicClock()
    config = WorkerConfig(model=str(resolve("smollm2")), num_blocks=170, max_num_seqs=16, max_num_batched_tokens=256, threads=1)
    executor = LocalExecutor(config, clock)
    served: dict[tuple[str, int], list[Served]] = {}
    recordings: dict[int, list[str]] = {}
    steps: list[tuple[StepWork, float]] = []
    try:
        points = points_for(config, executor.info)
        sweep = Sweep(executor, config.pipeline_depth, clock)
        order = [(repeat, load, name) for repeat in range(given.repeats) for load in range(given.loads) for name in POLICIES]
        for repeat, load, name in track(order, "serving and calibrating", console=console):
            sweep.run(points, clock.now() + given.slice, lambda: None)
            watched = Watched(executor, clock)
            found, lines = serve(watched, config, clock, candidate(name), load)
            served.setdefault((name, repeat), []).extend(found)
            recordings.setdefault(load, lines)
            steps += [] if repeat else watched.steps
        real = {name: [figures(served[name, repeat]) for repeat in range(given.repeats)] for name in POLICIES}
        return Measured(shape_of(config, executor.info), fit(sweep.cells()), real, list(recordings.values()), steps)
    finally:
        executor.close()


def simulated(measured: Measured, model: StepModel) -> dict[str, Figures]:
    shape = replace(measured.shape, step=model)
    with tempfile.TemporaryDirectory() as folder:
        traces = [exported(lines, Path(folder) / f"{load}.jsonl") for load, lines in enumerate(measured.recordings)]
        return {
            name: figures([one for load, trace in enumerate(traces) for one in simulate(load, trace, candidate(name), shape)])
            for name in POLICIES
        }


def rows_of(measured: Measured, by_sweep: dict[str, Figures], by_steps: dict[str, Figures]) -> list[dict[str, Any]]:
    rows = []
    for name, repeats in measured.real.items():
        for tier, figure in repeats[0]:
            values = [one[tier, figure] for one in repeats]
            middle, predicted = median(values), by_sweep[name][tier, figure]
            others = median(values[1:])
            rows.append(
                {
                    "policy": name, "tier": tier, "figure": figure, "measured": middle,
                    "noise": (max(values) - min(values)) / middle, "simulated": predicted, "off": predicted / middle - 1,
                    "by steps": by_steps[name][tier, figure], "off by steps": by_steps[name][tier, figure] / others - 1,
                }
            )  # fmt: skip
    return rows


def wrong_orders(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Pairs of policies whose order in a figure of a tier is another in the simulator, unless they are as good as equal in
    reality: no further apart than the larger of their noises, or than REQUIRED, within which the simulator may be off."""
    found = []
    for first in rows:
        for second in rows:
            if (first["tier"], first["figure"]) != (second["tier"], second["figure"]) or first["policy"] >= second["policy"]:
                continue
            apart = abs(first["measured"] / second["measured"] - 1)
            same = (first["measured"] < second["measured"]) == (first["simulated"] < second["simulated"])
            if not same and apart > max(REQUIRED, first["noise"], second["noise"]):
                found.append(f"{first['tier']} {first['figure']}: {first['policy']} and {second['policy']}")
    return found


def checks_of(rows: Sequence[dict[str, Any]], sweep: Fit) -> list[Check]:
    def limit(check_id: str, what: str, value: float, most: float) -> Check:
        return Check(check_id, what, value, f"<= {most:g}", "", value <= most)

    wrong = wrong_orders(rows)
    ways = (("", "off", "sweep"), ("STEPS-", "off by steps", "recorded steps"))
    return [
        limit("CAL-MAPE", "step time, mean error over kinds of steps", sweep.mape, MAPE_LIMIT),
        limit("CAL-WORST", "step time, worst kind", sweep.worst, WORST_LIMIT),
        *(
            limit(f"REPLAY-{way}{check}", f"{name} simulated / measured - 1, worst; by {what}", worst(rows, name, off), REQUIRED)
            for way, off, what in ways
            for check, name in zip(("TTFT50", "TTFT99", "RATE"), NAMES, strict=True)
        ),
        Check("REPLAY-ORDER", "policies in another order than measured", len(wrong), "= 0", "", not wrong),
    ]


def worst(rows: Sequence[dict[str, Any]], figure: str, off: str) -> float:
    return max(abs(float(row[off])) for row in rows if row["figure"] == figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=3, help="how many (default 3)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each load under each policy (default 2)")
    parser.add_argument("--slice", type=float, default=6.0, help="seconds of calibration before each run (default 6)")
    parser.add_argument("--clock", choices=("work", "wall"), default="work", help="what time is (default work)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    given = parser.parse_args()
    if given.repeats < 2:
        parser.error("--repeats: at least 2 are needed: the steps of the first are what the others are compared with")
    measured = measure(given)
    by_steps = fit(cells_of(measured.steps))
    rows = rows_of(measured, simulated(measured, measured.sweep.model), simulated(measured, by_steps.model))
    print_rows(f"the same load, measured and simulated; {given.loads} loads, each {given.repeats} times", rows)
    console.print(f"fitted to the sweep: {measured.sweep.model}; {len(measured.sweep.cells)} kinds of steps")
    console.print(
        f"fitted to recorded steps: {by_steps.model}; off by {by_steps.mape:.1%} on average, {by_steps.worst:.1%} at worst"
    )
    checks = checks_of(rows, measured.sweep)
    print_checks(checks)
    for wrong in wrong_orders(rows):
        console.print(f"another order: {wrong}")
    write_json(given.json, checks, rows)


if __name__ == "__main__":
    main()
