"""bench_replay.py: where steps take the same time, the engine and the simulator's replay of its recording do the same; and what
counts as another order of policies, as a step's time, and as scatter."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from fairlane.clock import FakeClock
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.fake_executor import FakeExecutor, StepTime
from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.simulator.fit import cells_of, fit
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.step_work import work_of
from fairlane.worker.shape import shape_of

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from bench_replay import off_by, recorded_of, scatter_of, wrong_orders
from replay_measure import IDLE_S, Measured, Watched
from replay_runs import POLICIES, WORKER, candidate, exported, in_order, independent, scattered, serve, simulate

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


WORKS = [work_of(1 + number % 16, 100 * number) for number in range(2000)]


def test_what_steps_were_off_by_is_found_again_whatever_the_worker_and_makes_it_neither_faster_nor_slower() -> None:
    """A machine that is a fifth slower for twenty steps of a hundred, and a model that is two thirds of what it does."""
    slow = [1.2 if number % 100 < 20 else 1.0 for number in range(len(WORKS))]
    steps = [(work, 1.5 * factor * CPU.seconds(work)) for work, factor in zip(WORKS, slow, strict=True)]
    factors = off_by(steps, CPU)
    spread, alike = scatter_of(factors)
    in_all = sum(factor * CPU.seconds(work) for factor, work in zip(factors, WORKS, strict=True))
    assert [factor / factors[50] for factor in factors] == pytest.approx(slow)
    assert (in_all, spread, alike > 0.9) == (
        pytest.approx(sum(map(CPU.seconds, WORKS))), pytest.approx(math.log(1.2) * 0.4), True
    )  # fmt: skip


def test_a_loads_steps_are_off_as_those_of_the_other_half_that_its_fit_is_of() -> None:
    steps = {load: [(work, (1 + load % 2) * CPU.seconds(work)) for work in WORKS] for load in range(4)}
    steps[2] = [(work, seconds * (3 if number % 2 else 1)) for number, (work, seconds) in enumerate(steps[2])]
    measured = Measured(shape_of(WORKER, INFO), fit(cells_of(steps[0])), {}, {}, steps, [])
    recorded = recorded_of(measured)
    factors = {load: one.factors for load, one in recorded.items()}
    assert [recorded[load].fit.model.seconds(WORKS[9]) for load in (0, 2)] == [
        pytest.approx(2 * CPU.seconds(WORKS[9]), rel=1e-3)
    ] * 2
    assert factors[0] == factors[2] == pytest.approx([1.0] * 4000, rel=1e-2)
    assert (factors[1] == factors[3], scatter_of(factors[1])[0] > 0.3) == (True, True)


def test_factors_are_played_in_their_order_from_a_place_by_chance_on() -> None:
    factors = [1.0, 2.0, 3.0, 4.0, 5.0]
    played = {tuple(islice(in_order(factors, f"run {number}"), 7)) for number in range(60)}
    twice = factors * 3
    assert played == {tuple(twice[start : start + 7]) for start in range(5)}


def test_a_replay_of_the_same_name_scatters_the_same_and_a_faster_run_is_faster_in_all_its_steps() -> None:
    works = [work_of(number, 50 * number) for number in range(1, 9)]
    first, again, slower = (scattered(CPU, independent(0.1, "x", of_run)) for of_run in (1.0, 1.0, 1.5))
    times = [[steps.seconds(work) for work in works] for steps in (first, again, slower)]
    assert times == [times[0], times[0], pytest.approx([1.5 * seconds for seconds in times[0]])]
