"""One scalar of a file into one value of the program: type, unit and bounds. Says exactly what is allowed when it refuses."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from typing import Any

from fairlane.config.fields import Amount, Bounds, Count, Duration, Percent, ShareOrCount, Size, Text
from fairlane.config.scalars import Kind, Resolved, percent, quantity, resolve, written
from fairlane.config.schema import EnumShape, ScalarShape
from fairlane.config.source import Scalar
from fairlane.wording import echo, suggestion


class BadValue(Exception):
    """The scalar is not what the shape allows; the text is `what: allowed`."""


def convert(scalar: Scalar, shape: ScalarShape | EnumShape) -> Any:
    """The scalar's value for the shape. Raises BadValue."""
    if isinstance(shape, EnumShape):
        return _enum(scalar, shape)
    marker = shape.marker
    match marker:
        case Duration():
            allowed = f"a duration such as 250ms, 10s, 5m, 1h or 2d, {_range(marker.min_s, marker.max_s, 'duration')}"
            return _unit(scalar, allowed, lambda text: quantity(text, "duration"), marker.min_s, marker.max_s)
        case Size():
            allowed = f"a size such as 64KiB or 4MiB, {_range(marker.min_bytes, marker.max_bytes, 'size')}"
            return int(_unit(scalar, allowed, lambda text: quantity(text, "size"), marker.min_bytes, marker.max_bytes))
        case Percent():
            allowed = f"a percentage from {marker.low * 100:g}% to {marker.high * 100:g}%"
            return _unit(scalar, allowed, percent, marker.low, marker.high)
        case Count():
            return _count(scalar, marker)
        case ShareOrCount():
            return _amount(scalar, marker)
    if shape.python in (int, float):
        return _number(scalar, shape.python, marker if isinstance(marker, Bounds) else Bounds())
    if shape.python is bool:
        found = resolve(scalar)
        return found.value if found.kind is Kind.BOOL else _refuse(scalar, found, "true or false")
    if shape.python is datetime.date:
        return _date(scalar)
    return _text(scalar, marker if isinstance(marker, Text) else Text())


def _refuse(scalar: Scalar, found: Resolved, allowed: str) -> Any:
    if found.problem:
        raise BadValue(f"{echo(scalar.text)} {found.problem}: {allowed} is allowed")
    quoted = "" if scalar.plain else " (it is quoted)"
    raise BadValue(f"{echo(scalar.text)} is {found.kind.value}{quoted}: {allowed} is allowed")


def _outside(scalar: Scalar, allowed: str) -> Any:
    raise BadValue(f"{echo(scalar.text)} is out of bounds: {allowed} is allowed")


def _enum(scalar: Scalar, shape: EnumShape) -> Any:
    for member in shape.enum:
        if scalar.text == str(member.value):
            return member
    known = [str(member.value) for member in shape.enum]
    # Short words are soon alike, and the list is short too.
    allowed = suggestion(scalar.text, known, 0.75) or f": one of {', '.join(known)} is allowed"
    raise BadValue(f"{echo(scalar.text)} is unknown{allowed}")


def _number(scalar: Scalar, python: type, bounds: Bounds) -> Any:
    allowed = _in_words(python, bounds)
    found = resolve(scalar)
    kinds = (Kind.INT,) if python is int else (Kind.INT, Kind.FLOAT)
    if found.kind not in kinds or found.problem:
        return _refuse(scalar, found, allowed)
    value = found.value
    if not isinstance(value, int | float):
        return _refuse(scalar, found, allowed)
    too_low = bounds.low is not None and (value < bounds.low or (bounds.low_open and value == bounds.low))
    if too_low or (bounds.high is not None and value > bounds.high):
        return _outside(scalar, allowed)
    return python(value)


def _in_words(python: type, bounds: Bounds) -> str:
    noun = "a whole number" if python is int else "a number"
    low = "" if bounds.low is None else f" {'above' if bounds.low_open else 'from'} {_plain(bounds.low)}"
    high = "" if bounds.high is None else f" {'to' if low and not bounds.low_open else 'up to'} {_plain(bounds.high)}"
    if low and not high and not bounds.low_open:
        return f"{noun} of at least {_plain(bounds.low or 0)}"
    return noun + low + high


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _range(low: float, high: float, family: str) -> str:
    return f"from {written(low, family)} to {written(high, family)}"


def _unit(scalar: Scalar, allowed: str, read: Callable[[str], float | None], low: float, high: float) -> float:
    found = resolve(scalar)
    if found.kind in (Kind.INT, Kind.FLOAT) and not found.problem:
        raise BadValue(f"{echo(scalar.text)} has no unit: {allowed} is allowed")
    value = read(scalar.text) if found.kind is Kind.TEXT else None
    if value is None:
        return float(_refuse(scalar, found, allowed))
    return value if low <= value <= high else float(_outside(scalar, allowed))


def _count(scalar: Scalar, marker: Count) -> int:
    allowed = f"a whole number or one such as 100k or 4M, {_range(marker.low, marker.high, 'count')},"
    found = resolve(scalar)
    value: float | None = None
    if found.kind is Kind.INT and not found.problem and isinstance(found.value, int):
        value = found.value
    elif found.kind is Kind.TEXT and scalar.plain:
        value = quantity(scalar.text, "count")
    if value is None:
        return int(_refuse(scalar, found, allowed))
    return int(value) if marker.low <= value <= marker.high else int(_outside(scalar, allowed))


def _amount(scalar: Scalar, marker: ShareOrCount) -> Amount:
    if scalar.text.endswith("%"):
        return Amount(share=convert(scalar, ScalarShape(float, marker.share)))
    try:
        return Amount(count=_count(scalar, marker.count))
    except BadValue as error:
        share = f"a percentage from {marker.share.low * 100:g}% to {marker.share.high * 100:g}%"
        raise BadValue(str(error).replace(" is allowed", f" or {share} is allowed")) from None


def _date(scalar: Scalar) -> datetime.date:
    try:
        if re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", scalar.text):
            return datetime.date.fromisoformat(scalar.text)
    except ValueError:
        pass
    raise BadValue(f"{echo(scalar.text)} is not a date: a date such as 2027-01-31 is allowed")


def _text(scalar: Scalar, marker: Text) -> str:
    found = resolve(scalar)
    if found.kind is not Kind.TEXT:
        raise BadValue(f"{echo(scalar.text)} is {found.kind.value}, not a text: {marker.what} is allowed; write it in quotes")
    if not re.fullmatch(marker.pattern, scalar.text):
        raise BadValue(f"{echo(scalar.text)} is not allowed: {marker.what} is needed")
    return scalar.text
