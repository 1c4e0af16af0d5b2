"""An Executor without a model, for tests and the simulator: it keeps a paged memory of token ids, reads every context back
through the block tables it was given, and derives the next token from what it read. A wrong block, a stale table or a
block handed to two owners therefore shows as a wrong token, just as it would on a GPU.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from fairlane.clock import FakeClock
from fairlane.scheduler.executor import ExecutorInfo, StepError
from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput, StepResult

NextToken = Callable[[Sequence[int], int], int]

_SPOILT = 2**32 - 1  # in a block that a failed step was to fill: nobody's token, and whoever reads it gets a wrong one


def crc_token(context: Sequence[int], vocab_size: int) -> int:
    """A next token that depends on every token before it."""
    return crc32(array("I", context).tobytes()) % vocab_size


@dataclass(frozen=True, slots=True)
class StepTime:
    """Modelled seconds of a step: fixed + per sequence + per token + per token of context read."""

    fixed_s: float = 0.005
    sequence_s: float = 4e-6
    token_s: float = 25e-6
    context_s: float = 65e-9

    def of(self, entries: Sequence[ScheduledSequence]) -> float:
        tokens = sum(e.num_tokens for e in entries)
        context = sum(e.start for e in entries)
        return self.fixed_s + self.sequence_s * len(entries) + self.token_s * tokens + self.context_s * context


@dataclass(slots=True)
class _Slot:
    tokens: list[int]
    table: list[int]


class FakeExecutor:
    """Runs each step at launch, in launch order, as a device stream would; result() advances the clock by its time.

    Only the first KV-cache group is kept. fail_steps and fail_launches: ids of steps that raise StepError in
    result() and in launch().
    """

    def __init__(
        self,
        info: ExecutorInfo,
        clock: FakeClock,
        *,
        step_time: StepTime | None = None,
        next_token: NextToken = crc_token,
        fail_steps: frozenset[int] = frozenset(),
        fail_launches: frozenset[int] = frozenset(),
    ) -> None:
        self._info = info
        self._clock = clock
        self._step_time = step_time or StepTime()
        self._next_token = next_token
        self._fail_steps = fail_steps
        self._fail_launches = fail_launches
        self._memory: list[list[int | None]] = [[None] * info.block_size for _ in range(info.num_blocks)]
        self._host: dict[int, list[int | None]] = {}  # what was swapped out and not yet in again
        self._slots: dict[int, _Slot] = {}
        self._results: deque[StepResult] = deque()

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, output: ScheduleOutput) -> int:
        for slot in output.released_slots:
            del self._slots[slot]
        for new in output.new:
            self._admit(new)
        for append in output.appends:
            self._slots[append.slot].table.extend(append.block_ids[0])
        if output.grown_slots:
            for slot, block in zip(output.grown_slots, output.grown_blocks[0], strict=True):
                self._slots[slot].table.append(block)
        self._move(output)
        decodes = [ScheduledSequence(slot, len(self._slots[slot].tokens) - 1, 1, True) for slot in output.decode_slots]
        entries = [*output.scheduled, *decodes]
        if len({entry.slot for entry in entries}) != len(entries):
            raise ValueError("a slot is scheduled twice")
        if output.step_id in self._fail_launches:
            raise StepError(f"launch {output.step_id} failed as asked")
        tokens = [self._compute(entry) for entry in output.scheduled]
        decoded = [self._compute(entry)[0] for entry in decodes]
        self._results.append(StepResult(output.step_id, tokens, decoded, elapsed_s=self._step_time.of(entries)))
        return output.step_id

    def result(self, handle: int) -> StepResult:
        result = self._results.popleft()
        if result.step_id != handle:
            raise ValueError(f"step {handle} asked for, {result.step_id} is next")
        self._clock.advance(result.elapsed_s)
        if handle in self._fail_steps:
            raise StepError(f"step {handle} failed as asked")
        return result

    def close(self) -> None:
        self._slots.clear()
        self._results.clear()

    def _admit(self, new: NewSequence) -> None:
        if new.slot in self._slots:
            raise ValueError(f"slot {new.slot} is taken")
        self._slots[new.slot] = _Slot(list(new.token_ids), list(new.block_tables[0]))

    def _move(self, output: ScheduleOutput) -> None:
        hosts = [host for _, host in output.swap_out] + [host for host, _ in output.swap_in]
        if len(set(hosts)) != len(hosts) or not all(0 <= host < self._info.num_host_blocks for host in hosts):
            raise ValueError(f"host blocks {hosts} are named twice in a step, or there are none such")
        fails = output.step_id in self._fail_steps | self._fail_launches  # a failed step keeps nothing
        for device, host in output.swap_out:
            self._host[host] = [None] * self._info.block_size if fails else list(self._memory[device])
        for source, destination in output.copies:
            self._memory[destination] = list(self._memory[source])
        for host, device in output.swap_in:
            kept = self._host.pop(host)
            self._memory[device] = [_SPOILT] * self._info.block_size if fails else kept

    def _compute(self, entry: ScheduledSequence) -> list[int]:
        slot = self._slots[entry.slot]
        end = entry.start + entry.num_tokens
        if end > len(slot.tokens):
            raise ValueError(f"slot {entry.slot}: token {end - 1} is not known")
        size = self._info.block_size
        for position in range(entry.start, end):
            block = slot.table[position // size]
            if block == 0:
                raise ValueError("write into the null block")
            self._memory[block][position % size] = slot.tokens[position]
        if not entry.sample:
            return []
        token = self._next_token(self._read(slot.table, end), self._info.vocab_size)
        slot.tokens.append(token)
        return [token]

    def _read(self, table: list[int], length: int) -> list[int]:
        context: list[int] = []
        for block in table:
            context.extend(-1 if token is None else token for token in self._memory[block])
            if len(context) >= length:
                break
        if -1 in context[:length]:
            raise ValueError("read of a slot that was never written")
        return context[:length]
