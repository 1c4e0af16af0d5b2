"""What the host spends on an engine step, by wrapping the scheduler's and the executor's calls for as long as a run lasts, and
how long the device idles between steps, where the executor tells.

An executor tells by `runner.step_events`: None while nobody asks. While it is a list, the runner appends a pair of CUDA events
(with timing) for each step, recorded on the compute stream right before the step's first copy or kernel and right after its last.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fairlane.scheduler.engine import Engine
from fairlane.scheduler.executor import Executor, ExecutorInfo
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.scheduler.scheduler import Scheduler

PARTS = ("schedule", "launch", "update", "take", "wait")


@dataclass(frozen=True, slots=True)
class Turn:
    """One round of the engine. Times in seconds; parts as in PARTS: `take` is result() once the device is done, `wait` the wait
    for it. launched: steps launched in this run up to the turn's end."""

    began_s: float
    ended_s: float
    parts: tuple[float, ...]
    launched: int

    @property
    def host_s(self) -> float:
        """All but the wait for the device."""
        return self.ended_s - self.began_s - self.parts[PARTS.index("wait")]


@dataclass(slots=True)
class HostTimes:
    """Collects the turns of one run."""

    turns: list[Turn] = field(default_factory=list)
    runner_s: list[float] = field(default_factory=list)
    step_events: list[tuple[Any, Any]] = field(default_factory=list)
    launched: int = 0
    _spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def turn(self, engine: Engine) -> bool:
        """engine.turn(), timed."""
        self._spent = dict.fromkeys(PARTS, 0.0)
        began = time.monotonic()
        busy = engine.turn(wait=False)
        self.turns.append(Turn(began, time.monotonic(), tuple(self._spent[part] for part in PARTS), self.launched))
        return busy

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self._spent[part] += time.perf_counter() - began

        return call

    @contextmanager
    def watching(self, scheduler: Scheduler, executor: Executor) -> Iterator[None]:
        """Wraps a scheduler made for this run, and the runner of the executor while the block lasts."""
        for part in ("schedule", "update"):
            setattr(scheduler, part, self.timed(part, getattr(scheduler, part)))
        runner = getattr(executor, "runner", None)
        execute = getattr(runner, "execute", None)
        tells = hasattr(runner, "step_events")
        try:
            if tells:
                runner.step_events = self.step_events  # type: ignore[union-attr]
            if execute is not None:
                runner.execute = self._timed_runner(execute)  # type: ignore[union-attr]
            yield
        finally:
            if tells:
                runner.step_events = None  # type: ignore[union-attr]
            if execute is not None:
                del runner.execute  # type: ignore[union-attr]  # the class's own shows again

    def _timed_runner(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        """On the runner's own thread, if it has one: kept apart from the engine's parts."""

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return execute(*arguments)
            finally:
                self.runner_s.append(time.perf_counter() - began)

        return call

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def figures(self, since_s: float, until_s: float) -> dict[str, float | None]:
        """Milliseconds a step (device idle: microseconds), means over the turns that lie between the two times, and the p99 of
        the host's work. Raises ValueError if there are none."""
        turns = [turn for turn in self.turns if since_s <= turn.began_s and turn.ended_s <= until_s]
        if not turns:
            raise ValueError("no step in which everything decodes: the outputs are too short for this batch")
        parts = {name: 1e3 * statistics.fmean(turn.parts[i] for turn in turns) for i, name in enumerate(PARTS)}
        total = 1e3 * statistics.fmean(turn.ended_s - turn.began_s for turn in turns)
        host = [1e3 * turn.host_s for turn in turns]
        first, last = max(0, turns[0].launched - 1), turns[-1].launched
        runner = self.runner_s[first:last]
        idle = self._idle_us(first, last)
        return {
            "steps": len(turns),
            "step_ms": total,
            "host_ms": statistics.fmean(host),
            "host_p99_ms": sorted(host)[min(len(host) - 1, int(0.99 * len(host)))],
            "schedule_ms": parts["schedule"],
            "launch_ms": parts["launch"],
            "update_ms": parts["update"],
            "take_ms": parts["take"],
            "rest_ms": total - sum(parts.values()),
            "wait_ms": parts["wait"],
            "runner_ms": 1e3 * statistics.fmean(runner) if runner else None,
            "device_idle_us": statistics.fmean(idle) if idle else None,
            "device_idle_p50_us": statistics.median(idle) if idle else None,
        }

    def _idle_us(self, first: int, last: int) -> list[float]:
        """Between the end of a step and the start of the next, for the steps [first, last) of the run."""
        events = self.step_events[first:last]
        if events:
            events[-1][1].synchronize()
        return [1e3 * ended.elapsed_time(begun) for (_, ended), (begun, _) in pairwise(events)]


class TimedExecutor:
    """An executor whose launch and result are timed, the latter in two parts."""

    def __init__(self, inner: Executor, host: HostTimes) -> None:
        self._inner = inner
        self._host = host
        self._launch = host.timed("launch", inner.launch)
        self._wait = host.timed("wait", wait_for)
        self._take = host.timed("take", inner.result)

    @property
    def info(self) -> ExecutorInfo:
        return self._inner.info

    def launch(self, output: ScheduleOutput) -> Any:
        self._host.launched += 1
        return self._launch(output)

    def result(self, handle: Any) -> StepResult:
        self._wait(handle)
        result: StepResult = self._take(handle)
        return result

    def close(self) -> None:
        self._inner.close()


def wait_for(handle: Any) -> None:
    """Until the step of a handle is done: its `done` CUDA event, or its `future`. With neither, result() waits itself, and that
    counts as work of the host."""
    if hasattr(handle, "done"):
        handle.done.synchronize()
    elif hasattr(handle, "future"):
        wait([handle.future])
