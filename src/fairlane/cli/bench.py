"""`fairlane bench`: loads on an engine in this process, without a server. Running and reckoning are fairlane.bench's; this reads
flags, shows how far it is and prints what came out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.cli import engine_flags
from fairlane.cli.exits import FAILED, INTERRUPTED, USAGE, must_be_writable, needs, stop

if TYPE_CHECKING:
    from rich.console import Console

    from fairlane.bench.figures import Row
    from fairlane.bench.loads import Load
    from fairlane.bench.run import Bench, Outcome
    from fairlane.scheduler.executor import Executor
    from fairlane.worker.config import WorkerConfig

ON_GPU = "one,batch-8,batch-64,batch-256"
ON_CPU = "1x128x32,4x128x32,16x128x32"


def bench(
    run: Annotated[
        str | None, typer.Option(metavar="LIST", help=f"Loads, with commas. Default: {ON_GPU}; on a CPU {ON_CPU}.")
    ] = None,
    model: engine_flags.Model = None,
    model_config: engine_flags.ModelConfig = None,
    load_format: engine_flags.LoadFormat = None,
    device: engine_flags.DeviceName = None,
    repeat: Annotated[int, typer.Option(min=1, max=100, help="Runs of each load; the median one is shown.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the random prompts; the runs of a load count on from it.")] = 0,
    worker_config: engine_flags.WorkerFile = None,
    settings: engine_flags.Settings = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write environment and figures there.")] = None,
) -> None:
    """Measure how fast this machine serves a model: tokens per second, time to the first token, time per token.

    It loads the model into this process, submits all requests of a load at once, waits for the last token and prints a table.
    Prompts are random token ids and outputs have exactly the length asked for, so the model's answers do not matter and random
    weights (--load dummy) measure the same as real ones: a GPU without any downloaded weights is enough.

    Loads: **one** (128 tokens in, 256 out), **batch-N** (N requests, 512 in, 128 out), **prefill-P** (P in, 1 out), **chat** (512
    requests of a chat service's lengths), **chat-N** (its first N), **NxPxO** (N requests of P in and O out).

    Exit codes: 0 measured, 1 a load failed, 2 a bad flag or model or no such device, 130 interrupted.

    Examples:

    fairlane bench    # the embedded model on this machine

    fairlane bench --load dummy --model-config llama-3.1-8b    # a GPU and no weights

    fairlane bench --model ~/models/Qwen3-0.6B --run one,8x1000x200 --repeat 3 --json bench.json

    fairlane bench --model-config qwen3-8b --run chat --set kv_cache=60GiB --set max_num_seqs=512
    """
    with needs("worker"):
        from fairlane.bench.setup import device_name, kv_tokens, peak_memory_bytes
        from fairlane.bench.show import output_console, table
    if json_file is not None and json_file.resolve().parent.is_dir():  # else it is made
        must_be_writable("--json", json_file)
    loads = None if run is None else _loads(run)
    config = engine_flags.checked_settings(
        model, model_config, load_format, device, worker_config, engine_flags.assignments(settings), loads or {}
    )
    if loads is None:
        loads = _loads(ON_GPU if config.device.value == "cuda" else ON_CPU)
        loads = _fitting(loads, config)
    console = output_console(to_file=not sys.stdout.isatty())
    rows: list[Row] = []
    code = 0
    with engine_flags.loaded(config) as executor:
        info = executor.info
        facts = {"model": info.model, "load_format": config.load_format.value, "device": device_name(config)}
        console.print(
            f"{info.model} ({config.load_format.value} weights) on {facts['device']}: {kv_tokens(info):,} tokens of KV cache, "
            f"at most {config.max_num_seqs} sequences and {config.max_num_batched_tokens:,} tokens a step"
        )
        try:
            code = _run_all(executor, config, loads, seed, repeat, rows)
        except KeyboardInterrupt:
            code = INTERRUPTED
        peak = peak_memory_bytes(config)
        for row in rows:
            row |= facts | {"kv_tokens": kv_tokens(info), "peak_memory_bytes": peak}
        if rows:
            console.print(table(rows))
        console.print(f"peak memory {peak / 2**30:.2f} GiB")
    _write(json_file, rows)
    raise typer.Exit(code)


def _loads(text: str) -> dict[str, Load]:
    from fairlane.bench.loads import named_load

    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not names:
        stop(USAGE, "--run names no load")
    try:
        return {name: named_load(name) for name in names}
    except ValueError as error:
        stop(USAGE, f"--run: {error}")


def _fitting(loads: dict[str, Load], config: WorkerConfig) -> dict[str, Load]:
    """Of the default loads those that the model's context holds; ends the command if it holds none."""
    from fairlane.bench.setup import context_of

    limit = context_of(config)
    fitting = {name: load for name, load in loads.items() if load.longest <= limit}
    if not fitting:
        stop(USAGE, f"the model's context of {limit:,} tokens holds none of the default loads: give some with --run, as NxPxO")
    return fitting


def _run_all(executor: Executor, config: WorkerConfig, loads: dict[str, Load], seed: int, repeat: int, rows: list[Row]) -> int:
    """Appends a row for each load that ran to its end; what did not is said, and makes the exit code 1."""
    from rich.console import Console

    from fairlane.bench.figures import figures, median_run
    from fairlane.bench.loads import Load
    from fairlane.bench.run import Bench, RunError

    errors, code = Console(stderr=True), 0
    engine = Bench(executor, config)
    warm = Load(tuple((prompt, min(output, 8)) for load in loads.values() for prompt, output in load.lengths[:4]))
    for name, load in {"warm-up": warm, **loads}.items():
        try:
            runs = [figures(one) for one in _runs(engine, name, load, seed, 1 if name == "warm-up" else repeat, errors)]
        except RunError as error:
            print(f"fairlane: {name}: {error}", file=sys.stderr)
            code = FAILED
            continue
        if name != "warm-up":
            rows.append({"load": name} | median_run(runs, "out_tok_s") | {"runs": repeat})
    return code


def _runs(engine: Bench, name: str, load: Load, seed: int, repeat: int, console: Console) -> Iterator[Outcome]:
    from fairlane.bench.show import progress_bar

    for number in range(repeat):
        with progress_bar(name, load.output_tokens, console) as progress:
            yield engine.run(load, seed=seed + number, progress=progress)


def _write(file: Path | None, rows: list[Row]) -> None:
    if file is None:
        return
    from fairlane.bench.results import write_document

    try:
        write_document(file, [], rows)
    except OSError as error:
        stop(FAILED, f"--json: {error}")
    print(f"written: {file}")
