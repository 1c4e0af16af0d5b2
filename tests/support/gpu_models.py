"""Small models with random weights for the GPU worker's tests, and transformers' own copies of them to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from device import cuda

SHAPES: dict[str, dict[str, Any]] = {
    "Llama": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
    "Qwen3": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64},
}
WINDOWED = {"Mistral": {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "sliding_window": 200}}


def save_model(folder: Path, kind: str) -> Any:
    import transformers

    sizes = {"vocab_size": 4099, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **(SHAPES | WINDOWED)[kind], max_position_embeddings=2048, tie_word_embeddings=False, dtype="bfloat16"
    )
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.05)
    model.save_pretrained(folder)
    # Loaded anew: a model converted with .to() has its rotary frequencies in bfloat16, too, which is off by whole radians soon.
    kinds = (torch.bfloat16, torch.float32)
    half, full = (type(model).from_pretrained(folder, dtype=dtype).eval().to(cuda) for dtype in kinds)
    return half, full


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4099, (length,), generator=generator).tolist()
