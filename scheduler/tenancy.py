"""Tiers and the policy snapshot, as the scheduler sees them: frozen facts with a generation. The gateway reads the policy
file and ships these; the words mean what docs/policies.md says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class TiersPolicy(Enum):
    """Which policy orders requests of different tiers."""

    FCFS = "fcfs"
    VIP = "vip"


class Shaping(Enum):
    """How much a tier is protected inside the step from lower tiers (semantics: `shaping`)."""

    OFF = "off"
    GENTLE = "gentle"
    BALANCED = "balanced"
    STRICT = "strict"


@dataclass(frozen=True, slots=True)
class Tier:
    """One service tier.

    priority: higher is more important; equal priorities form one band.
    weight: share among tiers of one band (used by FAIR).
    min_share: part of the worker's cost in [0, 1) a backlogged tier gets over any 10 s, whatever higher bands want.
    patience_s: a waiting request ranks one band higher after each patience waited; None: never.
    """

    name: str
    priority: int
    weight: float = 1.0
    min_share: float = 0.0
    patience_s: float | None = None
    shaping: Shaping = Shaping.OFF


@dataclass(frozen=True, slots=True)
class PolicySnapshot:
    """What the engine schedules by. Applied whole, between two steps."""

    generation: int
    sha256: str
    tiers_policy: TiersPolicy
    tiers: tuple[Tier, ...]

    def tier(self, name: str) -> Tier:
        """The tier of that name. Raises KeyError for one the snapshot does not have."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)
