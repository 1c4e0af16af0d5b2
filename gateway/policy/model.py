"""The policy in force, as the gateway asks it: who may call, as which node, with which tiers and limits. Frozen facts; how they
are written in the file is schema.py's, what makes a file wrong is loader.py's."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fairlane.gateway.policy.effective import MEMBER_DOMAIN, Cap, Effective, Level, RequestLimits, binding, for_member
from fairlane.scheduler.tenancy import (
    CostName,
    GroupShare,
    KVAmount,
    NodeShare,
    PolicySnapshot,
    Tier,
    TiersPolicy,
    WithinTenant,
    WithinTier,
)

if TYPE_CHECKING:
    from fairlane.config.strict import Located
    from fairlane.gateway.policy.schema import PolicyFile

__all__ = ["Cap", "Effective", "MemberTemplate", "Node", "Policy", "Principal", "TierPolicy"]

FILE_ORIGIN = "defaults"
_NO_LIMITS = RequestLimits()


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """A tier as the scheduler orders by it, and the limits the gateway applies to its requests.

    max_queue: waiting requests of the whole tier, over all tenants. The others: for requests whose owners state none.
    """

    tier: Tier
    max_output_tokens: int | None = None
    max_duration_s: float | None = None
    max_wait_s: float | None = None
    max_queue: int | None = None

    def limits(self) -> RequestLimits:
        return RequestLimits(self.max_output_tokens, self.max_duration_s, self.max_wait_s)


@dataclass(frozen=True, slots=True)
class MemberTemplate:
    """What every member of a tenant gets. max_members: how many of them may be remembered at once."""

    max_members: int
    weight: float = 1.0
    max_in_flight: int | None = None
    max_running: int | None = None
    max_queue: int | None = None
    max_wait_s: float | None = None
    max_output_tokens: int | None = None
    max_duration_s: float | None = None
    kv_limit: KVAmount | None = None

    def limits(self) -> RequestLimits:
        return RequestLimits(self.max_output_tokens, self.max_duration_s, self.max_wait_s)


@dataclass(frozen=True, slots=True)
class Node:
    """One organisation or tenant of the ownership tree. Limits are its own; `Policy.effective` says which bind.

    path: "org" or "org/tenant". tiers: what its requests may ask for, the first is its default; empty: only those below it can
    send requests. cache_domain: "tenant:org/tenant", "group:NAME", "public", or "member": each member has its own.
    models: names it may use; None: all. members: None: it has none.
    """

    path: str
    tiers: tuple[str, ...]
    cache_domain: str
    max_in_flight: int | None = None
    weight: float = 1.0
    min_share: float = 0.0
    ceil: float | None = None
    max_running: int | None = None
    max_queue: int | None = None
    max_wait_s: float | None = None
    max_output_tokens: int | None = None
    max_duration_s: float | None = None
    models: tuple[str, ...] | None = None
    members: MemberTemplate | None = None
    kv_guarantee: KVAmount | None = None
    kv_limit: KVAmount | None = None

    @property
    def shared_domain(self) -> str:
        """The cache domain that it shares with others, whose blocks count there; empty: its own."""
        return "" if self.cache_domain == MEMBER_DOMAIN or self.cache_domain.startswith("tenant:") else self.cache_domain

    @property
    def is_tenant(self) -> bool:
        return "/" in self.path

    def limits(self) -> RequestLimits:
        return RequestLimits(self.max_output_tokens, self.max_duration_s, self.max_wait_s)


@dataclass(frozen=True, slots=True)
class Principal:
    """Whom a key stands for. `not_after`: the last day it is valid (UTC). `loopback_only`: refused from other machines.
    `may_act_for_children`: it may name any node below its own."""

    key_id: str
    node: str
    not_after: datetime.date | None = None
    loopback_only: bool = False
    may_act_for_children: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """One checked policy file.

    sha256: of the file's bytes, in hex. path: what the file is called in messages. tiers: in file order. nodes: organisations
    and tenants by path, an organisation before its tenants. principals: by key hash (`hmac-sha256:...`). groups: those with KV
    quotas. aliases: alias to model name. not_enforced: a finding-like line for each key in the file that has no effect yet.
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
    within_tier: WithinTier = WithinTier.FCFS
    preempt_gap_ms: float | None = None
    cost: CostName = CostName.TOKENS
    within_tenant: WithinTenant = WithinTenant.FCFS
    plugin: str = ""
    groups: tuple[GroupShare, ...] = ()
    predict_output: bool = False
    locality_window_ms: float = 0.0
    defaults: RequestLimits = _NO_LIMITS
    not_enforced: tuple[str, ...] = ()
    source: Located[PolicyFile] | None = field(default=None, repr=False, compare=False)
    # By (node, tier, for its members?): as many as nodes times tiers, however many members there are.
    _known: dict[tuple[str, str, bool], Effective] = field(default_factory=dict, init=False, repr=False, compare=False)

    def effective(self, path: str, tier: str) -> Effective:
        """What binds a request of `path` ("org", "org/tenant" or "org/tenant/member") in `tier`, whether or not it may use that
        tier. Raises KeyError for a tier or node the policy does not have, and for a member of a tenant without members."""
        organisation, _, rest = path.partition("/")
        tenant, is_member, member = rest.partition("/")
        if not is_member:
            return self._known.get((path, tier, False)) or self._work_out(path, tier, False)
        owner = f"{organisation}/{tenant}"
        template = self.nodes[owner].members
        if template is None or not member or "/" in member:
            raise KeyError(path)
        known = self._known.get((owner, tier, True)) or self._work_out(owner, tier, True)
        kv_limit = template.kv_limit if known.cache_domain == MEMBER_DOMAIN else None
        return for_member(known, path, template.max_in_flight, template.max_queue, kv_limit)

    def _work_out(self, path: str, tier: str, for_members: bool) -> Effective:
        lineage = self.lineage(path)
        node = lineage[0]
        limits, _ = binding(*self.levels(path, tier, for_members))
        domain = node.cache_domain
        if domain == MEMBER_DOMAIN and not for_members:
            domain = f"tenant:{path}"  # its own requests, which no member sent
        found = Effective(
            path=path,
            tier=tier,
            tiers=node.tiers,
            cache_domain=domain,
            max_output_tokens=limits.max_output_tokens,
            max_duration_s=limits.max_duration_s,
            max_wait_s=limits.max_wait_s,
            caps=tuple(Cap(owner.path, owner.max_in_flight, owner.max_queue) for owner in lineage),
            kv_limits=tuple(self._kv_limits(node)),
        )
        self._known[(path, tier, for_members)] = found
        return found

    def _kv_limits(self, node: Node) -> Iterator[KVAmount]:
        if not node.shared_domain:
            yield from (owner.kv_limit for owner in self.lineage(node.path) if owner.kv_limit is not None)
        for group in self.groups:
            if node.shared_domain == f"group:{group.name}" and group.kv_limit is not None:
                yield group.kv_limit

    def lineage(self, path: str) -> tuple[Node, ...]:
        """The organisation or tenant `path` and what is above it, itself first. Raises KeyError if there is no such node."""
        node = self.nodes[path]
        organisation, is_tenant, _ = path.partition("/")
        return (node, self.nodes[organisation]) if is_tenant else (node,)

    def levels(self, path: str, tier: str, for_members: bool = False) -> tuple[list[Level], list[Level]]:
        """Who may limit a request of the node (or of its members): its owners, nearest first, and the defaults after them."""
        owners = [Level(node.path, node.limits()) for node in self.lineage(path)]
        template = self.nodes[path].members
        if for_members and template is not None:
            owners.insert(0, Level(f"members of {path}", template.limits()))
        return owners, [Level(f"tier {tier}", self.tiers[tier].limits()), Level(FILE_ORIGIN, self.defaults)]

    def snapshot(self, generation: int) -> PolicySnapshot:
        """What the engine needs of it."""
        return PolicySnapshot(
            generation,
            self.sha256,
            self.tiers_policy,
            tuple(entry.tier for entry in self.tiers.values()),
            self.within_tier,
            tuple(_share(node) for node in self.nodes.values()),
            self.preempt_gap_ms,
            self.cost,
            self.within_tenant,
            self.plugin,
            self.predict_output,
            locality_window_ms=self.locality_window_ms,
            groups=self.groups,
        )

    def with_principals(self, extra: Mapping[str, Principal]) -> Policy:
        """This policy with more keys; the file's own win. Raises ValueError for a key of a node it does not have."""
        for principal in extra.values():
            if principal.node not in self.nodes:
                raise ValueError(f"the policy has no node {principal.node}")
        return dataclasses.replace(self, principals={**extra, **self.principals})

    def nodes_without_keys(self) -> tuple[str, ...]:
        """Paths of the tenants that nobody can call as yet, in file order."""
        used = {principal.node for principal in self.principals.values()}
        delegated = {principal.node for principal in self.principals.values() if principal.may_act_for_children}
        return tuple(
            path
            for path, node in self.nodes.items()
            if node.is_tenant and path not in used and path.partition("/")[0] not in delegated
        )

    def render(self) -> str:
        """Every effective value and where it comes from, for people. Raises ValueError for a policy that no file made."""
        from fairlane.gateway.policy.render import render  # needs the YAML loader, which callers for requests do not

        return render(self)


def _share(node: Node) -> NodeShare:
    members = node.members
    return NodeShare(
        path=node.path,
        weight=node.weight,
        min_share=node.min_share,
        max_running=node.max_running,
        member_weight=1.0 if members is None else members.weight,
        member_max_running=None if members is None else members.max_running,
        kv_guarantee=node.kv_guarantee,
        kv_limit=node.kv_limit,
        member_kv_limit=None if members is None or node.cache_domain != MEMBER_DOMAIN else members.kv_limit,
        shared_domain=node.shared_domain,
        ceil=node.ceil,
    )
