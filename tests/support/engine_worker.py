"""A worker without a model: the real engine and the real gRPC servicer, with the fake executor behind them, in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from fairlane.blockmgr.manager import BlockManager
from fairlane.clock import FakeClock
from fairlane.protos.fairlane.v1 import worker_pb2_grpc
from fairlane.scheduler.engine import Engine, Stop
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.fake_executor import FakeExecutor, NextToken, crc_token
from fairlane.scheduler.policies import make_policy
from fairlane.scheduler.scheduler import Scheduler, SchedulerLimits
from fairlane.scheduler.tenancy import NO_POLICY
from fairlane.worker.boxes import WorkerBoxes
from fairlane.worker.servicer import WorkerServicer
from fairlane.worker.wire import welcome


@dataclass(frozen=True, slots=True)
class EngineWorker:
    """The scheduler belongs to the engine's thread."""

    address: str
    scheduler: Scheduler
    boxes: WorkerBoxes


@asynccontextmanager
async def serving(
    address: str, info: ExecutorInfo, limits: SchedulerLimits, next_token: NextToken = crc_token
) -> AsyncIterator[EngineWorker]:
    """Until the end of the block."""
    clock = FakeClock()
    blocks = BlockManager(info.num_blocks, info.block_size)
    scheduler = Scheduler(limits, blocks, make_policy(NO_POLICY), clock)
    boxes = WorkerBoxes(info.vocab_size, clock)
    engine = Engine(scheduler, FakeExecutor(info, clock, next_token=next_token), clock, boxes, boxes)
    server = grpc.aio.server()
    servicer = WorkerServicer(engine, boxes, welcome(info, "w", 7, 1), clock)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    assert server.add_insecure_port(address)
    thread = threading.Thread(target=engine.run, daemon=True)
    thread.start()
    await server.start()
    try:
        yield EngineWorker(address, scheduler, boxes)
    finally:
        await server.stop(0)
        boxes.put_item(Stop())
        await asyncio.to_thread(thread.join, 5)
