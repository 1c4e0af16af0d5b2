"""Any schema of ours as a JSON Schema: the same bounds and units, judged by jsonschema against values that people write."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import pytest
from jsonschema import Draft202012Validator

from fairlane.config.fields import Amount, Bounds, Count, Doc, Duration, Percent, ShareOrCount, Size, Text, planned
from fairlane.config.json_schema import json_schema
from fairlane.config.schema import field_at, shape_of
from fairlane.gateway.config import GatewayConfig
from fairlane.worker.config import WorkerConfig


class Colour(Enum):
    RED = "red"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Detail:
    speed: Annotated[float, Percent(), Doc("How fast.")]


@dataclass(frozen=True, slots=True)
class Schema:
    port: Annotated[int, Bounds(1, 65535), Doc("Where it listens.")]
    weight: Annotated[float, Bounds(0, 9, low_open=True)] = 1.0
    flag: bool = True
    wait: Annotated[float, Duration(), planned("How long.")] = 1.0
    size: Annotated[int, Size()] = 0
    count: Annotated[int | None, Count(1, 1000)] = None
    share: Annotated[float, Percent()] = 0.0
    word: Annotated[str, Text(r"[a-z]+", "a word")] = "a"
    colour: Annotated[Colour, Doc("Which.")] = Colour.RED
    day: datetime.date | None = None
    pool: Annotated[Amount | None, ShareOrCount()] = None
    mood: Colour | Detail = Colour.RED
    items: tuple[Detail, ...] = ()
    table: Mapping[Annotated[str, Text(r"[a-z]{1,3}", "letters")], Detail] = field(default_factory=dict)


FOUND = json_schema(Schema, "title")
VALIDATOR = Draft202012Validator(FOUND)


def takes(**values: Any) -> bool:
    return bool(VALIDATOR.is_valid({"port": 1, **values}))


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("port", [1, 65535], [0, 65536, "80", 1.5, None, True]),
        ("weight", [0.5, 9], [0, -1, 10, "2"]),
        ("flag", [True], ["true", 1]),
        ("wait", ["250ms", "1.5s", "2d"], [10, "10", "soon", "s", "1w"]),
        ("size", ["64KiB", "1.5MiB"], [64, "64KB", "64"]),
        ("count", [1, 1000, "100k", None], [0, 1001, "lots", "100K", 1.5]),
        ("share", ["5%", "12.5%"], [0.05, "5", "5 %"]),
        ("word", ["abc"], ["ABC", "", 5]),
        ("colour", ["red", "off"], ["blue", False, None]),
        ("day", ["2027-01-31", None], ["31.1.2027", 2027]),
        ("pool", ["20%", "100k", 5, None], ["most", -1, 0.2]),
        ("mood", ["red", {"speed": "5%"}], ["blue", {"sped": "5%"}, {}, []]),
        ("items", [[], [{"speed": "5%"}]], [{}, [{}], ["x"]]),
        ("table", [{}, {"abc": {"speed": "5%"}}], [[], {"abcd": {"speed": "5%"}}, {"abc": 5}]),
    ],
)
def test_a_value_is_valid_where_the_loader_takes_it(name: str, good: list[Any], bad: list[Any]) -> None:
    assert ([value for value in good if not takes(**{name: value})], [value for value in bad if takes(**{name: value})]) == (
        [],
        [],
    )


def test_unknown_and_missing_keys_are_invalid() -> None:
    assert (VALIDATOR.is_valid({"port": 1}), VALIDATOR.is_valid({"port": 1, "prot": 2}), VALIDATOR.is_valid({})) == (
        True,
        False,
        False,
    )


def test_descriptions_and_defaults_are_told() -> None:
    properties = FOUND["$defs"]["Schema"]["properties"]
    told = [(properties[name].get("description"), properties[name].get("default")) for name in ("port", "wait", "colour", "flag")]
    assert told == [("Where it listens.", None), ("How long. Not enforced yet.", None), ("Which.", "red"), (None, True)]


@pytest.mark.parametrize("schema", [GatewayConfig, WorkerConfig])
def test_every_schema_of_ours_can_be_told(schema: type[Any]) -> None:
    found = json_schema(schema, "title")
    Draft202012Validator.check_schema(found)
    assert set(found["$defs"][schema.__name__]["properties"]) == set(schema.__dataclass_fields__)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (("port",), "port"),
        (("mood", "speed"), "speed"),
        (("items", 0, "speed"), "speed"),
        (("table", "abc", "speed"), "speed"),
        (("table", "abc"), None),
        (("items", 0), None),
        (("prot",), None),
        (("port", "more"), None),
        ((), None),
    ],
)
def test_the_field_that_a_path_names_is_found(path: tuple[str | int, ...], name: str | None) -> None:
    found = field_at(Schema, path)
    assert (found.name if found else None) == name


@pytest.mark.parametrize("annotation", [int | str, Detail | Schema, Colour | Detail | int, complex])
def test_what_no_file_can_express_is_a_mistake_in_the_schema(annotation: Any) -> None:
    with pytest.raises(TypeError):
        shape_of(annotation)
