"""Flags over a loaded configuration: the same types and bounds as in the file, and a message that names the flag."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from fairlane.config.convert import BadValue, convert
from fairlane.config.schema import EnumShape, ObjectShape, ScalarShape, shape_of
from fairlane.config.source import Mark, Scalar
from fairlane.errors import ConfigError

T = TypeVar("T")


def override(config: T, flags: Mapping[str, str | None]) -> T:
    """`config`, a schema's instance, with the flags that are given (not None), by field name and as they were written.

    Raises ConfigError with a line for each bad one.

    Raises TypeError for a flag whose field is not a single value: a mistake in our command line, not in its use.
    """
    shape = shape_of(type(config))
    if not isinstance(shape, ObjectShape):
        raise TypeError(f"{type(config)} is not a schema")
    values: dict[str, Any] = {}
    findings = []
    for name, flag in flags.items():
        if flag is None:
            continue
        field = shape.fields[name].shape
        if not isinstance(field, ScalarShape | EnumShape):
            raise TypeError(f"{name} cannot be a flag")
        try:
            # A text field takes any text, also one that a file would have to quote.
            plain = isinstance(field, EnumShape) or field.python is not str
            values[name] = convert(Scalar(flag, plain, Mark(1, 1)), field)
        except BadValue as error:
            findings.append(f"--{name.replace('_', '-')} (or FAIRLANE_{name.upper()}): {error}")
    if findings:
        raise ConfigError(findings)
    return dataclasses.replace(config, **values)  # type: ignore[type-var]
