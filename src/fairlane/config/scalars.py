"""What a plain scalar means: the YAML 1.2 core schema, narrowed to what cannot be misread. `no`, `12:30` and `1_000` are texts;
a number is decimal, without leading zeros, and finite."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from fairlane.config.source import Scalar

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
# More digits than any bound of ours has; also keeps int() away from its quadratic (and since 3.11 refused) long inputs.
_MAX_DIGITS = 40

_UNITS_OF: dict[str, dict[str, Fraction | int]] = {
    "duration": {"ms": Fraction(1, 1000), "s": 1, "m": 60, "h": 3600, "d": 86400},
    "size": {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40},
    "count": {"k": 10**3, "M": 10**6, "G": 10**9},
}
_QUANTITY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([A-Za-z]+|%)")


class Kind(Enum):
    NULL = "nothing"
    BOOL = "true or false"
    INT = "a whole number"
    FLOAT = "a number"
    TEXT = "a text"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A scalar's kind and value. `problem` says why a number of that kind cannot be used; then the value is None."""

    kind: Kind
    value: bool | int | float | str | None
    problem: str | None = None


def resolve(scalar: Scalar) -> Resolved:
    """What the scalar is, before any schema is asked."""
    text = scalar.text
    if not scalar.plain:
        return Resolved(Kind.TEXT, text)
    if text in _NULLS:
        return Resolved(Kind.NULL, None)
    if text in _BOOLS:
        return Resolved(Kind.BOOL, _BOOLS[text])
    if _INT.fullmatch(text):
        return _resolve_int(text)
    if _BASED.fullmatch(text):
        return Resolved(Kind.INT, None, "is not decimal")
    if _NOT_FINITE.fullmatch(text):
        return Resolved(Kind.FLOAT, None, "is not a finite number")
    if _FLOAT.fullmatch(text):
        return _resolve_float(text)
    return Resolved(Kind.TEXT, text)


def _resolve_int(text: str) -> Resolved:
    digits = text.lstrip("+-")
    if len(digits) > _MAX_DIGITS:
        return Resolved(Kind.INT, None, f"has {len(digits)} digits")
    if len(digits) > 1 and digits[0] == "0":
        return Resolved(Kind.INT, None, "has a leading zero (octal in YAML 1.1, decimal in 1.2)")
    return Resolved(Kind.INT, int(text))


def _resolve_float(text: str) -> Resolved:
    if len(text) > _MAX_DIGITS:
        return Resolved(Kind.FLOAT, None, f"has {len(text)} characters")
    value = float(text)
    if not math.isfinite(value):
        return Resolved(Kind.FLOAT, None, "is not a finite number")
    return Resolved(Kind.FLOAT, value)


def quantity(text: str, family: str) -> float | None:
    """A number with a unit of the family (duration: seconds, size: bytes, count), or None if it is not written like one."""
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _UNITS_OF[family]:
        return None
    value = Fraction(match[1]) * _UNITS_OF[family][match[2]]  # exact: 0.07M is 70000
    if family != "duration" and value.denominator != 1:
        return None  # half a byte
    return float(value)


def percent(text: str) -> float | None:
    """`12.5%` as 0.125, or None."""
    match = _QUANTITY.fullmatch(text)
    return float(Fraction(match[1]) / 100) if match and match[2] == "%" else None


def written(value: float, family: str) -> str:
    """`value` as the file would say it, in the largest unit that shows it whole: 90 s is 90s, 120 s is 2m."""
    units = {"count": {"": 1}, "size": {}, "duration": {}}[family] | _UNITS_OF[family]
    for unit, factor in sorted(units.items(), key=lambda item: item[1], reverse=True):
        if value >= factor and value % factor == 0:
            return f"{float(value / factor):.0f}{unit}"
    smallest = min(units, key=lambda unit: units[unit])
    return f"{float(value / units[smallest]):g}{smallest}"
