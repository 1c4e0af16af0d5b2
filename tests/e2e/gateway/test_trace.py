"""The trace recorder in a real gateway: what reaches the disk, what never does, and that no request fails by it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from typer.testing import CliRunner

from fairlane.cli import app
from fairlane.clock import MonotonicClock
from fairlane.errors import ConfigError
from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.keys import hash_key
from fairlane.gateway.server import Gateway
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from gateway_world import PEPPER, FakeWorker, Keys, Service, make_policy

pytestmark = pytest.mark.asyncio

CANARY = "xyzzy-canary"


def make_gateway(worker: FakeWorker, model_dir: Path, keys: Keys, state_dir: Path | None, *, trace: bool = True) -> Gateway:
    config = GatewayConfig(port=0, coalesce=0.0, trace=trace)
    admin = hash_key(PEPPER, keys.admin)
    return Gateway(config, make_policy(keys), PEPPER, admin, worker.address, model_dir, MonotonicClock(), state_dir=state_dir)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder


@pytest_asyncio.fixture
async def recording(worker: FakeWorker, model_dir: Path, state_dir: Path) -> AsyncIterator[Service]:
    keys = Keys()
    gateway = make_gateway(worker, model_dir, keys, state_dir)
    await gateway.start()
    service = Service(gateway, worker, keys)
    await gateway.wait_ready(10)
    yield service
    await service.close()


async def exported(service: Service, state_dir: Path, *flags: str) -> list[dict[str, Any]]:
    """Ends the service, so that all is written, and reads its trace with the command."""
    await service.close()
    result = await asyncio.to_thread(CliRunner().invoke, app, ["trace", "export", "--state-dir", str(state_dir), *flags])
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def on_disk(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in (folder / "trace").rglob("*") if path.is_file())


async def test_a_finished_request_is_one_line_with_its_counts_and_times(recording: Service, state_dir: Path) -> None:
    response = await recording.complete(pb.GenerateRequest(prompt="hello", tier="gold"))
    (found,) = await exported(recording, state_dir)
    usage = response.finished.usage
    assert (found["arrival_s"], found["node"], found["tier"], found["model"], found["end"]) == (
        0.0, "acme/shop", "gold", "tiny", "stop",
    )  # fmt: skip
    assert (found["prompt_tokens"], found["output_tokens"], found["max_tokens"]) == (5, usage.completion_tokens, 200)
    # gRPC sends a deadline in coarse units, rounded up: a little more than the 20 s that were asked for may arrive.
    assert 0 < found["ttft_s"] <= found["end_s"] < found["deadline_s"] < 21


async def test_requests_that_end_badly_say_how(recording: Service, state_dir: Path, refused: Any) -> None:
    recording.worker.on_add = recording.worker.silent
    call = recording.generate(pb.GenerateRequest(prompt="x"))
    await call.read()
    call.cancel()
    await recording.worker.aborts.get()
    late = await refused(recording.generate(pb.GenerateRequest(prompt="x"), timeout=0.05))
    await recording.worker.aborts.get()
    gone, cut = await exported(recording, state_dir)
    assert (gone["end"], gone["cancel_after_s"] == gone["end_s"], gone["output_tokens"]) == ("CLIENT_GONE", True, 1)
    assert (late.code.name, cut["end"] in ("DEADLINE_EXCEEDED", "CLIENT_GONE")) == ("DEADLINE_EXCEEDED", True)


async def test_nothing_a_client_says_reaches_the_disk(recording: Service, state_dir: Path, refused: Any) -> None:
    """A canary in every text a request may have, in finished, cancelled and refused requests; and neither key nor hash."""
    recording.worker.on_add = recording.worker.answer(CANARY)
    request = pb.GenerateRequest(
        prompt=CANARY * 20,
        request_id=CANARY,
        stopping=pb.StoppingParams(stop=[f"{CANARY}!"]),
        cache=pb.CacheOptions(partition=CANARY),
    )
    chat = pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message(role="user", content=CANARY)]))
    answer = await recording.complete(request, metadata=[*recording.auth(), ("x-note", CANARY)])
    await recording.complete(chat)
    await recording.complete(pb.GenerateRequest(token_ids=pb.TokenIds(ids=list(CANARY.encode()))))
    await refused(recording.complete(pb.GenerateRequest(prompt=CANARY, model=CANARY)))
    lines = await exported(recording, state_dir)
    content = on_disk(state_dir)
    keys = recording.keys.shop.encode(), hash_key(PEPPER, recording.keys.shop).encode()
    ids = json.dumps(list(CANARY.encode()), separators=(",", ":"))[1:-1].encode()
    assert (len(lines), CANARY in answer.text, "prefix" in lines[0]) == (3, True, True)
    assert [secret for secret in (CANARY.encode(), ids, *keys, b"k-shop") if secret in content] == []


async def test_equal_beginnings_share_prefix_ids_of_one_tenant_only(recording: Service, state_dir: Path) -> None:
    long = "a" * 300
    for prompt in (long + "b" * 50, long + "c" * 50):
        await recording.complete(pb.GenerateRequest(prompt=prompt))
    await recording.complete(pb.GenerateRequest(prompt=long), metadata=recording.auth(recording.keys.docs))
    one, same, foreign = (found["prefix"] for found in await exported(recording, state_dir))
    assert (len(one), one == same, set(one) & set(foreign)) == (2, True, set())


async def test_a_disk_that_takes_nothing_fails_no_request_and_is_counted(recording: Service, state_dir: Path) -> None:
    shutil.rmtree(state_dir / "trace")
    (state_dir / "trace").write_text("in the way")
    answers = [await recording.complete(pb.GenerateRequest(prompt="x")) for _ in range(3)]
    await recording.close()
    dropped = recording.gateway._metrics.registry.get_sample_value("fairlane_trace_dropped_total")
    assert ([answer.text for answer in answers], dropped) == (["Hi."] * 3, 3.0)


async def test_nothing_is_recorded_unless_it_is_switched_on(worker: FakeWorker, model_dir: Path, state_dir: Path) -> None:
    keys = Keys()
    gateway = make_gateway(worker, model_dir, keys, state_dir, trace=False)
    await gateway.start()
    service = Service(gateway, worker, keys)
    await gateway.wait_ready(10)
    await service.complete(pb.GenerateRequest(prompt="x"))
    await service.close()
    result = await asyncio.to_thread(CliRunner().invoke, app, ["trace", "export", "--state-dir", str(state_dir)])
    assert (result.exit_code, "`trace: true` in gateway.yaml" in result.stderr) == (1, True)
    assert not (state_dir / "trace").exists()


async def test_a_gateway_without_a_place_to_record_in_does_not_start(worker: FakeWorker, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="state folder"):
        make_gateway(worker, model_dir, Keys(), None)


async def test_an_anonymous_export_into_a_file_names_nobody(recording: Service, state_dir: Path, tmp_path: Path) -> None:
    await recording.complete(pb.GenerateRequest(prompt="x"))
    out = tmp_path / "trace.jsonl"
    assert await exported(recording, state_dir, "--anonymise", "--since", "1h", "--out", str(out)) == []
    (found,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert ("acme" in out.read_text(), found["tier"], found["node"].count("/")) == (False, "gold", 1)


@pytest.mark.parametrize("since", ["soon", "0x1h", "1 h", ""])
async def test_a_time_that_is_none_is_misuse(state_dir: Path, since: str) -> None:
    arguments = ["trace", "export", "--since", since, "--state-dir", str(state_dir)]
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    assert (result.exit_code, f"--since {since}: a time such as" in result.stderr) == (2, True)
