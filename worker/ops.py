"""The fused elementwise ops of a model and copies of KV blocks, by device: Triton on a GPU, plain torch elsewhere. Both compute
the same (kernels/)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fairlane.kernels import reference
from fairlane.worker.linear import Linear


@dataclass(frozen=True, slots=True)
class Ops:
    """rmsnorm is kernels.reference's. The others begin with a linear layer, so that its kernel may do their work too:

    linear_add_rmsnorm(linear, x, residual, weight, eps): reference.add_rmsnorm of linear(x)
    linear_silu_mul(linear, x): reference.silu_mul of linear(x)
    """

    rmsnorm: Callable[[Tensor, Tensor, float], Tensor]
    linear_add_rmsnorm: Callable[[Linear, Tensor, Tensor, Tensor, float], Tensor]
    linear_silu_mul: Callable[[Linear, Tensor], Tensor]


def ops_for(device: torch.device) -> Ops:
    """Triton is imported only where there is a GPU for it."""
    if device.type != "cuda":
        return Ops(reference.rmsnorm, _linear_add_rmsnorm, _linear_silu_mul)
    return triton_ops()


def triton_ops() -> Ops:
    from fairlane.kernels.add_rmsnorm import add_rmsnorm, join_add_rmsnorm, rmsnorm
    from fairlane.kernels.silu_mul import silu_mul
    from fairlane.kernels.thin_linear import gated_linear, split_linear

    def linear_add_rmsnorm(linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        fused = linear.fused_weight(len(x))
        if fused is None:
            return add_rmsnorm(linear(x), residual, weight, eps)
        return join_add_rmsnorm(split_linear(x, fused), residual, weight, eps)

    def linear_silu_mul(linear: Linear, x: Tensor) -> Tensor:
        fused = linear.fused_weight(len(x), gated=True)
        return silu_mul(linear(x)) if fused is None else gated_linear(x, fused)

    return Ops(rmsnorm, linear_add_rmsnorm, linear_silu_mul)


def _linear_add_rmsnorm(linear: Linear, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return reference.add_rmsnorm(linear(x), residual, weight, eps)


def _linear_silu_mul(linear: Linear, x: Tensor) -> Tensor:
    return reference.silu_mul(linear(x))


def copy_blocks_for(device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """(pool, pairs): kernels.reference.copy_blocks, or the same in Triton."""
    if device.type != "cuda":
        return reference.copy_blocks
    from fairlane.kernels.copy_blocks import copy_blocks

    return copy_blocks
