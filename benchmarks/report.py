"""What every benchmark prints and writes: a table for people, and with --json FILE one document with the environment, the
checks (measured against required) and the rows."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 150)


@dataclass(frozen=True)
class Check:
    """One figure that must hold. `passed` is decided by whoever measured it."""

    id: str
    what: str
    measured: float
    required: str
    unit: str
    passed: bool


def environment() -> dict[str, Any]:
    """The machine and the versions that the figures depend on."""
    packages = {}
    for name in ("torch", "transformers", "grpcio", "numpy", "fairlane"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "packages": packages,
        "command": " ".join(sys.argv),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table whose columns are the keys of the first row."""
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
    for row in rows:
        table.add_row(*(_text(row.get(name)) for name in rows[0]))
    console.print(table)


def print_checks(checks: Sequence[Check]) -> None:
    table = Table(title="checks", title_justify="left")
    for name in ("id", "what", "measured", "required", ""):
        table.add_column(name)
    for check in checks:
        verdict = "[green]pass[/]" if check.passed else "[red]FAIL[/]"
        table.add_row(check.id, check.what, f"{_text(check.measured)} {check.unit}", check.required, verdict)
    console.print(table)


def write_json(path: Path | None, checks: Sequence[Check], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the document, if a path was asked for."""
    if path is None:
        return
    plain = [{("pass" if key == "passed" else key): value for key, value in asdict(check).items()} for check in checks]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"env": environment(), "checks": plain, "rows": list(rows)}, indent=1) + "\n")
    console.print(f"written: {path}")


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
