"""`fairlane bench` and `fairlane profile` as a user types them, on a tiny model with random weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fairlane.cli import app
from fairlane.worker import loading
from tiny_shape import TINY

SHORT = TINY | {"max_position_embeddings": 64}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(SHORT))
    return str(file)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_benchmark_prints_a_line_a_load_and_writes_the_figures(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out.json"
    flags = ["--model-config", tiny, "--device", "cpu", "--set", "num_blocks=64", "--set", "threads=1"]
    result = run("bench", *flags, "--run", "1x8x4,3x20x5", "--repeat", "2", "--json", str(out))
    document = json.loads(out.read_text())
    rows = [
        (row["load"], row["requests"], row["prompt_tokens"], row["output_tokens"], row["runs"], row["kv_tokens"])
        for row in document["rows"]
    ]
    said = [word in result.stdout for word in ("1x8x4", "3x20x5", "TTFT ms", "all decoding", "1,008 tokens of KV cache", "GiB")]
    assert (result.exit_code, rows, all(said), document["checks"]) == (
        0, [("1x8x4", 1, 8, 4, 2, 1008), ("3x20x5", 3, 60, 15, 2, 1008)], True, [],
    )  # fmt: skip


def test_a_load_that_fails_is_said_and_the_others_are_measured(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--model-config", tiny, "--device", "cpu", "--set", "num_blocks=3", "--set", "threads=1"]  # room for 32 tokens
    result = run("bench", *flags, "--run", "1x40x8,1x8x4", "--json", str(out))
    rows = [row["load"] for row in json.loads(out.read_text())["rows"]]
    assert (result.exit_code, rows, "1x40x8: request 0 gave 0 of 8 tokens" in result.stderr) == (1, ["1x8x4"], True)


@pytest.mark.parametrize(("settings", "recomputes"), [([], True), (["--set", "host_kv_cache=1MiB"], False)])
def test_a_load_that_outgrows_the_cache_swaps_where_there_is_host_memory(
    settings: list[str], recomputes: bool, tmp_path: Path
) -> None:
    shape, out = tmp_path / "long.json", tmp_path / "out.json"
    shape.write_text(json.dumps(SHORT | {"max_position_embeddings": 512}))
    # 13 blocks each at first and 17 in the end: not for two in 28.
    flags = ["--model-config", str(shape), "--device", "cpu", "--set", "num_blocks=29", "--set", "threads=1", *settings]
    result = run("bench", *flags, "--run", "2x200x60", "--json", str(out))
    (row,) = json.loads(out.read_text())["rows"]
    assert (result.exit_code, row["preemptions"], row["recomputed_tokens"] > 0) == (0, 1, recomputes)


@pytest.mark.parametrize("command", ["bench", "profile"])
@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--model-config", "llama-9"], "one of llama-2-7b, llama-3.1-8b, qwen3-0.6b, qwen3-8b"),
        (["--model", "/not/there"], "no model at '/not/there'"),
        (["--set", "kv_cache"], '"kv_cache" is not KEY=VALUE'),
        (["--set", "max_num_seqs=-1"], "max-num-seqs"),
        (["--set", "max_num_batched_tokens=32"], "must be at least max_num_seqs (64)"),
        (["--device", "tpu"], "one of cpu, cuda is allowed"),
        (["--device", "cuda"], "no CUDA device"),
    ],
)
def test_what_cannot_be_run_is_one_message_and_exit_code_2_before_a_weight_is_read(
    command: str, flags: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(loading, "load_weights", lambda *_, **__: pytest.fail("weights were read"))
    result = run(command, *flags)
    assert (result.exit_code, why in result.stderr, "Traceback" in result.stderr) == (2, True, False)


def test_a_profile_has_the_steps_parts_and_operators_in_table_and_trace(tiny: str, tmp_path: Path) -> None:
    flags = ["--model-config", tiny, "--device", "cpu", "--set", "threads=1", "--set", "pipeline_depth=1"]
    result = run("profile", *flags, "--batch", "3", "--context", "10", "--steps", "2", "--out", str(tmp_path / "t.json"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    counts = [
        sum(event.get("name") == name and event["ph"] == "X" for event in events) for name in ("step", "schedule", "update")
    ]
    said = [text in result.stdout for text in ("Operators on the host", "aten::", "ms a step without a profiler", "2 steps of 3")]
    assert (result.exit_code, counts, said) == (0, [2, 2, 2], [True] * 4)


def test_a_profile_of_prompts_runs_them(tiny: str, tmp_path: Path) -> None:
    flags = ["--model-config", tiny, "--device", "cpu", "--set", "threads=1", "--prefill"]
    result = run("profile", *flags, "--batch", "2", "--context", "20", "--steps", "1", "--out", str(tmp_path / "t.json"))
    assert (result.exit_code, "flash_attention" in (tmp_path / "t.json").read_text()) == (0, True)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--batch", "65"], "a batch of 65 is more than max_num_seqs (64)"),
        (["--context", "50", "--steps", "10"], "exceed the context of 64"),
        (["--batch", "20", "--set", "num_blocks=21"], "needs 60 blocks of KV cache, and there are 20"),
    ],
)
def test_a_batch_that_there_is_no_room_for_is_refused(flags: list[str], why: str, tiny: str, tmp_path: Path) -> None:
    common = ["--model-config", tiny, "--device", "cpu", "--set", "threads=1", "--context", "5", "--steps", "1"]
    result = run("profile", *common, *flags, "--out", str(tmp_path / "t.json"))
    assert (result.exit_code, why in result.stderr) == (1, True)


def test_viztracer_that_is_not_installed_is_one_line_before_a_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(loading, "load_weights", lambda *_, **__: pytest.fail("weights were read"))
    result = run("profile", "--viztracer", "host.json")
    assert (result.exit_code, result.stderr) == (2, "fairlane: this command needs viztracer: pip install 'fairlane[profile]'\n")


class Tracer:
    """What is used of viztracer.VizTracer; writes the calls it got."""

    def __init__(self, output_file: str, verbose: int) -> None:
        self.file, self.calls = Path(output_file), ["made"]

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def save(self) -> None:
        self.file.write_text(" ".join([*self.calls, "save"]))


def test_the_hosts_trace_is_written_where_it_was_asked_for(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "viztracer", SimpleNamespace(VizTracer=Tracer))  # type: ignore[arg-type]
    files = ["--out", str(tmp_path / "t.json"), "--viztracer", str(tmp_path / "host.json")]
    flags = ["--model-config", tiny, "--device", "cpu", "--set", "threads=1", "--batch", "2", "--context", "5", "--steps", "1"]
    result = run("profile", *flags, *files)
    assert (result.exit_code, (tmp_path / "host.json").read_text()) == (0, "made start stop save")


@pytest.mark.parametrize("loads", ["nix", ",", "1x60x5"])  # the tiny context is 64
def test_a_load_that_cannot_be_run_is_refused_before_a_weight_is_read(
    loads: str, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_weights", lambda *_, **__: pytest.fail("weights were read"))
    result = run("bench", "--model-config", tiny, "--device", "cpu", "--run", loads)
    assert (result.exit_code, result.stdout) == (2, "")
