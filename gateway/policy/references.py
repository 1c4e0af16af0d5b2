"""Names in the policy file: those that are used must exist, those that identify must be unique. A finding names both
places."""

from __future__ import annotations

import datetime
import zoneinfo
from collections.abc import Iterable, Iterator

from fairlane.config.source import Where
from fairlane.config.strict import Located
from fairlane.gateway.policy.checks import Entry, Found, entries, limited
from fairlane.gateway.policy.schema import DemotePart, OrganisationPart, PolicyFile, TenantPart
from fairlane.wording import suggestion


def errors(located: Located[PolicyFile]) -> list[Found]:
    return [
        *_empty(located),
        *_time_zone(located),
        *_tier_names(located),
        *_demotions(located),
        *_keys(located),
        *_identities(located),
        *_groups(located),
        *_aliases(located),
        *_models(located),
    ]


def warnings(located: Located[PolicyFile], today: datetime.date) -> list[Found]:
    """What is allowed but probably not meant."""
    return [*_expired(located, today), *_idle_members(located), *_nobody(located)]


def _empty(located: Located[PolicyFile]) -> Iterator[Found]:
    if not located.value.tiers:
        yield ("tiers",), "is empty: at least one tier is needed"
    if not located.value.organisations:
        yield ("organisations",), "has no tenant: at least one is needed"
    for name, part in located.value.organisations.items():
        if not part.tenants and not part.tiers:
            yield ("organisations", name), "has no tenants and no tiers of its own: nobody could send a request"


def _time_zone(located: Located[PolicyFile]) -> Iterator[Found]:
    name = located.value.timezone
    if name == "UTC":  # also where no time zone data is installed
        return
    try:
        zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        known = zoneinfo.available_timezones()
        near = [zone for zone in known if zone[:3].lower() == name[:3].lower()][:200]
        yield ("timezone",), f"unknown time zone {name}{suggestion(name, sorted(near)) or ': one such as UTC or Europe/Berlin'}"


def _tier_names(located: Located[PolicyFile]) -> Iterator[Found]:
    known = located.value.tiers
    for entry in entries(located.value):
        if not entry.tiers and entry.above is not None:
            what = "is missing" if entry.part.tiers is None else "is empty"
            yield (*entry.where, "tiers"), f"{what}: at least one of {', '.join(known)} is needed, here or in its organisation"
        for where, name, first in _items((*entry.where, "tiers"), entry.part.tiers or ()):
            if name not in known:
                yield where, _unknown_tier(located, name)
            elif first != where:
                yield where, f"the tier {name} is already listed at {located.mark(*first)}"


def _unknown_tier(located: Located[PolicyFile], name: str) -> str:
    known = list(located.value.tiers)
    allowed = suggestion(name, known) or f": the tiers are {', '.join(known)} ({located.mark('tiers')})"
    return f"unknown tier {name}{allowed}"


def _items(where: Where, names: Iterable[str]) -> Iterator[tuple[Where, str, Where]]:
    """Each item of a list: where it is, its name, and where that name is first."""
    first: dict[str, Where] = {}
    for index, name in enumerate(names):
        here: Where = (*where, index)
        yield here, name, first.setdefault(name, here)


def _demotions(located: Located[PolicyFile]) -> Iterator[Found]:
    for where, part, _, _ in limited(located.value):
        for index, budget in enumerate(part.budgets):
            target = budget.on_exhausted
            if isinstance(target, DemotePart) and target.demote_to not in located.value.tiers:
                yield (*where, "budgets", index, "on_exhausted", "demote_to"), _unknown_tier(located, target.demote_to)


def _keys(located: Located[PolicyFile]) -> Iterator[Found]:
    ids: dict[str, Where] = {}
    hashes: dict[str, Where] = {}
    for entry in entries(located.value):
        for index, key in enumerate(entry.part.keys):
            here: Where = (*entry.where, "keys", index)
            first = ids.setdefault(key.id, here)
            if first != here:
                yield (*here, "id"), f"the key id {key.id} is already used at {located.mark(*first, 'id')}: ids are unique"
            first = hashes.setdefault(key.hash, here)
            if first != here:
                yield (*here, "hash"), f"the same key is already used at {located.mark(*first, 'hash')}: a key has one tenant"
            if not entry.tiers and entry.above is None and key.may_act_for is None:
                yield here, f"could send nothing: give {entry.path} tiers of its own, or the key may_act_for: children"


def _identities(located: Located[PolicyFile]) -> Iterator[Found]:
    seen: dict[str, Where] = {}
    for entry in entries(located.value):
        for index, identity in enumerate(entry.part.identities):
            here: Where = (*entry.where, "identities", index)
            first = seen.setdefault(identity, here)
            if first != here:
                yield here, f"the same identity is already used at {located.mark(*first)}: an identity has one tenant"


def _groups(located: Located[PolicyFile]) -> Iterator[Found]:
    file = located.value
    paths = {entry.path: None for entry in entries(file)}
    members: dict[str, set[str]] = {}
    for group, part in file.groups.items():
        members[group] = set(part.members)
        for here, member, first in _items(("groups", group, "members"), part.members):
            if member not in paths:
                yield here, f"there is no tenant {member}{suggestion(member, list(paths))}"
            elif first != here:
                yield here, f"{member} is already listed at {located.mark(*first)}"
    for entry in entries(file):
        kind, _, group = entry.cache_domain.partition(":")
        if kind != "group" or (entry.above is None and not entry.tiers):
            continue
        own = entry.part.cache_domain is not None or entry.above is None
        here = (*(entry.where if own or entry.above is None else entry.above.where), "cache_domain")
        if group not in file.groups:
            if own:
                yield here, f"there is no group {group}{suggestion(group, list(file.groups))}"
        elif entry.path not in members[group] and entry.path.partition("/")[0] not in members[group]:
            place = located.mark("groups", group, "members")
            yield here, f"{entry.path} is not a member of the group {group}: add it at {place}"


def _aliases(located: Located[PolicyFile]) -> Iterator[Found]:
    seen: dict[str, Where] = {}
    for model, part in located.value.models.items():
        for index, alias in enumerate(part.aliases):
            here: Where = ("models", model, "aliases", index)
            if alias in located.value.models:
                yield here, f"the alias {alias} is a model's own name ({located.mark('models', alias)})"
            first = seen.setdefault(alias, here)
            if first != here:
                yield here, f"the alias {alias} is already used at {located.mark(*first)}"


def _models(located: Located[PolicyFile]) -> Iterator[Found]:
    known = located.value.models
    aliases = {alias: model for model, part in known.items() for alias in part.aliases}
    for entry in entries(located.value):
        if entry.part.models == ():
            yield (*entry.where, "models"), "is empty: leave it out to allow every model"
        above = entry.above.part.models if entry.above else None
        for where, name, first in _items((*entry.where, "models"), entry.part.models or ()):
            if name in aliases:
                yield where, f"{name} is an alias: say {aliases[name]} ({located.mark('models', aliases[name])})"
            elif name not in known:
                yield where, f"unknown model {name}{suggestion(name, list(known)) or ': add it to models'}"
            elif first != where:
                yield where, f"the model {name} is already listed at {located.mark(*first)}"
            elif entry.above is not None and above is not None and name not in above:
                yield where, f"its organisation may not use {name} ({located.mark(*entry.above.where, 'models')})"


def _expired(located: Located[PolicyFile], today: datetime.date) -> Iterator[Found]:
    for entry in entries(located.value):
        for index, key in enumerate(entry.part.keys):
            if key.not_after and key.not_after < today:
                yield (*entry.where, "keys", index, "not_after"), f"{key.not_after} is past: the key {key.id} is refused"


def _idle_members(located: Located[PolicyFile]) -> Iterator[Found]:
    """A group's member none of whose nodes uses the group."""
    users: dict[str, set[str]] = {}
    domains: dict[str, str] = {}
    for entry in entries(located.value):
        domains[entry.path] = entry.cache_domain
        users.setdefault(entry.cache_domain, set()).update({entry.path, entry.path.partition("/")[0]})
    for group, part in located.value.groups.items():
        for index, member in enumerate(part.members):
            if member in domains and member not in users.get(f"group:{group}", ()):
                message = f'{member} may use the group but does not: its cache_domain is "{domains[member]}"'
                yield ("groups", group, "members", index), message


def _nobody(located: Located[PolicyFile]) -> Iterator[Found]:
    """What is about members or tenants that do not exist."""
    for entry in entries(located.value):
        if isinstance(entry.part, OrganisationPart) and entry.part.tenants:
            continue
        below = isinstance(entry.part, TenantPart) and entry.part.members is not None
        for index, key in enumerate(entry.part.keys):
            if key.may_act_for is not None and not below:
                yield (*entry.where, "keys", index, "may_act_for"), f"has no effect: {entry.path} has {_nothing_below(entry)}"
        if entry.part.cache_domain == "member" and not below:
            yield (*entry.where, "cache_domain"), f"has no effect: {entry.path} has {_nothing_below(entry)}"


def _nothing_below(entry: Entry) -> str:
    return "no tenants" if entry.above is None else "no members: a tenant has them once it has the key `members`"
