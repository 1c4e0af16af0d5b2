"""`fairlane tenants`: suspend an organisation, a tenant or a member, and let it in again. Beats the policy file."""

from __future__ import annotations

from typing import Annotated

import typer

from fairlane.cli import admin, client

app = typer.Typer(no_args_is_help=True, help="Suspend and resume tenants.")

Node = Annotated[str, typer.Argument(metavar="NODE", help="ORG, ORG/TENANT or ORG/TENANT/MEMBER.")]


@app.callback()
def tenants() -> None:
    """Suspend and resume tenants. In force at once, kept over a restart, and in the server's audit log."""


@app.command()
def suspend(
    node: Node,
    abort: admin.Abort = False,
    for_: admin.For = None,
    target: admin.Target = admin.DEFAULT_TARGET,
    state_dir: client.StateDir = None,
) -> None:
    """Refuse new requests of a node and of everything below it (PERMISSION_DENIED SUSPENDED).

    Example: fairlane tenants suspend chatly/free --abort --for 30m
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    request = pb.SuspendNodeRequest(node=node, abort=abort, duration=admin.duration(for_))
    admin.say_overridden("suspended", admin.call(target, state_dir, "SuspendNode", request))


@app.command()
def resume(node: Node, target: admin.Target = admin.DEFAULT_TARGET, state_dir: client.StateDir = None) -> None:
    """End the suspension of a node. One of a node above it stays.

    Example: fairlane tenants resume chatly/free
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    admin.say_lifted(node, "resumed", admin.call(target, state_dir, "ResumeNode", pb.ResumeNodeRequest(node=node)))
