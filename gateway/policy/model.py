"""The policy in force, as the gateway asks it: who may call, as which node, with which tiers. Frozen facts; how they are written
in the file is schema.py's, what makes a file wrong is loader.py's."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from dataclasses import dataclass

from fairlane.scheduler.tenancy import PolicySnapshot, Tier, TiersPolicy


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """A tier as the scheduler orders by it, and the limits the gateway applies to its requests."""

    tier: Tier
    max_output_tokens: int | None = None
    max_duration_s: float | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """One node of the ownership tree.

    path: "org/tenant". tiers: what its requests may ask for; the first is its default.
    cache_domain: resolved: "tenant:org/tenant", "group:NAME" or "public".
    """

    path: str
    tiers: tuple[str, ...]
    cache_domain: str
    max_in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class Principal:
    """Whom a key stands for. `not_after`: the last day it is valid (UTC). `loopback_only`: refused from other machines."""

    key_id: str
    node: str
    not_after: datetime.date | None = None
    loopback_only: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """One checked policy file.

    sha256: of the file's bytes, in hex. path: what the file is called in messages. tiers: in file order.
    nodes: by path. principals: by key hash (`hmac-sha256:...`). aliases: alias to model name.
    """

    sha256: str
    text: str
    path: str
    tiers_policy: TiersPolicy
    tiers: Mapping[str, TierPolicy]
    nodes: Mapping[str, Node]
    principals: Mapping[str, Principal]
    aliases: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def snapshot(self, generation: int) -> PolicySnapshot:
        """What the engine needs of it."""
        tiers = tuple(entry.tier for entry in self.tiers.values())
        return PolicySnapshot(generation, self.sha256, self.tiers_policy, tiers)

    def with_principals(self, extra: Mapping[str, Principal]) -> Policy:
        """This policy with more keys; the file's own win. Raises ValueError for a key of a node it does not have."""
        for principal in extra.values():
            if principal.node not in self.nodes:
                raise ValueError(f"the policy has no node {principal.node}")
        return dataclasses.replace(self, principals={**extra, **self.principals})

    def nodes_without_keys(self) -> tuple[str, ...]:
        """Paths of the nodes that nobody can call as yet, in file order."""
        used = {principal.node for principal in self.principals.values()}
        return tuple(path for path in self.nodes if path not in used)
