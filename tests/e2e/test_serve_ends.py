"""How `fairlane serve` ends or mends itself, as real processes with a tiny model of random weights: a worker that hangs, a model
that cannot be loaded, a port that is taken."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from serving import free_port, serving, wait_until_serving

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def ask(max_tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def test_a_worker_that_hangs_is_killed_and_replaced(tmp_path: Path, model: Path) -> None:
    """SIGSTOP: the process lives, its socket accepts, the kernel acknowledges; only its heartbeat can tell."""
    (tmp_path / "gateway.yaml").write_text("worker_timeout: 1s\nping_interval: 100ms\n")
    flags = ("--model", str(model), "--load-format", "dummy", "--num-blocks", "600", "--config", str(tmp_path / "gateway.yaml"))
    with serving(tmp_path, *flags) as server, server.inference() as stub:
        key = server.key("chatly/free")
        call = stub.Generate(ask(8000), metadata=key)
        while next(call).WhichOneof("event") != "tokens":
            pass
        hung = server.status().worker
        os.kill(hung.pid, signal.SIGSTOP)
        with pytest.raises(grpc.RpcError) as lost:
            for _ in call:
                pass
        wait_until_serving(server)
        answer = stub.Complete(ask(3), metadata=key, timeout=60)
        status = server.status()
    assert (lost.value.code(), reason(lost.value)) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
    assert (hung.epoch, status.worker.epoch, Path(f"/proc/{hung.pid}").exists()) == (1, 2, False)
    assert answer.finished.usage.completion_tokens == 3
    log = "".join(server.log)
    assert f"killing worker {hung.pid}: silent for" in log, log


def reason(error: grpc.RpcError) -> str:
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)
    return next((str(info.reason) for detail in status.details if detail.Unpack(info)), "") if status else ""


def serve(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs it to its end, with a state folder of its own."""
    with tempfile.TemporaryDirectory(prefix="fl") as runtime_dir:
        environment = {
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "XDG_RUNTIME_DIR": runtime_dir,
            "XDG_CONFIG_HOME": str(folder / "none"),
        }
        command = [sys.executable, "-m", "fairlane", "serve", "--state-dir", str(folder / "state"), *flags]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
        assert list(Path(runtime_dir, "fairlane").glob("*")) == []  # no socket stays behind
    return done


def only_bin(folder: Path) -> str:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    return "pytorch_model.bin"


def code_of_its_own(folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoModelForCausalLM": "evil.Model"}}))
    return "config.json: auto_map is set"


@pytest.mark.parametrize("spoil", [only_bin, code_of_its_own])
def test_a_model_that_cannot_be_loaded_ends_serve_with_2_and_its_name(
    tmp_path: Path, model: Path, spoil: Callable[[Path], str]
) -> None:
    said = spoil(model)
    done = serve(tmp_path, "--port", str(free_port()), "--model", str(model))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    last = done.stderr[done.stderr.rindex("fairlane: ") :]
    assert said in last


@pytest.mark.parametrize("flag", ["--port", "--admin-port", "--metrics-port"])
def test_a_port_that_is_taken_ends_serve_with_1_and_names_the_flag(tmp_path: Path, model: Path, flag: str) -> None:
    ports = {"--port": "0", "--admin-port": "0", "--metrics-port": "0"}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = [text for pair in {**ports, flag: port}.items() for text in pair]
        done = serve(tmp_path, "--model", str(model), "--load-format", "dummy", *flags)
    line = f"fairlane: cannot listen on 127.0.0.1:{port}: Address already in use; choose another with {flag}"
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (1, "", line)
