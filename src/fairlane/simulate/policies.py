"""A policy file as the simulator takes it: the engine's snapshot, made by the gateway's own loader, and who may send what. Of the
gateway's limits only max_wait, max_duration and max_output_tokens are applied; it refuses nothing here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fairlane.gateway.policy.model import Policy
from fairlane.scheduler.simulator.placement import Placed, PolicyTree, place
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.worker import refusal
from fairlane.scheduler.simulator.workload import SimRequest, Workload
from fairlane.scheduler.tenancy import PolicySnapshot


@dataclass(frozen=True, slots=True)
class Candidate:
    """One policy to be tried. name: what tables call it."""

    name: str
    policy: Policy

    def snapshot(self) -> PolicySnapshot:
        return self.policy.snapshot(1)

    def refusal(self, shape: WorkerShape) -> str:
        """Why such a worker would not put it in force; empty if it would."""
        return refusal(self.snapshot(), shape)

    def weights(self, nodes: tuple[str, ...]) -> Mapping[str, float]:
        """Of organisations and tenants, and of the members among `nodes`."""
        weights = {path: node.weight for path, node in self.policy.nodes.items()}
        for node in nodes:
            tenant = self.policy.nodes.get("/".join(node.split("/")[:2]))
            if tenant is not None and tenant.members is not None and node not in weights:
                weights[node] = tenant.members.weight
        return weights

    def place(self, workload: Workload) -> Placed:
        """The workload under this policy, with the limits that it sets. Raises SimulationInputError."""
        tiers = sorted(self.policy.tiers.values(), key=lambda entry: -entry.tier.priority)
        senders = {path: node.tiers for path, node in self.policy.nodes.items() if node.tiers}
        with_members = frozenset(path for path, node in self.policy.nodes.items() if node.members is not None)
        placed = place(workload, PolicyTree([entry.tier.name for entry in tiers], senders, with_members))
        limited = tuple(self._limited(request) for request in placed.workload.requests)
        return replace(placed, workload=replace(placed.workload, requests=limited))

    def _limited(self, request: SimRequest) -> SimRequest:
        binding = self.policy.effective(request.node, request.tier)
        output, asked = request.output_tokens, request.max_tokens
        if binding.max_output_tokens is not None:
            output = min(output, binding.max_output_tokens)
            asked = None if asked is None else min(asked, binding.max_output_tokens)
        max_wait_s = request.max_wait_s if request.max_wait_s is not None else binding.max_wait_s
        deadline_s = request.deadline_s if request.deadline_s is not None else binding.max_duration_s
        return replace(
            request,
            output_tokens=output,
            max_tokens=asked,
            max_wait_s=max_wait_s,
            deadline_s=deadline_s,
            cache_domain=binding.cache_domain,
        )
