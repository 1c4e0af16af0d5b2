"""The policy in full, for people: every value that holds and where it comes from, a line of the file, a default, or a node above.
It prints what model.py and the schema say and decides nothing."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

from fairlane.config.fields import Amount, Duration, Percent
from fairlane.config.scalars import written
from fairlane.config.schema import EitherShape, Field, ListShape, ObjectShape, ScalarShape, Shape, shape_of
from fairlane.config.source import Where
from fairlane.config.strict import Located
from fairlane.gateway.policy.checks import Entry, entries
from fairlane.gateway.policy.effective import RequestLimits, binding
from fairlane.gateway.policy.schema import KeyPart, PolicyFile, TenantPart

if TYPE_CHECKING:
    from fairlane.gateway.policy.model import Policy

# Key, value, where it comes from.
Row = tuple[str, str, str]

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
    sections = [(f"policy {policy.path}, sha256 {policy.sha256[:12]}", _top(located))]
    sections.append(("scheduler", _rows(located, file.scheduler, ("scheduler",))))
    sections += [(f"tier {name}", _rows(located, tier, ("tiers", name))) for name, tier in file.tiers.items()]
    sections += [(f"group {name}", _rows(located, part, ("groups", name))) for name, part in file.groups.items()]
    for entry in entries(file):
        sections += _node(policy, located, entry)
    return "\n".join(_section(title, rows) for title, rows in sections)


def _section(title: str, rows: Iterable[Row]) -> str:
    rows = list(rows)
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    lines = [f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {origin}".rstrip() for key, value, origin in rows]
    return "\n".join([title, *lines, ""])


def _top(located: Located[PolicyFile]) -> list[Row]:
    file = located.value
    kept = {"timezone": file.timezone, "cached_token_price": f"{file.cached_token_price:g}"}
    rows = [(key + _later(("timezone",)), value, _origin(located, (key,))) for key, value in kept.items()]
    rows += [(f"defaults.{key}", value, origin) for key, value, origin in _rows(located, file.defaults, ("defaults",))]
    for name, model in file.models.items():
        rows.append((f"model {name}", _say_list(model.aliases) or "no aliases", _origin(located, ("models", name))))
    return rows


def _later(where: Where) -> str:
    field = _fields(PolicyFile).get(str(where[0]))
    return "" if field is None or field.doc.enforced else _LATER


def _fields(schema: Any) -> dict[str, Field]:
    shape = shape_of(schema)
    return dict(shape.fields) if isinstance(shape, ObjectShape) else {}


def _origin(located: Located[PolicyFile], where: Where) -> str:
    mark = located.marks.get(where)
    return f"line {mark.line}" if mark else "default"


def _rows(located: Located[PolicyFile], part: Any, where: Where, without: frozenset[str] = frozenset()) -> list[Row]:
    """A row for each field that holds something."""
    rows = []
    for name, field in _fields(type(part)).items():
        value = getattr(part, name)
        if name in without or value is None or value == ():
            continue
        rows.append((name + ("" if field.doc.enforced else _LATER), say(value, field.shape), _origin(located, (*where, name))))
    return rows


def _node(policy: Policy, located: Located[PolicyFile], entry: Entry) -> list[tuple[str, list[Row]]]:
    node = policy.nodes[entry.path]
    rows = [
        _inherited(located, entry, "tiers", _say_list(node.tiers) or "none: only its tenants send requests"),
        _inherited(located, entry, "models", _say_list(node.models or ()) or "all"),
        _inherited(located, entry, "cache_domain", node.cache_domain),
        *_rows(located, entry.part, entry.where, _RESOLVED),
        *_caps_above(located, entry.above),
        *_in_each_tier(policy, entry, False),
    ]
    sections = [(entry.path, rows)]
    if isinstance(entry.part, TenantPart) and entry.part.members is not None:
        members = _rows(located, entry.part.members, (*entry.where, "members"), _RESOLVED)
        members += _caps_above(located, entry)
        sections.append((f"{entry.path}/* (members)", members + _in_each_tier(policy, entry, True)))
    return sections


def _inherited(located: Located[PolicyFile], entry: Entry, key: str, value: str) -> Row:
    if (*entry.where, key) not in located.marks and entry.above is not None and (*entry.above.where, key) in located.marks:
        return key, value, f"{entry.above.path}, {_origin(located, (*entry.above.where, key))}"
    return key, value, _origin(located, (*entry.where, key))


def _caps_above(located: Located[PolicyFile], above: Entry | None) -> list[Row]:
    """What a node shares with its siblings: every ancestor's cap binds too."""
    rows = []
    while above is not None:
        for key in _CAPS:
            value = getattr(above.part, key)
            if value is not None:
                rows.append((f"{key} of all {above.path}", str(value), _origin(located, (*above.where, key))))
        above = above.above
    return rows


def _in_each_tier(policy: Policy, entry: Entry, for_members: bool) -> list[Row]:
    """The limits of single requests, which may differ from tier to tier."""
    rows = []
    for tier in policy.nodes[entry.path].tiers:
        limits, origins = binding(*policy.levels(entry.path, tier, for_members))
        rows += [(f"{key} in {tier}", value, origins[key]) for key, value in _limits(limits) if key in origins]
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
