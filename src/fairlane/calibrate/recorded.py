"""What a running worker has written into its step log (worker/step_log.py), read while it may still grow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.shape import ABOUT, WorkerShape
from fairlane.scheduler.step_work import StepWork

Steps = list[tuple[StepWork, float]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """shape: the worker's, with default times. about: what its log says of it. steps: work and seconds, in order."""

    shape: WorkerShape
    about: dict[str, Any]
    steps: Steps


def read_step_log(path: Path, older: Path) -> Recorded:
    """`path`, and before it the file that was full before it, if it is of the same worker. Raises SimulationInputError."""
    text = _lines(path)
    header = _header(path, text[0] if text else "")
    steps: Steps = []
    if older.exists() and (before := _lines(older)) and before[0] == text[0]:
        steps += _steps(older, before[1:])
    steps += _steps(path, text[1:])
    if not steps:
        raise SimulationInputError(f"{path}: holds no steps yet: let the worker serve requests for a while")
    try:
        shape = WorkerShape.of(header)
    except SimulationInputError as error:
        raise SimulationInputError(f"{path}:1: {error}") from None
    return Recorded(shape, header.get(ABOUT, {}), steps)


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SimulationInputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise SimulationInputError(f"{path}: is no step log: not UTF-8 text") from None
    return text[: text.rfind("\n") + 1].splitlines()  # the last line may be half of one


def _header(path: Path, line: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise SimulationInputError(f"{path}:1: is no step log: `step_log: FILE` in worker.yaml makes one")
    return header


def _steps(path: Path, lines: Iterable[str]) -> Iterator[tuple[StepWork, float]]:
    for number, line in enumerate(lines, 2):
        try:
            *counts, seconds = map(float, json.loads(line))
            yield StepWork(*counts), seconds
        except (TypeError, ValueError):
            raise SimulationInputError(f"{path}:{number}: is no step: five counts and a time are needed") from None
