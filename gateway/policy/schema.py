"""The policy file as a schema: which keys it may have and what each may hold. docs/policies.md says what they mean. What needs
two places of the file to decide is checked in loader.py."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from fairlane.config.fields import Bounds, Count, Duration, Percent, Text
from fairlane.scheduler.tenancy import Shaping, TiersPolicy

_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}"
Name = Annotated[str, Text(_NAME, "a name of up to 63 letters, digits, - and _")]
ModelName = Annotated[str, Text(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}", "a model name")]
NodePath = Annotated[str, Text(f"{_NAME}/{_NAME}", "organisation/tenant")]
KeyHash = Annotated[
    str, Text(r"hmac-sha256:[0-9a-f]{64}", "a hash as `fairlane keys new` prints it (hmac-sha256: and 64 hex digits)")
]
CacheDomain = Annotated[str, Text(f"tenant|public|group:{_NAME}", "tenant, public or group:NAME")]


@dataclass(frozen=True, slots=True)
class SchedulerPart:
    tiers: TiersPolicy = TiersPolicy.VIP


@dataclass(frozen=True, slots=True)
class TierPart:
    priority: Annotated[int, Bounds(-1_000_000, 1_000_000)]
    weight: Annotated[float, Bounds(0, 1_000_000, low_open=True)] = 1.0
    # Below 100%: a tier that is promised everything leaves nothing to order.
    min: Annotated[float, Percent(0.0, 0.99)] = 0.0
    patience: Annotated[float, Duration(0.001)] | None = None
    shaping: Shaping = Shaping.OFF
    max_output_tokens: Annotated[int, Count(1, 10_000_000)] | None = None
    max_duration: Annotated[float, Duration(0.1)] | None = None


@dataclass(frozen=True, slots=True)
class KeyPart:
    id: Name
    hash: KeyHash
    not_after: datetime.date | None = None


@dataclass(frozen=True, slots=True)
class TenantPart:
    tiers: tuple[Name, ...]
    keys: tuple[KeyPart, ...] = ()
    cache_domain: CacheDomain = "tenant"
    max_in_flight: Annotated[int, Count(1, 1_000_000)] | None = None


@dataclass(frozen=True, slots=True)
class OrganisationPart:
    tenants: Mapping[Name, TenantPart]


@dataclass(frozen=True, slots=True)
class GroupPart:
    members: tuple[NodePath, ...]


@dataclass(frozen=True, slots=True)
class ModelPart:
    aliases: tuple[ModelName, ...] = ()


@dataclass(frozen=True, slots=True)
class PolicyFile:
    version: Annotated[int, Bounds(1, 1)]
    tiers: Mapping[Name, TierPart]
    organisations: Mapping[Name, OrganisationPart]
    scheduler: SchedulerPart = SchedulerPart()
    groups: Mapping[Name, GroupPart] = field(default_factory=dict)
    models: Mapping[ModelName, ModelPart] = field(default_factory=dict)
