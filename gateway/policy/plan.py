"""What a new policy would change, value by value, with everything inherited resolved: which tiers, nodes and keys come, go and
move, which of their values change, and for how many. What that means to requests is plan_notes.py's; nothing here applies it."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from fairlane.config.strict import Located
from fairlane.gateway.policy.checks import entries
from fairlane.gateway.policy.entitled import entitled_shares, is_fair
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.policy.plan_notes import Note, notes
from fairlane.gateway.policy.render import Row, in_each_tier, member_rows, model_rows, own_rows, part_rows, top_rows
from fairlane.gateway.policy.schema import KeyPart, PolicyFile, TenantPart

NOTHING = "none"
_BY_ARRIVAL = "by arrival"
# Of a hash, enough to see that it is another one.
_HASH_CHARACTERS = len("hmac-sha256:") + 8


class Kind(Enum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    MOVED = "moved"


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is different.

    what: file, scheduler, tier, organisation, tenant, members, key, group or model. name: which one; "" for file and scheduler.
    key: what of it; "": all of it. before, after: as the file would write them. before_from, after_from: a line, a node above, a
    tier or a default. tenants, members: how many the change is for; of members the most there can be, as they have no entry.
    """

    kind: Kind
    what: str
    name: str
    key: str = ""
    before: str = ""
    after: str = ""
    before_from: str = ""
    after_from: str = ""
    moved_from: str = ""
    enforced: bool = True
    tenants: int = 0
    members: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """changes: in the order of the file. notes: what they mean to requests, and what is risky. warnings: the new file's own."""

    changes: tuple[Change, ...]
    notes: tuple[Note, ...]
    warnings: tuple[str, ...]


@dataclass(slots=True)
class _Thing:
    """Anything that has values of its own. reach: its tenants."""

    rows: dict[str, Row] = field(default_factory=dict)
    reach: frozenset[str] = frozenset()
    members: int = 0


_Things = dict[tuple[str, str], _Thing]


def plan(old: Policy, new: Policy) -> Plan:
    """Raises ValueError for a policy that no file made. Keys that are not in the file (demo keys) are left out of it."""
    old, new = _as_written(old), _as_written(new)
    before, after = _things(old), _things(new)
    moved = _moved(old, new)
    changes = list(_compare(before, after, moved))
    return Plan(tuple(changes), tuple(notes(old, new, moved)), new.warnings)


def _as_written(policy: Policy) -> Policy:
    principals = {digest: principal for digest, principal in policy.principals.items() if not principal.loopback_only}
    return dataclasses.replace(policy, principals=principals)


# -- the things of a policy ------------------------------------------------------------------------------------------------


def _things(policy: Policy) -> _Things:
    located = policy.source
    if located is None:
        raise ValueError("this policy was not loaded from a file")
    file = located.value
    tenants = frozenset(path for path, node in policy.nodes.items() if node.is_tenant)
    things: _Things = {
        ("file", ""): _thing(policy, top_rows(located), tenants),
        ("scheduler", ""): _thing(policy, part_rows(located, file.scheduler, ("scheduler",)), tenants),
    }
    for name, tier in file.tiers.items():
        users = frozenset(path for path in tenants if name in policy.nodes[path].tiers)
        things["tier", name] = _thing(policy, part_rows(located, tier, ("tiers", name)), users)
    for name, group in file.groups.items():
        users = frozenset(path for path in tenants if policy.nodes[path].cache_domain == f"group:{name}")
        things["group", name] = _thing(policy, part_rows(located, group, ("groups", name)), users)
    for name in file.models:
        users = frozenset(path for path in tenants if name in (policy.nodes[path].models or (name,)))
        things["model", name] = _thing(policy, model_rows(located, name), users)
    return things | _nodes(policy, located, tenants)


def _nodes(policy: Policy, located: Located[PolicyFile], tenants: frozenset[str]) -> _Things:
    things: _Things = {}
    shares = entitled_shares(policy)
    below_of: dict[str, set[str]] = defaultdict(set)
    for tenant in tenants:
        below_of[tenant.partition("/")[0]].add(tenant)
    for entry in entries(located.value):
        path = entry.path
        below = frozenset(below_of[path] if entry.above is None else {path})
        rows = [row for row in own_rows(policy, located, entry) if row.key != "keys"]
        rows += in_each_tier(policy, entry, False)
        rows += [
            Row(f"share in {tier}", f"{shares[path, tier] * 100:.4g}%" if is_fair(policy) else _BY_ARRIVAL, "weights")
            for tier in policy.nodes[path].tiers
            if not is_fair(policy) or (path, tier) in shares
        ]
        things["organisation" if entry.above is None else "tenant", path] = _thing(policy, rows, below)
        if isinstance(entry.part, TenantPart) and entry.part.members is not None:
            rows = member_rows(located, entry, entry.part.members) + in_each_tier(policy, entry, True)
            things["members", f"{path}/*"] = _thing(policy, rows, below)
        for index, key in enumerate(entry.part.keys):
            things["key", key.id] = _thing(policy, _key_rows(located, path, key, (*entry.where, "keys", index)), below)
    return things


def _key_rows(located: Located[PolicyFile], path: str, key: KeyPart, where: tuple[str | int, ...]) -> list[Row]:
    rows = part_rows(located, key, where, frozenset({"id", "hash"}))
    mark = located.mark(*where)
    line = f"line {mark.line}" if mark else ""
    return [Row("for", path, line), Row("hash", f"{key.hash[:_HASH_CHARACTERS]}…", line), *rows]


def _thing(policy: Policy, rows: list[Row], reach: frozenset[str]) -> _Thing:
    templates = [template for path in reach if (template := policy.nodes[path].members) is not None]
    return _Thing({row.key: row for row in rows}, reach, sum(template.max_members for template in templates))


# -- what is different -----------------------------------------------------------------------------------------------------


def _moved(old: Policy, new: Policy) -> dict[str, str]:
    """New path to old path of tenants that are the same under another: they keep a key, or their name, and no other does."""
    moved: dict[str, str] = {}
    for labels in (_keys, _names):
        gone = _labelled(labels(old), old, new, set(moved.values()))
        come = _labelled(labels(new), new, old, set(moved))
        pairs = {(path, before) for label in come.keys() & gone.keys() for path in come[label] for before in gone[label]}
        to, since = Counter(path for path, _ in pairs), Counter(before for _, before in pairs)
        moved |= {path: before for path, before in pairs if to[path] == since[before] == 1}
    return moved


def _labelled(labels: Iterable[tuple[str, str]], policy: Policy, other: Policy, without: Collection[str]) -> dict[str, set[str]]:
    """By label: the tenants that only this one of the two policies has, as far as the label is not everybody's."""
    found: dict[str, set[str]] = defaultdict(set)
    for label, path in labels:
        if policy.nodes[path].is_tenant and path not in other.nodes and path not in without:
            found[label].add(path)
    return {label: paths for label, paths in found.items() if len(paths) == 1}


def _keys(policy: Policy) -> Iterator[tuple[str, str]]:
    return ((digest, principal.node) for digest, principal in policy.principals.items())


def _names(policy: Policy) -> Iterator[tuple[str, str]]:
    return ((path.partition("/")[2], path) for path in policy.nodes)


def _compare(before: _Things, after: _Things, moved: Mapping[str, str]) -> Iterator[Change]:
    matched = set()
    for (what, name), thing in after.items():
        was = _before(what, name, moved)
        old = before.get((what, was))
        if old is None:
            yield _whole(Kind.ADDED, what, name, thing)
            yield from _values(what, name, _Thing(), thing, thing, Kind.ADDED)
            continue
        matched.add((what, was))
        if was != name:
            yield _whole(Kind.MOVED, what, name, thing, was)
        yield from _values(what, name, old, thing, thing, Kind.CHANGED)
    for (what, name), thing in before.items():
        if (what, name) not in matched:
            yield _whole(Kind.REMOVED, what, name, thing)


def _before(what: str, name: str, moved: Mapping[str, str]) -> str:
    if what == "members":
        tenant = name.removesuffix("/*")
        return f"{moved.get(tenant, tenant)}/*"
    return moved.get(name, name) if what == "tenant" else name


def _whole(kind: Kind, what: str, name: str, thing: _Thing, moved_from: str = "") -> Change:
    return Change(kind, what, name, moved_from=moved_from, tenants=len(thing.reach), members=thing.members)


def _values(what: str, name: str, old: _Thing, new: _Thing, reach: _Thing, kind: Kind) -> Iterator[Change]:
    """What is another value; of an added thing, what it does not merely have by default."""
    for key in dict.fromkeys((*new.rows, *old.rows)):
        was, now = old.rows.get(key), new.rows.get(key)
        one = now or was
        if one is None or (was and now and was.value == now.value) or (kind is Kind.ADDED and one.origin == "default"):
            continue
        if now is None and _is_of_a_tier_lost(key, new):
            continue
        yield Change(
            kind,
            what,
            name,
            key,
            before=was.value if was else "" if kind is Kind.ADDED else NOTHING,
            after=now.value if now else NOTHING,
            before_from=was.origin if was else "",
            after_from=now.origin if now else "",
            enforced=one.enforced,
            tenants=len(reach.reach),
            members=reach.members,
        )


def _is_of_a_tier_lost(key: str, thing: _Thing) -> bool:
    """Whether it is a value in a tier that may not be used any more, which the tiers themselves tell."""
    _, inside, tier = key.rpartition(" in ")
    return bool(inside) and "tiers" in thing.rows and tier not in thing.rows["tiers"].value.split(", ")
