"""A real `fairlane serve` for end-to-end tests: its own state folder and free ports, SmolLM2 on the CPU, demo keys."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fairlane.protos.fairlane.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc

CAPITAL = "What is the capital of France? Answer in one sentence."
START_TIMEOUT_S = 60.0


def free_port() -> int:
    """A port that was free a moment ago, and the two after it too (the admin API's and the metrics')."""
    while True:
        with socket.socket() as first, socket.socket() as second, socket.socket() as third:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
                third.bind(("127.0.0.1", port + 2))
            except (OSError, OverflowError):
                continue
            return port


@dataclass
class Served:
    """A running server. `log` grows as it speaks."""

    process: subprocess.Popen[str]
    port: int
    state_dir: Path
    log: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def key(self, node: str) -> tuple[tuple[str, str]]:
        """Call metadata of a tenant's demo key."""
        keys = json.loads((self.state_dir / "demo-keys.json").read_text())["tenants"]
        return (("authorization", f"Bearer {keys[node]}"),)

    @property
    def admin_key(self) -> tuple[tuple[str, str]]:
        return (("authorization", f"Bearer {json.loads((self.state_dir / 'demo-keys.json').read_text())['admin']}"),)

    @contextmanager
    def inference(self) -> Iterator[inference_pb2_grpc.InferenceStub]:
        with grpc.insecure_channel(self.target) as channel:
            yield inference_pb2_grpc.InferenceStub(channel)

    def status(self) -> admin_pb2.GetStatusResponse:
        with grpc.insecure_channel(f"127.0.0.1:{self.port + 1}") as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            return stub.GetStatus(admin_pb2.GetStatusRequest(), metadata=self.admin_key, timeout=10)

    def environment(self) -> dict[str, str]:
        return {**os.environ, "FAIRLANE_STATE_DIR": str(self.state_dir), "FAIRLANE_TARGET": self.target}

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[Served]:
    """Starts `fairlane serve FLAGS` and waits until it reports SERVING. Fails with its log when it does not."""
    port = free_port()
    state_dir = folder / "state"
    command = [sys.executable, "-m", "fairlane", "serve", "--port", str(port), "--state-dir", str(state_dir), *flags]
    with tempfile.TemporaryDirectory(prefix="fl") as runtime_dir:  # short: a socket's path has at most 107 bytes
        environment = {
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "XDG_RUNTIME_DIR": runtime_dir,
            "XDG_CONFIG_HOME": str(folder / "none"),
        }
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        server = Served(process, port, state_dir)
        reader = threading.Thread(target=_collect, args=(server,), daemon=True)
        reader.start()
        try:
            wait_until_serving(server)
            yield server
        finally:
            try:
                server.stop()
            finally:
                reader.join(5)


def _collect(server: Served) -> None:
    if server.process.stdout is not None:
        server.log.extend(server.process.stdout)
    server.ended.set()


def wait_until_serving(server: Served) -> None:
    """Health's Watch tells when it changes; no polling. RuntimeError with the server's log when it ends or takes too long."""
    with grpc.insecure_channel(server.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=""), timeout=START_TIMEOUT_S, wait_for_ready=True)
        threading.Thread(target=lambda: (server.ended.wait(START_TIMEOUT_S), watch.cancel()), daemon=True).start()
        try:
            for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.RpcError as error:
            raise RuntimeError(f"the server did not come up ({error.code()}):\n" + "".join(server.log[-40:])) from None
    raise RuntimeError("the health stream ended:\n" + "".join(server.log[-40:]))
