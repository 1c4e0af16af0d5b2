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

from fairlane.config.fields import Bounds, Count, Duration, Percent, Size, Text

Marker = Bounds | Duration | Size | Count | Percent | Text
_MARKERS = (Bounds, Duration, Size, Count, Percent, Text)
_SCALARS = (bool, int, float, str, datetime.date)


@dataclass(frozen=True, slots=True)
class ScalarShape:
    """A value of `python` type (bool, int, float, str, date), narrowed by a marker."""

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
class Field:
    name: str
    shape: Shape
    required: bool


@dataclass(frozen=True, slots=True)
class ObjectShape:
    """The fields of a dataclass, and no others."""

    type: Any  # a dataclass
    nullable: bool = False

    @property
    def fields(self) -> Mapping[str, Field]:
        return _fields_of(self.type)


Shape = ScalarShape | EnumShape | ListShape | MapShape | ObjectShape


def shape_of(annotation: Any) -> Shape:
    """The shape of a type. Raises TypeError for one that no file can express: a mistake in our schema, not in a file."""
    return _shape(annotation, None, False)


@functools.cache
def _fields_of(schema: Any) -> Mapping[str, Field]:
    hints = typing.get_type_hints(schema, include_extras=True)
    out = {}
    for field in dataclasses.fields(schema):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        out[field.name] = Field(field.name, shape_of(hints[field.name]), required)
    return out


def _shape(annotation: Any, marker: Marker | None, nullable: bool) -> Shape:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        own = [m for m in arguments[1:] if isinstance(m, _MARKERS)]
        return _shape(arguments[0], own[0] if own else marker, nullable)
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in arguments if a is not types.NoneType]
        if len(rest) != 1:
            raise TypeError(f"a union of several types cannot be read: {annotation}")
        return _shape(rest[0], marker, nullable or len(rest) < len(arguments))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return ListShape(_shape(arguments[0], None, False), nullable)
    if origin in (dict, Mapping):
        return MapShape(_key(arguments[0]), _shape(arguments[1], None, False), nullable)
    return _named_shape(annotation, marker, nullable)


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
