"""What binds one request: limits inherited along member template > tenant > organisation > tier > file, with where each comes
from. Pure functions over frozen facts; the policy file's text and its checks are elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fairlane.scheduler.tenancy import KVAmount

Number = TypeVar("Number", int, float)

MEMBER_DOMAIN = "member"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of single requests, as one level of the policy states them; None: it says nothing."""

    max_output_tokens: int | None = None
    max_duration_s: float | None = None
    max_wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class Cap:
    """How many requests one node may have, all below it included; None: no cap.

    max_in_flight: admitted and not finished. max_queue: admitted and not started.
    """

    path: str
    max_in_flight: int | None = None
    max_queue: int | None = None


@dataclass(frozen=True, slots=True)
class Effective:
    """What binds one request of `path` (a member, tenant or organisation) in `tier`.

    tiers: what it may ask for, its default first; empty: it cannot send requests of its own.
    cache_domain: resolved, ready for the worker.
    max_*: None where nothing limits it. caps: of the node itself, then of each ancestor, the organisation last.
    kv_limits: that its KV cache counts towards.
    """

    path: str
    tier: str
    tiers: tuple[str, ...]
    cache_domain: str
    max_output_tokens: int | None
    max_duration_s: float | None
    max_wait_s: float | None
    caps: tuple[Cap, ...]
    kv_limits: tuple[KVAmount, ...] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """One level that may state limits, and what it is called when somebody asks where a value comes from."""

    origin: str
    limits: RequestLimits


def binding(owners: Sequence[Level], defaults: Sequence[Level]) -> tuple[RequestLimits, dict[str, str]]:
    """The limits that bind, and the origin of each that is set, by its field's name.

    owners: the node and its ancestors: every one's limit binds, so the smallest counts.
    defaults: asked in order for what no owner states.
    """
    output, output_from = _bound(
        [(level.origin, level.limits.max_output_tokens) for level in owners],
        [(level.origin, level.limits.max_output_tokens) for level in defaults],
    )
    duration, duration_from = _bound(
        [(level.origin, level.limits.max_duration_s) for level in owners],
        [(level.origin, level.limits.max_duration_s) for level in defaults],
    )
    wait, wait_from = _bound(
        [(level.origin, level.limits.max_wait_s) for level in owners],
        [(level.origin, level.limits.max_wait_s) for level in defaults],
    )
    origins = {"max_output_tokens": output_from, "max_duration": duration_from, "max_wait": wait_from}
    return RequestLimits(output, duration, wait), {name: origin for name, origin in origins.items() if origin}


def _bound(
    owners: Iterable[tuple[str, Number | None]], defaults: Iterable[tuple[str, Number | None]]
) -> tuple[Number | None, str]:
    stated = [(value, origin) for origin, value in owners if value is not None]
    if stated:
        return min(stated, key=lambda item: item[0])  # the nearest of equals
    for origin, value in defaults:
        if value is not None:
            return value, origin
    return None, ""


def for_member(
    tenant: Effective, path: str, max_in_flight: int | None, max_queue: int | None, kv_limit: KVAmount | None = None
) -> Effective:
    """`tenant`, made for the tenant's members in general, for the member `path`."""
    domain = f"member:{path}" if tenant.cache_domain == MEMBER_DOMAIN else tenant.cache_domain
    return Effective(
        path,
        tenant.tier,
        tenant.tiers,
        domain,
        tenant.max_output_tokens,
        tenant.max_duration_s,
        tenant.max_wait_s,
        (Cap(path, max_in_flight, max_queue), *tenant.caps),
        tenant.kv_limits if kv_limit is None else (kv_limit, *tenant.kv_limits),
    )
