"""H5, tenants beside each other on one GPU under overload: what VIPs and light tenants get under FCFS, VIP with each shaping, and
FAIR, and what is left for the crowd. On the real engine, through the gateway, and as the simulator predicts it.

    python benchmarks/bench_tenants.py                            all of it on one H200, Llama-3.1-8B's shape (14 minutes)
    python benchmarks/bench_tenants.py --simulate                 the simulator alone, on any machine (about two minutes)
    python benchmarks/bench_tenants.py --only overload/vip-balanced,flood --via engine --workloads 1
    python benchmarks/bench_tenants.py --device cpu --model smollm2 --scale 0.05 --via engine,gateway       a dry run
    python benchmarks/bench_tenants.py --draw results/bench_tenants-h200.json                               pictures of results

Loads and policy files are in tenant_loads.py, vLLM's figures in peers_h200.json. Checks are of the engine's rows, of requests of
VIPs pooled over all workloads; the pictures show workload 1 under every policy, which has the arrivals that vLLM had. The worker:
bench_engine.py's, with vLLM's KV cache of 60,000 tokens and 128 sequences a step; 256 may hold KV, and host memory takes what is
swapped out.

Exit codes: 0 measured, 1 a row failed, 2 a bad flag or no such device.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import bench_serving
from bench_engine import assignment, positive
from bench_serving import look_at, served
from engine_loads import warm_up
from engine_peers import Peers
from report import print_checks, print_rows, write_json
from serving_load import NotServingError
from tenant_figures import checks, peer_rows, predictions, row_of
from tenant_loads import POLICIES, Workload, alone, flood, overload, shares
from tenant_pictures import draw_time_lines, draw_trade_off
from tenant_runs import ENGINE, GATEWAY, SETTINGS, SIMULATOR, Run, in_simulator, on_engine, through_gateway

from fairlane.bench.figures import Row
from fairlane.bench.loads import chat_lengths
from fairlane.bench.run import Bench, RunError
from fairlane.calibrate.grid import points_for
from fairlane.calibrate.sweep import Sweep
from fairlane.clock import MonotonicClock
from fairlane.errors import ConfigError
from fairlane.scheduler.executor import StepError
from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.fit import fit
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.step_time import H200
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executors import make_executor
from fairlane.worker.shape import shape_of

NUM_RESIDENT, HOST_KV, HOST_BLOCKS = 256, "16GiB", 8192
SHARES_EACH = 700
CALIBRATION = "calibration"
SHOWN = ("load", "policy", "via", "requests", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "many_tok_s")


@dataclass(frozen=True, slots=True)
class Part:
    """A row to be: a load under a policy. most: workloads, one after another, pooled."""

    load: str
    policy: str
    most: int = 1

    @property
    def name(self) -> str:
        return f"{self.load}/{self.policy}"

    def workloads(self, given: argparse.Namespace) -> list[Workload]:
        if self.load == "shares":
            return [shares(given.each).scaled(given.scale)]
        make = {"alone": alone, "overload": overload, "flood": flood}[self.load]
        return [make(number).scaled(given.scale) for number in range(1, min(given.workloads, self.most) + 1)]


PARTS = (
    Part("overload", "vip-balanced", most=5),
    Part("overload", "fcfs"),
    Part("flood", "flood-fair", most=3),
    Part("flood", "flood-fcfs"),
    Part("shares", "shares-fair"),
    Part("alone", "vip-balanced"),
    *(Part("overload", name) for name in POLICIES if name.startswith("vip-") and name != "vip-balanced"),
)
OVER_GATEWAY = ("overload/vip-balanced", "overload/fcfs", "flood/flood-fair")


class Session:
    """One invocation: what was asked, when it began, what came of it."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.shape: WorkerShape | None = None  # the simulator's; None: no engine has been measured
        self._began_s = time.monotonic()
        self._told = ""

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began_s:7.1f} s] {text}", flush=True)

    @property
    def deadline_s(self) -> float | None:
        return None if self.given.budget_s is None else self._began_s + self.given.budget_s

    def parts(self, among: Sequence[str] | None = None) -> list[Part]:
        wanted: list[str] = self.given.only
        found = [p for p in PARTS if not wanted or any(p.name == name or p.load == name for name in wanted)]
        return [part for part in found if among is None or part.name in among]

    def run(self, part: Part, one: Callable[[Workload], Run]) -> None:
        """A part's row, from its workloads one after another; what fails is reported, and the next part begins."""
        runs: list[Run] = []
        try:
            for workload in part.workloads(self.given):
                if self.deadline_s is not None and time.monotonic() > self.deadline_s:
                    self.say(f"{part.name}: out of time after {len(runs)} workloads")
                    break
                runs.append(one(workload))
                self.say(f"  {part.name} {runs[-1].via} {workload.number}: {summary(row_of(runs[-1:]))}")
        except (RunError, NotServingError, RuntimeError) as error:
            self.failures.append(f"{part.name}: {error}")
            self.say(f"FAILED {part.name}: {error}")
        if runs:
            self.rows.append(row_of(runs))
            write_json(self.given.json, checks(self.rows), self.rows)


def summary(row: Row) -> str:
    if "apart" in row:
        apart = "without end" if row["apart"] is None else f"at most {row['apart']:.2%}"
        return f"W/w {apart} apart over {row['window_s']:.1f} s"
    many = f", the many {row['many_tok_s']:,.0f} tokens/s" if row["many_tok_s"] else ""
    ttft, tpot = (f"{row[f'{name}_p50_ms']:.2f} / {row[f'{name}_p99_ms']:.2f}" for name in ("ttft", "tpot"))
    return f"TTFT {ttft}, TPOT {tpot} ms{many}"


def calibrate(session: Session, bench: Bench, config: WorkerConfig) -> None:
    """Fits the simulator's worker to this one, as `fairlane calibrate` does. Raises SimulationInputError, StepError."""
    clock, info = MonotonicClock(), bench.executor.info
    sweep, points = Sweep(bench.executor, config.pipeline_depth, clock), points_for(config, info)
    sweep.run(points, clock.now() + session.given.calibrate, lambda: None)
    found = fit(sweep.cells())
    session.shape = replace(shape_of(config, info), step=found.model)
    about = {"cells": len(found.cells), "kinds": len(points), "mape": found.mape, "worst": found.worst}
    session.rows.append({"load": CALIBRATION, "policy": None, "via": ENGINE, **about, "shape": session.shape.document({})})
    kinds = f"{len(found.cells)} of {len(points)} kinds of steps"
    session.say(f"calibrated: {kinds}, off by {found.mape:.1%}, {found.worst:.1%} at worst")


def simulate(session: Session) -> None:
    given = session.given
    shape = session.shape
    if shape is None:
        base = WorkerShape(H200) if given.shape is None else WorkerShape.load(given.shape)
        limits: dict[str, Any] = dict(SETTINGS) if given.scale == 1 else {}
        shape = replace(base, **limits, max_num_resident=NUM_RESIDENT, num_host_blocks=HOST_BLOCKS, max_prefill_chunk=0)
    for part in session.parts():
        session.run(part, lambda workload, part=part: in_simulator(shape, workload, part.policy))  # type: ignore[misc]


def measure(session: Session, config: WorkerConfig) -> None:
    say = session.say
    bench = Bench(make_executor(config, MonotonicClock()), config)
    try:
        say(f"{config.model}: {bench.executor.info.num_blocks:,} blocks")
        bench.run(warm_up(chat_lengths(), session.given.scale))
        if SIMULATOR in session.given.via and session.given.shape is None:
            calibrate(session, bench, config)
        for part in session.parts():
            session.run(
                part,
                lambda workload, part=part: on_engine(bench, workload, part.policy, session.deadline_s, _silent),  # type: ignore[misc]
            )
    finally:
        bench.executor.close()


def _silent(num_tokens: int) -> None:
    """Runs take half a minute each; their lines are progress enough."""


def measure_gateway(session: Session, config: WorkerConfig) -> None:
    for part in session.parts(OVER_GATEWAY):
        try:
            with tempfile.TemporaryDirectory(prefix="fl") as folder:
                _serve_part(session, config, replace(part, most=1), Path(folder))
        except NotServingError as error:
            session.failures.append(f"{part.name} through the gateway: {error}")
            session.say(f"FAILED {part.name} through the gateway: {error}")


def _serve_part(session: Session, config: WorkerConfig, part: Part, folder: Path) -> None:
    """Starts a server under the part's policy. Raises NotServingError."""
    given = session.given
    with served(folder, config, given.ready_timeout, POLICIES[part.policy]) as (target, keys):
        vocab_size = look_at(target, next(iter(keys.values()))).vocab_size
        session.run(
            part,
            lambda workload: through_gateway(target, keys, vocab_size, workload, part.policy, given.timeout, session.say),
        )


# -- the command -------------------------------------------------------------------------------------------------------------


def names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    known = {part.name for part in PARTS} | {part.load for part in PARTS}
    if unknown := [name for name in found if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such row; there are {', '.join(sorted(known))}")
    return found


def worlds(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found or not set(found) <= {ENGINE, GATEWAY, SIMULATOR}:
        raise argparse.ArgumentTypeError(f"{text}: of {ENGINE}, {GATEWAY}, {SIMULATOR}, with commas")
    return found


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--model", default="llama-3.1-8b", help="a name of configs/models, a config.json, an embedded model or a folder")
    add("--load-format", choices=("safetensors", "dummy"), help="dummy: random weights (always for a shape)")
    add("--via", type=worlds, default=[ENGINE, GATEWAY, SIMULATOR], metavar="WORLDS", help="engine,gateway,simulator")
    add("--simulate", action="store_true", help="short for --via simulator; checks are of its rows")
    add(
        "--shape",
        type=Path,
        metavar="FILE",
        help="the simulator's worker, of fairlane calibrate (default: the engine's fit)",
    )
    add("--calibrate", type=positive, default=60.0, metavar="S", help="seconds for that fit (default 60)")
    add("--only", type=names, default=[], metavar="ROWS", help="loads, or load/policy, with commas")
    add("--workloads", type=int, default=5, help="at most so many of a row that pools several (default 5: 200 VIP requests)")
    add("--each", type=int, default=SHARES_EACH, help="requests of each tenant of `shares` (default %(default)s)")
    add("--scale", type=positive, default=1.0, help="of counts and lengths (default 1; nothing is checked otherwise)")
    add("--budget-s", type=positive, metavar="S", help="no run begins, or goes on in the engine, after that many seconds")
    add("--timeout", type=positive, default=120.0, metavar="S", help="deadline of a request through the gateway (default 120)")
    add("--ready-timeout", type=positive, default=300.0, metavar="S", help="for loading the model (default 300)")
    add("--worker-config", type=Path, metavar="FILE")
    add("--set", type=assignment, action="append", default=[], metavar="KEY=VALUE", help="a worker setting")
    add("--json", type=Path, metavar="FILE", help="write environment, checks and rows there, as they come")
    add("--pictures", type=Path, metavar="FOLDER", help="draw bench_tenants-*.png there")
    add("--draw", type=Path, metavar="JSON", help="only draw earlier results, into --pictures (default: beside them)")
    given = parser.parse_args(argv)
    if given.workloads < 1 or given.each < 1:
        parser.error("--workloads and --each: at least 1")
    if given.simulate:
        given.via = [SIMULATOR]
    return given


def draw(rows: Sequence[Row], folder: Path) -> None:
    shown = [*rows, *peer_rows(Peers())]
    for name, picture in (("trade-off", draw_trade_off), ("time-lines", draw_time_lines)):
        picture(shown, folder / f"bench_tenants-{name}.png")
        print(f"written: {folder / f'bench_tenants-{name}.png'}", flush=True)


def worker_config(given: argparse.Namespace, folder: Path) -> WorkerConfig:
    """bench_serving.py's, with the peers' KV cache and batch, and room for those that pause."""
    if given.scale == 1:
        given.set = [*(f"{key}={value}" for key, value in SETTINGS.items()), f"max_num_resident={NUM_RESIDENT}", *given.set]
        given.set = [f"host_kv_cache={HOST_KV}", *given.set]
    return bench_serving.worker_config(given, folder)


def main(argv: list[str] | None = None) -> int:
    given = arguments(argv)
    if given.draw is not None:
        draw(json.loads(given.draw.read_text(encoding="utf-8"))["rows"], given.pictures or given.draw.parent)
        return 0
    session = Session(given)
    try:
        with tempfile.TemporaryDirectory(prefix="fl") as folder:
            if ENGINE in given.via or GATEWAY in given.via:
                config = worker_config(given, Path(folder))
            if ENGINE in given.via:
                measure(session, config)
            if SIMULATOR in given.via:
                simulate(session)
            if GATEWAY in given.via:
                measure_gateway(session, config)
    except (ConfigError, SimulationInputError, StepError, ValueError, OSError) as error:
        print(f"bench_tenants: {error}", file=sys.stderr, flush=True)
        return 2
    found = checks(session.rows, SIMULATOR if given.via == [SIMULATOR] else ENGINE) if given.scale == 1 else []
    tables = [row for row in [*session.rows, *(peer_rows(Peers()) if given.scale == 1 else [])] if row["load"] != CALIBRATION]
    print_rows("tenants", [{key: row.get(key) for key in SHOWN} for row in tables if row["load"] != "shares"])
    print_rows("shares", [{k: v for k, v in row.items() if k != "points"} for row in session.rows if row["load"] == "shares"])
    print_rows("simulated over measured, less 1", predictions(session.rows))
    print_checks(found)
    write_json(given.json, found, session.rows)
    if given.pictures is not None:
        draw(session.rows, given.pictures)
    for failure in session.failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if session.failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server and the load end with us
    sys.exit(main())
