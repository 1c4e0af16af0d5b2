"""The worker's gRPC face: one Connect stream per gateway. It moves messages between the network's event loop and the
engine's thread and answers pings itself, with the engine's step counter, so that a stuck engine shows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping

import grpc

from fairlane.clock import Clock
from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2_grpc
from fairlane.scheduler.engine import Engine
from fairlane.worker.boxes import Closed, Connection, Received, WorkerBoxes
from fairlane.worker.explain_wire import account_to_wire, ceil_to_wire
from fairlane.worker.shadow_wire import report_to_wire

log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
# Messages a gateway may leave unread before its stream is cut: minutes of steps, so only a dead one gets there.
MAX_UNREAD = 65_536


class _StreamSink:
    """A connection's outgoing queue, filled from any thread, drained by its stream."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[pb.FromWorker] = asyncio.Queue()
        self.overrun = asyncio.Event()

    def send(self, message: pb.FromWorker) -> None:
        # A loop that closed while the process stops has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._put, message)

    def _put(self, message: pb.FromWorker) -> None:
        if self._queue.qsize() >= MAX_UNREAD:
            self.overrun.set()
            return
        self._queue.put_nowait(message)

    async def get(self) -> pb.FromWorker:
        return await self._queue.get()


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Serves gateways until the process ends."""

    def __init__(self, engine: Engine, boxes: WorkerBoxes, welcome: pb.Welcome, clock: Clock) -> None:
        self._engine = engine
        self._boxes = boxes
        self._welcome = welcome
        self._clock = clock

    async def Connect(
        self, request_iterator: AsyncIterator[pb.ToWorker], context: grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker]
    ) -> None:
        sink = _StreamSink(asyncio.get_running_loop())
        connection = Connection(sink)
        reader = asyncio.create_task(self._read(request_iterator, connection, context))
        writer = asyncio.create_task(self._write(sink, context))
        overrun = asyncio.create_task(sink.overrun.wait())
        tasks = (reader, writer, overrun)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._boxes.put_item(Closed(connection))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(
        self,
        messages: AsyncIterator[pb.ToWorker],
        connection: Connection,
        context: grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker],
    ) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "hello":
                    if message.hello.protocol_version != PROTOCOL_VERSION:
                        text = f"this worker speaks protocol {PROTOCOL_VERSION}, not {message.hello.protocol_version}"
                        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
                    connection.sink.send(pb.FromWorker(welcome=self._welcome))
                case "ping":
                    connection.sink.send(pb.FromWorker(pong=self._pong(message.ping.nonce)))
                case _:
                    self._boxes.put_item(Received(connection, message))

    async def _write(self, sink: _StreamSink, context: grpc.aio.ServicerContext[pb.ToWorker, pb.FromWorker]) -> None:
        while True:
            await context.write(await sink.get())

    def _pong(self, nonce: int) -> pb.Pong:
        stats = self._engine.stats
        started_s = self._engine.step_started_s
        return pb.Pong(
            nonce=nonce,
            step_id=stats.step_id,
            running=stats.running,
            waiting=stats.waiting,
            blocks_used=stats.blocks_used,
            blocks_cached=stats.blocks_cached,
            block_utilization_ratio=stats.block_utilization_ratio,
            fragmentation_rate=stats.fragmentation_rate,
            preemptions=stats.preemptions,
            policy_generation=stats.policy_generation,
            policy_fault=stats.policy_fault,
            recomputed_tokens=stats.recomputed_tokens,
            swaps_out=stats.swaps_out,
            swaps_in=stats.swaps_in,
            host_blocks_used=stats.host_blocks_used,
            running_by_tier=_counts(stats.running_by_tier),
            waiting_by_tier=_counts(stats.waiting_by_tier),
            running_by_node=_counts(stats.running_by_node),
            waiting_by_node=_counts(stats.waiting_by_node),
            blocks_by_domain=_counts(stats.blocks_by_domain),
            kv_accounts=[account_to_wire(account) for account in stats.kv_accounts],
            evictions_by_reason=_counts(stats.evictions_by_reason),
            step_running_s=0.0 if started_s is None else self._clock.now() - started_s,
            shadow=None if stats.shadow is None else report_to_wire(stats.shadow),
            ceilings=[ceil_to_wire(ceil) for ceil in stats.ceilings],
        )


def _counts(counts: Mapping[str, int]) -> list[pb.CountSpec]:
    return [pb.CountSpec(name=name, count=count) for name, count in counts.items()]
