"""The measured side of bench_replay.py: one process, one worker on one thread, which serves the loads it is given under every
policy, again and again, with a slice of calibration before each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from replay_figures import Run
from replay_runs import POLICIES, WORKER, candidate, serve
from work_clock import PacedClock, WorkClock

from fairlane.calibrate.grid import points_for
from fairlane.calibrate.sweep import Sweep
from fairlane.clock import Clock, MonotonicClock
from fairlane.embedded import resolve
from fairlane.scheduler.executor import Executor
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.scheduler.simulator.fit import Fit, fit
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.step_work import StepWork, WorkCounter
from fairlane.worker.executor import LocalExecutor
from fairlane.worker.shape import shape_of

CLOCKS: Mapping[str, Callable[[], Clock]] = {"paced": PacedClock, "work": WorkClock, "wall": MonotonicClock}
# The probe by which the paced clock goes: a step of these loads has about as many tokens, and it takes about so long where nobody
# else is. So the loads press as hard on any machine, however slow it is at the time.
PROBE_TOKENS, PROBE_S = 64, 0.085
# More than a scheduler takes between two steps: nobody was there.
IDLE_S = 0.02


class Watched:
    """The executor of a run, whose steps are kept as (work, seconds), from the end of the step before on, as a worker's step log
    has them: the scheduler's work counts, waiting for somebody to come does not. between: called after each."""

    def __init__(self, inner: Executor, clock: Clock, between: Callable[[], None]) -> None:
        self.info = inner.info
        self.steps: list[tuple[StepWork, float]] = []
        self._inner = inner
        self._clock = clock
        self._between = between
        self._counter = WorkCounter()
        self._since_s = clock.now()

    def launch(self, output: ScheduleOutput) -> Any:
        now_s = self._clock.now()
        if now_s - self._since_s > IDLE_S:
            self._since_s = now_s
        work = self._counter.of(output)
        return self._inner.launch(output), work

    def result(self, handle: Any) -> StepResult:
        result = self._inner.result(handle[0])
        now_s = self._clock.now()
        self.steps.append((handle[1], now_s - self._since_s))
        self._between()
        self._since_s = self._clock.now()
        return result

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True, slots=True)
class Measured:
    """real: by policy and load, a run of each repeat. recordings: by load, of its first run under FCFS. sweep: its fit. steps: of
    a load's runs. paces: of the machine, as the clock found them."""

    shape: WorkerShape
    sweep: Fit
    real: Mapping[str, Mapping[int, Sequence[Run]]]
    recordings: Mapping[int, list[str]]
    steps: Mapping[int, Sequence[tuple[StepWork, float]]]
    paces: Sequence[float]


def measure(loads: Sequence[int], repeats: int, slice_s: float, clock_name: str, told: Callable[[str], None]) -> Measured:
    """told: what was served, after each run."""
    clock = CLOCKS[clock_name]()
    config = replace(WORKER, model=str(resolve("smollm2")))
    executor = LocalExecutor(config, clock)
    real: dict[str, dict[int, list[Run]]] = {name: {load: [] for load in loads} for name in POLICIES}
    recordings: dict[int, list[str]] = {}
    steps: dict[int, list[tuple[StepWork, float]]] = {load: [] for load in loads}
    try:
        between = _pace(clock, executor)
        points = points_for(config, executor.info)
        sweep = Sweep(Watched(executor, clock, between), config.pipeline_depth, clock)
        for load, name in [(load, name) for _ in range(repeats) for load in loads for name in POLICIES]:
            sweep.run(points, clock.now() + slice_s, lambda: None)
            watched = Watched(executor, clock, between)
            found, lines = serve(watched, config, clock, candidate(name), load)
            real[name][load].append(found)
            recordings.setdefault(load, lines)
            steps[load] += watched.steps
            told(name)
        paces = clock.paces if isinstance(clock, PacedClock) else []
        return Measured(shape_of(config, executor.info), fit(sweep.cells()), real, recordings, steps, paces)
    finally:
        executor.close()


def _pace(clock: Clock, executor: LocalExecutor) -> Callable[[], None]:
    """What is to be called between two steps. The probe is about a step: others slow down what computes less than what reads."""
    if not isinstance(clock, PacedClock):
        return lambda: None
    clock.pace_by(lambda: executor.runner.warm_up((PROBE_TOKENS,)), PROBE_S)
    return clock.keep_pace
