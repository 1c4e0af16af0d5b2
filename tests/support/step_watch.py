"""Looks at every step as it is launched: what is in it, who has just been admitted, who still waits. The rules that are checked
on it are in tests/properties."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.output import ScheduleOutput
from fairlane.scheduler.request import RequestId, Sequence, SequenceStatus


@dataclass(frozen=True)
class Placed:
    """Tokens [start, start + num_tokens) of a sequence; is_chunk: more was pending than one token."""

    sequence: Sequence
    start: int
    num_tokens: int
    is_chunk: bool

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Step:
    """evicted: by this step or since the one before it. waiting: after the step, in order of arrival."""

    output: ScheduleOutput
    placed: list[Placed]
    admitted: list[Sequence]
    evicted: set[RequestId]
    running: list[Sequence]
    waiting: list[Sequence]


class StepWatch:
    """Calls every rule with every step that is launched, and `idle` when there is nothing to launch and nothing out."""

    def __init__(self, driver: EngineDriver, *rules: Callable[[Step], None], idle: Callable[[], None] = lambda: None) -> None:
        self.driver = driver
        self.num_steps = 0
        self._rules = rules
        self._idle = idle
        self._ran: set[RequestId] = set()
        self._tokens: dict[int, int] = {}  # by slot: known to the runner
        executor: Any = driver.engine._executor
        self._launch = executor.launch
        self._schedule = driver.scheduler.schedule
        executor.launch = self._launched
        driver.scheduler.schedule = self._scheduled  # type: ignore[method-assign]

    def _scheduled(self) -> ScheduleOutput | None:
        output = self._schedule()
        if output is None and not self.driver.engine._in_flight:
            self._idle()
        return output

    def _launched(self, output: ScheduleOutput) -> Any:
        self.driver.scheduler.lane.settle()
        running = list(self.driver.scheduler.running)
        at = {sequence.held_slot: sequence for sequence in running}
        for new in output.new:
            self._tokens[new.slot] = len(new.token_ids)
        placed = []
        for entry in output.scheduled:
            is_chunk = self._tokens[entry.slot] - entry.start > 1
            placed.append(Placed(at[entry.slot], entry.start, entry.num_tokens, is_chunk))
            self._tokens[entry.slot] += entry.sample
        for slot in output.decode_slots:
            placed.append(Placed(at[slot], self._tokens[slot] - 1, 1, is_chunk=False))
            self._tokens[slot] += 1
        waiting = [s for s in self.driver.scheduler.sequences() if s.status is SequenceStatus.WAITING]
        evicted = {s.request_id for s in waiting} & self._ran
        self._ran = {s.request_id for s in running}
        step = Step(output, placed, [at[new.slot] for new in output.new], evicted, running, waiting)
        self.num_steps += 1
        for rule in self._rules:
            rule(step)
        return self._launch(output)


def paths(tenant: str) -> Iterator[str]:
    """Of the node and those above it."""
    parts = tenant.split("/")
    for depth in range(1, len(parts) + 1):
        yield "/".join(parts[:depth])


@contextmanager
def note(text: Callable[[], str]) -> Iterator[None]:
    """Adds to an AssertionError that passes through."""
    try:
        yield
    except AssertionError as error:
        error.add_note(text())
        raise
