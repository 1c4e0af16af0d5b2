"""`fairlane tiers`: stop taking requests of a tier for a while, and take them again. Beats the policy file."""

from __future__ import annotations

from typing import Annotated

import typer

from fairlane.cli import admin, client

app = typer.Typer(no_args_is_help=True, help="Pause and resume tiers.")

Tier = Annotated[str, typer.Argument(metavar="TIER", help="A tier of the policy in force.")]


@app.callback()
def tiers() -> None:
    """Pause and resume tiers. In force at once, kept over a restart, and in the server's audit log."""


@app.command()
def pause(
    tier: Tier, for_: admin.For = None, target: admin.Target = admin.DEFAULT_TARGET, state_dir: client.StateDir = None
) -> None:
    """Refuse new requests of a tier (UNAVAILABLE TIER_PAUSED, with a delay); those admitted go on.

    Example: fairlane tiers pause batch --for 2h
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    request = pb.PauseTierRequest(tier=tier, duration=admin.duration(for_))
    admin.say_overridden("paused", admin.call(target, state_dir, "PauseTier", request))


@app.command()
def resume(tier: Tier, target: admin.Target = admin.DEFAULT_TARGET, state_dir: client.StateDir = None) -> None:
    """Take requests of a tier again.

    Example: fairlane tiers resume batch
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    admin.say_lifted(tier, "resumed", admin.call(target, state_dir, "ResumeTier", pb.ResumeTierRequest(tier=tier)))
