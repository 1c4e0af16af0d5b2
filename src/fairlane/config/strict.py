"""The strict loader: a YAML text and a dataclass in, the dataclass's instance out, or every mistake at once, each as
`file:line:col: path: what is wrong: what is allowed`. Unknown keys, wrong types and values out of bounds never pass.

The gate is source.py, the meaning of scalars scalars.py, what a schema allows schema.py; here a tree is bound to a schema.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from fairlane.config.convert import BadValue, convert
from fairlane.config.fields import Amount
from fairlane.config.scalars import Kind, resolve
from fairlane.config.schema import EitherShape, EnumShape, Field, ListShape, MapShape, ObjectShape, ScalarShape, Shape, shape_of
from fairlane.config.source import (
    MAX_FINDINGS,
    Entries,
    Entry,
    Items,
    Mark,
    Node,
    Scalar,
    Where,
    finding,
    in_order,
    parse,
    read_file,
)
from fairlane.errors import ConfigError
from fairlane.wording import echo, suggestion

T = TypeVar("T")

__all__ = ["Located", "load", "load_file", "load_located"]


@dataclass(frozen=True, slots=True)
class Located(Generic[T]):
    """A loaded value and where each of its parts is written, for checks across fields.

    `marks` maps a path such as ("tiers", "gold", "weight") to the position of that key (of the item, inside a list).
    """

    value: T
    name: str
    marks: Mapping[Where, Mark]

    def mark(self, *path: str | int) -> Mark | None:
        """The position of `path`, or of the nearest part above it that the file has."""
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path)

    def finding(self, path: Where, message: str) -> str:
        """A line like the loader's own."""
        return finding(self.name, self.mark(*path), path, message)


def load(text: bytes, name: str, schema: type[T]) -> T:
    """The schema's instance in `text`; `name` is what messages call the file. Raises ConfigError with every finding."""
    return load_located(text, name, schema).value


def load_file(path: str | Path, schema: type[T]) -> T:
    """load() of a file. Raises UnreadableFile (a ConfigError) if there is nothing to check."""
    return load(read_file(path), str(path), schema)


def load_located(text: bytes, name: str, schema: type[T]) -> Located[T]:
    """load() with positions."""
    root, duplicates = parse(text, name)
    binder = _Binder(name)
    binder.findings += duplicates
    value: Any = binder.bind(root, shape_of(schema), ())
    if binder.findings:
        raise ConfigError(in_order(binder.findings))
    return Located(value, name, binder.marks)


class _Failed:
    """Stands for a value that has a finding; never leaves this module."""


_FAILED = _Failed()


class _Binder:
    """Walks nodes and shapes together; collects findings and positions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.findings: list[tuple[Mark, str]] = []
        self.marks: dict[Where, Mark] = {}

    def bind(self, node: Node, shape: Shape, path: Where) -> Any:
        """The value, or _FAILED after adding a finding."""
        self.marks.setdefault(path, node.mark)
        if isinstance(node, Scalar) and resolve(node).kind is Kind.NULL:
            return None if shape.nullable else self._fail(node.mark, path, f"is empty: {_needed(shape)}")
        match shape:
            case ObjectShape():
                return self._bind_object(node, shape, path)
            case MapShape():
                return self._bind_map(node, shape, path)
            case ListShape():
                return self._bind_list(node, shape, path)
            case EitherShape():
                return self._bind_either(node, shape, path)
            case _:
                return self._bind_scalar(node, shape, path)

    def _bind_object(self, node: Node, shape: ObjectShape, path: Where) -> Any:
        if not isinstance(node, Entries):
            return self._wrong_kind(node, shape, path)
        fields = shape.fields
        values: dict[str, Any] = {}
        for key, entry in node.entries.items():
            if key in fields:
                self.marks[(*path, key)] = entry.mark
                values[key] = self.bind(entry.value, fields[key].shape, (*path, key))
            else:
                self._unknown(key, entry, fields, path)
        missing = [f.name for f in fields.values() if f.required and f.name not in values]
        for name in missing:
            self._fail(node.mark, (*path, name), f"is missing: {_needed(fields[name].shape)}")
        if missing or _FAILED in values.values():
            return _FAILED
        return shape.type(**values)

    def _bind_map(self, node: Node, shape: MapShape, path: Where) -> Any:
        if not isinstance(node, Entries):
            return self._wrong_kind(node, shape, path)
        values: dict[str, Any] = {}
        for key, entry in node.entries.items():
            self.marks[(*path, key)] = entry.mark
            if not re.fullmatch(shape.key.pattern, key):
                self._fail(entry.mark, (*path, key), f"is not {shape.key.what}")
            values[key] = self.bind(entry.value, shape.value, (*path, key))
        return _FAILED if _FAILED in values.values() else values

    def _bind_list(self, node: Node, shape: ListShape, path: Where) -> Any:
        if not isinstance(node, Items):
            return self._wrong_kind(node, shape, path)
        values = tuple(self.bind(item, shape.item, (*path, index)) for index, item in enumerate(node.items))
        return _FAILED if _FAILED in values else values

    def _bind_either(self, node: Node, shape: EitherShape, path: Where) -> Any:
        if isinstance(node, Items):
            return self._wrong_kind(node, shape, path)
        return self.bind(node, shape.full if isinstance(node, Entries) else shape.short, path)

    def _bind_scalar(self, node: Node, shape: ScalarShape | EnumShape, path: Where) -> Any:
        if not isinstance(node, Scalar):
            return self._wrong_kind(node, shape, path)
        try:
            return convert(node, shape)
        except BadValue as error:
            return self._fail(node.mark, path, str(error))

    def _unknown(self, key: str, entry: Entry, fields: Mapping[str, Field], path: Where) -> None:
        # difflib is quadratic in the word: after MAX_FINDINGS nobody sees the suggestion.
        near = suggestion(key, list(fields)) if len(self.findings) <= MAX_FINDINGS else ""
        allowed = near or f": the keys allowed here are {', '.join(fields)}"
        self._fail(entry.mark, (*path, key), f"unknown key{allowed}")

    def _wrong_kind(self, node: Node, shape: Shape, path: Where) -> _Failed:
        found = {Scalar: "a single value", Items: "a list", Entries: "a mapping"}[type(node)]
        if isinstance(node, Scalar):
            found = f"{echo(node.text)} is {found}" if node.text else "is a single value"
            return self._fail(node.mark, path, f"{found}: {_needed(shape)}")
        return self._fail(node.mark, path, f"is {found}: {_needed(shape)}")

    def _fail(self, mark: Mark, path: Where, message: str) -> _Failed:
        self.findings.append((mark, finding(self.name, mark, path, message)))
        return _FAILED


_WORDS: Mapping[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    datetime.date: "a date",
    Amount: "a percentage or a number",
}


def _needed(shape: Shape) -> str:
    match shape:
        case ObjectShape():
            return f"a mapping with the keys {', '.join(shape.fields)} is needed"
        case MapShape():
            return "a mapping is needed ({} for none)"
        case ListShape():
            return "a list is needed ([] for none)"
        case EnumShape():
            return f"one of {', '.join(str(member.value) for member in shape.enum)} is needed"
        case EitherShape():
            return f"{_needed(shape.short).removesuffix(' is needed')} or {_needed(shape.full)}"
        case ScalarShape(python=python):
            return f"{_WORDS[python]} is needed"
