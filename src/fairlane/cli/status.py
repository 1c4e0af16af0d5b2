"""`fairlane status`: what is running, waiting and held right now, as the admin API tells it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fairlane.cli import admin, client


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

    key = client.admin_key(target, state_dir)
    with client.connect(target) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
        answer = stub.GetStatus(admin_pb2.GetStatusRequest(), metadata=client.metadata(key), timeout=10)
    if as_json:
        from google.protobuf.json_format import MessageToJson

        typer.echo(MessageToJson(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))
        return
    _print_tables(answer)


def _worker_facts(worker: Any) -> dict[str, str]:
    facts = _engine_facts(worker)
    if worker.host_blocks_total:
        swaps = f"{worker.swaps_out} swapped out, {worker.swaps_in} in again"
        facts["host KV"] = f"{worker.host_blocks_used} used of {worker.host_blocks_total}, {swaps}"
    return facts


def _engine_facts(worker: Any) -> dict[str, str]:
    if not worker.pid:
        return {"worker": "not connected" + (f"; the last one was epoch {worker.epoch}" if worker.epoch else "")}
    return {
        "worker": f"{'ready' if worker.ready else 'NOT READY'}, epoch {worker.epoch}, pid {worker.pid}, step {worker.step_id}",
        "engine": f"{worker.running} running, {worker.waiting} waiting, {worker.preemptions} preemptions",
        "KV blocks": f"{worker.blocks_used} used + {worker.blocks_cached} cached of {worker.blocks_total}"
        f" ({worker.block_utilization_ratio:.0%} utilized, {worker.fragmentation_rate:.0%} fragmented)",
    }


def _policy(policy: Any, at_worker: int) -> str:
    text = f"generation {policy.generation}, sha256 {policy.sha256[:12]}, {policy.path}"
    return text if at_worker in (0, policy.generation) else f"{text}; the worker has generation {at_worker}"


def _print_tables(answer: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    facts = {
        "model": answer.model or "none",
        "gateway": ("draining" if answer.draining else "serving") + f", {answer.in_flight} requests in flight",
        **_worker_facts(answer.worker),
        "policy": _policy(answer.policy, answer.worker.policy_generation),
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
        table.add_column("waiting", justify="right")
        for row in rows:
            table.add_row(row.node, str(row.in_flight), str(row.waiting))
        if rows:
            console.print()
            console.print(table)
    _print_warnings(answer)


def _print_warnings(answer: Any) -> None:
    """What an operator must not miss, last, so that it is what stays on the screen."""
    for override in answer.overrides:
        what = {1: "suspended", 2: "paused", 3: "revoked"}.get(override.kind, "overridden")
        until = f"until {admin.when(override.until)}" if override.HasField("until") else "until it is lifted"
        typer.echo(f"\n{override.name}: {what} {until}, by {override.by}")
    if answer.shadow.running:
        typer.echo(f"\n{answer.shadow.name or 'a policy'} is tried beside the one in force: fairlane policy shadow")
    if answer.shadow.dropped:
        typer.echo(f"\nTHE POLICY THAT WAS TRIED ({answer.shadow.name}) WAS DROPPED: {answer.shadow.dropped}")
    if answer.policy.error:
        findings = "\n  ".join(answer.policy.error)
        typer.echo(f"\nPOLICY FILE NOT IN FORCE: it cannot be used, generation {answer.policy.generation} stays:\n  {findings}")
