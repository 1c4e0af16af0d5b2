"""What `fairlane serve` does once its plan is checked: one gateway and one supervised worker, from the first bind to the last
goodbye. Returns exit codes; every way out leaves neither a process nor a socket behind."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import shutil
import signal
import socket
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from fairlane.cli.client import DEFAULT_TARGET
from fairlane.cli.exits import FAILED, INTERRUPTED, USAGE
from fairlane.clock import Clock, MonotonicClock
from fairlane.errors import ConfigError
from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.keys import DemoKeys
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.server import Gateway
from fairlane.paths import private_dir, runtime_dir
from fairlane.supervisor import Backoff, Supervisor, worker_command
from fairlane.worker.config import WorkerConfig

log = logging.getLogger("fairlane.serve")

_HEAL_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything serve needs, checked. `policy` includes the demo keys."""

    gateway: GatewayConfig
    worker: WorkerConfig
    policy: Policy
    demo: DemoKeys
    model_dir: Path
    ready_timeout_s: float


class _Signals:
    """The first SIGTERM or SIGINT asks for an orderly stop, the second ends the process with its worker at once."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.stop = asyncio.Event()
        self._supervisor = supervisor
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._received)

    def _received(self) -> None:
        if self.stop.is_set():
            self._supervisor.abandon()
            os._exit(INTERRUPTED)
        log.info("stopping: running requests may finish; once more to stop at once")
        self.stop.set()


async def run(plan: Plan) -> int:
    """Serves until a signal, or until the worker can never work. Returns the exit code."""
    clock = MonotonicClock()
    if problem := _port_problem(plan.gateway):
        return _failed(FAILED, problem)
    try:
        supervisor = Supervisor(worker_command(worker_json(plan.worker)), _socket_folder(), Backoff(clock))
        signals = _Signals(supervisor)
        address = supervisor.address
        gateway = Gateway(plan.gateway, plan.policy, plan.demo.pepper, plan.demo.admin_key_hash, address, plan.model_dir, clock)
    except (ConfigError, ValueError, OSError) as error:
        return _failed(USAGE, str(error))
    try:
        await gateway.start()
    except OSError as error:
        return _failed(FAILED, str(error))
    try:
        await supervisor.start()
        print(banner(plan, gateway), flush=True)
        code = await _until_stopped(plan, gateway, supervisor, signals, clock)
        grace_s = plan.gateway.drain_grace if code == 0 else 0.0
        await gateway.drain_and_stop(grace_s)
        return code
    finally:
        await supervisor.stop()


async def _until_stopped(plan: Plan, gateway: Gateway, supervisor: Supervisor, signals: _Signals, clock: Clock) -> int:
    stopped = asyncio.create_task(signals.stop.wait())
    unusable = asyncio.create_task(supervisor.unusable())
    ready = asyncio.create_task(gateway.wait_ready(plan.ready_timeout_s))
    healing = asyncio.create_task(heal(gateway, supervisor, clock, plan.gateway.worker_timeout))
    tasks: tuple[asyncio.Task[Any], ...] = (stopped, unusable, ready, healing)
    try:
        await asyncio.wait((stopped, unusable, ready, healing), return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and ready.exception() is None:
            print("Ready.", flush=True)
            await asyncio.wait((stopped, unusable, healing), return_when=asyncio.FIRST_COMPLETED)
        if unusable.done():
            return _failed(USAGE, f"the worker cannot run:\n{unusable.result()}")
        if stopped.done():
            return 0
        if healing.done():
            healing.result()  # raises what ended it
        return _failed(FAILED, f"the worker was not ready within {plan.ready_timeout_s:g} s")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def heal(
    gateway: Gateway, supervisor: Supervisor, clock: Clock, timeout_s: float, interval_s: float = _HEAL_INTERVAL_S
) -> None:
    """Replaces a worker that was ready and has not been for `timeout_s`, though its process lives. Never returns.

    Judged by the epoch the gateway saw ready, so that a new process has all the time it needs to load its model.
    """
    ready_epoch, lost_s = 0, None
    while True:
        await asyncio.sleep(interval_s)
        facts = gateway.worker.facts
        if gateway.worker.ready and facts is not None:
            ready_epoch, lost_s = facts.epoch, None
        elif ready_epoch == supervisor.epoch:
            lost_s = clock.now() if lost_s is None else lost_s
            if clock.now() - lost_s > timeout_s:
                supervisor.restart(f"not ready for {timeout_s:g} s")
                ready_epoch, lost_s = 0, None


def worker_json(config: WorkerConfig) -> str:
    """The worker's settings as its --config-json takes them: sizes in bytes, enums by value."""
    values = dataclasses.asdict(config)
    return json.dumps({name: value.value if isinstance(value, Enum) else value for name, value in values.items()})


def banner(plan: Plan, gateway: Gateway) -> str:
    """What a person needs to know first, and a command to try."""
    target = f"{plan.gateway.host}:{gateway.port}"
    tenants = ", ".join(plan.demo.tenants) or "none (every tenant has keys of its own)"
    flag = "" if target == DEFAULT_TARGET else f"--target {target} "
    facts = {
        "inference": target,
        "admin": f"{plan.gateway.admin_host}:{gateway.admin_port}",
        "model": f"{plan.worker.served_name or plan.worker.model} ({plan.model_dir}), {plan.worker.device.value}; loading",
        "policy": f"{plan.policy.path}, generation 1, sha256 {plan.policy.sha256[:12]}",
        "demo keys": f"{plan.demo.path} for {tenants}; they work from this machine only",
        "try": f'fairlane generate {flag}"Why is the sky blue?"',
    }
    width = max(map(len, facts))
    return "\n".join(["", "Fairlane is up", *(f"  {name:<{width}}  {value}" for name, value in facts.items()), ""])


def _port_problem(config: GatewayConfig) -> str | None:
    """Why a port cannot be had, in words that gRPC does not give; None if both are free just now."""
    admin_port = config.admin_port if config.admin_port is not None else config.port and config.port + 1
    for flag, host, port in (("--port", config.host, config.port), ("--admin-port", config.admin_host, admin_port)):
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
                probe.bind(address)
        except OSError as error:
            return f"cannot listen on {host}:{port}: {error.strerror}; choose another with {flag}"
    return None


def _socket_folder() -> Path:
    """A folder for this process's worker socket. Folders of dead processes are removed on the way."""
    base = private_dir(runtime_dir())
    for old in base.glob("serve-*"):
        pid = old.name.removeprefix("serve-")
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(old, ignore_errors=True)
    return base / f"serve-{os.getpid()}"


def _failed(code: int, message: str) -> int:
    print(f"fairlane: {message}", file=sys.stderr, flush=True)
    return code
