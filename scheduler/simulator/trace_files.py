"""Reading trace files line by line: compressed or not, with every complaint at its line."""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fairlane.scheduler.simulator.errors import SimulationInputError

# More is no count of tokens, and a prompt has to fit into memory.
MAX_COUNT, MAX_PROMPT_TOKENS = 2**40, 10_000_000


def lines(path: Path) -> list[str]:
    """The text of a file, or of a .gz; a byte order mark and empty lines at the end are nothing. Raises SimulationInputError."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except OSError as error:
        raise SimulationInputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (EOFError, zlib.error):
        raise SimulationInputError(f"{path}: is a damaged gzip file") from None
    except UnicodeDecodeError:
        raise SimulationInputError(f"{path}: is not UTF-8 text") from None
    found = text.rstrip().splitlines()
    if not found:
        raise SimulationInputError(f"{path}: is empty")
    return found


class Row:
    """One line of a trace, with its fields by name."""

    def __init__(self, path: Path, line: int, values: dict[str, Any]) -> None:
        self._where = f"{path}:{line}"
        self._values = values

    def wrong(self, field: str, needed: str) -> NoReturn:
        raise SimulationInputError(f"{self._where}: {field}: {self._values.get(field)!r}: {needed}")

    def text(self, field: str) -> str:
        value = self._values.get(field)
        if not isinstance(value, str) or not value.strip():
            self.wrong(field, "a name is needed")
        return value.strip()

    def number(self, field: str, *, least: float = 0.0) -> float:
        """A finite number, at least `least`."""
        given = self._values.get(field)
        if given is None or isinstance(given, bool):
            self.wrong(field, "a number is needed")
        try:
            value = float(given)
        except OverflowError:
            value = math.inf
        except (TypeError, ValueError):
            self.wrong(field, "a number is needed")
        if not math.isfinite(value) or value < least:
            self.wrong(field, f"at least {least:g} is needed")
        return value

    def count(self, field: str, *, least: int = 1, most: int = MAX_COUNT) -> int:
        """A whole number from `least` to `most`."""
        value = self.number(field, least=least)
        if value != int(value):
            self.wrong(field, "a whole number is needed")
        if value > most:
            self.wrong(field, f"at most {most} is allowed")
        return int(value)

    def prompt(self, field: str) -> int:
        """The tokens of a prompt."""
        return self.count(field, most=MAX_PROMPT_TOKENS)

    def ids(self, field: str) -> tuple[int, ...]:
        """A list of whole numbers; none if it is not there."""
        value = self._values.get(field, [])
        if not isinstance(value, list) or not all(isinstance(one, int) and one >= 0 for one in value):
            self.wrong(field, "a list of whole numbers, at least 0, is needed")
        return tuple(value)

    def has(self, field: str) -> bool:
        return self._values.get(field) is not None


def csv_rows(path: Path, text: Sequence[str], columns: Sequence[str]) -> Iterator[Row]:
    """Rows below a header that names at least these columns."""
    header = text[0].split(",")
    missing = [column for column in columns if column not in header]
    if missing:
        raise SimulationInputError(f"{path}:1: there is no column {missing[0]}")
    for number, cells in _cells(path, text[1:]):
        if len(cells) != len(header):
            raise SimulationInputError(f"{path}:{number}: {len(cells)} fields: the header names {len(header)}")
        yield Row(path, number, dict(zip(header, cells, strict=True)))


def _cells(path: Path, text: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line with its number; the first is line 2. A quoted cell ends in its line."""
    for number, line in enumerate(text, 2):
        try:
            yield number, next(csv.reader([line], strict=True), [])
        except csv.Error as error:
            raise SimulationInputError(f"{path}:{number}: is no line of a CSV file: {error}") from None


def json_rows(path: Path, text: Sequence[str]) -> Iterator[Row]:
    """One JSON object a line."""
    for number, line in enumerate(text, 1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise SimulationInputError(f"{path}:{number}: is not a JSON object")
        yield Row(path, number, values)
