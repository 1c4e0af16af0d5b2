"""What serve decides while it runs: which worker to replace, and what the worker is told."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fairlane.cli.run import Plan, _port_problem, _warn_of_plaintext, banner, heal, run, worker_json
from fairlane.clock import FakeClock
from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.keys import DemoKeys
from fairlane.gateway.policy.loader import load_policy_file
from fairlane.gateway.policy_source import PolicySource
from fairlane.paths import state_dir
from fairlane.worker.__main__ import config_from_json
from fairlane.worker.config import Device, LoadFormat, WorkerConfig
from serving import free_port


class World:
    """heal() over a gateway and a supervisor that are moved by hand, one look at a time."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.worker = SimpleNamespace(ready=False, facts=None, hung=None)
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


def hang(world: World) -> None:
    """The gateway's verdict on the process it is connected to."""
    world.worker.ready, world.worker.hung = False, (world.worker.facts.epoch, "silent for 5.1 s")


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


async def test_a_worker_found_hung_is_replaced_at_once_and_once() -> None:
    world = World()
    gateway, supervisor = cast(Any, SimpleNamespace(worker=world.worker)), cast(Any, world.supervisor)
    task = asyncio.create_task(heal(gateway, supervisor, world.clock, 5.0, interval_s=0.0))
    world.ready(1)
    await world.pass_s(0.0)
    hang(world)
    await world.pass_s(0.0)
    replaced_without_waiting = list(world.restarts)
    await world.pass_s(60.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (replaced_without_waiting, world.restarts) == ([1], [1])


async def test_an_old_verdict_does_not_fall_on_the_new_process() -> None:
    assert await history(lambda w: w.ready(1), hang, lambda w: w.ready(2), nothing, hang) == [1, 2]


class TestPorts:
    """What is said of an address that cannot be had, before anything is started."""

    def test_the_same_port_twice(self) -> None:
        assert _port_problem(GatewayConfig(port=5000, admin_port=5000)) == (
            "--admin-port and --port are both 5000; choose another for one of them"
        )

    def test_the_same_port_on_overlapping_addresses(self) -> None:
        port = free_port()
        problem = _port_problem(GatewayConfig(host="0.0.0.0", port=port, admin_port=port, metrics=False))
        assert problem == f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --admin-port"

    def test_a_port_in_use(self) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            problem = _port_problem(GatewayConfig(port=port, admin_port=0))
        assert problem == f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another with --port"

    def test_a_host_that_is_not_there(self) -> None:
        problem = _port_problem(GatewayConfig(host="nosuch.invalid", port=0, admin_port=0)) or ""
        assert re.fullmatch(r"cannot listen on nosuch\.invalid:0: there is no such host \(.+\); correct --host", problem)

    def test_an_address_of_another_machine(self) -> None:
        problem = _port_problem(GatewayConfig(port=0, admin_port=0, admin_host="192.0.2.1"))
        assert problem == "cannot listen on 192.0.2.1:0: this machine has no such address; correct admin_host in gateway.yaml"

    def test_free_ports_are_no_problem_also_in_brackets(self) -> None:
        assert _port_problem(GatewayConfig(host="[::1]", port=0, admin_port=0)) is None


def try_line(host: str = "127.0.0.1", port: int = 50051, folder: Path | None = None, tenants: int = 1) -> str:
    """The banner's command for a server at that address with that state folder."""
    folder = folder or state_dir()
    demo = DemoKeys(folder / "demo-keys.json", b"", "", {f"o/{n}": "" for n in range(tenants)})
    policy, source = cast(Any, SimpleNamespace(path="p", sha256="0" * 64)), PolicySource(Path("p"))
    plan = Plan(GatewayConfig(host=host), WorkerConfig(), policy, source, demo, folder, Path("m"), 1.0)
    gateway: Any = SimpleNamespace(port=port, admin_port=port + 1, metrics_port=port + 2, policy_generation=1)
    lines = banner(plan, gateway).splitlines()
    return next(line for line in lines if line.startswith("  try")).split(maxsplit=1)[1]


def test_the_banners_command_reaches_this_very_server() -> None:
    question = '"Why is the sky blue?"'
    assert [
        try_line(),
        try_line(port=8001),
        try_line(host="::1"),
        try_line(host="0.0.0.0", port=8001),
        try_line(folder=Path("/srv/my state")),
        try_line(host="192.0.2.7"),
        try_line(tenants=0),
    ] == [
        f"fairlane generate {question}",
        f"fairlane generate --target 127.0.0.1:8001 {question}",
        f"fairlane generate --target '[::1]:50051' {question}",
        f"fairlane generate --target 127.0.0.1:8001 {question}",
        f"fairlane generate --state-dir '/srv/my state' {question}",
        f"fairlane generate --target 192.0.2.7:50051 --key-file KEYFILE {question}",
        f"fairlane generate --key-file KEYFILE {question}",
    ]


async def test_a_worker_that_cannot_be_started_is_one_line_and_stops_the_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(config: str) -> Any:
        return lambda socket, epoch: ["/no/such/program"]

    monkeypatch.setattr("fairlane.cli.run.worker_command", command)
    source = PolicySource(Path(__file__).parents[3] / "configs" / "tenants.yaml")
    policy = load_policy_file(source.path)
    demo = DemoKeys.load_or_create(policy, tmp_path)
    port = free_port()
    config = GatewayConfig(port=port, admin_port=0, metrics_port=0)
    folder: Any = None  # no tokenizer
    code = await run(Plan(config, WorkerConfig(), policy, source, demo, tmp_path, folder, 1.0))
    said = capsys.readouterr()
    with socket.socket() as free_again:
        free_again.bind(("127.0.0.1", port))
    assert (code, said.out) == (1, "")
    assert re.fullmatch(r"fairlane: the worker cannot be started: .*No such file.*\n", said.err)


def test_the_worker_reads_exactly_the_settings_it_is_sent() -> None:
    config = dataclasses.replace(
        WorkerConfig(), model="/m", device=Device.CUDA, load_format=LoadFormat.DUMMY, num_blocks=9, served_name="x"
    )
    assert (config_from_json(worker_json(config)), config_from_json(worker_json(WorkerConfig()))) == (config, WorkerConfig())


def test_serving_plaintext_to_other_machines_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for config in (GatewayConfig(), GatewayConfig(host="::1"), GatewayConfig(host="localhost")):
        _warn_of_plaintext(config)
    quiet = list(caplog.records)
    _warn_of_plaintext(GatewayConfig(host="0.0.0.0", admin_host="192.0.2.1"))
    said = [(record.levelname, record.getMessage().partition(" is ")[0]) for record in caplog.records]
    assert quiet == []
    assert said == [("WARNING", "the inference API on 0.0.0.0"), ("WARNING", "the admin API on 192.0.2.1")]
