"""Tiers and the policy snapshot, as the scheduler sees them: frozen facts with a generation. The gateway reads the policy
file and ships these; the words mean what docs/policies.md says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class TiersPolicy(Enum):
    """Which policy orders requests of different tiers."""

    FCFS = "fcfs"
    VIP = "vip"
    FAIR = "fair"


class WithinTier(Enum):
    """Which policy orders requests of one band: by arrival, or by fair shares over the ownership tree."""

    FCFS = "fcfs"
    FAIR = "fair"


class WithinTenant(Enum):
    """What orders one tenant's own requests: arrival, or the latest time at which each must start."""

    FCFS = "fcfs"
    DEADLINE = "deadline"


class CostName(Enum):
    """What shares are shares of (cost.py)."""

    TOKENS = "tokens"
    ROOFLINE = "roofline"
    KV_TIME = "kv_time"
    DRF = "drf"


class Shaping(Enum):
    """How much a tier is protected inside the step from lower tiers (semantics: `shaping`)."""

    OFF = "off"
    GENTLE = "gentle"
    BALANCED = "balanced"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class ShapingRule:
    """The same in detail. prefill_share: part of the step's tokens that lower tiers' prefill may use while the tier is there.
    pause_decodes: lower tiers' decodes pause while it prefills. max_step_s: the longest a step may take, whoever is there.
    rests: they pause in every other step at most, so that none goes without a token for two.
    """

    prefill_share: float = 1.0
    pause_decodes: bool = True
    max_step_s: float | None = None
    rests: bool = False


@dataclass(frozen=True, slots=True)
class Tier:
    """One service tier.

    priority: higher is more important; equal priorities form one band.
    weight: share among tiers of one band (used by FAIR).
    min_share: part of the worker's cost in [0, 1) a backlogged tier gets over any 10 s, whatever higher bands want.
    ceil: most of the worker's time that it may take, in (0, 1], even if the rest idles; None: all of it.
    patience_s: a waiting request ranks one band higher after each patience waited; None: never.
    ttft_target_s, tpot_target_s: time to the first token and per further token that DEADLINE aims at; None: any.
    """

    name: str
    priority: int
    weight: float = 1.0
    min_share: float = 0.0
    patience_s: float | None = None
    shaping: Shaping | ShapingRule = Shaping.OFF
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    ceil: float | None = None


@dataclass(frozen=True, slots=True)
class KVAmount:
    """KV cache: a share of a worker's blocks, in [0, 1], or a number of tokens. Exactly one is given."""

    share: float | None = None
    tokens: int | None = None

    def blocks(self, num_blocks: int, block_size: int) -> int:
        """Whole blocks of a pool of num_blocks, rounded down."""
        if self.share is not None:
            return int(self.share * num_blocks + 1e-9)  # 30% of 10 blocks is 3, whatever binary fractions make of it
        return (self.tokens or 0) // block_size

    def __str__(self) -> str:
        return f"{self.tokens} tokens" if self.share is None else f"{self.share * 100:.4g}%"


@dataclass(frozen=True, slots=True)
class NodeShare:
    """An organisation or tenant of the ownership tree, and the template of its members.

    path: "northwind" or "northwind/checkout"; members are one level below and need no entry.
    weight: share among its siblings. min_share, ceil: as a tier's, for this node and all below it.
    max_running: sequences of this node and all below it that may hold KV at once; None: no cap.
    kv_guarantee, kv_limit: of its private cache domain and all below it; None: nothing is promised, nothing limits it.
    shared_domain: "group:NAME" or "public", where its blocks count for that account; empty: they count for it.
    """

    path: str
    weight: float = 1.0
    min_share: float = 0.0
    max_running: int | None = None
    member_weight: float = 1.0
    member_max_running: int | None = None
    kv_guarantee: KVAmount | None = None
    kv_limit: KVAmount | None = None
    member_kv_limit: KVAmount | None = None
    shared_domain: str = ""
    ceil: float | None = None


@dataclass(frozen=True, slots=True)
class GroupShare:
    """A group whose cache domain has a quota of its own."""

    name: str
    kv_guarantee: KVAmount | None = None
    kv_limit: KVAmount | None = None


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """What the engine schedules by. Applied whole, between two steps.

    preempt_gap_ms: how far ahead of a waiting node, in worker time, a running one may be before FAIR takes its blocks;
    None: FAIR does not preempt. cost: what work is charged by. plugin: a policy installed at the worker,
    instead of tiers_policy, within_tier and within_tenant. predict_output: FAIR orders by what a request will probably generate
    from its admission on. groups: those with KV quotas. locality_window_ms: how far behind, in worker time, FAIR lets a waiting
    node fall so that one whose prefix is cached goes before it; 0: not at all.
    """

    generation: int
    sha256: str
    tiers_policy: TiersPolicy
    tiers: tuple[Tier, ...]
    within_tier: WithinTier = WithinTier.FCFS
    nodes: tuple[NodeShare, ...] = ()
    preempt_gap_ms: float | None = None
    cost: CostName = CostName.TOKENS
    within_tenant: WithinTenant = WithinTenant.FCFS
    plugin: str = ""
    predict_output: bool = False
    groups: tuple[GroupShare, ...] = ()
    locality_window_ms: float = 0.0

    def tier(self, name: str) -> Tier:
        """The tier of that name. Raises KeyError for one the snapshot does not have."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)


# What an engine runs under until a gateway has sent a policy: it refuses every request for having no such tier.
NO_POLICY = PolicySnapshot(0, "", TiersPolicy.FCFS, (Tier("", 0),))
