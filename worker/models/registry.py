"""Which class runs an architecture, and what the architectures of the Llama family differ in. A new one of the family is an
entry here; anything else needs a class of its own with LlamaModel's methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairlane.worker.errors import ModelLoadError

if TYPE_CHECKING:
    from fairlane.worker.models.llama import LlamaModel

Traits = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """traits(config.json, num_layers) -> ModelConfig's biases, qk_norm and windows."""

    load_class: Callable[[], type[LlamaModel]]
    traits: Callable[[dict[str, Any], int], Traits]


def architecture_of(raw: dict[str, Any], file: Path) -> tuple[str, Architecture]:
    """The first known name in config.json's `architectures`. Raises ModelLoadError that lists the known ones."""
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return name, ARCHITECTURES[name]
    raise ModelLoadError(f"{file}: architectures {names!r} is not supported; supported are: {', '.join(sorted(ARCHITECTURES))}")


def model_class(architecture: str) -> type[LlamaModel]:
    """The class that runs a known architecture."""
    return ARCHITECTURES[architecture].load_class()


def _llama_class() -> type[LlamaModel]:
    from fairlane.worker.models.llama import LlamaModel

    return LlamaModel


def _traits(qkv_bias: bool, o_bias: bool, mlp_bias: bool, qk_norm: bool, windows: list[int | None]) -> Traits:
    return {"qkv_bias": qkv_bias, "o_bias": o_bias, "mlp_bias": mlp_bias, "qk_norm": qk_norm, "windows": tuple(windows)}


def _llama(raw: dict[str, Any], num_layers: int) -> Traits:
    bias = bool(raw.get("attention_bias", False))
    return _traits(bias, bias, bool(raw.get("mlp_bias", False)), False, [None] * num_layers)


def _mistral(raw: dict[str, Any], num_layers: int) -> Traits:
    return _traits(False, False, False, False, [raw.get("sliding_window")] * num_layers)


def _qwen2(raw: dict[str, Any], num_layers: int) -> Traits:
    return _traits(True, False, False, False, _qwen_windows(raw, num_layers))


def _qwen3(raw: dict[str, Any], num_layers: int) -> Traits:
    bias = bool(raw.get("attention_bias", False))
    return _traits(bias, bias, False, True, _qwen_windows(raw, num_layers))


def _qwen_windows(raw: dict[str, Any], num_layers: int) -> list[int | None]:
    """layer_types wins; older files say: the layers from max_window_layers on slide, if use_sliding_window."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == num_layers:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    first = int(raw.get("max_window_layers", 28))
    return [window if layer >= first else None for layer in range(num_layers)]


ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(_llama_class, _llama),
    "MistralForCausalLM": Architecture(_llama_class, _mistral),
    "Qwen2ForCausalLM": Architecture(_llama_class, _qwen2),
    "Qwen3ForCausalLM": Architecture(_llama_class, _qwen3),
}
