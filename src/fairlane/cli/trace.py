"""`fairlane trace`: what a server has recorded of its requests, as a load that the simulator replays."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from fairlane.cli import client
from fairlane.cli.durations import seconds_of
from fairlane.cli.exits import FAILED, must_be_writable, needs, stop

app = typer.Typer(no_args_is_help=True, help="What a server has recorded of its requests.")


@app.callback()
def trace() -> None:
    """What a server has recorded of its requests."""


@app.command()
def export(
    since: Annotated[str | None, typer.Option(metavar="TIME", help="Only the last 90s, 30m, 12h or 2d. Default: all.")] = None,
    anonymise: Annotated[bool, typer.Option("--anonymise", help="Give nodes and models names that no policy has.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write there. Default: standard output.")] = None,
    state_dir: client.StateDir = None,
) -> None:
    """Write the recorded requests as a trace: a JSON object a line, in order of arrival, with no content of any request.

    A server records while gateway.yaml says `trace: true`. This reads its state folder, so run it on its machine, as its user.

    Exit code 0: done, 1: nothing is recorded or it cannot be read, 2: used wrongly.

    Example: fairlane trace export --since 24h --anonymise --out yesterday.jsonl
    """
    with needs("server"):
        from fairlane.gateway.trace.export import export as exported
        from fairlane.gateway.trace.files import FOLDER, recorded_lines
        from fairlane.paths import state_dir as default_state_dir
    must_be_writable("--out", out)
    folder = (state_dir or default_state_dir()) / FOLDER
    damaged: list[str] = []
    since_s = None if since is None else time.time() - seconds_of("--since", since)
    try:
        lines = list(
            exported(
                recorded_lines(folder),
                since_s=since_s,
                anonymise=anonymise,
                skipped=lambda path, number: damaged.append(f"{path}:{number}"),
            )
        )
    except OSError as error:
        stop(FAILED, f"{folder}: cannot be read: {error.strerror or error}")
    for where in damaged:
        typer.echo(f"warning: {where}: is no record, skipped", err=True)
    if not lines:
        none = f"{folder}: no requests are recorded{' since then' if since else ''}"
        stop(FAILED, f"{none}: `trace: true` in gateway.yaml records, and --state-dir must be the server's")
    text = "".join(f"{line}\n" for line in lines)
    try:
        if out is None:
            sys.stdout.write(text)
        else:
            out.write_text(text, encoding="utf-8")
    except OSError as error:
        stop(FAILED, f"{out or 'standard output'}: cannot be written: {error.strerror}")
    typer.echo(f"{len(lines)} requests", err=True)
