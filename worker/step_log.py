"""The step log: what each step did and how long it took, a line a step, so that `fairlane calibrate --recorded` can fit the
simulator's worker to this one. Token counts only. It stands between the engine and its executor and inbox, and costs a few
microseconds a step.

    {"about": {...}, "num_blocks": ...}                      the first line of a file: what the worker is (shape.py)
    [sequences, tokens, context, scores, copies, seconds]    step_work.py's counts

A step's time is from the end of the step before it, or from when the engine woke up for it, to its own end: what the scheduler,
the inbox and the outbox take is part of it, as it is part of what requests wait for.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from fairlane.clock import Clock
from fairlane.scheduler.engine import Command, Inbox
from fairlane.scheduler.executor import Executor, ExecutorInfo
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.scheduler.step_work import StepWork, WorkCounter
from fairlane.worker.config import WorkerConfig
from fairlane.worker.shape import shape_of

log = logging.getLogger("fairlane.worker")

# Lines of a file. One that is full, or of an earlier worker, becomes FILE.1, in place of the one before.
LINES = 100_000


def open_step_log(config: WorkerConfig, info: ExecutorInfo) -> StepLog | None:
    """None where none is wanted. Raises ValueError for a file that cannot be written."""
    if config.step_log is None:
        return None
    about = {"model": info.model, "device": config.device.value}
    try:
        return StepLog(Path(config.step_log), shape_of(config, info).document(about))
    except OSError as error:
        raise ValueError(f"step_log: {config.step_log}: cannot be written: {error.strerror or error}") from None


class StepLog:
    """Where the lines go. What the disk does not take ends the log, never a step."""

    def __init__(self, path: Path, header: dict[str, Any], lines: int = LINES) -> None:
        """Raises OSError if the file cannot be written."""
        self._path = path
        self._header = json.dumps(header, separators=(",", ":"))
        self._most = lines
        self._written = 0
        self._file: TextIO | None = self._begin()

    def write(self, work: StepWork, seconds: float) -> None:
        if self._file is None:
            return
        try:
            if self._written >= self._most:
                self._file.close()
                self._file = self._begin()
            self._file.write(f"[{work[0]},{work[1]},{work[2]},{work[3]:.0f},{work[4]},{seconds:.7f}]\n")
            self._written += 1
        except OSError as error:
            log.error("the step log ends here: %s", error)
            self._file = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> TextIO:
        self._written = 0
        if self._path.exists():
            self._path.replace(older(self._path))
        file = self._path.open("w", encoding="utf-8", buffering=1)  # by lines: a log that is read while it grows has whole ones
        file.write(self._header + "\n")
        return file


def older(path: Path) -> Path:
    """Where the lines before those in `path` are, if there are any."""
    return Path(f"{path}.1")


class LoggedExecutor:
    """An executor and an inbox, both those of one engine, whose steps are written down."""

    def __init__(self, inner: Executor, inbox: Inbox, clock: Clock, step_log: StepLog) -> None:
        self._inner = inner
        self._inbox = inbox
        self._clock = clock
        self._log = step_log
        self._counter = WorkCounter()
        self._since_s = clock.now()

    @property
    def info(self) -> ExecutorInfo:
        return self._inner.info

    def launch(self, output: ScheduleOutput) -> tuple[Any, StepWork]:
        work = self._counter.of(output)
        return self._inner.launch(output), work

    def result(self, handle: tuple[Any, StepWork]) -> StepResult:
        inner, work = handle
        result: StepResult = self._inner.result(inner)
        now_s = self._clock.now()
        self._log.write(work, now_s - self._since_s)
        self._since_s = now_s
        return result

    def close(self) -> None:
        self._inner.close()

    def drain(self, timeout_s: float | None) -> Iterable[Command]:
        """What the inbox has. An engine that is idle waits here, which is no step's time."""
        commands = self._inbox.drain(timeout_s)
        if timeout_s is None:
            self._since_s = self._clock.now()
        return commands
