"""`fairlane status`: what is running, waiting and held right now, as the admin API tells it."""

from __future__ import annotations

from typing import Any

import typer

from fairlane.cli import admin, client


def status(
    as_json: admin.AsJson = False,
    target: admin.Target = admin.DEFAULT_TARGET,
    state_dir: client.StateDir = None,
) -> None:
    """Show the server's state: the worker, its KV blocks, and requests by tier and tenant.

    The admin key comes from $FAIRLANE_ADMIN_KEY, else from the demo keys.

    Example: fairlane status --json
    """
    from fairlane.protos.fairlane.v1 import admin_pb2 as pb

    answer = admin.call(target, state_dir, "GetStatus", pb.GetStatusRequest())
    if as_json:
        admin.print_json(answer)
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
    facts = {
        "model": answer.model or "none",
        "gateway": ("draining" if answer.draining else "serving") + f", {answer.in_flight} requests in flight",
        **_worker_facts(answer.worker),
        "policy": _policy(answer.policy, answer.worker.policy_generation),
    }
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {value}")
    for title, rows in (("tier", answer.tiers), ("tenant", answer.nodes)):
        if rows:
            typer.echo()
            admin.print_table(
                (title, "in flight", "waiting"), [(row.node, f"{row.in_flight:>9}", f"{row.waiting:>7}") for row in rows]
            )
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
