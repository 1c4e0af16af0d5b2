"""`fairlane requests`: what is in flight right now, why one of them waits, and end one."""

from __future__ import annotations

from typing import Annotated

import typer

from fairlane.cli import admin, client, explanation

app = typer.Typer(no_args_is_help=True, help="See, explain and cancel requests in flight.")


@app.callback()
def requests() -> None:
    """See, explain and cancel requests in flight."""


@app.command("list")
def list_(
    node: Annotated[str, typer.Option(metavar="PATH", help="Only this node's and those below it.")] = "",
    tier: Annotated[str, typer.Option(metavar="NAME", help="Only this tier's.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The oldest so many.")] = 100,
    as_json: admin.AsJson = False,
    target: admin.Target = admin.DEFAULT_TARGET,
    state_dir: client.StateDir = None,
) -> None:
    """List requests in flight, the oldest first.

    Example: fairlane requests list --node chatly --tier batch
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    answer = admin.call(target, state_dir, "ListRequests", pb.ListRequestsRequest(node=node, tier=tier, limit=limit))
    if as_json:
        admin.print_json(answer)
        return
    rows = [
        (r.node, r.request_id, r.tier, "running" if r.started else "waiting", f"{r.age_s:.1f} s", r.key_id)
        for r in answer.requests
    ]
    if rows:
        admin.print_table(("node", "request", "tier", "state", "age", "key"), rows)
    typer.echo(f"{answer.total} in flight" + (f", {len(rows)} shown" if len(rows) < answer.total else ""))


@app.command()
def cancel(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Whose request it is, in full.")],
    request_id: Annotated[str, typer.Argument(metavar="REQUEST", help="Its id, as `requests list` shows it.")],
    target: admin.Target = admin.DEFAULT_TARGET,
    state_dir: client.StateDir = None,
) -> None:
    """End one request; its client gets CANCELLED.

    Example: fairlane requests cancel chatly/paid 5f2b9c0d4e8a1b3c5f2b9c0d4e8a1b3c
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    admin.call(target, state_dir, "CancelRequest", pb.CancelRequestRequest(node=node, request_id=request_id))
    typer.echo(f"{request_id}: cancelled")


@app.command()
def explain(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Whose request it is, in full.")],
    request_id: Annotated[str, typer.Argument(metavar="REQUEST", help="Its id, as `requests list` shows it.")],
    as_json: admin.AsJson = False,
    target: admin.Target = admin.DEFAULT_TARGET,
    state_dir: client.StateDir = None,
) -> None:
    """Say why a request waits: its rank, who goes before it and who holds what it needs, caps, evictions, when it may start.

    Example: fairlane requests explain chatly/paid 5f2b9c0d4e8a1b3c5f2b9c0d4e8a1b3c
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    answer = admin.call(target, state_dir, "ExplainRequest", pb.ExplainRequestRequest(node=node, request_id=request_id))
    if as_json:
        admin.print_json(answer)
    else:
        explanation.show(f"{node} {request_id}", answer)
