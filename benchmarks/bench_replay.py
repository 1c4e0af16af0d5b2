"""The simulator against reality: real CPU workers with SmolLM2 serve loads of three tiers under FCFS, VIP and FAIR; what the
recorder writes of a run under FCFS is replayed in the simulator under the same policies. Its worker is fitted to this machine in
both of `fairlane calibrate`'s ways: by a sweep, in slices between the runs, and from recorded steps, for one half of the loads
from those of the other half. What is compared, and what chance could do: replay_figures.py.

    python benchmarks/bench_replay.py [--json FILE] [--loads 20] [--repeats 2] [--processes 2] [--clock paced|work|wall]

A worker has one thread; processes serve at the same time, each its part of the loads, and are replayed each with its own fit.
A real run is one draw of chance, and so is one replay: every load is replayed some times, each step's time off from the model's
as the recorded steps were, in their order. Column `once` has replays without that, one of each load.

By default time is what a worker's thread computes, in seconds of a machine of a given pace (work_clock.py), so that others on the
machine disturb little; --clock work leaves the pace as it is, and --clock wall is for a machine of one's own.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from statistics import correlation, pstdev
from typing import Any, NamedTuple

from replay_figures import NAMES, Compared, Key, Run, compare
from replay_measure import CLOCKS, Measured, measure
from replay_runs import POLICIES, candidate, exported, in_order, scattered, simulate
from report import console, print_checks, print_rows, write_json
from rich.progress import track

from fairlane.bench.results import Check
from fairlane.scheduler.simulator.fit import MAPE_LIMIT, WORST_LIMIT, Fit, cells_of, fit
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.step_work import StepWork

REQUIRED = 0.15
# Of each load, with steps that are off as recorded ones were.
REPLAYS = 8
Replays = Mapping[str, Mapping[int, Sequence[Run]]]  # by policy and load


def measure_all(given: argparse.Namespace) -> list[Measured]:
    """In as many processes at once as asked for."""
    parts = [range(given.loads)[number :: given.processes] for number in range(given.processes)]
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(len(parts), context) as pool:
        told: Queue[str] = manager.Queue()
        running = [pool.submit(measure, list(part), given.repeats, given.slice, given.clock, told.put) for part in parts]
        total = given.loads * given.repeats * len(POLICIES)
        for _ in track(_served(told, running, total), "serving and calibrating", total, console=console):
            pass
        return [one.result() for one in running]


def _served(told: Queue[str], running: Sequence[Future[Measured]], total: int) -> Iterator[str]:
    """What is told, so many times. Raises what ended a process before."""
    for _ in range(total):
        while True:
            try:
                yield told.get(timeout=1.0)
                break
            except Empty:
                for one in running:
                    if one.done():
                        one.result()


class Recorded(NamedTuple):
    """A fit to recorded steps, and by what each of them, in the order of the runs, is off from it."""

    fit: Fit
    factors: Sequence[float]


def recorded_of(measured: Measured) -> dict[int, Recorded]:
    """By load, of the steps of other loads: of the half of them that it is not in."""
    loads = list(measured.steps)
    halves = [loads[0::2], loads[1::2]]
    found = []
    for half in halves:
        steps = [step for load in half for step in measured.steps[load]]
        fitted = fit(cells_of(steps))
        found.append(Recorded(fitted, off_by(steps, fitted.model)))
    return {load: found[1 - number] for number, half in enumerate(halves) for load in half}


def off_by(steps: Sequence[tuple[StepWork, float]], model: StepModel) -> list[float]:
    """Of each step, by what the model has to be multiplied; all together they take as long as it says."""
    pairs = [(seconds, model.seconds(work)) for work, seconds in steps if seconds > 0 and work.tokens > 0]
    longer = math.fsum(seconds for seconds, _ in pairs) / math.fsum(modelled for _, modelled in pairs)
    return [seconds / modelled / longer for seconds, modelled in pairs]


def scatter_of(factors: Sequence[float]) -> tuple[float, float]:
    """Deviation of their logarithms, and how much of a step's is the next one's too (correlation)."""
    logs = [math.log(factor) for factor in factors]
    return pstdev(logs), correlation(logs[:-1], logs[1:])


def replays(
    measured: Measured, models: Mapping[int, StepModel], factors: Mapping[int, Sequence[float]] | None, count: int = REPLAYS
) -> Replays:
    """count replays of each recording under each policy. factors: by load, those of its steps; None: they are the model's."""

    def shape(load: int, name: str) -> WorkerShape:
        step = models[load] if factors is None else scattered(models[load], in_order(factors[load], name))
        return replace(measured.shape, step=step)

    with tempfile.TemporaryDirectory() as folder:
        traces = {load: exported(lines, Path(folder) / f"{load}.jsonl") for load, lines in measured.recordings.items()}
        return {
            name: {
                load: [simulate(load, trace, candidate(name), shape(load, f"{name} {load} {number}")) for number in range(count)]
                for load, trace in traces.items()
            }
            for name in POLICIES
        }


def compared(name: str, found: Sequence[Measured], made: Sequence[Replays]) -> dict[Key, Compared]:
    """Of a policy, every process's runs with its replays."""
    pairs = [
        (run, replayed[name][load])
        for measured, replayed in zip(found, made, strict=True)
        for load, runs in measured.real[name].items()
        for run in runs
    ]
    return compare([run for run, _ in pairs], [own for _, own in pairs])


def rows_of(found: Sequence[Measured], recorded: Sequence[Mapping[int, Recorded]]) -> list[dict[str, Any]]:
    """recorded: each process's, by load."""
    fitted = [{load: one.fit.model for load, one in own.items()} for own in recorded]
    swept = [dict.fromkeys(one.steps, one.sweep.model) for one in found]
    factors = [{load: one.factors for load, one in own.items()} for own in recorded]
    by_sweep = [replays(*one) for one in zip(found, swept, factors, strict=True)]
    by_steps = [replays(*one) for one in zip(found, fitted, factors, strict=True)]
    once = [replays(one, own, None, 1) for one, own in zip(found, swept, strict=True)]
    rows = []
    for name in POLICIES:
        of_sweep, of_once = compared(name, found, by_sweep), compared(name, found, once)
        of_steps = compared(name, found, by_steps)
        for key, one in of_sweep.items():
            other = of_steps[key]
            rows.append(
                {
                    "policy": name, "tier": key.tier, "figure": key.figure, "measured": one.measured, "+-": one.noise,
                    "simulated": one.simulated, "off": one.off, "from": one.low, "to": one.high, "once": of_once[key].off,
                    "by steps": other.simulated, "off by steps": other.off, "steps from": other.low, "steps to": other.high,
                }
            )  # fmt: skip
    return rows


def wrong_orders(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Pairs of policies whose order in a figure of a tier is another in the simulator, unless they are as good as equal in
    reality: no further apart than what chance does to either, or than REQUIRED, within which the simulator may be off."""
    found = []
    for first in rows:
        for second in rows:
            if (first["tier"], first["figure"]) != (second["tier"], second["figure"]) or first["policy"] >= second["policy"]:
                continue
            apart = abs(first["measured"] / second["measured"] - 1)
            same = (first["measured"] < second["measured"]) == (first["simulated"] < second["simulated"])
            if not same and apart > max(REQUIRED, first["+-"], second["+-"]):
                found.append(f"{first['tier']} {first['figure']}: {first['policy']} and {second['policy']}")
    return found


def checks_of(rows: Sequence[dict[str, Any]], sweeps: Sequence[Fit]) -> list[Check]:
    def limit(check_id: str, what: str, value: float, most: float) -> Check:
        return Check(check_id, what, value, f"<= {most:g}", "", value <= most)

    def replayed(check_id: str, figure: str, columns: tuple[str, str, str], way: str) -> Check:
        off, low, high = columns
        worst = max((row for row in rows if row["figure"] == figure), key=lambda row: abs(float(row[off])))
        where = f"{worst['tier']} under {worst['policy']}, 95 %: {worst[low]:+.3f} to {worst[high]:+.3f}"
        return limit(check_id, f"{figure} simulated / measured - 1, worst; by {way} ({where})", abs(worst[off]), REQUIRED)

    wrong = wrong_orders(rows)
    ways = (
        ("", ("off", "from", "to"), "sweep"),
        ("STEPS-", ("off by steps", "steps from", "steps to"), "recorded steps"),
    )
    return [
        limit("CAL-MAPE", "step time, mean error over kinds of steps", max(one.mape for one in sweeps), MAPE_LIMIT),
        limit("CAL-WORST", "step time, worst kind", max(one.worst for one in sweeps), WORST_LIMIT),
        *(
            replayed(f"REPLAY-{prefix}{check}", figure, columns, way)
            for prefix, columns, way in ways
            for check, figure in zip(("TTFT50", "TTFT99", "RATE"), NAMES, strict=True)
        ),
        Check("REPLAY-ORDER", "policies in another order than measured", len(wrong), "= 0", "", not wrong),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each load under each policy (default 2)")
    parser.add_argument("--slice", type=float, default=2.0, help="seconds of calibration before each run (default 2)")
    parser.add_argument("--processes", type=int, default=2, help="that serve at once, a core each (default 2)")
    parser.add_argument("--clock", choices=tuple(CLOCKS), default="paced", help="what time is (default paced)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    given = parser.parse_args()
    if given.repeats < 1:
        parser.error("--repeats: at least 1 is needed")
    if not 1 <= given.processes <= given.loads // 2:
        parser.error(
            "--processes: each needs two loads, one to fit to and one to compare, so at least 1 and at most half of --loads"
        )
    found = measure_all(given)
    recorded = [recorded_of(one) for one in found]
    rows = rows_of(found, recorded)
    print_rows(f"the same loads, measured and simulated; {given.loads} of them, each {given.repeats} times", rows)
    for one, by_load in zip(found, recorded, strict=True):
        console.print(f"fitted to the sweep: {one.sweep.model}; {len(one.sweep.cells)} kinds of steps")
        for fitted, factors in {id(own): own for own in by_load.values()}.values():
            spread, alike = scatter_of(factors)
            console.print(f"fitted to steps: {fitted.model}; off by {fitted.mape:.1%} on average, {fitted.worst:.1%} at worst")
            console.print(f"those steps are off by {spread:.1%} (deviation), and {alike:.0%} of that is the next step's, too")
        if one.paces:
            console.print(f"a second of this machine was worth {min(one.paces):.2f} to {max(one.paces):.2f} of the clock")
    checks = checks_of(rows, [one.sweep for one in found])
    print_checks(checks)
    for wrong in wrong_orders(rows):
        console.print(f"another order: {wrong}")
    write_json(given.json, checks, rows)


if __name__ == "__main__":
    main()
