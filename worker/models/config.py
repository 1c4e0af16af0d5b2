"""config.json as the facts the worker needs. It decides what is refused (code in the folder, quantized weights, unknown
activations); which class runs an architecture is the registry's business. transformers is not imported: it is slow to start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairlane.worker.errors import ModelLoadError

_ATTENTION = ("full_attention", "sliding_attention")
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its kind (default, linear, dynamic, llama3, yarn, longrope), base and the kind's own parameters."""

    kind: str
    theta: float
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama shape. windows: by layer, the sliding window or None for full attention."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    rope: RopeConfig
    dtype: str
    initializer_range: float
    eos_token_ids: tuple[int, ...]

    @property
    def max_supported_len(self) -> int:
        """The longest sequence the rotary embedding is made for."""
        factor = float(self.rope.parameters.get("factor") or 1.0)
        if self.rope.kind == "dynamic":
            return int(self.max_position_embeddings * factor)
        if self.rope.kind == "yarn":
            original = self.rope.parameters.get("original_max_position_embeddings") or self.max_position_embeddings
            return max(self.max_position_embeddings, int(original * factor))
        return self.max_position_embeddings


def load_model_config(path: Path) -> ModelConfig:
    """Reads a folder's config.json (or the file given), and generation_config.json beside it for the end-of-sequence ids.

    Raises ModelLoadError.
    """
    from fairlane.worker.models.registry import architecture_of

    file = path if path.is_file() else path / "config.json"
    raw = _read_json(file)
    _refuse_code(raw, "")
    if "quantization_config" in raw:
        raise ModelLoadError(f"{file}: quantization_config is set; give a folder with unquantized safetensors")
    name, architecture = architecture_of(raw, file)
    _refuse_attention(raw, file)
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"{file}: hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")
    num_heads = _integer(raw, "num_attention_heads", file)
    num_layers = _integer(raw, "num_hidden_layers", file)
    head_dim = raw.get("head_dim") or _integer(raw, "hidden_size", file) // num_heads
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelLoadError(f"{file}: {num_heads} heads, {num_kv_heads} KV heads and head_dim {head_dim} do not fit together")
    return ModelConfig(
        architecture=name,
        vocab_size=_integer(raw, "vocab_size", file),
        hidden_size=_integer(raw, "hidden_size", file),
        intermediate_size=_integer(raw, "intermediate_size", file),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(num_kv_heads),
        head_dim=int(head_dim),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        **architecture.traits(raw, num_layers),
        rope=_rope(raw, file),
        dtype=_dtype(raw, file),
        initializer_range=float(raw.get("initializer_range", 0.02)),
        eos_token_ids=_eos(raw, file),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing: give a Hugging Face model folder, or an embedded model's name") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ModelLoadError(f"{path} must hold a JSON object")
    return raw


def _refuse_code(value: Any, path: str) -> None:
    """Anything that would make a loader run code from the folder is refused, however deep it hides."""
    if isinstance(value, dict):
        for key, inner in value.items():
            here = f"{path}.{key}" if path else str(key)
            if key in ("auto_map", "trust_remote_code", "custom_pipelines"):
                raise ModelLoadError(
                    f"config.json: {here} is set, but code from a model folder is never run; "
                    "remove the key if the architecture is a standard one"
                )
            _refuse_code(inner, here)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_code(inner, f"{path}[{index}]")


def _integer(raw: dict[str, Any], key: str, file: Path) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelLoadError(f"{file}: {key} must be a positive whole number, not {value!r}")
    return value


def _refuse_attention(raw: dict[str, Any], file: Path) -> None:
    """A layer whose attention is of another kind would be computed as if it were full."""
    kinds = raw.get("layer_types")
    unknown = [kind for kind in kinds if kind not in _ATTENTION] if isinstance(kinds, list) else []
    if unknown:
        known = ", ".join(_ATTENTION)
        raise ModelLoadError(f"{file}: attention of kind {unknown[0]!r} (layer_types) is not supported; supported are: {known}")


def _dtype(raw: dict[str, Any], file: Path) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or _DTYPES[0])
    if dtype not in _DTYPES:
        raise ModelLoadError(f"{file}: weights of type {dtype!r} are not supported; supported are: {', '.join(_DTYPES)}")
    return dtype


def _rope(raw: dict[str, Any], file: Path) -> RopeConfig:
    """Reads both spellings: rope_theta with rope_scaling, and the newer rope_parameters."""
    parameters = dict(raw.get("rope_scaling") or {})
    parameters.update(raw.get("rope_parameters") or {})
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if float(parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelLoadError(f"{file}: partial_rotary_factor other than 1 is not supported")
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind in ("yarn", "longrope", "llama3"):
        original = raw.get("original_max_position_embeddings") or raw.get("max_position_embeddings")
        if not parameters.get("original_max_position_embeddings"):
            parameters["original_max_position_embeddings"] = original
    return RopeConfig(kind, theta, parameters)


def _eos(raw: dict[str, Any], file: Path) -> tuple[int, ...]:
    path = file.parent / "generation_config.json"
    generation = _read_json(path) if path.exists() else {}
    ids: list[int] = []
    for value in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if isinstance(token, int) and token not in ids:
                ids.append(token)
    return tuple(ids)
