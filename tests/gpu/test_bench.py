"""`fairlane bench` and `fairlane profile` on a GPU, with random weights of a small shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import device  # noqa: F401  (first: it skips this file where there is no GPU)

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from fairlane.cli import app

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4099,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
SETTINGS = ["--device", "cuda", "--set", "num_blocks=512", "--set", "max_num_seqs=16", "--set", "max_num_batched_tokens=1024"]


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("shape") / "small.json"
    file.write_text(json.dumps(SHAPE))
    return str(file)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_loads_are_measured(shape: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = run("bench", "--model-config", shape, *SETTINGS, "--run", "1x30x20,8x200x20", "--json", str(out))
    rows = json.loads(out.read_text())["rows"]
    seen = [(row["load"], row["output_tokens"], row["kv_tokens"], row["peak_memory_bytes"] > 0) for row in rows]
    assert (result.exit_code, seen) == (0, [("1x30x20", 20, 511 * 16, True), ("8x200x20", 160, 511 * 16, True)])


def test_a_profile_shows_our_kernels_on_the_device(shape: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    batch = ["--batch", "8", "--context", "200", "--steps", "5", "--top", "50"]
    result = run("profile", "--model-config", shape, *SETTINGS, *batch, "--out", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = {event["name"] for event in events if event.get("cat") == "kernel"}
    ours = [any(name in kernel for kernel in kernels) for name in ("_decode_kernel", "_gated_kernel", "_score_kernel")]
    titles = ("Kernels and copies on the device", "Operators on the host", "Parts of a step on the host")
    assert (result.exit_code, ours, [title in result.stdout for title in titles]) == (0, [True] * 3, [True] * 3)
