"""`fairlane status`: what is running, waiting and held right now, as the admin API tells it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fairlane.cli import client


def status(
    target: Annotated[
        str, typer.Option(envvar="FAIRLANE_ADMIN_TARGET", metavar="HOST:PORT", help="The server's admin address.")
    ] = "127.0.0.1:50052",
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole answer as JSON.")] = False,
    state_dir: client.StateDir = None,
) -> None:
    """Show the server's state: the worker, its KV blocks, and requests by tier and tenant.

    The admin key comes from $FAIRLANE_ADMIN_KEY, else from the demo keys.

    Example: fairlane status --json
    """
    from fairlane.protos.fairlane.v1 import admin_pb2, admin_pb2_grpc

    key = client.admin_key(state_dir)
    with client.connect(target) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.GetStatus(admin_pb2.GetStatusRequest(), metadata=client.metadata(key), timeout=10)
    if as_json:
        from google.protobuf.json_format import MessageToJson

        typer.echo(MessageToJson(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return
    _print_tables(answer)


def _print_tables(answer: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    worker = answer.worker
    facts = {
        "model": answer.model or "none",
        "gateway": ("draining" if answer.draining else "serving") + f", {answer.in_flight} requests in flight",
        "worker": f"{'ready' if worker.ready else 'NOT READY'}, epoch {worker.epoch}, pid {worker.pid}, step {worker.step_id}",
        "engine": f"{worker.running} running, {worker.waiting} waiting, {worker.preemptions} preemptions",
        "KV blocks": f"{worker.blocks_used} used + {worker.blocks_cached} cached of {worker.blocks_total}"
        f" ({worker.block_utilization_ratio:.0%} utilized, {worker.fragmentation_rate:.0%} fragmented)",
        "policy": f"generation {worker.policy_generation}",
    }
    console = Console()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)
    for title, rows in (("tier", answer.tiers), ("tenant", answer.nodes)):
        table = Table(title_justify="left", box=None, padding=(0, 2, 0, 0))
        table.add_column(title)
        table.add_column("in flight", justify="right")
        for row in rows:
            table.add_row(row.node, str(row.in_flight))
        if rows:
            console.print()
            console.print(table)
