"""The policy in full, for people: every value that holds and where it comes from, a line of the file, a default, or a node above.
It prints what model.py and the schema say and decides nothing."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from fairlane.config.fields import Amount, Duration, Percent
from fairlane.config.scalars import written
from fairlane.config.schema import EitherShape, Field, ListShape, ObjectShape, ScalarShape, Shape, shape_of
from fairlane.config.source import Where
from fairlane.config.strict import Located
from fairlane.gateway.policy.checks import Entry, entries
from fairlane.gateway.policy.effective import RequestLimits, binding
from fairlane.gateway.policy.schema import KeyPart, MembersPart, PolicyFile, TenantPart

if TYPE_CHECKING:
    from fairlane.gateway.policy.model import Policy


class Row(NamedTuple):
    """One value that holds: the key, the value as the file would write it, where it comes from, and whether it has an effect."""

    key: str
    value: str
    origin: str
    enforced: bool = True


_LATER = " (not enforced yet)"
# Shown with what they are inherited from, or below as what binds in each tier.
_RESOLVED = frozenset({"tiers", "models", "cache_domain", "max_wait", "max_output_tokens", "max_duration", "tenants", "members"})
_CAPS = ("max_in_flight", "max_running", "max_queue")


def render(policy: Policy) -> str:
    """The text, ending in a newline. Raises ValueError for a policy that no file made."""
    located = policy.source
    if located is None:
        raise ValueError("this policy was not loaded from a file")
    file = located.value
    top = top_rows(located) + [row._replace(key=f"model {name}") for name in file.models for row in model_rows(located, name)]
    sections = [(f"policy {policy.path}, sha256 {policy.sha256[:12]}", top)]
    sections.append(("scheduler", part_rows(located, file.scheduler, ("scheduler",))))
    sections += [(f"tier {name}", part_rows(located, tier, ("tiers", name))) for name, tier in file.tiers.items()]
    sections += [(f"group {name}", part_rows(located, part, ("groups", name))) for name, part in file.groups.items()]
    for entry in entries(file):
        sections += _node(policy, located, entry)
    return "\n".join(_section(title, rows) for title, rows in sections)


def _section(title: str, rows: Iterable[Row]) -> str:
    shown = [(row.key + ("" if row.enforced else _LATER), row.value, row.origin) for row in rows]
    widths = [max((len(line[column]) for line in shown), default=0) for column in (0, 1)]
    lines = [f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {origin}".rstrip() for key, value, origin in shown]
    return "\n".join([title, *lines, ""])


def top_rows(located: Located[PolicyFile]) -> list[Row]:
    """What the file says on its own behalf."""
    file = located.value
    kept = {"timezone": file.timezone, "cached_token_price": f"{file.cached_token_price:g}"}
    rows = [Row(key, value, _origin(located, (key,)), _fields(PolicyFile)[key].doc.enforced) for key, value in kept.items()]
    return rows + [row._replace(key=f"defaults.{row.key}") for row in part_rows(located, file.defaults, ("defaults",))]


def model_rows(located: Located[PolicyFile], name: str) -> list[Row]:
    aliases = _say_list(located.value.models[name].aliases) or "no aliases"
    return [Row("aliases", aliases, _origin(located, ("models", name)))]


def _fields(schema: Any) -> dict[str, Field]:
    shape = shape_of(schema)
    return dict(shape.fields) if isinstance(shape, ObjectShape) else {}


def _origin(located: Located[PolicyFile], where: Where) -> str:
    mark = located.marks.get(where)
    return f"line {mark.line}" if mark else "default"


def part_rows(located: Located[PolicyFile], part: Any, where: Where, without: frozenset[str] = frozenset()) -> list[Row]:
    """A row for each field that holds something."""
    rows = []
    for name, field in _fields(type(part)).items():
        value = getattr(part, name)
        if name in without or value is None or value == ():
            continue
        rows.append(Row(name, say(value, field.shape), _origin(located, (*where, name)), field.doc.enforced))
    return rows


def _node(policy: Policy, located: Located[PolicyFile], entry: Entry) -> list[tuple[str, list[Row]]]:
    rows = [*own_rows(policy, located, entry), *_caps_above(located, entry.above), *in_each_tier(policy, entry, False)]
    sections = [(entry.path, rows)]
    if isinstance(entry.part, TenantPart) and entry.part.members is not None:
        members = member_rows(located, entry, entry.part.members) + _caps_above(located, entry)
        sections.append((f"{entry.path}/* (members)", members + in_each_tier(policy, entry, True)))
    return sections


def own_rows(policy: Policy, located: Located[PolicyFile], entry: Entry) -> list[Row]:
    """What the node has, inherited or its own; what binds in each tier, and its ancestors' caps, are not among it."""
    node = policy.nodes[entry.path]
    return [
        _inherited(located, entry, "tiers", _say_list(node.tiers) or "none: only its tenants send requests"),
        _inherited(located, entry, "models", _say_list(node.models or ()) or "all"),
        _inherited(located, entry, "cache_domain", node.cache_domain),
        *part_rows(located, entry.part, entry.where, _RESOLVED),
    ]


def member_rows(located: Located[PolicyFile], tenant: Entry, members: MembersPart) -> list[Row]:
    """What the tenant's template says."""
    return part_rows(located, members, (*tenant.where, "members"), _RESOLVED)


def _inherited(located: Located[PolicyFile], entry: Entry, key: str, value: str) -> Row:
    if (*entry.where, key) not in located.marks and entry.above is not None and (*entry.above.where, key) in located.marks:
        return Row(key, value, f"{entry.above.path}, {_origin(located, (*entry.above.where, key))}")
    return Row(key, value, _origin(located, (*entry.where, key)))


def _caps_above(located: Located[PolicyFile], above: Entry | None) -> list[Row]:
    """What a node shares with its siblings: every ancestor's cap binds too."""
    rows = []
    while above is not None:
        values = {key: getattr(above.part, key) for key in (*_CAPS, "ceil")}
        for key, value in values.items():
            if value is not None:
                text = f"{value * 100:.4g}%" if key == "ceil" else str(value)
                rows.append(Row(f"{key} of all {above.path}", text, _origin(located, (*above.where, key))))
        above = above.above
    return rows


def in_each_tier(policy: Policy, entry: Entry, for_members: bool) -> list[Row]:
    """The limits of single requests, which may differ from tier to tier."""
    rows = []
    for tier in policy.nodes[entry.path].tiers:
        limits, origins = binding(*policy.levels(entry.path, tier, for_members))
        rows += [Row(f"{key} in {tier}", value, origins[key]) for key, value in _limits(limits) if key in origins]
    return rows


def _limits(limits: RequestLimits) -> list[tuple[str, str]]:
    return [
        ("max_wait", written(limits.max_wait_s or 0.0, "duration")),
        ("max_output_tokens", str(limits.max_output_tokens)),
        ("max_duration", written(limits.max_duration_s or 0.0, "duration")),
    ]


def _say_list(names: Iterable[str]) -> str:
    return ", ".join(names)


def say(value: Any, shape: Shape) -> str:
    """A value as the file would write it. Of a key its id, never its hash."""
    if value is None:
        return "none"
    if isinstance(shape, EitherShape):
        return say(value, shape.full if dataclasses.is_dataclass(value) else shape.short)
    if isinstance(shape, ListShape):
        return ", ".join(say(item, shape.item) for item in value)
    if isinstance(value, KeyPart):
        return _key(value)
    if isinstance(shape, ObjectShape):
        inner = [(name, getattr(value, name), field.shape) for name, field in shape.fields.items()]
        return "{" + ", ".join(f"{name}: {say(part, at)}" for name, part, at in inner if part is not None) + "}"
    return _scalar(value, shape.marker if isinstance(shape, ScalarShape) else None)


def _scalar(value: Any, marker: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(marker, Duration):
        return written(value, "duration")
    if isinstance(marker, Percent):
        return f"{value * 100:g}%"
    if isinstance(value, Amount):
        return f"{value.share * 100:g}%" if value.share is not None else f"{value.count} tokens"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _key(key: KeyPart) -> str:
    until = f" until {key.not_after}" if isinstance(key.not_after, datetime.date) else ""
    return f"{key.id}{until}{' for its children too' if key.may_act_for else ''}"
