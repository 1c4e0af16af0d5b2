"""The model runner that is not there: an Executor that counts tokens and says how long the step would have taken. It knows every
request's output length and keeps it to itself: the scheduler sees an end-of-text token come.

Most of a busy step is the column of decodes, the same list for many steps. It is entered once (_Column) and then costs the same
whatever its length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop

from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput, StepResult
from fairlane.scheduler.simulator.clock import EventClock
from fairlane.scheduler.simulator.event_log import EventLog
from fairlane.scheduler.simulator.meter import Counts, Meter
from fairlane.scheduler.simulator.plan import Planned
from fairlane.scheduler.simulator.shape import END_OF_TEXT, TOKEN, WorkerShape
from fairlane.scheduler.step_work import work_of


@dataclass(slots=True)
class _Slot:
    """A sequence on the device. length: tokens with keys and values. left: output tokens until it ends; below 1: it has.
    known: tokens that it had before it was evicted; up to there it computes them again. decodes_from: tokens after which it has
    neither those nor prompt left to compute."""

    planned: Planned
    counts: Counts
    length: int
    left: int
    known: int
    decodes_from: int

    def compute(self, num_tokens: int) -> None:
        """The next tokens get keys and values, and are counted unless they are of the output: those are when they are sampled."""
        start, end = self.length, self.length + num_tokens
        self.length = end
        if start >= self.decodes_from:
            return
        if start < self.known:
            self.counts.recomputed += min(end, self.known) - start
        if start < self.planned.prompt_tokens:
            self.counts.prompt += max(0, min(end, self.planned.prompt_tokens) - max(start, self.known))


class _Column:
    """The slots that decode in every step, from the step on in which they became a column."""

    def __init__(self, slots: list[int], members: list[_Slot]) -> None:
        self.slots = slots
        self.members = members
        self.steps = 0
        self.context = sum(member.length for member in members)
        self.tokens = [TOKEN] * len(members)
        self.seconds = 0.0  # of each member's part of the steps' time
        self.ends = [(member.left, index) for index, member in enumerate(members) if member.planned.stops and member.left > 0]
        heapify(self.ends)

    def step(self) -> list[int]:
        """Everybody decodes one token; the list is not to be changed."""
        self.steps += 1
        self.context += len(self.members)
        if not self.ends or self.ends[0][0] > self.steps:
            return self.tokens
        tokens = self.tokens.copy()
        while self.ends and self.ends[0][0] == self.steps:
            tokens[heappop(self.ends)[1]] = END_OF_TEXT
        return tokens

    def settle(self) -> None:
        """Tells the members how far they have come."""
        steps, self.steps = self.steps, 0
        if not steps:
            return
        for member in self.members:
            member.compute(steps)
            # After the last token there may be one more step, launched before the scheduler knew.
            member.counts.output += min(steps, member.left) if member.left > 0 else 0
            member.left -= steps
            member.counts.seconds += self.seconds
        self.seconds = 0.0
        self.ends = [(left - steps, index) for left, index in self.ends]


class TimedExecutor:
    """Runs one step after the other; result() moves the clock to its end. Planned requests are looked up by their sampling
    seed, the one part of a request that reaches the runner and that nobody else uses here."""

    def __init__(
        self, worker: int, shape: WorkerShape, planned: Sequence[Planned], clock: EventClock, meter: Meter, log: EventLog
    ) -> None:
        self._worker = worker
        self._model = shape.step
        self._info = shape.info()
        self._planned = planned
        self._clock = clock
        self._meter = meter
        self._log = log
        self._slots: dict[int, _Slot] = {}
        self._computed: dict[int, int] = {}  # by request: the most tokens it had when it was evicted
        self._column = _Column([], [])
        self._device_free_s = 0.0
        self._results: deque[tuple[float, StepResult]] = deque()
        self.num_steps = 0
        self.busy_s = 0.0
        self.longest_step_s = 0.0

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, output: ScheduleOutput) -> int:
        if output.decode_slots is not self._column.slots or output.released_slots:
            self._column.settle()
        for slot in output.released_slots:
            gone = self._slots.pop(slot)
            number = gone.planned.number
            self._computed[number] = max(self._computed.get(number, 0), gone.length)
        for new in output.new:
            self._admit(new)
        if output.decode_slots is not self._column.slots:
            self._column = _Column(output.decode_slots, [self._slots[slot] for slot in output.decode_slots])
        column = self._column
        num_decodes, context = len(column.members), column.context
        chunks: list[tuple[int, int]] = []
        tokens: list[list[int]] = []
        for entry in output.scheduled:
            tokens.append(self._compute(entry))
            if entry.num_tokens == 1:
                num_decodes += 1
                context += entry.start
            else:
                chunks.append((entry.start, entry.num_tokens))
        copies = len(output.swap_out) + len(output.swap_in)
        elapsed_s = self._model.seconds(work_of(num_decodes, context, chunks, copies))
        self._split(elapsed_s, output.scheduled, num_decodes, sum(length for _, length in chunks))
        decoded = column.step() if column.members else []
        starts_s = max(self._clock.now(), self._device_free_s)
        self._device_free_s = starts_s + elapsed_s
        self.num_steps += 1
        self.busy_s += elapsed_s
        self.longest_step_s = max(self.longest_step_s, elapsed_s)
        self._log.step(self._worker, starts_s, output)
        self._results.append((self._device_free_s, StepResult(output.step_id, tokens, decoded, elapsed_s=elapsed_s)))
        return output.step_id

    def result(self, handle: int) -> StepResult:
        ends_s, result = self._results.popleft()
        if result.step_id != handle:
            raise ValueError(f"step {handle} asked for, {result.step_id} is next")
        self._clock.move_to(max(ends_s, self._clock.now()))
        return result

    def close(self) -> None:
        self._slots.clear()
        self._results.clear()

    def settle(self) -> None:
        """Brings the meter up to date."""
        self._column.settle()

    def _split(self, elapsed_s: float, entries: list[ScheduledSequence], num_decodes: int, chunk_tokens: int) -> None:
        """Between those that the step is for."""
        if not num_decodes and not chunk_tokens:
            return  # it only copies
        unit_s = elapsed_s / (2 * num_decodes + chunk_tokens)
        self._column.seconds += 2 * unit_s
        for entry in entries:
            self._slots[entry.slot].counts.seconds += unit_s * (2 if entry.num_tokens == 1 else entry.num_tokens)

    def _admit(self, new: NewSequence) -> None:
        planned = self._planned[new.sampling["seed"]]
        counts = self._meter.of(planned.account)
        generated = len(new.token_ids) - new.num_prompt_tokens
        known = self._computed.get(planned.number, 0)
        decodes_from = max(known, planned.prompt_tokens)
        self._slots[new.slot] = _Slot(planned, counts, 0, planned.output_tokens - generated, known, decodes_from)

    def _compute(self, entry: ScheduledSequence) -> list[int]:
        slot = self._slots[entry.slot]
        if slot.length < entry.start:  # its first chunk: what lies before came from the cache or from host memory
            slot.length = entry.start
        slot.compute(entry.num_tokens)
        if not entry.sample:
            return []
        slot.counts.output += slot.left > 0
        slot.left -= 1
        return [END_OF_TEXT if slot.left == 0 and slot.planned.stops else TOKEN]
