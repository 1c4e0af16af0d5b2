"""What `fairlane serve` does once its plan is checked: one gateway and one supervised worker, from the first bind to the last
goodbye. Returns exit codes; every way out leaves neither a process nor a socket behind."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from fairlane.cli.client import DEFAULT_TARGET
from fairlane.cli.exits import FAILED, INTERRUPTED, USAGE
from fairlane.cli.target import WILDCARDS, host_port, is_local
from fairlane.clock import Clock, MonotonicClock
from fairlane.errors import ConfigError
from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.keys import DemoKeys
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.policy_source import PolicySource
from fairlane.gateway.server import Gateway
from fairlane.paths import private_dir, runtime_dir, state_dir
from fairlane.supervisor import Backoff, Supervisor, worker_command
from fairlane.worker.config import WorkerConfig

log = logging.getLogger("fairlane.serve")

_HEAL_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything serve needs, checked. `policy` includes the demo keys; `source` is where it came from and may change."""

    gateway: GatewayConfig
    worker: WorkerConfig
    policy: Policy
    source: PolicySource
    demo: DemoKeys
    state_dir: Path
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
        gateway = make_gateway(plan, address, clock)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, gateway.reload_policy)
    except (ConfigError, ValueError, OSError) as error:
        return _failed(USAGE, str(error))
    try:
        await gateway.start()
    except OSError as error:
        return _failed(FAILED, str(error))
    try:
        try:
            await supervisor.start()
        except OSError as error:
            await gateway.drain_and_stop(0.0)
            return _failed(FAILED, f"the worker cannot be started: {error}")
        print(banner(plan, gateway), flush=True)
        _warn_of_plaintext(plan.gateway)
        code = await _until_stopped(plan, gateway, supervisor, signals, clock)
        grace_s = plan.gateway.drain_grace if code == 0 else 0.0
        await gateway.drain_and_stop(grace_s)
        return code
    finally:
        await supervisor.stop()


def make_gateway(plan: Plan, worker_address: str, clock: Clock) -> Gateway:
    """Raises ConfigError or OSError for state that cannot be used."""
    demo = plan.demo
    return Gateway(
        plan.gateway,
        plan.policy,
        demo.pepper,
        demo.admin_key_hash,
        worker_address,
        plan.model_dir,
        clock,
        source=plan.source,
        state_dir=plan.state_dir,
    )


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
    """Replaces a worker that lives and is of no use: at once if the gateway found it hung, and after `timeout_s` if it was ready
    and is not any more (a process that has just died is replaced without us). Never returns.

    Judged by the epoch the gateway saw, so that a new process has all the time it needs to load its model.
    """
    ready_epoch, lost_s, healed_epoch = 0, None, 0
    while True:
        await asyncio.sleep(interval_s)
        facts, hung = gateway.worker.facts, gateway.worker.hung
        if hung is not None and healed_epoch < hung[0] == supervisor.epoch:
            healed_epoch = supervisor.epoch
            supervisor.restart(hung[1])
            ready_epoch, lost_s = 0, None
            continue
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
    tenants = ", ".join(plan.demo.tenants) or "none (every tenant has keys of its own)"
    metrics = f"http://{host_port(plan.gateway.metrics_host, gateway.metrics_port)}/metrics"
    facts = {
        "inference": host_port(plan.gateway.host, gateway.port),
        "admin": host_port(plan.gateway.admin_host, gateway.admin_port),
        "metrics": metrics if plan.gateway.metrics else "off",
        "model": f"{plan.worker.served_name or plan.worker.model} ({plan.model_dir}), {plan.worker.device.value}; loading",
        "policy": f"{plan.policy.path}, generation {gateway.policy_generation}, sha256 {plan.policy.sha256[:12]}",
        "demo keys": f"{plan.demo.path} for {tenants}; they work from this machine only",
        "try": f'fairlane generate {"".join(flag + " " for flag in _client_flags(plan, gateway))}"Why is the sky blue?"',
    }
    width = max(map(len, facts))
    return "\n".join(["", "Fairlane is up", *(f"  {name:<{width}}  {value}" for name, value in facts.items()), ""])


def _warn_of_plaintext(config: GatewayConfig) -> None:
    for what, host in (("the inference API", config.host), ("the admin API", config.admin_host)):
        if not is_local(host_port(host, 0)):
            log.warning("%s on %s is not encrypted: keys and prompts can be read on the way; put TLS in front of it", what, host)


def _client_flags(plan: Plan, gateway: Gateway) -> list[str]:
    """What a client command on this machine needs to reach this server with a key that it takes."""
    target = host_port(WILDCARDS.get(plan.gateway.host, plan.gateway.host), gateway.port)
    flags = [] if target == DEFAULT_TARGET else [f"--target {shlex.quote(target)}"]
    if not plan.demo.tenants or not is_local(target):
        return [*flags, "--key-file KEYFILE"]
    folder = plan.state_dir.absolute()
    return flags if folder == state_dir().absolute() else [*flags, f"--state-dir {shlex.quote(str(folder))}"]


def _port_problem(config: GatewayConfig) -> str | None:
    """Why a port cannot be had, in words that gRPC does not give; None if all are free just now."""
    admin_port = config.admin_port if config.admin_port is not None else config.port and config.port + 1
    metrics_port = config.metrics_port if config.metrics_port is not None else admin_port and admin_port + 1
    wanted = [("", config.host, config.port), ("admin-", config.admin_host, admin_port)]
    if config.metrics:
        wanted.append(("metrics-", config.metrics_host, metrics_port))
    taken: dict[tuple[str, int], str] = {}
    with ExitStack() as probes:  # all at a time, so that two of the same port are noticed
        for prefix, host, port in wanted:
            other = taken.setdefault((host, port), prefix) if port else prefix
            if other != prefix:
                return f"--{prefix}port and --{other}port are both {port}; choose another for one of them"
            try:
                _probe(probes, host.strip("[]"), port)
            except OSError as error:
                return f"cannot listen on {host_port(host, port)}: {_why(error, prefix)}"
    return None


def _probe(probes: ExitStack, host: str, port: int) -> None:
    """Listens there until `probes` closes. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    probe = probes.enter_context(socket.socket(family, kind, protocol))
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
    probe.bind(address)
    probe.listen()


def _why(error: OSError, prefix: str) -> str:
    """What is wrong with the address or the port, and what to change: a flag, or a key of gateway.yaml."""
    key = f"{prefix}host".replace("-", "_")
    change = "--host" if not prefix else f"{key} in gateway.yaml"
    if isinstance(error, socket.gaierror):
        return f"there is no such host ({error.strerror}); correct {change}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"this machine has no such address; correct {change}"
    return f"{error.strerror}; choose another with --{prefix}port"


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
