"""What a step does, as far as its time depends on it: counted from what the scheduler tells the executor, so that steps of a
worker that serves, of a calibration and of the simulator are told in the same few numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fairlane.scheduler.output import ScheduleOutput


class StepWork(NamedTuple):
    """sequences: with a token in the step. tokens: computed. context: tokens before those of its decodes (sequences with one
    token), whose keys and values are read. scores: (query, key) pairs of its chunks. copies: blocks to or from host memory."""

    sequences: float
    tokens: float
    context: float
    scores: float
    copies: float = 0


def work_of(num_decodes: int, context: int, chunks: Iterable[tuple[int, int]] = (), copies: int = 0) -> StepWork:
    """Of decodes that read `context` tokens together, and chunks of (start, tokens)."""
    sequences, tokens, scores = num_decodes, num_decodes, 0.0
    for start, length in chunks:
        sequences += 1
        tokens += length
        scores += length * (start + length / 2)
    return StepWork(sequences, tokens, context, scores, copies)


class WorkCounter:
    """Follows one executor's steps, in the order in which they are launched. The column of steady decodes costs nothing but its
    first step: the scheduler keeps the list as long as it stays the same."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}  # by slot: tokens with keys and values, up to date but for the column's
        self._column: list[int] = []
        self._context = 0
        self._steps = 0

    def of(self, output: ScheduleOutput) -> StepWork:
        if output.decode_slots is not self._column:
            self._settle()
            self._column = output.decode_slots
            self._context = sum(self._lengths.get(slot, 0) for slot in self._column)
        num_decodes, context = len(self._column), self._context
        chunks: list[tuple[int, int]] = []
        for entry in output.scheduled:
            self._lengths[entry.slot] = entry.start + entry.num_tokens
            if entry.num_tokens == 1:
                num_decodes += 1
                context += entry.start
            else:
                chunks.append((entry.start, entry.num_tokens))
        self._steps += 1
        self._context += len(self._column)
        return work_of(num_decodes, context, chunks, len(output.swap_out) + len(output.swap_in))

    def _settle(self) -> None:
        for slot in self._column:
            self._lengths[slot] = self._lengths.get(slot, 0) + self._steps
        self._steps = 0
