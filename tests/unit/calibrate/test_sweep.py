"""The sweep on an executor whose step times are known, and that refuses what a real one would."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict

import pytest

from fairlane.calibrate.grid import Point, points_for
from fairlane.calibrate.sweep import Sweep
from fairlane.clock import FakeClock
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.scheduler.simulator.fit import fit
from fairlane.scheduler.simulator.step_time import H100
from fairlane.scheduler.step_work import StepWork, WorkCounter
from fairlane.worker.config import WorkerConfig

CONFIG = WorkerConfig(max_num_seqs=64, max_num_batched_tokens=2048)
INFO = ExecutorInfo("known", 1000, 16_384, 16, 20_000, (2,), num_host_blocks=600)


class Known:
    """Takes H100's times, one step after the other; keeps what a runner would refuse."""

    def __init__(self, clock: FakeClock) -> None:
        self.info = INFO
        self.clock = clock
        self.counter = WorkCounter()
        self.free_s = 0.0
        self.ends: deque[tuple[int, float]] = deque()
        self.room: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self.refused: list[str] = []

    def launch(self, output: ScheduleOutput) -> int:
        for slot in output.released_slots:
            self.room.pop(slot, None)
        for new in output.new:
            blocks = new.block_tables[0]
            self.room[new.slot], self.tokens[new.slot] = len(blocks) * INFO.block_size, len(new.token_ids)
            if not 0 < min(blocks) <= max(blocks) < INFO.num_blocks:
                self.refused.append(f"blocks of {new.slot}")
        for entry in output.scheduled:
            if (
                entry.start + entry.num_tokens > self.room.get(entry.slot, 0)
                or entry.start + entry.num_tokens > self.tokens[entry.slot]
            ):
                self.refused.append(f"tokens of {entry.slot}")
            self.tokens[entry.slot] += entry.sample
        for slot in output.decode_slots:
            self.tokens[slot] += 1
            if self.tokens[slot] > self.room.get(slot, 0):
                self.refused.append(f"a block of {slot}")
        if output.num_scheduled_tokens > CONFIG.max_num_batched_tokens or len(self.room) > CONFIG.max_num_seqs:
            self.refused.append("a step that is too large")
        self.free_s = max(self.free_s, self.clock.now()) + H100.seconds(self.counter.of(output))
        self.ends.append((output.step_id, self.free_s))
        return output.step_id

    def result(self, handle: int) -> StepResult:
        step_id, end_s = self.ends.popleft()
        assert step_id == handle
        self.clock.advance(max(0.0, end_s - self.clock.now()))
        return StepResult(step_id, [])

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_sweep_finds_the_times_of_the_worker_and_asks_for_nothing_it_could_not_do(depth: int) -> None:
    clock = FakeClock()
    executor = Known(clock)
    told: list[float] = []
    points = points_for(CONFIG, INFO)
    sweep = Sweep(executor, depth, clock)
    for until_s in (5.0, 1e9):  # in two goes
        sweep.run(points, until_s, lambda: told.append(clock.now()))
    cells = sweep.cells()
    found = fit(cells)
    close = {name: pytest.approx(value, rel=0.03) for name, value in asdict(H100).items()}
    calls = len(told) % len(points)
    # Nothing stays in the executor: others may use it then.
    assert (executor.refused, executor.room, len(cells), asdict(found.model), calls) == ([], {}, len(points), close, 0)


def test_a_budget_ends_it_and_what_was_not_reached_has_no_cell() -> None:
    clock = FakeClock()
    points = points_for(CONFIG, INFO)
    sweep = Sweep(Known(clock), 0, clock)
    sweep.run(points, 1.0, lambda: None)
    assert (0 < len(sweep.cells()) < len(points), clock.now() < 2.0) == (True, True)


def test_only_what_fits_the_worker_is_measured() -> None:
    small = ExecutorInfo("small", 1000, 600, 16, 100, (2,))
    points = points_for(WorkerConfig(max_num_seqs=8, max_num_batched_tokens=100, max_prefill_chunk=40), small)
    most = [max(getattr(p, name) for p in points) for name in ("decodes", "chunk", "copies")]
    ends = max(max([*p.lengths(), *(p.start + chunk for chunk in p.chunks())]) for p in points)
    blocks = max(p.num_blocks(16) for p in points)
    assert (most, ends < 600, blocks < 100, Point(8, 128) in points) == ([8, 40, 0], True, True, True)


@pytest.mark.parametrize("num_blocks", [60, 100, 150])
def test_a_worker_with_all_its_sequences_is_measured_where_memory_holds_only_short_ones(num_blocks: int) -> None:
    config = WorkerConfig(max_num_seqs=16, max_num_batched_tokens=128)
    points = points_for(config, ExecutorInfo("small", 1000, 8192, 16, num_blocks, (2,)))
    full = {(point.decodes, point.chunk): point for point in points if point.decodes >= 15}
    filled = [full[kind].num_blocks(16) / num_blocks for kind in ((16, 0), (15, 16), (15, 64))]
    assert (len(full), max(point.context for point in full.values()) < 128) == (3, True)
    assert 0.65 < min(filled) <= max(filled) < 1


def test_where_memory_holds_longer_ones_only_those_are_measured() -> None:
    config = WorkerConfig(max_num_seqs=16, max_num_batched_tokens=256)
    points = points_for(config, ExecutorInfo("large", 1000, 8192, 16, 400, (2,)))
    assert {(p.decodes, p.context) for p in points if p.decodes >= 15} == {(16, 128), (15, 128)}


def test_lengths_are_spread_about_the_context() -> None:
    lengths = Point(5, 100).lengths()
    assert (lengths, Point(1, 100).lengths(), Point(0).lengths()) == ([50, 75, 100, 125, 150], [100], [])


def test_the_counts_of_a_cell_are_those_of_the_point() -> None:
    clock = FakeClock()
    sweep = Sweep(Known(clock), 0, clock)
    sweep.run([Point(4, 128, 64, prompts=2)], 0.1, lambda: None)
    (cell,) = sweep.cells()
    # Four that decode, of 128 tokens each on average and a few more once they are measured, and two prompts of 32.
    assert (cell.work._replace(context=0), cell.work.context) == (StepWork(6, 68, 0, 1024), pytest.approx(4 * 130, abs=8))
