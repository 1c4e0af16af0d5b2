"""What a benchmark can be asked to run: loads by name, shapes by name, and what is refused before a weight is read."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from fairlane.bench import setup
from fairlane.bench.loads import Load, chat_lengths, named_load, uniform
from fairlane.bench.models import model_config_file, num_parameters, shipped_models
from fairlane.bench.setup import Asked, refuse_what_cannot_run, settings_for
from fairlane.worker.config import Device, LoadFormat
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.host_memory import available_bytes
from fairlane.worker.models.config import load_model_config
from fairlane.worker.models.llama import LlamaModel

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("one", ((128, 256),)),
        ("batch-3", ((512, 128),) * 3),
        ("prefill-700", ((700, 1),)),
        ("chat-2", chat_lengths()[:2]),
        ("chat", chat_lengths()),
        ("2x30x4", ((30, 4), (30, 4))),
    ],
)
def test_a_load_is_what_its_name_says(name: str, lengths: tuple[tuple[int, int], ...]) -> None:
    assert named_load(name) == Load(lengths)


@pytest.mark.parametrize("name", ["", "two", "batch-0", "batch-", "1x2", "1x2x0", "0x2x2", "1x2x3x4", "chat-1.5", "-1x2x3"])
def test_a_name_that_says_no_load_is_refused_with_those_that_do(name: str) -> None:
    with pytest.raises(ValueError, match=f'no load "{name}": give one, batch-N'):
        named_load(name)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama31-8b", "Llama-3.1-8B", "llama3.1_8b"])
def test_a_shape_is_found_with_and_without_its_punctuation(name: str) -> None:
    assert model_config_file(name).name == "llama-3.1-8b.json"


def test_an_unknown_shape_is_answered_with_those_that_ship() -> None:
    with pytest.raises(ValueError, match=r"llama-2-7b, llama-3\.1-8b, qwen3-0\.6b, qwen3-8b"):
        model_config_file("llama-3.2-8b")


def test_a_file_and_a_folder_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_config_file(str(tmp_path)) == model_config_file(str(tmp_path / "config.json")) == tmp_path / "config.json"


@pytest.mark.parametrize("name", ["llama-2-7b", "qwen3-0.6b"])  # one with two tables, one with one
def test_the_parameters_are_those_the_model_has(name: str) -> None:
    config = load_model_config(shipped_models()[name])
    model = LlamaModel(config, 64, torch.bfloat16, torch.device("meta"))
    matrices = sum(tensor.numel() for tensor in model.tensors().values() if tensor.dim() == 2)
    assert num_parameters(config) == pytest.approx(matrices, rel=1e-9)


# -- settings ----------------------------------------------------------------------------------------------------------------


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_without_a_device_named_a_gpu_is_taken_with_its_settings_and_flags_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch)
    config = settings_for(Asked(model_config="qwen3-8b", settings={"kv_cache": "8GiB", "max_num_seqs": "32"}))
    seen = (config.device, config.load_format, config.max_num_batched_tokens, config.kv_cache, config.max_num_seqs)
    expected = (Device.CUDA, LoadFormat.DUMMY, 8192, 8 << 30, 32)
    assert (seen, config.prefix_caching, Path(config.model).name) == (expected, False, "qwen3-8b.json")


def test_without_a_gpu_it_is_the_cpu_and_a_gpu_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    with pytest.raises(ModelLoadError, match="no CUDA device"):
        settings_for(Asked(model_config="qwen3-8b", device="cuda"))
    assert settings_for(Asked(model_config="qwen3-8b")).device is Device.CPU


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (Asked(model="m", model_config="qwen3-8b"), "give one of them"),
        (Asked(model_config="qwen3-8b", load_format="safetensors"), "a shape without weights"),
        (Asked(model_config="nix"), 'no model config "nix"'),
        (Asked(settings={"kv_cash": "1GiB"}), "no setting kv_cash"),
    ],
)
def test_flags_that_contradict_each_other_or_name_nothing_are_refused(
    asked: Asked, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu(monkeypatch)
    with pytest.raises(ValueError, match=why):
        settings_for(asked)


def test_a_load_beyond_the_models_context_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch)
    config = settings_for(Asked(model_config="llama-3.1-8b"))
    with pytest.raises(ValueError, match="load long has a request of 8,449 tokens, and the model's context is 8,448"):
        refuse_what_cannot_run(config, {"short": uniform(9, 8000, 448), "long": uniform(1, 8000, 449)})


def test_weights_beyond_this_machines_memory_are_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpu(monkeypatch)
    shape = json.loads((ROOT / "configs" / "models" / "llama-3.1-8b.json").read_text())
    file = tmp_path / "huge.json"
    file.write_text(json.dumps(shape | {"num_hidden_layers": 32_000}))  # 28 TB as float32
    config = settings_for(Asked(model_config=str(file)))
    with pytest.raises(ValueError, match=r"the weights take .* GiB as float32, and .* are available"):
        refuse_what_cannot_run(config, {"one": uniform(1, 1, 1)})


def test_weights_beyond_what_a_containers_limit_leaves_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_gpu(monkeypatch)
    (tmp_path / "memory.max").write_text(f"{2 << 30}\n")
    (tmp_path / "memory.current").write_text(f"{1 << 30}\n")
    (tmp_path / "memory.stat").write_text("inactive_file 0\n")
    monkeypatch.setattr(setup, "available_bytes", partial(available_bytes, cgroup=tmp_path))
    with pytest.raises(ValueError, match=r"the weights take 2\.2 GiB as float32, and 1\.0 GiB of memory are available"):
        refuse_what_cannot_run(settings_for(Asked(model_config="qwen3-0.6b")), {"one": uniform(1, 1, 1)})
