"""`fairlane demo`: three tenants on one small server, policy after policy, live. What happens is in fairlane.demo; this reads
flags and finds what a server of somebody else's needs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.cli import client
from fairlane.cli.exits import FAILED, INTERRUPTED, USAGE, must_be_writable, needs, stop

if TYPE_CHECKING:
    from fairlane.demo.scenario import PhasePolicy
    from fairlane.demo.server import Place


def demo(
    policies: Annotated[str, typer.Option(metavar="LIST", help="Phases, of fcfs, vip and fair.")] = "fcfs,vip,fair",
    seconds: Annotated[
        float | None, typer.Option(min=5, max=3600, help="How long a phase takes. Default: 25, longer on a slow machine.")
    ] = None,
    picture: Annotated[Path, typer.Option(metavar="FILE", help="Where the comparison is drawn to.")] = Path("fairlane-demo.png"),
    no_picture: Annotated[bool, typer.Option("--no-picture", help="Draw none.")] = False,
    target: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="A running server, shown as it is. Default: one of the demo's own.")
    ] = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="With --target: its metrics. Default: its port + 2.")
    ] = None,
    state_dir: client.StateDir = None,
) -> None:
    """Watch a burst of important requests, a steady stream and a flood of batch work share one small KV cache: first come, first
    served; then VIP; then FAIR. About a minute and a half; a table and a picture at the end.

    It starts a server of its own on free ports and leaves nothing behind but the picture. Its policy file is printed: edit it
    while it runs and see.

    Exit codes: 0 done, 1 the server failed, 2 used wrongly, 130 interrupted.

    Examples:

    fairlane demo

    fairlane demo --policies vip --seconds 600    # time to play with the policy file

    fairlane demo --target 127.0.0.1:50051        # a server started by `fairlane serve` on this machine
    """
    with needs("all"):
        if not no_picture:
            import matplotlib  # noqa: F401 - not there: say so now, not after two minutes
        from rich.console import Console

        from fairlane.clock import MonotonicClock
        from fairlane.demo.server import ServerFailed
        from fairlane.demo.show import Options, Show
    place = None if target is None else _place(target, metrics, state_dir)
    options = Options(_phases(policies), seconds, None if no_picture else picture, place)
    must_be_writable("--picture", options.picture)
    try:
        finished = asyncio.run(Show(options, Console(), MonotonicClock()).run())
    except ServerFailed as error:
        stop(FAILED, f"the demo's server did not start:\n{error}")
    if not finished:
        raise typer.Exit(INTERRUPTED)


def _phases(text: str) -> tuple[PhasePolicy, ...]:
    from fairlane.demo.scenario import PhasePolicy

    known = {policy.value: policy for policy in PhasePolicy}
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        stop(USAGE, f'--policies: "{text}" names no phases: a list of {", ".join(known)} is needed, such as fcfs,vip')
    return tuple(known[name] for name in names)


def _place(target: str, metrics: str | None, state_dir: Path | None) -> Place:
    """Where a running server is, and the demo keys of the scenario's tenants."""
    from fairlane.demo.scenario import LOADS
    from fairlane.demo.server import Place

    keys = {load.tenant: client.api_key(target, None, load.tenant, state_dir) for load in LOADS}
    host, _, port = target.rpartition(":")
    if not host or not port.isdecimal():
        stop(USAGE, f'--target: "{target}" is not HOST:PORT')
    return Place(target, metrics or f"{host}:{int(port) + 2}", keys)
