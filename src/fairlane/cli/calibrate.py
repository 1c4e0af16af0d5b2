"""`fairlane calibrate`: fits the simulator's worker to a real one. Measuring is fairlane.calibrate's, the fit the
simulator's; this reads flags, shows how far it is and writes what came out."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairlane.cli import engine_flags
from fairlane.cli.exits import FAILED, USAGE, must_be_writable, needs, stop

if TYPE_CHECKING:
    from fairlane.scheduler.executor import Executor
    from fairlane.scheduler.simulator.fit import Cell, Fit
    from fairlane.scheduler.simulator.shape import WorkerShape
    from fairlane.worker.config import WorkerConfig


def calibrate(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the worker's shape there.")] = Path("shape.json"),
    budget: Annotated[float, typer.Option(min=1, max=3600, help="Seconds to measure, after loading the model.")] = 90.0,
    recorded: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure nothing: read what a worker wrote as its `step_log`.")
    ] = None,
    model: engine_flags.Model = None,
    model_config: engine_flags.ModelConfig = None,
    load_format: engine_flags.LoadFormat = None,
    device: engine_flags.DeviceName = None,
    worker_config: engine_flags.WorkerFile = None,
    settings: engine_flags.Settings = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every cell there.")] = None,
) -> None:
    """Measure how long this machine's steps take, for `fairlane policy simulate --shape FILE`.

    A step's time is modelled as fixed + sequence * sequences + the larger of weights and token * tokens (and of the other what
    `blend` says) + context * tokens read by decodes + attention * pairs of a prompt's chunk. This fits the coefficients to
    measured steps and says how far off they are; the file has them, and the worker's KV cache and limits.

    Two ways. By itself it loads the model and times steps of every kind (sequences x context x prompt chunk) until the budget is
    spent; give it the worker.yaml that you serve with, while nothing else runs here. With --recorded it takes the steps of a
    worker that serves: put `step_log: FILE` into worker.yaml, let it serve for some minutes, and read FILE here, on any machine.

    A fit is good if it misses no more than 10 % on average over the kinds of steps, and no kind by more than 25 %.

    Exit codes: 0 a good fit, 1 not a good one (the file is written all the same) or steps failed, 2 used wrongly.

    Examples:

    fairlane calibrate    # the embedded model on this machine

    fairlane calibrate --worker-config worker.yaml --model ~/models/Qwen3-0.6B --out qwen3.json

    fairlane calibrate --load dummy --model-config llama-3.1-8b --out h200.json    # a GPU and no weights

    fairlane calibrate --recorded /var/log/fairlane/steps.jsonl
    """
    with needs("worker"):
        from fairlane.scheduler.simulator.errors import SimulationInputError
        from fairlane.scheduler.simulator.fit import fit
    for flag, file in (("--out", out), ("--json", json_file)):
        must_be_writable(flag, file)
    given = (model, model_config, load_format, device, worker_config, settings)
    try:
        if recorded is not None:
            if any(flag is not None for flag in given):
                stop(USAGE, "--recorded measures nothing: a model, a device and settings have no place beside it")
            shape, about, cells = _recorded(recorded)
        else:
            config = engine_flags.checked_settings(*given[:5], engine_flags.assignments(settings), {})
            shape, about, cells = _measured(config, budget)
        found = fit(cells)
    except SimulationInputError as error:
        stop(FAILED, f"there is no fit: {error}")
    _show(found)
    _write(out, shape, about, found)
    if json_file is not None:
        _write_cells(json_file, found)
    if not found.is_good:
        stop(FAILED, "the fit is not good: measure longer (--budget), and while nothing else runs here")


def _recorded(file: Path) -> tuple[WorkerShape, dict[str, Any], list[Cell]]:
    """Raises SimulationInputError."""
    from fairlane.calibrate.recorded import read_step_log
    from fairlane.scheduler.simulator.fit import cells_of
    from fairlane.worker.step_log import older

    found = read_step_log(file, older(file))
    cells = cells_of(found.steps)
    print(f"{file}: {len(found.steps):,} steps of {len(cells)} kinds, {found.about.get('model', 'a model')}")
    return found.shape, found.about, cells


def _measured(config: WorkerConfig, budget_s: float) -> tuple[WorkerShape, dict[str, Any], list[Cell]]:
    """Ends the command where a step fails."""
    from fairlane.bench.setup import device_name, kv_tokens
    from fairlane.scheduler.executor import StepError
    from fairlane.worker.shape import shape_of

    with engine_flags.loaded(config) as executor:
        info = executor.info
        about = {"model": info.model, "load_format": config.load_format.value, "device": device_name(config)}
        print(f"{info.model} on {about['device']}: {kv_tokens(info):,} tokens of KV cache", flush=True)
        try:
            cells = _sweep(executor, config, budget_s)
        except StepError as error:
            stop(FAILED, f"a step failed: {error}")
        return shape_of(config, info), about, cells


def _sweep(executor: Executor, config: WorkerConfig, budget_s: float) -> list[Cell]:
    """Raises StepError."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from fairlane.calibrate.grid import points_for
    from fairlane.calibrate.sweep import Sweep
    from fairlane.clock import MonotonicClock

    console = Console(stderr=True)
    clock = MonotonicClock()
    points = points_for(config, executor.info)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        start_s = clock.now()
        task = bar.add_task(f"{len(points)} kinds of steps", total=budget_s)
        sweep = Sweep(executor, config.pipeline_depth, clock)
        sweep.run(points, start_s + budget_s, lambda: bar.update(task, completed=clock.now() - start_s))
    cells = sweep.cells()
    steps = sum(cell.steps for cell in cells)
    print(f"{steps:,} steps of {len(cells)} kinds out of {len(points)}, in {clock.now() - start_s:.0f} s")
    return cells


def _show(found: Fit) -> None:
    from rich.table import Table

    from fairlane.bench.show import output_console
    from fairlane.scheduler.simulator.fit import MAPE_LIMIT, WORST_LIMIT

    model, console = found.model, output_console(to_file=not sys.stdout.isatty())
    table = Table(title="a step takes the sum of", title_justify="left", show_header=False)
    for name, value, unit in (
        ("any step", model.fixed_s * 1e3, "ms"),
        ("each sequence", model.sequence_s * 1e6, "us"),
        ("reading the weights", model.weights_s * 1e3, "ms"),
        ("or, if that is more, computing: each token", model.token_s * 1e6, "us"),
        ("  how much of the lesser counts, too: 0 none, 1 all", model.blend, ""),
        ("1000 tokens of context", model.context_s * 1e9, "us"),
        ("1000 x 1000 scores of a prompt", model.attention_s * 1e9, "ms"),
        ("a block to or from the host, beside the step", model.swap_block_s * 1e6, "us"),
    ):
        table.add_row(name, f"{value:,.4g}", unit)
    console.print(table)
    ranked = sorted(zip(found.cells, found.errors, strict=True), key=lambda pair: -abs(pair[1]))
    worst = Table(title="furthest off", title_justify="left")
    for heading in ("sequences", "tokens", "context", "scores", "copies", "measured ms", "model ms", "off"):
        worst.add_column(heading, justify="right")
    for cell, error in ranked[:6]:
        counts = (f"{count:,.0f}" for count in cell.work)
        worst.add_row(*counts, f"{1e3 * cell.seconds:.2f}", f"{1e3 * cell.seconds * (1 + error):.2f}", f"{error:+.1%}")
    console.print(worst)
    verdict = "good" if found.is_good else "NOT good"
    console.print(
        f"off by {found.mape:.1%} on average (at most {MAPE_LIMIT:.0%}), {found.worst:.1%} at worst (at most {WORST_LIMIT:.0%}): "
        f"{verdict}"
    )


def _write(file: Path, shape: WorkerShape, about: dict[str, Any], found: Fit) -> None:
    said = about | {"cells": len(found.cells), "mape": round(found.mape, 4), "worst": round(found.worst, 4)}
    document = dataclasses.replace(shape, step=found.model).document(said)
    try:
        file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        stop(FAILED, f"--out: {file}: cannot be written: {error.strerror}")
    print(f"written: {file}; try it with: fairlane policy simulate POLICY --shape {file} --workload W9")


def _write_cells(file: Path, found: Fit) -> None:
    from fairlane.bench.results import Check, write_document
    from fairlane.scheduler.simulator.fit import MAPE_LIMIT, WORST_LIMIT

    checks = [
        Check("CAL-MAPE", "step time, mean error over cells", found.mape, f"<= {MAPE_LIMIT}", "", found.mape <= MAPE_LIMIT),
        Check("CAL-WORST", "step time, worst cell", found.worst, f"<= {WORST_LIMIT}", "", found.worst <= WORST_LIMIT),
    ]
    rows = [
        cell.work._asdict() | {"seconds": cell.seconds, "steps": cell.steps, "error": error}
        for cell, error in zip(found.cells, found.errors, strict=True)
    ]
    try:
        write_document(file, checks, rows)
    except OSError as error:
        stop(FAILED, f"--json: {error}")
    print(f"written: {file}")
