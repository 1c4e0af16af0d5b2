"""Rows for the sampling kernels, and the judge of their tokens: the reference's token, or one that float rounding excuses. The
noise is two logarithms whose last bits libraries differ in, and top_p compares a sum."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fairlane.kernels import reference_sampling as reference
from fairlane.kernels.reference_sampling import SamplingTensors

ULPS = 4  # of a score: one of the noise's, one of the sum's rounding, for either token
SHARE = 1e-5  # of top_p: what summing a vocabulary of float32 shares in another order may change


@dataclass(frozen=True)
class Ask:
    """One row's parameters; the defaults draw from everything."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 7
    position: int = 0
    sibling: int = 0


def tensors(asks: list[Ask], device: torch.device | str = "cpu") -> SamplingTensors:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(ask, name) for ask in asks], dtype=dtype, device=device)

    floats = {name: column(name, torch.float32) for name in ("temperature", "top_p", "min_p")}
    return SamplingTensors(**floats, **{name: column(name, torch.int64) for name in ("top_k", "seed", "position", "sibling")})


def scores(logits: Tensor, ask: Ask) -> tuple[Tensor, Tensor]:
    """Scaled logits and scores, float32 [V], of one row of logits [V], on its device."""
    scaled = logits.to(torch.float32) / torch.tensor(ask.temperature, dtype=torch.float32, device=logits.device)
    group = torch.arange(-(-len(logits) // 4), device=logits.device)
    key = [torch.full_like(group, value) for value in (ask.seed, ask.sibling, ask.position)]
    return scaled, scaled + reference.gumbel_noise(*key, group).flatten()[: len(logits)]


def excused(logits: Tensor, ask: Ask, got: int, wanted: int) -> bool:
    """True if the two tokens' scores are equal but for rounding, or a filter's edge lies between them within rounding."""
    if ask.temperature == 0:
        return False
    scaled, score = (values.double().cpu() for values in scores(logits, ask))
    ulp = 2.0 ** (math.floor(math.log2(max(abs(float(score[got])), abs(float(score[wanted])), 1.0))) - 23)
    if abs(float(score[got] - score[wanted])) <= ULPS * ulp:
        return True
    weight = torch.exp(scaled - scaled.max())
    if 0 < ask.top_k < len(scaled):
        weight = weight.masked_fill(scaled < torch.topk(scaled, ask.top_k).values[-1], 0.0)
    edges = [float(weight[scaled > scaled[token]].sum() / weight.sum()) for token in (got, wanted)]
    if ask.top_p < 1 and min(abs(edge - ask.top_p) for edge in edges) <= SHARE:
        return True
    least = float(scaled.max()) + math.log(ask.min_p) if ask.min_p > 0 else -math.inf
    return min(abs(float(scaled[token]) - least) for token in (got, wanted)) <= ULPS * ulp


def misdrawn(logits: Tensor, asks: list[Ask], got: Tensor) -> list[str]:
    """Rows whose token is neither the reference's nor excused."""
    wanted = reference.sample(logits, tensors(asks, logits.device)).tolist()
    pairs = enumerate(zip(asks, got.tolist(), wanted, strict=True))
    return [
        f"row {row}: {mine}, not {theirs} ({ask})"
        for row, (ask, mine, theirs) in pairs
        if mine != theirs and not (0 <= mine < logits.shape[1] and excused(logits[row], ask, mine, theirs))
    ]
