"""Whose a workload's requests are under a policy at hand: a trace's nodes and tiers are the policy's where it has them; the
others are dealt to its tenants, so that any trace can be tried with any policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.workload import Workload


@dataclass(frozen=True, slots=True)
class PolicyTree:
    """tiers: names, most important first. senders: tenants, and organisations that may send requests of their own: the tiers each
    may use, its default first. with_members: tenants that have members."""

    tiers: Sequence[str]
    senders: Mapping[str, Sequence[str]]
    with_members: frozenset[str] = frozenset()

    @property
    def strangers_go_to(self) -> Sequence[str]:
        """To tenants, in a policy that has any that may send."""
        return [path for path in self.senders if "/" in path] or list(self.senders)


@dataclass(frozen=True, slots=True)
class Placed:
    """The workload in the policy's words, and who became whom, where that is somebody else."""

    workload: Workload
    renamed: Mapping[tuple[str, str], tuple[str, str]]


def place(workload: Workload, tree: PolicyTree) -> Placed:
    """Raises SimulationInputError for a policy in which nobody may send requests."""
    if not tree.senders:
        raise SimulationInputError("nobody in the policy has tiers: nobody could send these requests")
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
    sender = "/".join(node.split("/")[:2])
    if sender in tree.senders:
        allowed = tree.senders[sender]
        home = node if sender in tree.with_members else sender
        if tier in allowed:
            return home, tier
        alike = _alike(tier, tiers, tree)
        return home, alike if alike is not None and alike in allowed else allowed[0]
    wanted = _alike(tier, tiers, tree)
    homes = tree.strangers_go_to
    may = [path for path in homes if wanted is None or wanted in tree.senders[path]] or homes
    home = may[number % len(may)]
    allowed = tree.senders[home]
    return home, wanted if wanted is not None and wanted in allowed else allowed[0]


def _alike(tier: str, tiers: Sequence[str], tree: PolicyTree) -> str | None:
    """The policy's tier for one of the workload's: of the same name, else as high among its own as that is. None: a workload with
    one tier says nothing about importance."""
    if tier in tree.tiers:
        return tier
    if len(tiers) < 2:
        return None
    return tree.tiers[round(tiers.index(tier) * (len(tree.tiers) - 1) / (len(tiers) - 1))]
