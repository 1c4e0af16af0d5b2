"""Every variant of the Llama shape gives transformers' logits, with the same weights, in chunks and token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny_models import executor_for, relative_error, save_tiny, teacher_forced

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Llama", {}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "mha": ("Llama", {"num_key_value_heads": 4}),
    "gqa 4": ("Llama", {"num_key_value_heads": 1}),
    "gqa 7": ("Llama", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 112}),
    "head_dim 80": ("Llama", {"head_dim": 80}),
    "head_dim 96": ("Llama", {"head_dim": 96}),
    "all biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "rope llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "rope linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}}),
    "rope dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    "rope yarn": ("Llama", {"rope_parameters": YARN}),
    "rope yarn, mscale": ("Llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False}}),
    "mistral window": ("Mistral", {"sliding_window": 11, "head_dim": 16}),
    "mistral full": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2 mixed windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3 biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    kind, changes = VARIANTS[variant]
    model = save_tiny(tmp_path, kind, **changes)
    tokens = torch.randint(3, 211, (60,), generator=torch.Generator().manual_seed(2))
    chunks = [5, 1, 1, 9, 1, 16, 8, 1, 1, 17]
    with torch.no_grad():
        expected = model(tokens.unsqueeze(0)).logits[0][torch.tensor(chunks).cumsum(0) - 1]
    measured = teacher_forced(executor_for(tmp_path), tokens.tolist(), chunks)
    assert relative_error(measured, expected) < 1e-4


@pytest.mark.parametrize(("kind", "length"), [("dynamic", 200), ("longrope", 100)])
def test_rope_that_depends_on_the_length_is_that_of_the_longest_served(kind: str, length: int, tmp_path: Path) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0} if kind == "dynamic" else LONGROPE
    model = save_tiny(tmp_path, rope_parameters=parameters)
    tokens = torch.randint(3, 211, (length,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(tokens.unsqueeze(0)).logits[0, -1]
    executor = executor_for(tmp_path, max_model_len=length)
    measured = teacher_forced(executor, tokens.tolist(), [length - 40, 39, 1])[-1]
    assert relative_error(measured, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_are_computed_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    save_tiny(tmp_path).to(dtype).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = list(range(10, 40))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    assert relative_error(teacher_forced(executor_for(tmp_path), tokens, [30])[0], expected) < 1e-4


def test_shards_are_one_model(tmp_path: Path) -> None:
    model = save_tiny(tmp_path, max_shard_size="60KB")
    tokens = list(range(10, 40))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    measured = teacher_forced(executor_for(tmp_path), tokens, [30])[0]
    assert (len(list(tmp_path.glob("model-*.safetensors"))) > 1, relative_error(measured, expected) < 1e-4) == (True, True)
