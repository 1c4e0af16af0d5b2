"""What a schema (a frozen dataclass with the markers of fields.py) allows, as a small tree of shapes. The strict loader binds a
file to it; anything else that must know what is allowed (documentation, a JSON Schema) walks the same tree."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from fairlane.config.fields import Amount, Bounds, Count, Doc, Duration, Percent, ShareOrCount, Size, Text

Marker = Bounds | Duration | Size | Count | Percent | ShareOrCount | Text
_MARKERS = (Bounds, Duration, Size, Count, Percent, ShareOrCount, Text)
_SCALARS = (bool, int, float, str, datetime.date, Amount)
_NO_DOC = Doc("")


@dataclass(frozen=True, slots=True)
class ScalarShape:
    """A value of `python` type (bool, int, float, str, date, Amount), narrowed by a marker."""

    python: type
    marker: Marker | None = None
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class EnumShape:
    """One of the enum's values."""

    enum: type[Enum]
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class ListShape:
    item: Shape
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class MapShape:
    """Free keys, which are texts that match `key`."""

    key: Text
    value: Shape
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class EitherShape:
    """A single value, or a mapping that says the same in more detail."""

    short: ScalarShape | EnumShape
    full: ObjectShape
    nullable: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    shape: Shape
    required: bool
    default: Any = None  # of a field that is not required; None also for "none"
    doc: Doc = _NO_DOC


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """The fields of a dataclass, and no others."""

    type: Any  # a dataclass
    nullable: bool = False

    @property
    def fields(self) -> Mapping[str, Field]:
        return _fields_of(self.type)


Shape = ScalarShape | EnumShape | ListShape | MapShape | ObjectShape | EitherShape


def shape_of(annotation: Any) -> Shape:
    """The shape of a type. Raises TypeError for one that no file can express: a mistake in our schema, not in a file."""
    return _shape(annotation, None, False)


def field_at(schema: Any, path: tuple[str | int, ...]) -> Field | None:
    """The field of the schema that `path` in a file names; None for a map's own key, a list's item and what does not exist."""
    shape, found = shape_of(schema), None
    for part in path:
        found = None
        if isinstance(shape, EitherShape):
            shape = shape.full
        if isinstance(shape, ObjectShape) and part in shape.fields:
            found = shape.fields[str(part)]
            shape = found.shape
        elif isinstance(shape, MapShape):
            shape = shape.value
        elif isinstance(shape, ListShape):
            shape = shape.item
        else:
            return None
    return found


@functools.cache
def _fields_of(schema: Any) -> Mapping[str, Field]:
    hints = typing.get_type_hints(schema, include_extras=True)
    out = {}
    for field in dataclasses.fields(schema):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = None if field.default is dataclasses.MISSING else field.default
        out[field.name] = Field(field.name, shape_of(hints[field.name]), required, default, _doc(hints[field.name]))
    return out


def _doc(hint: Any) -> Doc:
    found = [part for part in typing.get_args(hint)[1:] if isinstance(part, Doc)] if typing.get_origin(hint) is Annotated else []
    return found[0] if found else _NO_DOC


def _shape(annotation: Any, marker: Marker | None, nullable: bool) -> Shape:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        own = [m for m in arguments[1:] if isinstance(m, _MARKERS)]
        return _shape(arguments[0], own[0] if own else marker, nullable)
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in arguments if a is not types.NoneType]
        nullable = nullable or len(rest) < len(arguments)
        return _shape(rest[0], marker, nullable) if len(rest) == 1 else _either(annotation, rest, marker, nullable)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return ListShape(_shape(arguments[0], None, False), nullable)
    if origin in (dict, Mapping):
        return MapShape(_key(arguments[0]), _shape(arguments[1], None, False), nullable)
    return _named_shape(annotation, marker, nullable)


def _either(annotation: Any, parts: list[Any], marker: Marker | None, nullable: bool) -> EitherShape:
    shapes = [_shape(part, marker, False) for part in parts]
    short = [shape for shape in shapes if isinstance(shape, ScalarShape | EnumShape)]
    full = [shape for shape in shapes if isinstance(shape, ObjectShape)]
    if len(shapes) != 2 or len(short) != 1 or len(full) != 1:
        raise TypeError(f"only one single value and one mapping can be told apart in a union: {annotation}")
    return EitherShape(short[0], full[0], nullable)


def _named_shape(annotation: Any, marker: Marker | None, nullable: bool) -> Shape:
    if annotation in _SCALARS:
        return ScalarShape(annotation, marker, nullable)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return EnumShape(annotation, nullable)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return ObjectShape(annotation, nullable)
    raise TypeError(f"not a type that a file can hold: {annotation}")


def _key(annotation: Any) -> Text:
    shape = shape_of(annotation)
    if not isinstance(shape, ScalarShape) or shape.python is not str:
        raise TypeError(f"keys are texts, not {annotation}")
    return shape.marker if isinstance(shape.marker, Text) else Text(r"[^\s].*", "a name")
