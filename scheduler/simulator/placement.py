"""Whose a workload's requests are under a policy at hand: a trace's nodes and tiers are the policy's where it has them; the
others are dealt to its tenants, so that any trace can be tried with any policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.workload import Workload


@dataclass(frozen=True, slots=True)
class PolicyTree:
    """tiers: names, most important first. tenants: the tiers each may use, its default first. with_members: tenants that have
    members."""

    tiers: Sequence[str]
    tenants: Mapping[str, Sequence[str]]
    with_members: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Placed:
    """The workload in the policy's words, and who became whom, where that is somebody else."""

    workload: Workload
    renamed: Mapping[tuple[str, str], tuple[str, str]]


def place(workload: Workload, tree: PolicyTree) -> Placed:
    """Raises SimulationInputError for a policy in which nobody may send requests."""
    if not tree.tenants:
        raise SimulationInputError("the policy has no tenants: nobody could send these requests")
    pairs = list(dict.fromkeys((request.node, request.tier) for request in workload.requests))
    order = {node: number for number, node in enumerate(workload.nodes)}
    became = {pair: _place(*pair, order[pair[0]], workload.tiers, tree) for pair in pairs}
    requests = tuple(
        replace(request, node=became[request.node, request.tier][0], tier=became[request.node, request.tier][1])
        for request in workload.requests
    )
    renamed = {pair: other for pair, other in became.items() if pair != other}
    return Placed(replace(workload, requests=requests, tiers=tuple(tree.tiers)), renamed)


def _place(node: str, tier: str, number: int, tiers: Sequence[str], tree: PolicyTree) -> tuple[str, str]:
    tenant = "/".join(node.split("/")[:2])
    if tenant in tree.tenants:
        allowed = tree.tenants[tenant]
        home = node if tenant in tree.with_members else tenant
        if tier in allowed:
            return home, tier
        alike = _alike(tier, tiers, tree)
        return home, alike if alike is not None and alike in allowed else allowed[0]
    wanted = _alike(tier, tiers, tree)
    may = [path for path, allowed in tree.tenants.items() if wanted is None or wanted in allowed] or list(tree.tenants)
    home = may[number % len(may)]
    allowed = tree.tenants[home]
    return home, wanted if wanted is not None and wanted in allowed else allowed[0]


def _alike(tier: str, tiers: Sequence[str], tree: PolicyTree) -> str | None:
    """The policy's tier for one of the workload's: of the same name, else as high among its own as that is. None: a workload with
    one tier says nothing about importance."""
    if tier in tree.tiers:
        return tier
    if len(tiers) < 2:
        return None
    return tree.tiers[round(tiers.index(tier) * (len(tree.tiers) - 1) / (len(tiers) - 1))]
