"""The JSON Schema of a configuration file, for editors: made from the same shapes that the strict loader binds to, so that
neither can know a key that the other does not. Checks across two places of a file are beyond it; the loader has them."""

from __future__ import annotations

import datetime
from enum import Enum
from typing import Any

from fairlane.config.fields import Amount, Bounds, Count, Duration, Percent, ShareOrCount, Size, Text
from fairlane.config.schema import EitherShape, EnumShape, Field, ListShape, MapShape, ObjectShape, ScalarShape, Shape, shape_of

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NUMBER = r"[0-9]{1,15}(\.[0-9]{1,9})?"
_DURATION = rf"^{_NUMBER}(ms|s|m|h|d)$"
_SIZE = rf"^{_NUMBER}(B|KiB|MiB|GiB|TiB)$"
_COUNT = rf"^{_NUMBER}[kMG]$"
_PERCENT = rf"^{_NUMBER}%$"
_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"

Json = dict[str, Any]


def json_schema(schema: type[Any], title: str) -> Json:
    """The schema of a file that `load(text, name, schema)` accepts, as plain values. Mappings are under $defs by their class."""
    definitions: dict[str, Json] = {}
    root = _of(shape_of(schema), definitions)
    return {"$schema": _DIALECT, "title": title, **root, "$defs": dict(sorted(definitions.items()))}


def _of(shape: Shape, definitions: dict[str, Json]) -> Json:
    found = _without_null(shape, definitions)
    return {"anyOf": [found, {"type": "null"}]} if shape.nullable else found


def _without_null(shape: Shape, definitions: dict[str, Json]) -> Json:
    match shape:
        case EnumShape():
            return {"enum": [member.value for member in shape.enum]}
        case ListShape():
            return {"type": "array", "items": _of(shape.item, definitions)}
        case MapShape():
            names = {"pattern": f"^(?:{shape.key.pattern})$"}
            return {"type": "object", "propertyNames": names, "additionalProperties": _of(shape.value, definitions)}
        case EitherShape():
            return {"anyOf": [_of(shape.short, definitions), _of(shape.full, definitions)]}
        case ObjectShape():
            return _reference(shape, definitions)
        case ScalarShape():
            return _scalar(shape)


def _reference(shape: ObjectShape, definitions: dict[str, Json]) -> Json:
    name: str = shape.type.__name__
    if name not in definitions:
        definitions[name] = {}  # found by whatever of it refers back to it
        definitions[name] = {
            "type": "object",
            "properties": {field.name: _property(field, definitions) for field in shape.fields.values()},
            "required": [field.name for field in shape.fields.values() if field.required],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}


def _property(field: Field, definitions: dict[str, Json]) -> Json:
    found = _of(field.shape, definitions)
    text = field.doc.text + ("" if field.doc.enforced else " Not enforced yet.")
    if isinstance(field.default, str | bool):
        found = found | {"default": field.default}
    if isinstance(field.default, Enum):
        found = found | {"default": field.default.value}
    return {"description": text.strip(), **found} if text.strip() else found


def _scalar(shape: ScalarShape) -> Json:
    match shape.marker:
        case Duration():
            return {"type": "string", "pattern": _DURATION}
        case Size():
            return {"type": "string", "pattern": _SIZE}
        case Percent():
            return {"type": "string", "pattern": _PERCENT}
        case Count() as count:
            return {"anyOf": [_counted(count), {"type": "string", "pattern": _COUNT}]}
        case ShareOrCount() as marker:
            texts = [{"type": "string", "pattern": pattern} for pattern in (_COUNT, _PERCENT)]
            return {"anyOf": [_counted(marker.count), *texts]}
        case Bounds() as bounds:
            return {"type": "integer" if shape.python is int else "number", **_bounds(bounds)}
        case Text() as text:
            return {"type": "string", "pattern": f"^(?:{text.pattern})$"}
        case None:
            return _plain(shape.python)


def _plain(python: type) -> Json:
    if python is datetime.date:
        return {"type": "string", "pattern": _DATE}
    if python is Amount:
        raise TypeError("an Amount needs a ShareOrCount marker")
    return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[python]}


def _counted(count: Count) -> Json:
    return {"type": "integer", "minimum": count.low, "maximum": count.high}


def _bounds(bounds: Bounds) -> Json:
    out: Json = {}
    if bounds.low is not None:
        out["exclusiveMinimum" if bounds.low_open else "minimum"] = bounds.low
    if bounds.high is not None:
        out["maximum"] = bounds.high
    return out
