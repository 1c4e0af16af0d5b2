"""The product as a newcomer meets it: `fairlane serve`, then `fairlane generate`, a plain gRPC stub, tiers that overtake, a
killed worker, a storm of cancelled clients. Everything here is real: processes, sockets, SmolLM2."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from displaced import GREEDY, displaced, token_ids
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from serving import CAPITAL, Served, serving, wait_until_serving

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for the tests that leave it as they found it: 96 blocks of 16 tokens."""
    with serving(tmp_path_factory.mktemp("serve"), "--num-blocks", "97", "--max-num-seqs", "16") as served:
        yield served


def chat(text: str, *, max_tokens: int = 32, tier: str = "", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        messages=pb.Messages(messages=[pb.Message(role="user", content=text)]),
        sampling=GREEDY,
        stopping=pb.StoppingParams(max_tokens=max_tokens, **fields),
        tier=tier,
        response=pb.ResponseOptions(return_token_ids=True, lifecycle_events=True),
    )


def text_of(events: list[pb.GenerateEvent]) -> str:
    return "".join(event.tokens.text for event in events)


def drained(server: Served) -> bool:
    """Whether nothing is in flight and no block is held, asked until it is so or a second has passed."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        status = server.status()
        if status.in_flight == 0 and status.worker.running == 0 and status.worker.waiting == 0 and status.worker.blocks_used == 0:
            return True
    return False


def test_fairlane_generate_needs_no_flags_and_says_paris(server: Served) -> None:
    command = [sys.executable, "-m", "fairlane", "generate", CAPITAL]
    done = subprocess.run(command, capture_output=True, text=True, env=server.environment(), timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_the_plain_stub_of_the_examples_says_paris(server: Served) -> None:
    example = ROOT / "examples" / "generate.py"
    assert len(example.read_text().splitlines()) <= 30
    key = dict(server.key("northwind/checkout"))["authorization"].removeprefix("Bearer ")
    environment = {**server.environment(), "FAIRLANE_API_KEY": key}
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_a_preempted_request_still_says_paris_with_the_same_tokens(server: Served) -> None:
    """While the batch request runs, a gold one arrives that needs 94 of the 96 blocks and takes the batch request's."""
    got = displaced(server, chat(CAPITAL))
    kinds = [event.WhichOneof("event") for event in got.events]
    assert got.events[-1].finished.usage.preemptions >= 1
    assert kinds.index("preempted") < kinds.index("resumed")
    assert "Paris" in text_of(got.events)
    assert token_ids(got.events)[: len(got.alone)] == got.alone
    assert [event.seq for event in got.events] == list(range(len(got.events)))


def test_500_clients_cancelled_at_random_moments_leave_nothing_and_disturb_nobody(server: Served) -> None:
    survivors = [chat(f"Count from {n} to {n + 20}.", max_tokens=48, ignore_eos=True) for n in range(4)]
    with server.inference() as stub:
        key = server.key("chatly/free")
        before = [token_ids(list(stub.Generate(request, metadata=key))) for request in survivors]
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(lambda r: token_ids(list(stub.Generate(r, metadata=key))), request) for request in survivors]
            with ThreadPoolExecutor(32) as clients:
                list(clients.map(lambda seed: _cancelled_client(stub, server, random.Random(seed)), range(500)))
            during = [stream.result(300) for stream in streams]
    assert drained(server)
    assert during == before


def _cancelled_client(stub: object, server: Served, rng: random.Random) -> None:
    """A client that reads up to five events, in whatever state its request is, and goes away."""
    node, tier = rng.choice([("northwind/checkout", "gold"), ("northwind/docs-api", "standard"), ("chatly/free", "batch")])
    request = chat(f"Write about {rng.random()}.", max_tokens=64, tier=tier)
    call = stub.Generate(request, metadata=server.key(node))  # type: ignore[attr-defined]
    timer = threading.Timer(rng.random() * 0.05, call.cancel)
    timer.start()
    try:
        for _ in range(rng.randrange(6)):
            next(call)
    except (grpc.RpcError, StopIteration):
        pass
    finally:
        call.cancel()
        timer.cancel()


def test_a_killed_worker_ends_every_stream_with_a_reason_and_is_replaced(tmp_path: Path) -> None:
    with serving(tmp_path, "--num-blocks", "200") as server, server.inference() as stub:
        key = server.key("chatly/free")
        calls = [stub.Generate(chat(f"Story {n}", max_tokens=900, ignore_eos=True), metadata=key) for n in range(8)]
        for call in calls:
            while next(call).WhichOneof("event") != "started":
                pass
        os.kill(server.status().worker.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        with ThreadPoolExecutor(len(calls)) as pool:
            errors = list(pool.map(_error_of, calls))
        ended_s = time.monotonic()
        assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
        assert {_reason(error) for error in errors} == {"WORKER_LOST"}
        assert ended_s - killed_s < 5.0
        wait_until_serving(server)
        assert "Paris" in stub.Complete(chat(CAPITAL), metadata=key, timeout=60).text
        assert server.status().worker.epoch == 2


def _error_of(call: grpc.Call) -> grpc.RpcError:
    try:
        for _ in call:  # type: ignore[attr-defined]
            pass
    except grpc.RpcError as error:
        return error
    raise AssertionError("the stream ended without an error")


def _reason(error: grpc.RpcError) -> str:
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    return ""


def test_sigterm_lets_running_streams_finish_and_exits_with_zero(tmp_path: Path) -> None:
    with serving(tmp_path, "--num-blocks", "200") as server, server.inference() as stub:
        call = stub.Generate(chat("Tell me a story.", max_tokens=40, ignore_eos=True), metadata=server.key("chatly/free"))
        events = [next(call)]
        server.process.send_signal(signal.SIGTERM)
        events += list(call)
        assert len(token_ids(events)) == 40
        assert events[-1].WhichOneof("event") == "finished"
        assert server.process.wait(30) == 0


def test_nothing_but_the_three_documented_ports_is_open(server: Served) -> None:
    """Listening TCP sockets of the server and its worker, from /proc: inference, admin and metrics, on loopback."""
    pids = {server.process.pid, server.status().worker.pid}
    inodes = {
        os.readlink(f"/proc/{pid}/fd/{fd}")[8:-1]
        for pid in pids
        for fd in os.listdir(f"/proc/{pid}/fd")
        if os.path.islink(f"/proc/{pid}/fd/{fd}") and os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:[")
    }
    listening = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].rsplit(":", 1)
                listening.add((address, int(port, 16)))
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, plain and mapped into IPv6
    assert {port for _, port in listening} == {server.port, server.port + 1, server.port + 2}
    assert {address for address, _ in listening} <= loopback
