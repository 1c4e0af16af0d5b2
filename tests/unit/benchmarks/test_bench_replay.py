"""bench_replay.py: where steps take the same time, the engine and the simulator's replay of its recording do the same; and what
counts as another order of policies, as a step's time, and as scatter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fairlane.clock import FakeClock
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.fake_executor import FakeExecutor, StepTime
from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.step_work import work_of
from fairlane.worker.shape import shape_of

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from bench_replay import scatter_of, wrong_orders
from replay_measure import IDLE_S, Watched
from replay_runs import POLICIES, WORKER, candidate, exported, scattered, serve, simulate

INFO = ExecutorInfo("known", 1000, 8192, 16, 100, (2,))
CPU = StepModel(fixed_s=0.03, sequence_s=0.0003, weights_s=0.002, token_s=0.0012, context_s=9e-6, attention_s=1e-6)


@dataclass(frozen=True, slots=True)
class Modelled(StepTime):
    """The fake device's time as the simulator has it."""

    def of(self, entries: Sequence[ScheduledSequence]) -> float:
        decodes = [entry.start for entry in entries if entry.num_tokens == 1]
        chunks = [(entry.start, entry.num_tokens) for entry in entries if entry.num_tokens > 1]
        return CPU.seconds(work_of(len(decodes), sum(decodes), chunks))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("load", [1, 2])
def test_with_the_same_step_times_the_simulator_replays_what_the_engine_did(
    tmp_path: Path, policy: str, depth: int, load: int
) -> None:
    clock = FakeClock(5.0)
    executor = FakeExecutor(INFO, clock, step_time=Modelled())
    config = replace(WORKER, pipeline_depth=depth)
    served, lines = serve(executor, config, clock, candidate(policy), load)
    trace = exported(lines, tmp_path / "recorded.jsonl")
    replayed = simulate(load, trace, candidate(policy), replace(shape_of(config, INFO), step=CPU))
    in_order = sorted(served, key=lambda one: one.arrival_s)
    found = [(one.tier, one.preemptions, one.ttft_s, one.ended_s - one.arrival_s) for one in replayed]
    expected = [(one.tier, one.preemptions, one.ttft_s, one.ended_s - one.arrival_s) for one in in_order]
    assert found == [(*one[:2], *(pytest.approx(value, abs=1e-3) for value in one[2:])) for one in expected]


def row(policy: str, measured: float, simulated: float, noise: float = 0.0) -> dict[str, Any]:
    return {
        "policy": policy, "tier": "gold", "figure": "TTFT p50", "measured": measured, "simulated": simulated, "+-": noise
    }  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ([row("a", 1, 1), row("b", 2, 3)], 0),
        ([row("a", 1, 3), row("b", 2, 2)], 1),
        ([row("a", 1, 3), row("b", 1.1, 2)], 0),  # as good as equal
        ([row("a", 1, 3), row("b", 2, 2, noise=1.5)], 0),  # no telling
        ([row("a", 1, 3), row("b", 2, 2), row("c", 3, 1)], 3),
    ],
)
def test_another_order_counts_where_reality_has_one(rows: list[dict[str, Any]], wrong: int) -> None:
    assert len(wrong_orders(rows)) == wrong


def steps_of(gaps_s: Sequence[float]) -> tuple[list[float], int]:
    """What Watched keeps of decodes of a tenth of a second after so long each, and how often it called `between`."""
    clock = FakeClock()
    calls: list[float] = []
    watched = Watched(FakeExecutor(INFO, clock, step_time=StepTime(fixed_s=0.1)), clock, lambda: calls.append(clock.now()))
    for number, gap_s in enumerate(gaps_s):
        clock.advance(gap_s)
        new = [] if number else [NewSequence(0, [1], 1, [[1]], {})]
        watched.result(watched.launch(ScheduleOutput(number + 1, new=new, scheduled=[ScheduledSequence(0, number, 1, True)])))
    return [seconds for _, seconds in watched.steps], len(calls)


def test_a_steps_time_has_the_schedulers_work_in_it_but_not_that_nobody_was_there() -> None:
    steps, calls = steps_of([0.0, IDLE_S / 2, 10 * IDLE_S])
    assert (steps, calls) == (pytest.approx([0.1, 0.1 + IDLE_S / 2, 0.1], abs=1e-3), 3)


def test_scatter_is_that_of_the_steps_whatever_a_few_pauses_took() -> None:
    noisy = scattered(CPU, 0.07, "a")
    works = [work_of(1 + number % 16, 100 * number) for number in range(2000)]
    steps = [(work, noisy.seconds(work) * (50 if number % 100 == 0 else 1)) for number, work in enumerate(works)]
    assert scatter_of({1: steps}, {1: CPU}) == pytest.approx(0.07, rel=0.15)


def test_a_replay_of_the_same_name_scatters_the_same_and_a_faster_run_is_faster_in_all_its_steps() -> None:
    works = [work_of(number, 50 * number) for number in range(1, 9)]
    first, again, slower = scattered(CPU, 0.1, "x"), scattered(CPU, 0.1, "x"), scattered(CPU, 0.1, "x", of_run=1.5)
    times = [[steps.seconds(work) for work in works] for steps in (first, again, slower)]
    assert times == [times[0], times[0], pytest.approx([1.5 * seconds for seconds in times[0]])]
