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
import typer
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from typer.testing import CliRunner

from fairlane.cli import app
from fairlane.gateway.keys import DemoKeys, hash_key, is_well_formed, load_or_create_pepper
from fairlane.gateway.policy.loader import load_policy_file, load_policy_text
from fairlane.protos.fairlane.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from fairlane.protos.fairlane.v1 import inference_pb2 as pb

ROOT = Path(__file__).parents[3]
POLICY = ROOT / "configs" / "tenants.yaml"


def run(*arguments: str, stdin: str | None = None, **environment: str) -> Any:
    return CliRunner().invoke(app, list(arguments), input=stdin, env=environment or None)


def options(command: Any, path: str = "fairlane") -> Iterator[tuple[str, Any]]:
    """Every option of every command, and where it is."""
    yield from ((path, option) for option in command.params if option.param_type_name == "option")
    for name, inner in getattr(command, "commands", {}).items():
        yield from options(inner, f"{path} {name}")


def test_no_value_is_called_like_its_option() -> None:
    # typer 0.27 would call the option like the value: --PORT.
    alike = [
        (path, option.name) for path, option in options(typer.main.get_command(app)) if option.metavar == option.name.upper()
    ]
    assert alike == []


class Scripted(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.AdminServicer):
    """Answers "Hello world" and remembers what it was asked; refuses the tier "forbidden" with rich details."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.keys: list[str] = []
        self.worker = admin_pb2.WorkerStatus(
            ready=True, epoch=2, pid=7, blocks_total=100, blocks_used=25, block_utilization_ratio=0.25
        )

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
        nodes = [admin_pb2.NodeStatus(node="northwind/checkout", in_flight=3)]
        if self.keys[-1] == "Bearer wrong":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such key")
        return admin_pb2.GetStatusResponse(model="smollm2", in_flight=3, worker=self.worker, nodes=nodes)

    def ListRequests(self, request: admin_pb2.ListRequestsRequest, context: grpc.ServicerContext) -> Any:
        found = [
            admin_pb2.RequestInfo(node=node, request_id=f"{number:032x}", tier="gold", age_s=9.9, key_id="checkout-1")
            for number, node in enumerate(("northwind/checkout", "chatly/paid/" + "a" * 128))
        ]
        return admin_pb2.ListRequestsResponse(requests=found, total=2)


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


def test_a_wrong_admin_key_is_told_where_it_comes_from(server: tuple[Scripted, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_ADMIN_KEY", "wrong")
    done = run("status", "--target", server[1])
    assert (done.exit_code, "FAIRLANE_ADMIN_KEY" in done.stderr, "FAIRLANE_API_KEY" in done.stderr) == (1, True, False), (
        done.stderr
    )


def test_a_request_id_is_never_broken(server: tuple[Scripted, str], demo: DemoKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = run("requests", "list", "--target", server[1], "--state-dir", str(demo.path.parent)).stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["request", f"{0:032x}", f"{1:032x}", "in"]


def test_status_shows_host_memory_where_a_worker_swaps(server: tuple[Scripted, str], demo: DemoKeys) -> None:
    scripted, target = server
    without = run("status", "--target", target, "--state-dir", str(demo.path.parent)).stdout
    scripted.worker = admin_pb2.WorkerStatus(pid=7, host_blocks_total=64, host_blocks_used=9, swaps_out=5, swaps_in=3)
    shown = run("status", "--target", target, "--state-dir", str(demo.path.parent)).stdout
    assert re.search(r"host KV\s+9 used of 64, 5 swapped out, 3 in again", shown) and "host KV" not in without


def test_a_lost_worker_is_shown_as_not_connected(server: tuple[Scripted, str], demo: DemoKeys) -> None:
    scripted, target = server
    scripted.worker = admin_pb2.WorkerStatus(epoch=3)
    shown = run("status", "--target", target, "--state-dir", str(demo.path.parent)).stdout
    assert re.search(r"worker\s+not connected; the last one was epoch 3", shown)
    assert ("running" in shown, "pid" in shown, "KV blocks" in shown) == (False, False, False)


@pytest.mark.parametrize("target", ["127.evil.invalid:50051", "localhost.invalid:50051", "dns://8.8.8.8/localhost:1"])
@pytest.mark.parametrize("command", [("generate", "x"), ("chat",), ("status",)])
def test_demo_keys_stay_on_this_machine(demo: DemoKeys, command: tuple[str, ...], target: str) -> None:
    result = run(*command, "--target", target, "--state-dir", str(demo.path.parent), stdin="x\n")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"no key for {target}: set FAIRLANE_" in result.stderr


def test_no_proxy_comes_between_a_client_and_its_own_machine(server: tuple[Scripted, str], demo: DemoKeys) -> None:
    base = ("generate", "--state-dir", str(demo.path.parent), "x", "--target")
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"), "http://127.0.0.1:1")
    result = run(*base, server[1], **proxies)
    assert (result.exit_code, result.stdout) == (0, "Hello wörld\n")


@pytest.mark.parametrize("key", ["fl_a\nb", "fl_ä", "fl_a b", "x" * 600])
@pytest.mark.parametrize(("command", "variable"), [("generate", "FAIRLANE_API_KEY"), ("status", "FAIRLANE_ADMIN_KEY")])
def test_a_variable_that_holds_no_key_is_said_so(command: str, variable: str, key: str) -> None:
    arguments = ("x",) if command == "generate" else ()
    result = run(command, *arguments, **{variable: key})
    assert (result.exit_code, result.stderr) == (
        2, f"fairlane: {variable} does not hold an API key: one line of letters and digits is needed\n",
    )  # fmt: skip


@pytest.mark.parametrize("target", ["", "a b:1", "h\nst:1", "ä:1"])
def test_a_target_that_is_no_address_is_said_so(target: str) -> None:
    result = run("generate", "x", "--target", target, FAIRLANE_API_KEY="k")
    assert (result.exit_code, "is no address: HOST:PORT is needed" in result.stderr, result.stderr.count("\n")) == (2, True, 1)


def test_a_host_that_does_not_exist_is_said_so() -> None:
    result = run("generate", "x", "--target", "nosuch.invalid:1", FAIRLANE_API_KEY="k")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (
        1, "fairlane: cannot find the host of nosuch.invalid:1: is its name right?",
    )  # fmt: skip


def command_line(*arguments: str | bytes, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A real process: bytes as the shell gives them, the terminal's encoding as the environment says."""
    command = [sys.executable, "-P", "-m", "fairlane", *arguments]
    path = {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, input=stdin, capture_output=True, env={**os.environ, **path, **environment}, check=False)


@pytest.mark.parametrize(
    "arguments", [(b"a\xffb",), ("x", "--tier", b"\xff"), ("x", "--model", b"\xff"), ("x", "--target", b"\xff")]
)
def test_an_argument_that_is_not_utf8_is_one_line_and_exit_code_2(demo: DemoKeys, arguments: tuple[str | bytes, ...]) -> None:
    result = command_line("generate", "--state-dir", str(demo.path.parent), *arguments, FAIRLANE_API_KEY="k")
    assert (result.returncode, result.stdout, result.stderr.count(b"\n"), b"Traceback" in result.stderr) == (2, b"", 1, False)


def test_a_chat_line_that_is_not_utf8_is_said_so_and_the_next_one_is_asked(server: tuple[Scripted, str], demo: DemoKeys) -> None:
    scripted, target = server
    result = command_line("chat", "--target", target, "--state-dir", str(demo.path.parent), stdin=b"a\xff\nb\n")
    assert [[m.content for m in request.messages.messages] for request in scripted.requests] == [["b"]]
    assert (result.returncode, result.stderr) == (0, b"fairlane: that line is not UTF-8 text\n")


def test_a_terminal_that_lacks_a_character_gets_an_escape_not_a_traceback(server: tuple[Scripted, str], demo: DemoKeys) -> None:
    result = command_line("generate", "--target", server[1], "--state-dir", str(demo.path.parent), "x", PYTHONIOENCODING="ascii")
    assert (result.returncode, result.stdout, result.stderr) == (0, b"Hello w\\xf6rld\n", b"")


@pytest.mark.parametrize("key_id", ["a: b{", "-a", "ä", "a\nb", "a" * 64, "a b"])
def test_a_key_id_that_the_policy_would_refuse_makes_no_key(tmp_path: Path, key_id: str) -> None:
    result = run("keys", "new", "--id", key_id, "--state-dir", str(tmp_path))
    assert (result.exit_code, result.stdout, "a name of up to 63 letters" in result.stderr) == (2, "", True)


@pytest.mark.parametrize("arguments", [("--id", "k7"), ("--id", "a" * 63), ("--id", "0_-Z"), ()])
def test_the_entry_of_a_new_key_is_taken_by_the_policy(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    entry = run("keys", "new", *arguments, "--state-dir", str(tmp_path)).stderr.split("\n", 1)[1]
    text = (
        f"version: 1\ntiers: {{t: {{priority: 1}}}}\norganisations:\n o:\n  tiers: [t]\n  keys:\n{entry}  tenants: {{a: {{}}}}\n"
    )
    assert len(load_policy_text(text.encode(), "p").principals) == 1


def test_no_command_takes_a_key_on_the_command_line() -> None:
    helps = [run(name, "--help").stdout for name in ("generate", "chat", "status", "serve")]
    assert [text for text in helps if re.search(r"--(api-|admin-)?key\b(?!-file)", text)] == []


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("serve",),
        ("generate",),
        ("chat",),
        ("status",),
        ("bench",),
        ("profile",),
        ("model", "pull"),
        ("policy", "check"),
        ("keys", "new"),
    ],
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


@pytest.mark.parametrize(
    ("flags", "environment", "said"),
    [
        (
            ["--port", "70000"],
            {},
            '--port (or FAIRLANE_PORT): "70000" is out of bounds: a whole number from 0 to 65535 is allowed',
        ),
        ([], {"FAIRLANE_PORT": "70000"}, '--port (or FAIRLANE_PORT): "70000" is out of bounds'),
        (["--policy", "BAD.YAML"], {}, "bad.yaml:2:1: tires: unknown key"),
        (["--config", "NEGATIVE.YAML"], {}, "negative.yaml:1:17: worker_timeout: "),
        (["--state-dir", "SHARED"], {}, "shared is open to other users (mode 1777): choose another folder, or chmod 700"),
    ],
)
def test_serve_checks_before_it_binds(tmp_path: Path, flags: list[str], environment: dict[str, str], said: str) -> None:
    (tmp_path / "bad.yaml").write_text("version: 1\ntires: {}\norganisations: {}\n")
    (tmp_path / "negative.yaml").write_text("worker_timeout: -3s\n")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    places = {name: str(tmp_path / name.lower()) for name in ("BAD.YAML", "NEGATIVE.YAML", "SHARED")}
    result = serve(*(places.get(flag, flag) for flag in ["--model", str(tmp_path), *flags]), **environment)
    assert (result.returncode, result.stdout, said in result.stderr, "Traceback" in result.stderr) == (2, "", True, False)


def test_serve_names_a_model_that_is_not_there(tmp_path: Path) -> None:
    result = serve("--model", str(tmp_path / "none"))
    assert (result.returncode, "no model at" in result.stderr) == (2, True)
