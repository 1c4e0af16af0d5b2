"""The strict loader against the mistakes that people and attackers make. Every expected line is written out by hand."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.config.fields import Amount, Bounds, Count, Duration, Percent, ShareOrCount, Size, Text
from fairlane.config.source import MAX_BYTES, MAX_NODES, UnreadableFile
from fairlane.config.strict import load, load_file, load_located
from fairlane.errors import ConfigError


class Colour(Enum):
    RED = "red"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Detail:
    speed: Annotated[float, Percent(0, 1)]


@dataclass(frozen=True, slots=True)
class Inner:
    weight: Annotated[float, Bounds(0, 10, low_open=True)]
    name: str = ""


@dataclass(frozen=True, slots=True)
class Schema:
    port: Annotated[int, Bounds(1, 65535)] = 1
    flag: bool = True
    wait: Annotated[float, Duration(0, 3600)] = 1.0
    size: Annotated[int, Size(0, 1 << 20)] = 0
    count: Annotated[int, Count(1, 10_000_000)] = 1
    share: Annotated[float, Percent(0, 1)] = 0.0
    word: Annotated[str, Text(r"[a-z]+", "a word")] = "a"
    colour: Colour = Colour.RED
    day: datetime.date | None = None
    maybe: Annotated[int, Bounds(0)] | None = None
    either: Annotated[int | None, Bounds(0, 9)] = None
    inner: Inner | None = None
    mood: Colour | Detail = Colour.RED
    pool: Annotated[Amount | None, ShareOrCount(Percent(0, 0.5), Count(1, 1000))] = None
    items: tuple[Inner, ...] = ()
    table: Mapping[Annotated[str, Text(r"[a-z]{1,3}", "one to three letters")], Inner] = field(default_factory=dict)


def findings(text: str | bytes) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text if isinstance(text, bytes) else text.encode(), "f", Schema)
    return list(caught.value.findings)


def test_every_kind_of_value_is_read_in_its_own_unit() -> None:
    text = """
port: 80
flag: false
wait: 250ms
size: 1.5KiB
count: 4M
share: 12.5%
word: no
colour: off
day: 2027-01-31
maybe: null
either: 3
inner: {weight: 2}
mood: {speed: 5%}
pool: 20%
items: [{weight: 0.5, name: "12:30"}]
table: {a: {weight: 1e0}}
"""
    assert load(text.encode(), "f", Schema) == Schema(
        80, False, 0.25, 1536, 4_000_000, 0.125, "no", Colour.OFF, datetime.date(2027, 1, 31), None, 3,
        Inner(2.0), Detail(0.05), Amount(share=0.2), (Inner(0.5, "12:30"),), {"a": Inner(1.0)},
    )  # fmt: skip


def test_a_byte_order_mark_is_accepted() -> None:
    assert load(b"\xef\xbb\xbfport: 5", "f", Schema).port == 5


def test_every_mistake_is_reported_at_once_in_the_order_of_the_file() -> None:
    text = "prot: 5\nport: 0\ninner: {}\nport: 7\nitems: 3\n"
    assert findings(text) == [
        'f:1:1: prot: unknown key, did you mean "port"?',
        'f:2:7: port: "0" is out of bounds: a whole number from 1 to 65535 is allowed',
        "f:3:8: inner.weight: is missing: a number is needed",
        "f:4:1: port: duplicate key: it is already given at 2:1",
        'f:5:8: items: "3" is a single value: a list is needed ([] for none)',
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("port: 014", 'port: "014" has a leading zero'),
        ("port: 1_000", 'port: "1_000" is a text'),
        ("port: 12:30", 'port: "12:30" is a text'),
        ("port: 0x10", 'port: "0x10" is not decimal'),
        ("port: 1e3", 'port: "1e3" is a number'),
        ("port: '80'", 'port: "80" is a text (it is quoted)'),
        ("port: true", 'port: "true" is true or false'),
        ("port: " + "9" * 5000, "port: (a text of 5000 characters) has 5000 digits"),
        ("port:", "port: is empty"),
        ("flag: no", 'flag: "no" is a text: true or false is allowed'),
        ("flag: 1", 'flag: "1" is a whole number: true or false is allowed'),
        ("inner: {weight: 0}", 'inner.weight: "0" is out of bounds: a number above 0 up to 10 is allowed'),
        ("inner: {weight: -3}", 'inner.weight: "-3" is out of bounds'),
        ("inner: {weight: .nan}", 'inner.weight: ".nan" is not a finite number: a number above 0 up to 10 is allowed'),
        ("inner: {weight: .inf}", 'inner.weight: ".inf" is not a finite number'),
        ("inner: {weight: 1e400}", 'inner.weight: "1e400" is not a finite number'),
        ("inner: {weight: '2'}", 'inner.weight: "2" is a text (it is quoted)'),
        ("inner: {weight: 1, nmae: x}", 'inner.nmae: unknown key, did you mean "name"?'),
        ("wait: 10", 'wait: "10" has no unit: a duration such as 250ms'),
        ("wait: 2h", 'wait: "2h" is out of bounds'),
        ("wait: lots", 'wait: "lots" is a text'),
        ("size: 2MiB", 'size: "2MiB" is out of bounds'),
        ("size: 0.0001KiB", 'size: "0.0001KiB" is a text'),
        ("count: 1.5", 'count: "1.5" is a number'),
        ("share: 101%", 'share: "101%" is out of bounds: a percentage from 0% to 100% is allowed'),
        ("share: 0.5", 'share: "0.5" has no unit'),
        ("word: 5", 'word: "5" is a whole number, not a text'),
        ("word: A", 'word: "A" is not allowed: a word is needed'),
        ("colour: blue", 'colour: "blue" is unknown: one of red, off is allowed'),
        ("colour: rede", 'colour: "rede" is unknown, did you mean "red"?'),
        ("mood: blue", 'mood: "blue" is unknown: one of red, off is allowed'),
        ("mood: {speed: 101%}", 'mood.speed: "101%" is out of bounds'),
        ("mood: []", "mood: is a list: one of red, off or a mapping with the keys speed is needed"),
        ("mood:", "mood: is empty: one of red, off or a mapping with the keys speed is needed"),
        ("pool: 51%", 'pool: "51%" is out of bounds: a percentage from 0% to 50% is allowed'),
        (
            "pool: 2k",
            'pool: "2k" is out of bounds: a whole number or one such as 100k or 4M, from 1 to 1k, or',
        ),
        (
            "pool: most",
            'pool: "most" is a text: a whole number or one such as 100k or 4M, from 1 to 1k, or a percentage from 0% to 50%',
        ),
        ("day: 2027-02-30", 'day: "2027-02-30" is not a date'),
        ("table: {abcd: {weight: 1}}", "table.abcd: is not one to three letters"),
        ("table: []", "table: is a list: a mapping is needed"),
        ("items: [{weight: 1}, 5]", 'items[1]: "5" is a single value: a mapping with the keys weight, name is needed'),
        ("<<: {port: 1}", '"<<": unknown key'),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(text: str, line: str) -> None:
    assert [found.split(": ", 1)[1].startswith(line) for found in findings(text)] == [True]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "f:1:1: is empty"),
        ("# only a comment\n", "f:1:1: is empty"),
        ("- 1", "f:1:1: is a list: a mapping with the keys port"),
        ("just text", 'f:1:1: "just text" is a single value'),
        ("port: 1\n\tflag: true", "f:2:1: is not YAML: found character a tab"),
        ("items: [", "f:1:9: is not YAML"),
        ("port: 1\n---\nport: 2", "f:2:1: a second document starts here"),
        ("word: é".encode("latin-1"), "f:1:7: is not UTF-8: byte 0xe9"),
        ("port: 1\nword: \0", "f:2:7: contains a NUL byte"),
        ('word: "\\x00"', "f:1:7: word: contains a control character"),
        ("word: \x07", "f:1:7: contains the control character U+0007"),
        ("word: !!python/object/apply:os.system [id]", "f:1:7: word: tags (!) are not allowed"),
        ("word: !env HOME", "f:1:7: word: tags (!) are not allowed"),
        ("word: &a b", "f:1:7: word: anchors and aliases"),
        ("items: &a [*a]", "f:1:8: items: anchors and aliases"),
        ("? [a]\n: 1", "f:1:3: a key must be a text"),
        ("[" * 5000, "f:1:33: is nested too deeply: at most 32 levels"),
        ("- " * 5000, "f:1:65: is nested too deeply: at most 32 levels"),
        ("x: [" * 5000, "f:1:65: is nested too deeply: at most 32 levels"),
        (b"x" * (50 << 20), f"f: is larger than 1 MiB: at most {MAX_BYTES} bytes"),
        ("[" + "1," * MAX_NODES + "]", "f:1:200000: [99999]: too many values"),
        ("port: 1\nport: 2\n- a", "f:2:1: port: duplicate key"),
    ],
)
def test_the_gate_refuses_before_anything_is_constructed(text: str | bytes, line: str) -> None:
    assert findings(text)[0].startswith(line)


def test_alias_bombs_are_refused_at_their_first_anchor() -> None:
    bomb = "a: &a [x,x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)},*{chr(97 + i)}]\n" for i in range(20))
    assert findings(bomb) == ["f:1:4: a: anchors and aliases (&, *) are not allowed: write the value out"]


def test_findings_are_capped_and_counted() -> None:
    found = findings("".join(f"key{i}: 1\n" for i in range(70)))
    assert (len(found), found[-1]) == (51, "... and 20 more")


def test_a_text_that_could_be_a_secret_is_never_repeated() -> None:
    secret = "fl_aB3dE6gH9jK2mN5pQ8sT1vW4yZ7"
    told = "\n".join([*findings(f"colour: {secret}"), *findings(f"{secret}: 1"), *findings(f"port: {secret}")])
    assert secret not in told


def test_positions_are_known_for_checks_across_fields() -> None:
    located = load_located(b"port: 1\nitems:\n  - weight: 1\n  - weight: 2\n", "f", Schema)
    assert located.finding(("items", 1, "weight"), "is odd") == "f:4:5: items[1].weight: is odd"
    assert str(located.mark("items", 1, "name")) == "4:5"


def test_a_pipe_a_folder_and_a_missing_file_are_refused_without_waiting(tmp_path: Path) -> None:
    import os

    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    told = []
    for path in (fifo, tmp_path, tmp_path / "none", Path("/dev/null")):
        with pytest.raises(UnreadableFile) as caught:
            load_file(path, Schema)
        told.append(str(caught.value).removeprefix(f"{path}: "))
    assert told == [
        "is not a regular file",
        "is a directory, not a file",
        "cannot be read: No such file or directory",
        "is not a regular file",
    ]


def test_it_needs_no_pydantic() -> None:
    assert not any(name.split(".")[0] == "pydantic" for name in vars(sys.modules["fairlane.config.strict"]))


@given(st.one_of(st.binary(max_size=300), st.text(alphabet="abport:[]{}-&*!%'\"\n \t#|>?,0189.", max_size=200).map(str.encode)))
def test_any_bytes_give_a_schema_or_findings_with_the_files_name(text: bytes) -> None:
    try:
        outcome: object = load(text, "f", Schema)
    except ConfigError as error:
        outcome = error
        assert all(line.startswith(("f:", "...")) for line in error.findings)
    assert isinstance(outcome, Schema | ConfigError)


@given(st.integers(-(10**45), 10**45))
def test_an_integer_is_read_exactly_when_it_is_within_bounds(number: int) -> None:
    try:
        read: int | None = load(f"port: {number}".encode(), "f", Schema).port
    except ConfigError:
        read = None
    assert read == (number if 1 <= number <= 65535 else None)
