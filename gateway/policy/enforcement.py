"""Which keys of a policy file have no effect: because this version does not enforce them yet, or because others in the same
file leave them nothing to decide."""

from __future__ import annotations

from collections.abc import Iterator

from fairlane.config.schema import field_at
from fairlane.config.source import Where
from fairlane.config.strict import Located
from fairlane.gateway.policy.checks import Found, entries, limited
from fairlane.gateway.policy.schema import PolicyFile
from fairlane.gateway.policy.shares import is_only_child
from fairlane.scheduler.tenancy import Shaping, TiersPolicy, WithinTenant, WithinTier

NOT_ENFORCED = "is not enforced yet"


def not_enforced(located: Located[PolicyFile]) -> list[Found]:
    """A finding for each key of the file that is read and checked but has no effect."""
    found: list[Found] = []
    for where in located.marks:
        field = field_at(PolicyFile, where)
        if field is not None and not field.doc.enforced:
            found.append((where, NOT_ENFORCED))
    return found


def without_effect(located: Located[PolicyFile]) -> list[Found]:
    """A warning for each key that the rest of the file leaves nothing to decide."""
    return [
        *_tier_keys(located),
        *_targets(located),
        *_weights(located),
        *_idle_scheduler_keys(located),
        *_bursts(located),
        *_kv_quotas(located),
    ]


def _is_fair(file: PolicyFile) -> bool:
    """Whether anything may be shared by weight."""
    tiers, within = file.scheduler.tiers, file.scheduler.within_tier
    if file.scheduler.plugin is not None:  # who knows
        return True
    return tiers is TiersPolicy.FAIR or (tiers is TiersPolicy.VIP and within is WithinTier.FAIR)


# What the order of tiers leaves undecided. `priority` must be written, so it is never a mistake.
_IDLE_TIER_KEYS = {
    TiersPolicy.VIP: (),
    TiersPolicy.FAIR: ("patience", "shaping"),
    TiersPolicy.FCFS: ("min", "patience", "shaping"),
}
_WITHOUT_FAIR = "has no effect without fair shares: scheduler.within_tier fair, or scheduler.tiers fair"


def _tier_keys(located: Located[PolicyFile]) -> Iterator[Found]:
    policy = located.value.scheduler.tiers
    if located.value.scheduler.plugin is not None:
        return
    for name in located.value.tiers:
        for key in _IDLE_TIER_KEYS[policy]:
            if _written(located, "tiers", name, key):
                yield ("tiers", name, key), f"has no effect with scheduler.tiers {policy.value}"
    if policy is TiersPolicy.FCFS:
        for entry in entries(located.value):
            if _written(located, *entry.where, "min"):
                yield (*entry.where, "min"), "has no effect with scheduler.tiers fcfs"


def _targets(located: Located[PolicyFile]) -> Iterator[Found]:
    scheduler = located.value.scheduler
    if scheduler.plugin is not None or scheduler.within_tenant is not WithinTenant.FCFS:
        return
    for name, tier in located.value.tiers.items():
        for key in ("ttft_target", "tpot_target"):
            if not _written(located, "tiers", name, key):
                continue
            if scheduler.tiers is TiersPolicy.VIP and tier.shaping is Shaping.OFF:
                yield ("tiers", name, key), "has no effect without scheduler.within_tenant deadline or shaping"
            elif scheduler.tiers is TiersPolicy.FCFS or (scheduler.tiers is TiersPolicy.FAIR and key == "tpot_target"):
                yield ("tiers", name, key), "has no effect without scheduler.within_tenant deadline"


def _weights(located: Located[PolicyFile]) -> Iterator[Found]:
    file = located.value
    fair = _is_fair(file)
    for name in file.tiers:
        if _written(located, "tiers", name, "weight"):
            if not fair:
                yield ("tiers", name, "weight"), _WITHOUT_FAIR
            elif not _shares_its_band(name, file):
                yield ("tiers", name, "weight"), f"has no effect: no other tier has its priority, {file.tiers[name].priority}"
    for where, _, _, entry in limited(file):
        if _written(located, *where, "weight"):
            if not fair:
                yield (*where, "weight"), _WITHOUT_FAIR
            elif where == entry.where and is_only_child(entry, file):
                yield (*where, "weight"), f"has no effect: {entry.path} has no sibling to share with"


def _shares_its_band(name: str, file: PolicyFile) -> bool:
    if file.scheduler.tiers is TiersPolicy.FAIR:  # one band of all
        return len(file.tiers) > 1
    return sum(tier.priority == file.tiers[name].priority for tier in file.tiers.values()) > 1


def _idle_scheduler_keys(located: Located[PolicyFile]) -> Iterator[Found]:
    scheduler = located.value.scheduler
    if scheduler.plugin is not None:
        for key in ("tiers", "within_tier", "within_tenant", "preempt_gap_ms", "predict_output", "locality_window_ms"):
            if _written(located, "scheduler", key):
                yield ("scheduler", key), "has no effect with scheduler.plugin"
        return
    for key in ("preempt_gap_ms", "predict_output", "locality_window_ms"):
        if _written(located, "scheduler", key) and not _is_fair(located.value):
            yield ("scheduler", key), _WITHOUT_FAIR
    decided = {TiersPolicy.FCFS: WithinTier.FCFS, TiersPolicy.FAIR: WithinTier.FAIR}.get(scheduler.tiers)
    if _written(located, "scheduler", "within_tier") and decided not in (None, scheduler.within_tier):
        yield ("scheduler", "within_tier"), f"has no effect with scheduler.tiers {scheduler.tiers.value}"


def _bursts(located: Located[PolicyFile]) -> Iterator[Found]:
    for where, part, _, _ in limited(located.value):
        if part.burst is not None and part.requests_per_minute is None and part.tokens_per_minute is None:
            yield (*where, "burst"), "has no effect without requests_per_minute or tokens_per_minute"


def _kv_quotas(located: Located[PolicyFile]) -> Iterator[Found]:
    """Blocks of a shared domain count for that, not for the node; members have blocks of their own only in domains of their
    own."""
    for entry in entries(located.value):
        is_tenant = entry.above is not None
        if is_tenant and entry.cache_domain not in ("tenant", "member"):
            for key in ("kv_guarantee", "kv_limit"):
                if _written(located, *entry.where, key):
                    yield (*entry.where, key), f"has no effect: its blocks count for its cache_domain, {entry.cache_domain}"
        if entry.cache_domain != "member" and _written(located, *entry.where, "members", "kv_limit"):
            yield (*entry.where, "members", "kv_limit"), "has no effect without cache_domain member"


def _written(located: Located[PolicyFile], *where: str | int) -> bool:
    path: Where = where
    return path in located.marks
