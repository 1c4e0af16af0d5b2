"""What a step does, counted from the scheduler's output alone, against the simulator's executor, which keeps its own books."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.scheduler.simulator.catalogue import WORKLOADS
from fairlane.scheduler.simulator.scene import Scene
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import Simulation
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.step_work import StepWork, WorkCounter, work_of
from fairlane.scheduler.tenancy import PolicySnapshot, Tier, TiersPolicy

# Every count shows in the time, by a factor of its own.
TELLING = StepModel(fixed_s=1e-3, sequence_s=1e-5, weights_s=0, token_s=1e-6, context_s=1e-9, attention_s=1e-10, swap_block_s=0)


def test_work_adds_up_decodes_and_chunks() -> None:
    # 3 decodes over 100 tokens; chunks of 10 tokens at 0 and 4 at 20: 10 * 5 + 4 * 22 pairs.
    assert work_of(3, 100, [(0, 10), (20, 4)], 7) == StepWork(5, 17, 100, 138, 7)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_host_blocks", [0, 2000])
def test_a_watcher_counts_what_the_executor_does_through_evictions_and_swaps(depth: int, num_host_blocks: int) -> None:
    shape = WorkerShape(TELLING, num_blocks=900, num_host_blocks=num_host_blocks, max_num_seqs=48, depth=depth)
    workload = WORKLOADS["W9"](Scene(3, 6.0, shape))
    tiers = tuple(Tier(name, 100 - place) for place, name in enumerate(workload.tiers))
    simulation = Simulation(workload, PolicySnapshot(1, "", TiersPolicy.VIP, tiers), shape)
    executor, counter = simulation.workers[0].executor, WorkCounter()
    expected: list[float] = []
    seconds: list[float] = []
    launch, result = executor.launch, executor.result

    def watched_launch(output: ScheduleOutput) -> int:
        expected.append(TELLING.seconds(counter.of(output)))
        return launch(output)

    def watched_result(handle: Any) -> StepResult:
        found = result(handle)
        seconds.append(found.elapsed_s)
        return found

    vars(executor).update(launch=watched_launch, result=watched_result)
    done = simulation.run()
    assert (done.preemptions > 0, len(seconds) > 100, expected[: len(seconds)]) == (True, True, pytest.approx(seconds))
