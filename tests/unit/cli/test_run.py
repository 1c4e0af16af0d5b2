"""What serve decides while it runs: which worker to replace, and what the worker is told."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

from fairlane.cli.run import heal, worker_json
from fairlane.clock import FakeClock
from fairlane.worker.__main__ import config_from_json
from fairlane.worker.config import Device, LoadFormat, WorkerConfig


class World:
    """heal() over a gateway and a supervisor that are moved by hand, one look at a time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.worker = SimpleNamespace(ready=False, facts=None)
        self.supervisor = SimpleNamespace(epoch=1, restart=self._restart)
        self.restarts: list[int] = []

    def _restart(self, reason: str) -> None:
        self.restarts.append(self.supervisor.epoch)
        self.supervisor.epoch += 1

    def ready(self, epoch: int) -> None:
        self.worker.ready, self.worker.facts = True, SimpleNamespace(epoch=epoch)

    async def pass_s(self, seconds: float) -> None:
        for _ in range(10):
            self.clock.advance(seconds / 10)
            for _ in range(3):  # the task's turn
                await asyncio.sleep(0)


async def history(*steps: Any) -> list[int]:
    world = World()
    gateway: Any = SimpleNamespace(worker=world.worker)
    supervisor: Any = world.supervisor
    task = asyncio.create_task(heal(gateway, supervisor, world.clock, 5.0, interval_s=0.0))
    try:
        for step in steps:
            step(world)
            await world.pass_s(6.0)
        return world.restarts
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def lose(world: World) -> None:
    world.worker.ready = False


def new_process(world: World) -> None:
    world.supervisor.epoch += 1


def nothing(world: World) -> None:
    pass


async def test_a_worker_that_was_ready_and_is_lost_for_longer_than_the_timeout_is_replaced() -> None:
    assert await history(lambda world: world.ready(1), lose) == [1]


async def test_a_worker_that_loads_its_model_has_all_the_time_it_needs() -> None:
    assert await history(nothing, nothing, nothing) == []


async def test_a_new_process_is_not_blamed_for_the_old_ones_loss() -> None:
    # The gateway has not noticed yet that epoch 1 died when epoch 2 starts to load.
    assert await history(lambda world: world.ready(1), new_process, lose, nothing) == []


async def test_each_loss_costs_one_process() -> None:
    assert await history(lambda w: w.ready(1), lose, nothing, lambda w: w.ready(2), lose, nothing) == [1, 2]


async def test_a_worker_that_comes_back_in_time_is_kept() -> None:
    world_ready = [lambda world: world.ready(1)] * 3
    assert await history(*world_ready) == []


def test_the_worker_reads_exactly_the_settings_it_is_sent() -> None:
    config = dataclasses.replace(
        WorkerConfig(), model="/m", device=Device.CUDA, load_format=LoadFormat.DUMMY, num_blocks=9, served_name="x"
    )
    assert (config_from_json(worker_json(config)), config_from_json(worker_json(WorkerConfig()))) == (config, WorkerConfig())
