"""`fairlane profile`: where a step of the worker spends its time. Recording is fairlane.bench.profile's; this reads flags and
prints what was recorded."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.cli import engine_flags
from fairlane.cli.exits import FAILED, must_be_writable, needs, stop

if TYPE_CHECKING:
    from rich.table import Table

    from fairlane.bench.profile import Recording, Spent


def profile(
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a step.")] = 16,
    context: Annotated[int, typer.Option(min=1, help="Prompt tokens of each.")] = 200,
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Steps to record.")] = 20,
    prefill: Annotated[bool, typer.Option("--prefill", help="Record the steps from the first on: prompts.")] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The trace, for chrome://tracing or ui.perfetto.dev.")] = Path(
        "trace.json"
    ),
    viztracer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record the host's Python there, too; needs fairlane[profile].")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Lines of each table.")] = 15,
    model: engine_flags.Model = None,
    model_config: engine_flags.ModelConfig = None,
    load_format: engine_flags.LoadFormat = None,
    device: engine_flags.DeviceName = None,
    worker_config: engine_flags.WorkerFile = None,
    settings: engine_flags.Settings = None,
) -> None:
    """Show where a step of the worker spends its time: operators and kernels, the host's parts, milliseconds a step.

    A batch is brought to where all its sequences decode; some steps are timed, then as many others are recorded. The figures
    with a profiler are slower than those without: compare shares, not times. `nsys` shows the worker of a real server, if that
    was started with FAIRLANE_NVTX=1.

    Exit codes: 0 done, 1 the batch could not be run, 2 a bad flag or model or no such device.

    Examples:

    fairlane profile --batch 16 --context 200

    fairlane profile --model-config llama-3.1-8b --batch 64 --context 512 --out b64.json --viztracer host.json

    fairlane profile --model-config qwen3-0.6b --prefill --batch 4 --context 2000 --steps 2
    """
    with needs("worker"):
        from fairlane.bench.loads import uniform
        from fairlane.bench.profile import Batch, ProfileError, Profiler
        from fairlane.bench.show import output_console
    if viztracer is not None:
        with needs("profile"):
            if importlib.util.find_spec("viztracer") is None:
                raise ModuleNotFoundError("no viztracer", name="viztracer")
    for flag, file in (("--out", out), ("--viztracer", viztracer)):
        must_be_writable(flag, file)
    name = f"{batch}x{context}x{steps}"
    config = engine_flags.checked_settings(
        *(model, model_config, load_format, device, worker_config, engine_flags.assignments(settings)),
        {name: uniform(batch, context, steps)},
    )
    if config.device.value == "cpu":
        config = dataclasses.replace(config, pipeline_depth=0)  # torch's profiler sees the thread that starts it
    console = output_console(to_file=not sys.stdout.isatty())
    with engine_flags.loaded(config) as executor:
        try:
            profiler = Profiler(executor, config, Batch(batch, context, prefill), steps)
            recording = profiler.record(out)
            if viztracer is not None:
                profiler.record_host(viztracer)
            profiler.close()
        except ProfileError as error:
            stop(FAILED, str(error))
    for table in _tables(recording, top):
        console.print(table)
    console.print(
        f"{recording.step_ms:.3f} ms a step without a profiler, {recording.recorded_step_ms:.3f} ms with it "
        f"({recording.steps} steps of {batch} sequences)"
    )
    console.print(f"written: {', '.join(str(file) for file in (out, viztracer) if file is not None)}")


def _tables(recording: Recording, top: int) -> list[Table]:
    tables = [_table("Parts of a step on the host", recording.spans, recording.spans[:1])]
    for place, title in (("device", "Kernels and copies on the device"), ("host", "Operators on the host")):
        spent = recording.spent[place]
        if spent:
            tables.append(_table(f"{title}, the largest {min(top, len(spent))} of {len(spent)}", spent[:top], spent))
    return tables


def _table(title: str, shown: list[Spent], whole: list[Spent]) -> Table:
    """Shares are of the sum of `whole`."""
    from rich.markup import escape
    from rich.table import Table

    total = sum(one.self_ms for one in whole) or 1.0
    table = Table(title=title, title_justify="left")
    table.add_column("what", no_wrap=True, max_width=90)
    for column in ("ms a step", "share", "calls a step"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in shown:
        table.add_row(escape(one.name), f"{one.self_ms:.4f}", f"{one.self_ms / total:.1%}", f"{one.calls:,.4g}")
    return table
