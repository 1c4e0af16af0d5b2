"""`fairlane policy simulate`: what a policy would have done with a trace or a workload. The work is fairlane.simulate's; this
reads flags and says what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.cli.exits import FAILED, USAGE, must_be_writable, needs, stop
from fairlane.cli.policy import load_or_stop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fairlane.scheduler.simulator.placement import Placed
    from fairlane.simulate.policies import Candidate
    from fairlane.simulate.runs import Asked, Run

# Times the recorded, or a workload's own, rate.
MAX_SPEED = 1000.0


def mount(app: typer.Typer) -> None:
    """Adds the command to `fairlane policy`."""
    app.command()(simulate)


def simulate(
    file: Annotated[str, typer.Argument(metavar="POLICY", help="The policy file to try.")],
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Replay this trace.")] = None,
    workload: Annotated[str | None, typer.Option(metavar="NAME", help="Or a made workload, W1 to W12.")] = None,
    against: Annotated[str | None, typer.Option(metavar="POLICY2", help="A policy file to compare with.")] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Other arrivals, other lengths.")] = 0,
    workers: Annotated[int, typer.Option(min=1, max=256, metavar="N", help="How many workers.")] = 1,
    shape: Annotated[
        str, typer.Option(metavar="FILE|NAME", help="What a worker is, as `fairlane calibrate` writes it; h100-8b, h200-8b.")
    ] = "h100-8b",
    duration: Annotated[
        str | None, typer.Option(metavar="TIME", help="How long, as 60s. Default: the trace's length; 60s of a workload.")
    ] = None,
    speed: Annotated[float, typer.Option(metavar="X", help="How many times as fast requests arrive.")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write every figure there.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw time lines there.")] = None,
    assertions: Annotated[Path | None, typer.Option("--assert", metavar="FILE", help="What must hold, as YAML.")] = None,
) -> None:
    """Try a policy on recorded or made traffic: the real scheduler with its blocks, on a clock of its own. Nothing is served.

    Requests of nodes and tiers that the policy does not have are dealt to its tenants. Of the gateway's limits only max_wait,
    max_duration and max_output_tokens are applied. Keys that are not enforced yet have no effect here either.

    Exit codes: 0 done and all assertions hold, 1 one fails, or the policy has errors or would be refused by such a worker, 2 used
    wrongly.

    Examples:

    fairlane policy simulate tenants.yaml --workload W9 --duration 30s

    fairlane policy simulate new.yaml --against tenants.yaml --trace yesterday.jsonl --assert promises.yaml --png promises.png

    fairlane calibrate --out shape.json && fairlane policy simulate tenants.yaml --trace yesterday.jsonl --shape shape.json
    """
    with needs("server"):
        from fairlane.config.source import UnreadableFile
        from fairlane.errors import ConfigError
        from fairlane.scheduler.simulator.errors import SimulationInputError
        from fairlane.simulate.assertions import check_names, judge, load_assertions
        from fairlane.simulate.policies import Candidate
        from fairlane.simulate.runs import prepare
        from fairlane.simulate.show import document, faults, output_console, tables, verdicts
    if png is not None:
        with needs("demo"):
            import matplotlib  # noqa: F401 - not there: say so now, not after the runs
    for option, path in (("--json", json_file), ("--png", png)):
        must_be_writable(option, path)
    candidates = [Candidate(name, load_or_stop(name)) for name in (file, against) if name is not None]
    try:
        asked = _asked(trace, workload, seed, workers, shape, duration, speed)
        required = None if assertions is None else load_assertions(assertions)
        placed = prepare(candidates, asked.load())
        if required is not None:
            check_names(required, placed[0].workload, candidates[0])
    except (SimulationInputError, UnreadableFile) as error:
        stop(USAGE, str(error))
    except ConfigError as error:
        for finding in error.findings:
            typer.echo(finding, err=True)
        raise typer.Exit(USAGE) from None
    for candidate in candidates:
        if why := candidate.refusal(asked.shape):
            stop(FAILED, f"{candidate.name}: a worker of this shape refuses it: {why}")
    _say_who(candidates, placed)
    runs = _runs(candidates, placed, asked)
    found = [] if required is None else judge(required.value.assertions, runs[0].report)
    console = output_console()
    tables(console, runs)
    if found:
        verdicts(console, found)
    try:
        if json_file is not None:
            json_file.write_text(json.dumps(document(asked, runs, found), indent=2) + "\n", encoding="utf-8")
        if png is not None:
            from fairlane.simulate.picture import draw

            draw(runs, png)
    except OSError as error:
        stop(FAILED, f"{error.filename}: cannot be written: {error.strerror}")
    if replaced := faults(runs):
        stop(FAILED, "; ".join(replaced))
    if not all(verdict.holds for verdict in found):
        raise typer.Exit(FAILED)


def _asked(
    trace: Path | None, workload: str | None, seed: int, workers: int, shape: str, duration: str | None, speed: float
) -> Asked:
    """Raises SimulationInputError."""
    from fairlane.scheduler.simulator.shape import shape_named
    from fairlane.simulate.runs import Asked

    if (trace is None) == (workload is None):
        stop(USAGE, "--trace FILE or --workload NAME, one of them, is needed")
    if not 0 < speed <= MAX_SPEED:
        stop(USAGE, f"--speed: {speed:g}: more than 0 and at most {MAX_SPEED:g} is needed")
    return Asked(trace, workload, seed, _seconds(duration), speed, workers, shape_named(shape))


def _seconds(duration: str | None) -> float | None:
    from fairlane.config.scalars import quantity
    from fairlane.scheduler.simulator.traces import MAX_DURATION_S

    if duration is None:
        return None
    seconds = quantity(duration, "duration")
    if seconds is None or not 0 < seconds <= MAX_DURATION_S:
        stop(USAGE, f'--duration: "{duration}": a time such as 60s or 10m, at most 7d, is needed')
    return seconds


def _runs(candidates: list[Candidate], placed: list[Placed], asked: Asked) -> list[Run]:
    """One after the other, with a bar on standard error where that is a terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    from fairlane.simulate.runs import simulate as run

    runs, console = [], Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        for candidate, one in zip(candidates, placed, strict=True):
            task = bar.add_task(escape(candidate.name), total=one.workload.duration_s)
            runs.append(run(candidate, one, asked, lambda time_s, task=task: bar.update(task, completed=time_s)))  # type: ignore[misc]
    return runs


def _say_who(candidates: Sequence[Candidate], placed: Sequence[Placed]) -> None:
    """Which of the workload's clients became which of the policy's tenants; of both policies, if those are others."""
    told = placed[:1] if all(one.renamed == placed[0].renamed for one in placed) else placed
    for candidate, one in zip(candidates, told, strict=False):
        shown = [f"{a} ({b}) -> {c} ({d})" for (a, b), (c, d) in list(one.renamed.items())[:6]]
        if shown:
            more = f" and {len(one.renamed) - len(shown)} more" if len(one.renamed) > len(shown) else ""
            policy = "the policy" if len(told) == 1 else candidate.name
            typer.echo(f"not in {policy}, so dealt to its tenants: {', '.join(shown)}{more}", err=True)
