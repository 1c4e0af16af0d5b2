"""What a benchmark leaves behind: one JSON document with the environment, the checks (measured against required) and the rows."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """One figure that must hold. `passed` is decided by whoever measured it. worst: of the runs that `measured` is a mean of."""

    id: str
    what: str
    measured: float
    required: str
    unit: str
    passed: bool
    worst: float | None = None


def environment() -> dict[str, Any]:
    """The machine and the versions that the figures depend on."""
    packages: dict[str, str | None] = {}
    for name in ("torch", "triton", "transformers", "grpcio", "numpy", "fairlane"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": nvidia_smi("name", "driver_version"),
        "packages": packages,
        "command": " ".join(sys.argv),
    }


def nvidia_smi(*fields: str) -> list[str]:
    """One line per GPU, the fields separated by commas; empty where there is no GPU or nvidia-smi cannot say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def write_document(path: Path, checks: Sequence[Check], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the document, and the folders above it. Raises OSError."""
    plain = [
        {("pass" if key == "passed" else key): value for key, value in asdict(check).items() if (key, value) != ("worst", None)}
        for check in checks
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"env": environment(), "checks": plain, "rows": list(rows)}, indent=1) + "\n")
