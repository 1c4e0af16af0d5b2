"""A scripted worker, a tiny tokenizer, a policy built by hand, and a real gateway on loopback between them and a stock gRPC
client (support/gateway_world.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

import gateway_world as world
from fairlane.cli import app
from fairlane.clock import MonotonicClock
from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.keys import hash_key
from fairlane.gateway.server import Gateway
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from gateway_world import PEPPER, FakeWorker, Keys, Refusal, Service, following, make_model_dir, make_policy, policy_text


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model_dir(tmp_path / "model")


@pytest_asyncio.fixture
async def worker(tmp_path: Path) -> AsyncIterator[FakeWorker]:
    fake = FakeWorker(tmp_path / "worker.sock")
    await fake.start()
    yield fake
    await fake.kill()


@pytest.fixture
def gateway_config() -> GatewayConfig:
    """Tests override this fixture to change the configuration."""
    return GatewayConfig(port=0, coalesce=0.0)


@pytest_asyncio.fixture
async def unready(worker: FakeWorker, model_dir: Path, gateway_config: GatewayConfig) -> AsyncIterator[Service]:
    """A started gateway that may not have found its worker yet."""
    keys = Keys()
    gateway = Gateway(
        gateway_config, make_policy(keys), PEPPER, hash_key(PEPPER, keys.admin), worker.address, model_dir, MonotonicClock()
    )
    await gateway.start()
    running = Service(gateway, worker, keys)
    yield running
    await running.close()


@pytest_asyncio.fixture
async def service(unready: Service) -> Service:
    await unready.gateway.wait_ready(10)
    return unready


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Returns once a condition holds; fails after 10 s."""
    return world.until


@pytest.fixture
def rest() -> Callable[[Any], Awaitable[list[pb.GenerateEvent]]]:
    """Reads a stream to its good end."""
    return world.rest


@pytest.fixture
def refused() -> Callable[[Any], Awaitable[Refusal]]:
    """Awaits a call (unary or stream) that must fail, and reads the error."""
    return world.refused


# -- a gateway that follows a policy file, and the commands run against it ---------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "policy").mkdir()
    return tmp_path / "policy" / "tenants.yaml"


@pytest_asyncio.fixture
async def served(path: Path, worker: FakeWorker, model_dir: Path, tmp_path: Path) -> AsyncIterator[Service]:
    keys = Keys()
    path.write_text(policy_text(keys))
    async with following(path, worker, keys, model_dir, tmp_path / "state") as service:
        yield service


@pytest.fixture
def run(served: Service) -> Callable[..., Awaitable[Any]]:
    """A command line, run beside the gateway's event loop."""

    async def call(*arguments: str, stdin: str | None = None) -> Any:
        environment = {
            "FAIRLANE_ADMIN_KEY": served.keys.admin,
            "FAIRLANE_ADMIN_TARGET": f"127.0.0.1:{served.gateway.admin_port}",
            "COLUMNS": "200",
        }
        return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), input=stdin, env=environment)

    return call
