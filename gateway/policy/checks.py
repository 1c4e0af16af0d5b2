"""What needs two places of the policy file to judge: names that must exist, things that must be unique, shares that must fit.
Every finding names both places. Errors make the file unusable; warnings say what has no effect or will soon surprise."""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Iterator

from fairlane.config.source import MAX_FINDINGS, Mark, Where, finding
from fairlane.config.strict import Located, suggestion
from fairlane.gateway.policy.schema import PolicyFile, TenantPart
from fairlane.scheduler.tenancy import TiersPolicy

# Live secrets that ops paste by mistake. Ours first; the others by their published, self-describing prefixes.
_SECRETS = re.compile(
    r"fl_[A-Za-z0-9_-]{32,}|\bsk-[A-Za-z0-9_-]{20,}|\bAKIA[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{30,}"
    r"|\bhf_[A-Za-z0-9]{30,}|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY"
)

_Message = tuple[Where, str]


def secrets(text: str, name: str) -> list[str]:
    """A finding for each thing in the text, comments included, that looks like a live secret. Its value is never repeated."""
    out = []
    for match in itertools.islice(_SECRETS.finditer(text), MAX_FINDINGS):
        before = text[: match.start()]
        mark = Mark(before.count("\n") + 1, len(before) - before.rfind("\n"))
        message = "SECRET_IN_POLICY: looks like a live key in clear text: only its hash belongs here; revoke the key"
        out.append(finding(name, mark, (), message))
    return out


def errors(located: Located[PolicyFile]) -> list[str]:
    """Every cross-field mistake, in the order of the file."""
    found = [*_empty(located), *_tier_names(located), *_keys(located), *_shares(located), *_groups(located), *_aliases(located)]
    return _lines(located, found)


def warnings(located: Located[PolicyFile], today: datetime.date) -> list[str]:
    """What is allowed but probably not meant."""
    return _lines(located, [*_expired(located, today), *_idle_members(located), *_without_effect(located)])


def _lines(located: Located[PolicyFile], found: list[_Message]) -> list[str]:
    def position(item: _Message) -> tuple[int, int]:
        mark = located.mark(*item[0])
        return (mark.line, mark.column) if mark else (0, 0)

    return [located.finding(where, message) for where, message in sorted(found, key=position)]


def _tenants(file: PolicyFile) -> Iterator[tuple[Where, str, TenantPart]]:
    for organisation, part in file.organisations.items():
        for tenant, tenant_part in part.tenants.items():
            yield ("organisations", organisation, "tenants", tenant), f"{organisation}/{tenant}", tenant_part


def _empty(located: Located[PolicyFile]) -> Iterator[_Message]:
    if not located.value.tiers:
        yield ("tiers",), "is empty: at least one tier is needed"
    if not any(True for _ in _tenants(located.value)):
        yield ("organisations",), "has no tenant: at least one is needed"


def _tier_names(located: Located[PolicyFile]) -> Iterator[_Message]:
    known = list(located.value.tiers)
    for where, _, tenant in _tenants(located.value):
        if not tenant.tiers:
            yield (*where, "tiers"), f"is empty: at least one of {', '.join(known)} is needed"
        seen: dict[str, int] = {}
        for index, name in enumerate(tenant.tiers):
            first = seen.setdefault(name, index)
            if name not in known:
                hint = suggestion(name, known) or f": the tiers are {', '.join(known)} ({located.mark('tiers')})"
                yield (*where, "tiers", index), f"unknown tier {name}{hint}"
            elif first != index:
                yield (*where, "tiers", index), f"the tier {name} is already listed at {located.mark(*where, 'tiers', first)}"


def _keys(located: Located[PolicyFile]) -> Iterator[_Message]:
    ids: dict[str, Where] = {}
    hashes: dict[str, Where] = {}
    for where, _, tenant in _tenants(located.value):
        for index, key in enumerate(tenant.keys):
            here: Where = (*where, "keys", index)
            first = ids.setdefault(key.id, here)
            if first != here:
                yield (*here, "id"), f"the key id {key.id} is already used at {located.mark(*first, 'id')}: ids are unique"
            first = hashes.setdefault(key.hash, here)
            if first != here:
                yield (*here, "hash"), f"the same key is already used at {located.mark(*first, 'hash')}: a key has one tenant"


def _shares(located: Located[PolicyFile]) -> Iterator[_Message]:
    promised = {name: tier.min for name, tier in located.value.tiers.items() if tier.min}
    total = sum(promised.values())
    if total > 1 + 1e-9:
        places = ", ".join(f"{name} {share:.4g}% at {located.mark('tiers', name, 'min')}" for name, share in _percent(promised))
        yield ("tiers",), f"the tiers' min sum to {total * 100:.4g}%: at most 100% is allowed ({places})"


def _percent(shares: dict[str, float]) -> list[tuple[str, float]]:
    return [(name, share * 100) for name, share in shares.items()]


def _groups(located: Located[PolicyFile]) -> Iterator[_Message]:
    file = located.value
    paths = {path: where for where, path, _ in _tenants(file)}
    members: dict[str, dict[str, int]] = {}
    for group, part in file.groups.items():
        seen = members.setdefault(group, {})
        for index, member in enumerate(part.members):
            here: Where = ("groups", group, "members", index)
            first = seen.setdefault(member, index)
            if member not in paths:
                yield here, f"there is no tenant {member}{suggestion(member, list(paths))}"
            elif first != index:
                yield here, f"{member} is already listed at {located.mark(*here[:-1], first)}"
    for where, path, tenant in _tenants(file):
        kind, _, group = tenant.cache_domain.partition(":")
        here = (*where, "cache_domain")
        if kind != "group":
            continue
        if group not in file.groups:
            yield here, f"there is no group {group}{suggestion(group, list(file.groups))}"
        elif path not in members[group]:
            place = located.mark("groups", group, "members")
            yield here, f"{path} is not a member of the group {group}: add it at {place}"


def _aliases(located: Located[PolicyFile]) -> Iterator[_Message]:
    seen: dict[str, Where] = {}
    for model, part in located.value.models.items():
        for index, alias in enumerate(part.aliases):
            here: Where = ("models", model, "aliases", index)
            if alias in located.value.models:
                yield here, f"the alias {alias} is a model's own name ({located.mark('models', alias)})"
            first = seen.setdefault(alias, here)
            if first != here:
                yield here, f"the alias {alias} is already used at {located.mark(*first)}"


def _expired(located: Located[PolicyFile], today: datetime.date) -> Iterator[_Message]:
    for where, _, tenant in _tenants(located.value):
        for index, key in enumerate(tenant.keys):
            if key.not_after and key.not_after < today:
                yield (*where, "keys", index, "not_after"), f"{key.not_after} is past: the key {key.id} is refused"


def _idle_members(located: Located[PolicyFile]) -> Iterator[_Message]:
    domains = {path: tenant.cache_domain for _, path, tenant in _tenants(located.value)}
    for group, part in located.value.groups.items():
        for index, member in enumerate(part.members):
            if member in domains and domains[member] != f"group:{group}":
                message = f'{member} may use the group but does not: its cache_domain is "{domains[member]}"'
                yield ("groups", group, "members", index), message


def _without_effect(located: Located[PolicyFile]) -> Iterator[_Message]:
    policy = located.value.scheduler.tiers
    idle = ["weight"] if policy is TiersPolicy.VIP else ["priority", "weight", "min", "patience", "shaping"]
    for name in located.value.tiers:
        for key in idle:
            # priority must be written, so it cannot be a mistake.
            if key != "priority" and ("tiers", name, key) in located.marks:
                yield ("tiers", name, key), f"has no effect with scheduler.tiers {policy.value}"
