"""Steps of chosen kinds on a loaded engine, timed. The executor is driven without a scheduler: a sequence with 8,000 tokens of
context is told to the runner as one that has been computed, so that nobody waits for its prompt; what its keys and values are
does not matter to the time.

A step's time is from the end of the step before it to its own end, with the worker's pipeline: what a step costs a busy worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import count
from typing import Any

from fairlane.calibrate.grid import ROOM, Point
from fairlane.clock import Clock
from fairlane.scheduler.executor import Executor
from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.request import SamplingParams
from fairlane.scheduler.simulator.fit import Cell
from fairlane.scheduler.step_work import StepWork, WorkCounter

# Steps of one visit that count, and the most visits of a point.
STEPS = 3
ROUNDS = 9
_GREEDY = asdict(SamplingParams(temperature=0.0))


class Sweep:
    """One executor that nobody else uses. depth: the worker's pipeline depth."""

    def __init__(self, executor: Executor, depth: int, clock: Clock) -> None:
        self._executor = executor
        self._depth = depth
        self._clock = clock
        self._counter = WorkCounter()
        self._step_ids = count(1)
        self._held: list[int] = []
        self._num_visits = 0
        self._samples: dict[Point, list[tuple[StepWork, float]]] = {}

    def run(self, points: Sequence[Point], until_s: float, progress: Callable[[], None]) -> None:
        """Goes round the points until the clock says until_s, from where the run before ended. progress is told after each.
        Raises StepError."""
        if not self._num_visits:
            self._visit(points[0])  # the first steps of a process are not like others
            self._samples.clear()
        while self._num_visits < ROUNDS * len(points) and self._clock.now() < until_s:
            self._visit(points[self._num_visits % len(points)])
            self._num_visits += 1
            progress()
        self._executor.result(self._executor.launch(ScheduleOutput(next(self._step_ids), released_slots=self._held)))
        self._held = []  # others may use the executor now

    def cells(self) -> list[Cell]:
        """One for each point that was reached."""
        return [Cell.of(samples) for samples in self._samples.values()]

    def _visit(self, point: Point) -> None:
        outputs = self._steps(point)
        skipped = 1 + self._depth  # they bring the sequences, or wait for the step that does
        last_s = self._clock.now()
        in_flight: deque[tuple[Any, StepWork]] = deque()
        for number in range(skipped + STEPS + self._depth):
            output = next(outputs)
            in_flight.append((self._executor.launch(output), self._counter.of(output)))
            if len(in_flight) <= self._depth:
                continue
            handle, work = in_flight.popleft()
            self._executor.result(handle)
            now_s = self._clock.now()
            if number - self._depth >= skipped:
                self._samples.setdefault(point, []).append((work, now_s - last_s))
            last_s = now_s
        while in_flight:
            self._executor.result(in_flight.popleft()[0])

    def _steps(self, point: Point) -> Iterator[ScheduleOutput]:
        """The same step again and again; the first one brings the sequences. Slots: decodes first, then the prompts'."""
        blocks = count(1)
        block_size, vocab_size = self._executor.info.block_size, self._executor.info.vocab_size

        def new(slot: int, length: int) -> NewSequence:
            table = [next(blocks) for _ in range(-(-(length + ROOM) // block_size))]
            return NewSequence(slot, _tokens(slot, length, vocab_size), length, [table], _GREEDY)

        decoding = [new(slot, length + 1) for slot, length in enumerate(point.lengths())]
        slots = [sequence.slot for sequence in decoding]
        prompts = [new(slot, point.start + chunk) for slot, chunk in enumerate(point.chunks(), point.decodes)]
        swapped = [(next(blocks), host) for host in range(point.copies)]
        released, self._held = self._held, [*slots, *(sequence.slot for sequence in prompts)]
        # A prompt's first chunk comes with its sequence and is all of it; one that goes on is known and samples nothing yet.
        begins = not point.start
        scheduled = [ScheduledSequence(one.slot, point.start, len(one.token_ids) - point.start, begins) for one in prompts]
        first = [ScheduledSequence(slot, length, 1, True) for slot, length in enumerate(point.lengths())]
        yield ScheduleOutput(
            next(self._step_ids),
            released_slots=released,
            new=decoding + prompts,
            scheduled=scheduled + first,
        )
        while True:
            yield ScheduleOutput(
                next(self._step_ids),
                new=prompts if begins else [],
                scheduled=scheduled,
                decode_slots=slots,
                swap_out=swapped,
            )


def _tokens(slot: int, length: int, vocab_size: int) -> list[int]:
    return [(slot * 31 + place * 7) % vocab_size for place in range(length)]
