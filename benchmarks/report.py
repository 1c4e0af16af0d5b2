"""What every benchmark prints and writes: a table for people, and with --json FILE one document with the environment, the
checks (measured against required) and the rows. On a terminal rich draws the tables, if it is installed; else they are text."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairlane.bench.results import Check, write_document

try:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
except ImportError:  # a GPU machine with torch and triton alone can still measure kernels
    RICH = False
else:
    RICH = True


class PlainConsole:
    """The two things that benchmarks do with a rich console, without rich."""

    def print(self, text: object = "") -> None:
        print(text, flush=True)

    @contextmanager
    def status(self, text: str) -> Iterator[PlainConsole]:
        self.update(text)
        yield self

    def update(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


# Where rich is missing nobody asks for more than PlainConsole has.
console: Console = Console(width=None if sys.stdout.isatty() else 150) if RICH else PlainConsole()  # type: ignore[assignment]


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table whose columns are the keys of the first row."""
    if rows:
        right = {name for name, value in rows[0].items() if not isinstance(value, str)}
        _print_table(title, list(rows[0]), [[_text(row.get(name)) for name in rows[0]] for row in rows], right)


def print_checks(checks: Sequence[Check]) -> None:
    if not checks:
        return
    header = ["id", "what", "measured", "required", ""]
    lines = [[c.id, c.what, f"{_text(c.measured)} {c.unit}", c.required, "pass" if c.passed else "FAIL"] for c in checks]
    if any(check.worst is not None for check in checks):
        header.insert(3, "worst")
        for line, check in zip(lines, checks, strict=True):
            line.insert(3, "" if check.worst is None else _text(check.worst))
    _print_table("checks", header, lines, set())


def write_json(path: Path | None, checks: Sequence[Check], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the document, if a path was asked for."""
    if path is None:
        return
    write_document(path, checks, rows)
    console.print(f"written: {path}")


def write_csv(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the rows, if a path was asked for; columns in the order in which rows first have them."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    console.print(f"written: {path}")


_COLOURS = {"pass": "green", "good": "green", "FAIL": "red", "WRONG": "red", "ERROR": "red"}


def _print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]], right: set[str]) -> None:
    if not RICH or not sys.stdout.isatty():
        print(_plain_table(title, header, lines, right), flush=True)
        return
    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, justify="right" if name in right else "left")
    for line in lines:
        table.add_row(*(f"[{_COLOURS[cell]}]{cell}[/]" if cell in _COLOURS else escape(cell) for cell in line))
    console.print(table)


def _plain_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]], right: set[str]) -> str:
    widths = [max(len(line[at]) for line in (header, *lines)) for at in range(len(header))]
    ruler = ["-" * width for width in widths]
    shown = [
        "  ".join(
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(header, line, widths, strict=True)
        )
        for line in (header, ruler, *lines)
    ]
    return "\n".join(line.rstrip() for line in (title, *shown, ""))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
