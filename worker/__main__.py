"""The worker process: loads the model, runs the engine on its own thread, serves gateways on a socket until told to stop.

    python -m fairlane.worker --socket unix:/run/fairlane/worker.sock --config-json '{"model": "/models/smollm2"}'

Exit codes: 0 asked to stop (SIGTERM, SIGINT, or the supervisor's end of our standard input is gone), 2 the configuration or
the model cannot work and a restart would not help, 70 the engine died.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import stat
import sys
import threading
from dataclasses import fields
from typing import Any

import grpc

from fairlane.blockmgr.manager import BlockManager
from fairlane.clock import Clock, MonotonicClock
from fairlane.protos.fairlane.v1 import worker_pb2_grpc
from fairlane.scheduler.engine import Engine, Stop
from fairlane.scheduler.executor import Executor
from fairlane.scheduler.output import ScheduleOutput
from fairlane.scheduler.policies import make_policy
from fairlane.scheduler.scheduler import Scheduler
from fairlane.scheduler.tenancy import NO_POLICY
from fairlane.worker.boxes import WorkerBoxes
from fairlane.worker.config import Device, LoadFormat, WorkerConfig
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.executors import limits_of, make_executor
from fairlane.worker.servicer import WorkerServicer
from fairlane.worker.step_log import LoggedExecutor, StepLog, open_step_log
from fairlane.worker.tracing import span
from fairlane.worker.wire import welcome

log = logging.getLogger("fairlane.worker")

EXIT_UNUSABLE = 2
EXIT_ENGINE_DIED = 70
# A gateway pings every few seconds; the library's default would call that abuse after the third.
SERVER_OPTIONS = (
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.so_reuseport", 0),
)


def config_from_json(text: str) -> WorkerConfig:
    """The resolved configuration a supervisor passes. Raises ValueError for anything else."""
    values: dict[str, Any] = json.loads(text)
    unknown = set(values) - {f.name for f in fields(WorkerConfig)}
    if unknown:
        raise ValueError(f"unknown worker settings: {', '.join(sorted(unknown))}")
    if "load_format" in values:
        values["load_format"] = LoadFormat(values["load_format"])
    if "device" in values:
        values["device"] = Device(values["device"])
    return WorkerConfig(**values)


class _ShownScheduler(Scheduler):
    """Shows a profiler how long scheduling takes."""

    def schedule(self) -> ScheduleOutput | None:
        with span("schedule"):
            return super().schedule()


def build_scheduler(config: WorkerConfig, executor: Executor, clock: Clock) -> Scheduler:
    """A scheduler over the executor's blocks. Raises ValueError for limits that contradict each other."""
    info = executor.info
    blocks = BlockManager(
        info.num_blocks,
        info.block_size,
        enable_prefix_caching=config.prefix_caching,
        num_host_blocks=info.num_host_blocks,
    )
    kind = _ShownScheduler if config.device is Device.CUDA else Scheduler
    return kind(limits_of(config, info.max_model_len), blocks, make_policy(NO_POLICY), clock)


def _run_engine(engine: Engine) -> None:
    """The engine's thread. A worker whose engine is dead must not look alive, whatever killed it."""
    try:
        engine.run()
    except BaseException:
        log.critical("the engine died", exc_info=True)
        logging.shutdown()
        os._exit(EXIT_ENGINE_DIED)


def _watch_parent(stopped: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """Ends with the supervisor: it holds the other end of our standard input and never writes."""
    if not stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
        return

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def build_engine(config: WorkerConfig, executor: Executor, boxes: WorkerBoxes, clock: Clock, step_log: StepLog | None) -> Engine:
    """step_log: where the engine's steps are written down, if anywhere."""
    scheduler = build_scheduler(config, executor, clock)
    if step_log is None:
        return Engine(scheduler, executor, clock, boxes, boxes, config.pipeline_depth)
    logged = LoggedExecutor(executor, boxes, clock, step_log)
    return Engine(scheduler, logged, clock, logged, boxes, config.pipeline_depth)


async def serve(
    config: WorkerConfig, executor: Executor, address: str, epoch: int, clock: Clock, step_log: StepLog | None
) -> None:
    """Serves until SIGTERM, SIGINT or the supervisor's end."""
    boxes = WorkerBoxes(executor.info.vocab_size, clock)
    engine = build_engine(config, executor, boxes, clock, step_log)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    hello = welcome(executor.info, f"worker-{os.getpid()}", epoch, os.getpid())
    servicer = WorkerServicer(engine, boxes, hello, clock)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(address)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    _watch_parent(stopped, loop)
    thread = threading.Thread(target=_run_engine, args=(engine,), name="engine", daemon=True)
    thread.start()
    await server.start()
    blocks = hello.num_blocks, hello.block_size, hello.num_host_blocks
    log.info("worker ready: model %s, %d blocks of %d tokens, %d more in host memory", hello.model, *blocks)
    await stopped.wait()
    await server.stop(0.5)
    boxes.put_item(Stop())
    await asyncio.to_thread(thread.join, 5.0)
    executor.close()
    if step_log is not None:
        step_log.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="fairlane.worker", description="One Fairlane worker: a model, its KV cache and an engine."
    )
    parser.add_argument("--socket", required=True, help="address to serve gateways on, e.g. unix:/run/fairlane/worker.sock")
    parser.add_argument("--epoch", type=int, default=1, help="fencing epoch; grows with each start of the same worker")
    parser.add_argument("--config-json", required=True, help="worker settings as JSON, the keys of worker.yaml, sizes in bytes")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    clock = MonotonicClock()
    try:
        config = config_from_json(arguments.config_json)
        limits_of(config, 1)  # before minutes of loading
        executor = make_executor(config, clock)
        step_log = open_step_log(config, executor.info)
    except (ValueError, ModelLoadError) as error:
        print(f"fairlane worker: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    address = arguments.socket if ":" in arguments.socket else f"unix:{arguments.socket}"
    asyncio.run(serve(config, executor, address, arguments.epoch, clock, step_log))
    return 0


if __name__ == "__main__":
    sys.exit(main())
