"""Which model folders are refused, and that the message names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fairlane.worker.config import Device, LoadFormat
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.models.config import load_model_config
from tiny_models import executor_for, save_tiny, teacher_forced

WEIGHTS = "model.safetensors"


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "weights.pt"])
def test_pickled_weights_are_named_and_never_opened(folder: Path, name: str) -> None:
    (folder / WEIGHTS).rename(folder / name)
    with pytest.raises(ModelLoadError, match=rf"only in {name}.*convert them to safetensors"):
        executor_for(folder)


def test_a_folder_without_weights_says_what_to_add(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors.*load_format: dummy"):
        executor_for(folder)


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
        ({"trust_remote_code": True}, "trust_remote_code"),
        ({"text_config": {"inner": [{"trust_remote_code": False}]}}, r"text_config\.inner\[0\]\.trust_remote_code"),
    ],
)
def test_code_in_a_model_folder_is_refused_however_deep(folder: Path, changes: dict[str, Any], path: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelLoadError, match=rf"{path} is set"):
        executor_for(folder)


def test_an_unknown_architecture_lists_the_known_ones(folder: Path) -> None:
    edit_config(folder, architectures=["MambaForCausalLM"])
    with pytest.raises(ModelLoadError, match=r"MambaForCausalLM.*LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"):
        executor_for(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"vocab_size": None}, "vocab_size must be a positive whole number"),
        ({"num_key_value_heads": 3}, "do not fit together"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral' is not supported.*dynamic, linear"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "'llama3': a parameter is missing.*factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "'chunked_attention'.*full_attention, sliding_attention"),
        ({"dtype": "float8_e4m3fn"}, "type 'float8_e4m3fn' .*bfloat16, float16, float32"),
    ],
)
def test_what_the_model_would_compute_wrongly_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(ModelLoadError, match=message):
        executor_for(folder)


@pytest.mark.parametrize("text", ["{", "[1]", b"\xff\xfe"])
def test_a_config_that_is_no_json_object_is_named(folder: Path, text: str | bytes) -> None:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        executor_for(folder)


def test_missing_and_unexpected_tensors_are_listed_by_name(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")

    edit_weights(folder, change)
    with pytest.raises(
        ModelLoadError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight.*unexpected: .*mlp\.extra\.weight"
    ):
        executor_for(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[63\], config\.json implies \[64\]"):
        executor_for(folder)


def test_a_tensor_of_an_integer_type_is_refused(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has type I8"):
        executor_for(folder)


def test_a_truncated_file_is_named(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match=rf"{WEIGHTS} is damaged"):
        executor_for(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ('{"weight_map": {"a": "../model.safetensors"}}', "not the plain name"),
        ('{"weight_map": {"a": "model-2.safetensors"}}', r"names model-2\.safetensors, which is missing"),
        ('{"weights": {}}', "not a readable safetensors index"),
        ("no json", "not a readable safetensors index"),
    ],
)
def test_an_index_that_leads_astray_is_refused(folder: Path, index: str, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=message):
        executor_for(folder)


def test_a_tied_checkpoint_may_carry_the_head_again(folder: Path) -> None:
    before = teacher_forced(executor_for(folder), [5, 6, 7], [3])
    edit_weights(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert torch.equal(teacher_forced(executor_for(folder), [5, 6, 7], [3]), before)


def test_dummy_needs_only_the_config_and_repeats_by_seed(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    first, again, other = (
        teacher_forced(executor_for(folder, load_format=LoadFormat.DUMMY, seed=seed), [5, 6, 7], [3]) for seed in (1, 1, 2)
    )
    assert (torch.equal(first, again), torch.equal(first, other)) == (True, False)


def test_dummy_runs_a_lone_config_file(folder: Path) -> None:
    lone = folder / "shape.json"
    (folder / "config.json").rename(lone)
    info = executor_for(lone, load_format=LoadFormat.DUMMY).info
    assert (info.model, info.vocab_size) == ("shape", 211)


def test_the_shapes_that_ship_are_read() -> None:
    shapes = Path(__file__).parents[3] / "configs" / "models"
    read = {path.stem: load_model_config(path).num_layers for path in shapes.glob("*.json")}
    assert read == {"llama-3.1-8b": 32, "llama-2-7b": 32, "qwen3-0.6b": 28, "qwen3-8b": 36}


def test_a_model_that_is_nowhere_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no model at .*absent.*embedded models: smollm2"):
        executor_for(tmp_path / "absent")


def test_a_length_beyond_the_models_is_refused(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="max_model_len 129 exceeds the 128 tokens"):
        executor_for(folder, max_model_len=129)


def test_a_cache_too_small_for_a_block_says_how_much_is_needed(folder: Path) -> None:
    # 3 layers * 2 * 2 KV heads * 256 slots * 16 dims * 4 bytes = 196 608 bytes a block; one to use and the null block: 1 MiB
    with pytest.raises(ModelLoadError, match="a block takes 196608 bytes; set at least 1MiB"):
        executor_for(folder, num_blocks=None, kv_cache=200_000, block_size=256)


def test_cuda_where_there_is_none_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelLoadError, match="no CUDA device"):
        executor_for(folder, device=Device.CUDA)


def test_end_of_sequence_ids_come_from_both_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert executor_for(folder).info.eos_token_ids == (7, 9, 2)
