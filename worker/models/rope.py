"""Rotary frequencies of every kind the Llama family uses, as one cos / sin table by position. Formulas and parameter names are
those of transformers' `modeling_rope_utils`.

Where a kind depends on the length (dynamic NTK, longrope), the longest length the worker serves decides, once: a sequence's
keys stay in the cache, so frequencies that changed as it grows would disagree with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fairlane.worker.errors import ModelLoadError
from fairlane.worker.models.config import ModelConfig

Frequencies = tuple[Tensor, float]  # inverse frequencies float32 [D / 2], factor on cos and sin


def rope_tables(config: ModelConfig, max_len: int, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [num_positions, D / 2], for a worker that serves sequences of up to max_len tokens."""
    if config.rope.kind not in _KINDS:
        raise ModelLoadError(f"rope type {config.rope.kind!r} is not supported; supported are: {', '.join(sorted(_KINDS))}")
    try:
        inverse, factor = _KINDS[config.rope.kind](config, max_len)
    except (KeyError, TypeError) as error:
        raise ModelLoadError(f"rope type {config.rope.kind!r}: a parameter is missing or malformed: {error}") from error
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def _inverse(config: ModelConfig, theta: float) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32) / config.head_dim
    return 1.0 / (theta**exponents)


def _default(config: ModelConfig, max_len: int) -> Frequencies:
    return _inverse(config, config.rope.theta), 1.0


def _linear(config: ModelConfig, max_len: int) -> Frequencies:
    return _inverse(config, config.rope.theta) / float(config.rope.parameters["factor"]), 1.0


def _dynamic(config: ModelConfig, max_len: int) -> Frequencies:
    factor, trained = float(config.rope.parameters["factor"]), config.max_position_embeddings
    dim = config.head_dim
    stretch = (factor * max(max_len, trained) / trained - (factor - 1)) ** (dim / (dim - 2))
    return _inverse(config, config.rope.theta * stretch), 1.0


def _llama3(config: ModelConfig, max_len: int) -> Frequencies:
    values = config.rope.parameters
    factor, low, high = (float(values[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(values["original_max_position_embeddings"])
    inverse = _inverse(config, config.rope.theta)
    wavelength = 2 * math.pi / inverse
    smooth = (trained / wavelength - low) / (high - low)
    blended = (1 - smooth) * inverse / factor + smooth * inverse
    slow = torch.where(wavelength > trained / low, inverse / factor, inverse)
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, blended, slow), 1.0


def _yarn(config: ModelConfig, max_len: int) -> Frequencies:
    values = config.rope.parameters
    trained = float(values["original_max_position_embeddings"])
    factor = float(values.get("factor") or config.max_position_embeddings / trained)
    dim, theta = config.head_dim, config.rope.theta

    def dimension(rotations: float) -> float:
        return (dim * math.log(trained / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dimension(float(values.get("beta_fast") or 32)), dimension(float(values.get("beta_slow") or 1))
    if values.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as in the source: no division by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    inverse = _inverse(config, theta)
    return inverse / factor * ramp + inverse * (1 - ramp), _yarn_factor(config, factor)


def _yarn_factor(config: ModelConfig, factor: float) -> float:
    values = config.rope.parameters
    if values.get("attention_factor") is not None:
        return float(values["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if values.get("mscale") and values.get("mscale_all_dim"):
        return mscale(float(values["mscale"])) / mscale(float(values["mscale_all_dim"]))
    return mscale(1.0)


def _longrope(config: ModelConfig, max_len: int) -> Frequencies:
    values = config.rope.parameters
    trained = float(values["original_max_position_embeddings"])
    factor = float(values.get("factor") or config.max_position_embeddings / trained)
    scale = values.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    chosen = values["long_factor"] if max_len > trained else values["short_factor"]
    return _inverse(config, config.rope.theta) / torch.tensor(chosen, dtype=torch.float32), float(scale)


_KINDS: dict[str, Callable[[ModelConfig, int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
