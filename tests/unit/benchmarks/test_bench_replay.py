"""bench_replay.py: where steps take the same time, the engine and the simulator's replay of its recording do the same; and what
counts as another order of policies."""

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
from fairlane.scheduler.output import ScheduledSequence
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.step_work import work_of
from fairlane.worker.config import WorkerConfig
from fairlane.worker.shape import shape_of

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

from bench_replay import wrong_orders
from replay_runs import POLICIES, candidate, exported, serve, simulate

CONFIG = WorkerConfig(num_blocks=170, max_num_seqs=16, max_num_batched_tokens=256, threads=1)
INFO = ExecutorInfo("known", 1000, 8192, 16, 170, (2,))
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
def test_with_the_same_step_times_the_simulator_replays_what_the_engine_did(tmp_path: Path, policy: str, depth: int) -> None:
    clock = FakeClock(5.0)
    executor = FakeExecutor(INFO, clock, step_time=Modelled())
    config = replace(CONFIG, pipeline_depth=depth)
    served, lines = serve(executor, config, clock, candidate(policy), 1)
    trace = exported(lines, tmp_path / "recorded.jsonl")
    replayed = simulate(1, trace, candidate(policy), replace(shape_of(config, INFO), step=CPU))
    in_order = sorted(served, key=lambda one: one.arrival_s)
    found = [(one.tier, one.preemptions, one.ttft_s, one.ended_s - one.arrival_s) for one in replayed]
    expected = [(one.tier, one.preemptions, one.ttft_s, one.ended_s - one.arrival_s) for one in in_order]
    assert found == [(*one[:2], *(pytest.approx(value, abs=1e-3) for value in one[2:])) for one in expected]


def row(policy: str, measured: float, simulated: float, noise: float = 0.0) -> dict[str, Any]:
    return {
        "policy": policy, "tier": "gold", "figure": "TTFT p50", "measured": measured, "simulated": simulated, "noise": noise
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
