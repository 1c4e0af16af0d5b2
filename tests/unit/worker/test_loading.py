"""What `device: cuda` is refused for, before any weight is read, and with which exit code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlane.worker.__main__ import EXIT_UNUSABLE, main
from fairlane.worker.config import Device, WorkerConfig
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.loading import device_for, load_model, refuse_without_kernels
from fairlane.worker.models.config import ModelConfig, load_model_config
from tiny_models import SIZES


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}))
    return load_model_config(tmp_path)


def test_without_a_gpu_the_worker_says_so_and_exits_before_it_looks_at_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code = main(["--socket", "unix:/nowhere", "--config-json", '{"device": "cuda", "model": "/not/there"}'])
    assert (code, "shows no CUDA device" in capsys.readouterr().err) == (EXIT_UNUSABLE, True)


def test_limits_that_contradict_each_other_are_refused_before_loading(capsys: pytest.CaptureFixture[str]) -> None:
    settings = json.dumps({"model": "/not/there", "max_num_seqs": 64, "max_num_batched_tokens": 32})
    code = main(["--socket", "unix:/nowhere", "--config-json", settings])
    assert (code, "must be at least max_num_seqs (64)" in capsys.readouterr().err) == (EXIT_UNUSABLE, True)


def test_a_gpu_without_bfloat16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(ModelLoadError, match=r"7\.5; device: cuda needs 8\.0"):
        device_for(WorkerConfig(device=Device.CUDA))


def test_batch_invariance_on_a_cpu_is_refused_before_loading() -> None:
    with pytest.raises(ModelLoadError, match="batch_invariant is for device: cuda"):
        load_model(WorkerConfig(model="/not/there", batch_invariant=True))


@pytest.mark.parametrize(
    ("changes", "block_size", "message"),
    [
        ({"head_dim": 8}, 16, "head_dim 8 .* 16 to 256"),
        ({"head_dim": 512}, 16, "head_dim 512 .* 16 to 256"),
        ({}, 24, "block_size 24 .* 8, 16, 32, 64"),
        ({"num_heads": 256, "num_kv_heads": 1}, 16, "256 query heads for one KV head"),
    ],
)
def test_attention_without_a_kernel_is_refused_with_what_works(
    model: ModelConfig, changes: dict[str, Any], block_size: int, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        refuse_without_kernels(dataclasses.replace(model, **changes), block_size, torch.bfloat16)


def test_attention_with_a_kernel_is_not(model: ModelConfig) -> None:
    refused = []
    for head_dim in (14, 16, 64, 80, 96, 128, 256, 258):
        try:
            refuse_without_kernels(dataclasses.replace(model, head_dim=head_dim), 16, torch.bfloat16)
        except ModelLoadError:
            refused.append(head_dim)
    assert refused == [14, 258]


def test_what_has_no_kernel_is_refused_before_weights_are_read(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(ModelLoadError, match="block_size 48"):  # and not that the folder has no weights
        load_model(WorkerConfig(device=Device.CUDA, model=str(tmp_path), block_size=48))
