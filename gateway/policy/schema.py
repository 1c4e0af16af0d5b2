"""The policy file as a schema: which keys it may have, what each may hold, and which are read but have no effect yet.
docs/policies.md says what they mean. What needs two places of the file to decide is checked in checks.py and its siblings."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

from fairlane.config.fields import Amount, Bounds, Count, Doc, Duration, Percent, ShareOrCount, Text, planned
from fairlane.scheduler.tenancy import CostName, Shaping, TiersPolicy, WithinTenant, WithinTier

_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
Name = Annotated[str, Text(_NAME, "a name of up to 63 letters, digits, - and _")]
ModelName = Annotated[str, Text(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}", "a model name")]
NodePath = Annotated[str, Text(f"{_NAME}(?:/{_NAME})?", "organisation or organisation/tenant")]
KeyHash = Annotated[
    str, Text(r"hmac-sha256:[0-9a-f]{64}", "a hash as `fairlane keys new` prints it (hmac-sha256: and 64 hex digits)")
]
SpiffeId = Annotated[
    str, Text(r"spiffe://[a-z0-9._-]{1,255}(?:/[A-Za-z0-9._-]{1,255}){1,16}", "a SPIFFE id such as spiffe://example.org/ns/shop")
]
CacheDomain = Annotated[str, Text(f"tenant|member|public|group:{_NAME}", "tenant, member, public or group:NAME")]
ZoneName = Annotated[str, Text(r"[A-Za-z][A-Za-z0-9_+-]{0,31}(?:/[A-Za-z0-9_+-]{1,31}){0,2}", "a time zone, as Europe/Berlin")]

Weight = Annotated[float, Bounds(0, 1_000_000, low_open=True)]
# Below 100%: a tier or node that is promised everything leaves nothing to order.
Minimum = Annotated[float, Percent(0.0, 0.99)]
Ceiling = Annotated[float, Percent(0.001, 1.0)]
Requests = Annotated[int, Count(1, 1_000_000)]
OutputTokens = Annotated[int, Count(1, 10_000_000)]
Tokens = Annotated[int, Count(1, 10**15)]
MaxDuration = Annotated[float, Duration(0.1)]
MaxWait = Annotated[float, Duration(0.001)]


class Period(Enum):
    DAY = "day"
    MONTH = "month"


class OnExhausted(Enum):
    REFUSE = "refuse"


class MayActFor(Enum):
    CHILDREN = "children"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerPart:
    tiers: Annotated[
        TiersPolicy, Doc("How tiers are ordered: vip by priority, fair by shares, fcfs by arrival, whatever the tier.")
    ] = TiersPolicy.VIP
    within_tier: Annotated[WithinTier, Doc("What orders tenants inside a band: fcfs by arrival, fair by shares.")] = (
        WithinTier.FCFS
    )
    within_tenant: Annotated[WithinTenant, Doc("What orders one tenant's own requests.")] = WithinTenant.FCFS
    cost: Annotated[CostName, Doc("What shares are shares of.")] = CostName.TOKENS
    plugin: Annotated[
        Name | None, Doc("A policy installed at the worker, in place of tiers, within_tier and within_tenant. Default: none.")
    ] = None
    preempt_gap_ms: Annotated[
        float | None, Bounds(0, 3_600_000), Doc("How far behind, in ms of worker time, lets fair shares evict. Default: never.")
    ] = None
    predict_output: Annotated[
        bool, Doc("Whether fair shares order by what a running request will probably still generate, too.")
    ] = False
    locality_window_ms: Annotated[
        float,
        Bounds(0, 3_600_000),
        Doc("How far behind, in ms of worker time, fair shares let requests fall for others whose prompts are cached."),
    ] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingPart:
    prefill_share: Annotated[float, Percent(0.0, 1.0), Doc("The part of a step's tokens for lower tiers' prompts.")] = 1.0
    max_step: Annotated[float | None, Duration(0.001, 10), Doc("The longest a step may take, at any time.")] = None
    pause_decodes: Annotated[bool, Doc("Whether lower tiers' streams pause while this tier reads prompts.")] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of single requests, wherever they may be given."""

    max_wait: Annotated[MaxWait | None, Doc("The longest from admission to the first step; then QUEUE_TIMEOUT.")] = None
    max_output_tokens: Annotated[OutputTokens | None, Doc("The most tokens one request may generate.")] = None
    max_duration: Annotated[MaxDuration | None, Doc("The longest a request without a deadline of its own may take.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPart(RequestLimits):
    priority: Annotated[int, Bounds(-1_000_000, 1_000_000), Doc("Higher is more important; equal priorities form one band.")]
    weight: Annotated[Weight, Doc("Share among the tiers of one band.")] = 1.0
    min: Annotated[Minimum, Doc("Share of worker cost over 10 s that waiting work of this tier gets in any case.")] = 0.0
    ceil: Annotated[Ceiling | None, Doc("The most of the worker's time it may take, even if the rest idles.")] = None
    patience: Annotated[MaxWait | None, Doc("After waiting this long, and again, a request ranks one band higher.")] = None
    shaping: Annotated[Shaping | ShapingPart, Doc("How a running request is protected from lower tiers' prompts.")] = Shaping.OFF
    max_queue: Annotated[Requests | None, Doc("The most waiting requests of this tier, over all tenants.")] = None
    ttft_target: Annotated[float | None, Duration(0.001), Doc("Aimed-at time to the first token.")] = None
    tpot_target: Annotated[float | None, Duration(0.001), Doc("Aimed-at time per further token.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPart:
    id: Annotated[Name, Doc("Its name in logs; unique in the file.")]
    hash: Annotated[KeyHash, Doc("As `fairlane keys new` prints it.")]
    not_after: Annotated[datetime.date | None, Doc("The last day it is valid, in UTC.")] = None
    may_act_for: Annotated[MayActFor | None, Doc("children: it may name any node below its own.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DemotePart:
    demote_to: Annotated[Name, Doc("The tier that its requests go on in.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPart:
    per: Annotated[Period, Doc("A calendar day or month in the file's timezone.")]
    tokens: Annotated[Tokens, Doc("How many tokens it allows.")]
    warn_at: Annotated[float | None, Percent(0.01, 1.0), Doc("The part used that raises a warning.")] = None
    on_exhausted: Annotated[OnExhausted | DemotePart, Doc("What happens to requests once it is used up.")] = OnExhausted.REFUSE


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsPart(RequestLimits):
    """What organisations, tenants and the members of a tenant may have in common."""

    weight: Annotated[Weight, Doc("Share among its siblings. Never inherited.")] = 1.0
    max_in_flight: Annotated[Requests | None, Doc("The most requests admitted and not finished; above it: refused.")] = None
    max_running: Annotated[Requests | None, Doc("The most sequences in the batch; above it: waiting.")] = None
    max_queue: Annotated[Requests | None, Doc("The most waiting requests; above it: refused.")] = None
    requests_per_minute: Annotated[int | None, Count(1, 10**9), planned("Admissions per minute, as a token bucket.")] = None
    tokens_per_minute: Annotated[Tokens | None, planned("Uncached prompt and output tokens per minute.")] = None
    burst: Annotated[
        float | None, Duration(1, 86_400), planned("How much of a rate may be used at once, as time. Default: 1m.")
    ] = None
    budgets: Annotated[tuple[BudgetPart, ...], planned("Token budgets per calendar day or month.")] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersPart(LimitsPart):
    max_members: Annotated[int, Count(1, 1_000_000), Doc("How many are remembered at once; idle ones are forgotten.")] = 10_000
    kv_limit: Annotated[Amount | None, ShareOrCount(), Doc("KV cache that each never exceeds, with cache_domain member.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePart(LimitsPart):
    """What organisations and tenants have in common."""

    tiers: Annotated[tuple[Name, ...] | None, Doc("The tiers its requests may name; the first is the default.")] = None
    keys: Annotated[tuple[KeyPart, ...], Doc("API keys, as hashes.")] = ()
    identities: Annotated[tuple[SpiffeId, ...], planned("Client certificates that stand for it.")] = ()
    models: Annotated[tuple[ModelName, ...] | None, Doc("The models it may use. Default: all.")] = None
    cache_domain: Annotated[CacheDomain | None, Doc("Who shares cached prefixes with it. Default: tenant (nobody).")] = None
    min: Annotated[Minimum, Doc("Share of worker cost over 10 s that its waiting work gets in any case.")] = 0.0
    ceil: Annotated[Ceiling | None, Doc("The most of the worker's time it may take, even if the rest idles.")] = None
    kv_guarantee: Annotated[
        Amount | None, ShareOrCount(), Doc("KV cache it can always have back: a share of the pool, or tokens.")
    ] = None
    kv_limit: Annotated[Amount | None, ShareOrCount(), Doc("KV cache it never exceeds: a share of the pool, or tokens.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPart(NodePart):
    members: Annotated[MembersPart | None, Doc("The template of its members, which need no entry. Default: no members.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrganisationPart(NodePart):
    tenants: Annotated[Mapping[Name, TenantPart], Doc("Its tenants by name.")] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPart:
    members: Annotated[tuple[NodePath, ...], Doc("Who may use the cache domain group:NAME.")]
    kv_guarantee: Annotated[Amount | None, ShareOrCount(), Doc("KV cache that its blocks can always have back.")] = None
    kv_limit: Annotated[Amount | None, ShareOrCount(), Doc("KV cache that its blocks never exceed.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    aliases: Annotated[tuple[ModelName, ...], Doc("Further names that it answers to.")] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFile:
    version: Annotated[int, Bounds(1, 1), Doc("The format of the file; always 1.")]
    tiers: Annotated[Mapping[Name, TierPart], Doc("The tiers by name. A tier belongs to a request.")]
    organisations: Annotated[Mapping[Name, OrganisationPart], Doc("The ownership tree: organisations and their tenants.")]
    timezone: Annotated[ZoneName, planned("Where a budget's day begins.")] = "UTC"
    scheduler: Annotated[SchedulerPart, Doc("What orders requests.")] = SchedulerPart()
    defaults: Annotated[RequestLimits, Doc("Limits of requests for which nothing nearer says otherwise.")] = RequestLimits()
    cached_token_price: Annotated[float, Bounds(0, 1), planned("What a cached prompt token counts for in token rates.")] = 0.1
    groups: Annotated[Mapping[Name, GroupPart], Doc("Tenants that may share a cache domain.")] = field(default_factory=dict)
    models: Annotated[Mapping[ModelName, ModelPart], Doc("The models by name, and their other names.")] = field(
        default_factory=dict
    )
