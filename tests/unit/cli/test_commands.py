"""The commands as a user types them: exit codes, what goes to which stream, and that no secret is taken or shown where it should
not be. The server is a scripted one behind real gRPC."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from typer.testing import CliRunner

from fairlane.cli import app
from fairlane.gateway.keys import DemoKeys, hash_key, is_well_formed, load_or_create_pepper
from fairlane.gateway.policy.loader import load_policy_file
from fairlane.protos.fairlane.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from fairlane.protos.fairlane.v1 import inference_pb2 as pb

ROOT = Path(__file__).parents[3]
POLICY = ROOT / "configs" / "tenants.yaml"


def run(*arguments: str, stdin: str | None = None, **environment: str) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin, env=environment or None)


class Scripted(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.AdminServicer):
    """Answers "Hello world" and remembers what it was asked; refuses the tier "forbidden" with rich details."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.keys: list[str] = []

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateEvent]:
        self.requests.append(request)
        self.keys.append(dict(context.invocation_metadata())["authorization"])
        if request.tier == "forbidden":
            status = status_pb2.Status(code=grpc.StatusCode.PERMISSION_DENIED.value[0], message="not this tier")
            bad = error_details_pb2.BadRequest(field_violations=[{"field": "tier", "description": "one of gold, batch"}])
            for detail in (error_details_pb2.ErrorInfo(reason="TIER_NOT_ALLOWED", domain="fairlane"), bad):
                packed = any_pb2.Any()
                packed.Pack(detail)
                status.details.append(packed)
            context.abort_with_status(rpc_status.to_status(status))
        yield pb.GenerateEvent(seq=0, queued=pb.Queued(request_id="r"))
        yield pb.GenerateEvent(seq=1, tokens=pb.Tokens(text="Hello ", num_tokens=1))
        yield pb.GenerateEvent(seq=2, tokens=pb.Tokens(text="wörld", num_tokens=2))
        usage = pb.Usage(prompt_tokens=4, completion_tokens=3)
        yield pb.GenerateEvent(seq=3, finished=pb.Finished(usage=usage, tier="gold"))

    def GetStatus(self, request: admin_pb2.GetStatusRequest, context: grpc.ServicerContext) -> admin_pb2.GetStatusResponse:
        self.keys.append(dict(context.invocation_metadata())["authorization"])
        worker = admin_pb2.WorkerStatus(ready=True, epoch=2, blocks_total=100, blocks_used=25, block_utilization_ratio=0.25)
        nodes = [admin_pb2.NodeStatus(node="northwind/checkout", in_flight=3)]
        return admin_pb2.GetStatusResponse(model="smollm2", in_flight=3, worker=worker, nodes=nodes)


@pytest.fixture
def server() -> Iterator[tuple[Scripted, str]]:
    scripted = Scripted()
    server = grpc.server(ThreadPoolExecutor(4))
    inference_pb2_grpc.add_InferenceServicer_to_server(scripted, server)
    admin_pb2_grpc.add_AdminServicer_to_server(scripted, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield scripted, f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.fixture
def demo(tmp_path: Path) -> DemoKeys:
    return DemoKeys.load_or_create(load_policy_file(POLICY), tmp_path)


def test_a_good_policy_is_exit_code_0() -> None:
    result = run("policy", "check", str(POLICY))
    assert (result.exit_code, result.stdout) == (0, f"{POLICY}: ok: 3 tiers, 4 tenants, 0 keys\n")


def test_a_bad_policy_is_exit_code_1_with_every_finding_on_standard_error() -> None:
    result = run("policy", "check", "-", stdin="version: 1\ntires: {}\norganisations: 3\n")
    lines = result.stderr.splitlines()
    assert (result.exit_code, result.stdout, [line.split(": ")[0] for line in lines]) == (
        1, "", ["<stdin>:1:1", "<stdin>:2:1", "<stdin>:3:16"],
    )  # fmt: skip


def test_what_cannot_be_read_is_exit_code_2_with_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    files = ("/dev/null", str(tmp_path), str(tmp_path / "fifo"), str(tmp_path / "none"))
    results = [*(run("policy", "check", file) for file in files), run("policy", "check", "-", stdin="")]
    assert [(r.exit_code, r.stdout, r.stderr.count("\n")) for r in results] == [(2, "", 1)] * 5


def test_warnings_do_not_fail_the_check(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(POLICY.read_text())
    file.chmod(0o666)
    result = run("policy", "check", str(file))
    assert (result.exit_code, result.stderr) == (0, f"warning: {file}: is writable by every user of this machine: chmod o-w\n")


def test_a_new_key_goes_to_standard_output_and_its_hash_beside_it(tmp_path: Path) -> None:
    result = run("keys", "new", "--id", "k7", "--state-dir", str(tmp_path))
    key = result.stdout.strip()
    assert (result.exit_code, is_well_formed(key), key in result.stderr) == (0, True, False)
    assert f'id: k7\n    hash: "{hash_key(load_or_create_pepper(tmp_path), key)}"' in result.stderr


def test_generate_streams_the_text_and_nothing_else_to_standard_output(server: tuple[Scripted, str], demo: DemoKeys) -> None:
    scripted, target = server
    result = run("generate", "--target", target, "--state-dir", str(demo.path.parent), "--max-tokens", "9", "Hi")
    request = scripted.requests[0]
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello wörld\n", "")
    assert (request.messages.messages[0].content, request.sampling.temperature, request.stopping.max_tokens) == ("Hi", 0.0, 9)
    assert scripted.keys == [f"Bearer {demo.tenants['northwind/checkout']}"]


def test_the_key_comes_from_the_file_then_the_environment_then_the_demo_keys(
    server: tuple[Scripted, str], demo: DemoKeys, tmp_path: Path
) -> None:
    scripted, target = server
    (tmp_path / "key").write_text("from-file\n")
    base = ("generate", "--target", target, "--state-dir", str(demo.path.parent), "--raw", "x")
    run(*base, "--key-file", str(tmp_path / "key"), FAIRLANE_API_KEY="from-environment")
    run(*base, FAIRLANE_API_KEY="from-environment")
    run(*base, "--tenant", "chatly/free", FAIRLANE_API_KEY="from-environment")
    assert scripted.keys == ["Bearer from-file", "Bearer from-environment", f"Bearer {demo.tenants['chatly/free']}"]


def test_a_refusal_is_one_message_with_reason_and_fields_and_exit_code_1(server: tuple[Scripted, str], demo: DemoKeys) -> None:
    result = run("generate", "--target", server[1], "--state-dir", str(demo.path.parent), "--tier", "forbidden", "x")
    assert (result.exit_code, result.stdout, result.stderr) == (
        1, "", "fairlane: PERMISSION_DENIED TIER_NOT_ALLOWED: not this tier\n  tier: one of gold, batch\n",
    )  # fmt: skip


def test_no_server_says_how_to_start_one(demo: DemoKeys) -> None:
    result = run("generate", "--target", "127.0.0.1:1", "--state-dir", str(demo.path.parent), "x")
    assert (result.exit_code, "start one with `fairlane serve`" in result.stderr) == (1, True)


@pytest.mark.parametrize("arguments", [("--state-dir", "/nonexistent"), ("--key-file", "/nonexistent"), ("--key-file", "/")])
def test_no_key_is_exit_code_2_and_says_where_keys_come_from(arguments: tuple[str, ...]) -> None:
    result = run("generate", *arguments, "x")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)


def test_an_unknown_tenant_is_answered_with_those_there_are(demo: DemoKeys) -> None:
    result = run("generate", "--state-dir", str(demo.path.parent), "--tenant", "chatly/nobody", "x")
    assert (result.exit_code, "northwind/checkout, northwind/docs-api, chatly/paid, chatly/free" in result.stderr) == (2, True)


def test_chat_keeps_the_history_until_reset(server: tuple[Scripted, str], demo: DemoKeys) -> None:
    scripted, target = server
    lines = "one\ntwo\n\n/reset\nthree\n/exit\nnever\n"
    run("chat", "--target", target, "--state-dir", str(demo.path.parent), "--system", "S", stdin=lines)
    asked = [[(m.role, m.content) for m in request.messages.messages] for request in scripted.requests]
    assert asked == [
        [("system", "S"), ("user", "one")],
        [("system", "S"), ("user", "one"), ("assistant", "Hello wörld"), ("user", "two")],
        [("system", "S"), ("user", "three")],
    ]


def test_chat_goes_on_after_a_refusal(server: tuple[Scripted, str], demo: DemoKeys) -> None:
    scripted, target = server
    result = run("chat", "--target", target, "--state-dir", str(demo.path.parent), "--tier", "forbidden", stdin="a\nb\n")
    assert [len(r.messages.messages) for r in scripted.requests] == [1, 1]
    assert (result.exit_code, result.stderr.count("TIER_NOT_ALLOWED")) == (0, 2)


def test_status_shows_the_state_and_uses_the_admin_key(server: tuple[Scripted, str], demo: DemoKeys) -> None:
    scripted, target = server
    shown = run("status", "--target", target, "--state-dir", str(demo.path.parent)).stdout
    as_json = json.loads(run("status", "--target", target, "--state-dir", str(demo.path.parent), "--json").stdout)
    assert re.search(r"KV blocks\s+25 used \+ 0 cached of 100 \(25% utilized", shown) is not None
    assert (as_json["worker"]["epoch"], as_json["draining"], set(scripted.keys)) == ("2", False, {f"Bearer {demo.admin}"})


def test_no_command_takes_a_key_on_the_command_line() -> None:
    helps = [run(name, "--help").stdout for name in ("generate", "chat", "status", "serve")]
    assert [text for text in helps if re.search(r"--(api-|admin-)?key\b(?!-file)", text)] == []


@pytest.mark.parametrize(
    "command", [(), ("serve",), ("generate",), ("chat",), ("status",), ("model", "pull"), ("policy", "check"), ("keys", "new")]
)
def test_every_command_has_help(command: tuple[str, ...]) -> None:
    assert run(*command, "--help").exit_code == 0


def serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "fairlane", "serve", *arguments]
    path = {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **path, **environment}, check=False)


def test_serve_reports_every_wrong_flag_file_and_variable_before_it_binds() -> None:
    result = serve("--device", "tpu", "--policy", "/none.yaml", FAIRLANE_PORT="abc")
    assert (result.returncode, result.stdout, result.stderr.splitlines()) == (
        2, "",
        [
            "fairlane: cannot start:",
            '--port (or FAIRLANE_PORT): "abc" is a text: a whole number from 0 to 65535 is allowed',
            '--device (or FAIRLANE_DEVICE): "tpu" is unknown: one of cpu, cuda is allowed',
            "/none.yaml: cannot be read: No such file or directory",
        ],
    )  # fmt: skip


def test_serve_names_a_model_that_is_not_there(tmp_path: Path) -> None:
    result = serve("--model", str(tmp_path / "none"))
    assert (result.returncode, "no model at" in result.stderr) == (2, True)
