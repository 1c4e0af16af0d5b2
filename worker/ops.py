"""The fused elementwise ops of a model and copies of KV blocks, by device: Triton on a GPU, plain torch elsewhere. Both compute
the same (kernels/)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fairlane.kernels import reference


@dataclass(frozen=True, slots=True)
class Ops:
    """As kernels.reference's functions of these names."""

    rmsnorm: Callable[[Tensor, Tensor, float], Tensor]
    add_rmsnorm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    silu_mul: Callable[[Tensor], Tensor]


def ops_for(device: torch.device) -> Ops:
    """Triton is imported only where there is a GPU for it."""
    if device.type != "cuda":
        return Ops(reference.rmsnorm, reference.add_rmsnorm, reference.silu_mul)
    from fairlane.kernels.add_rmsnorm import add_rmsnorm, rmsnorm
    from fairlane.kernels.silu_mul import silu_mul

    return Ops(rmsnorm, add_rmsnorm, silu_mul)


def copy_blocks_for(device: torch.device) -> Callable[[Tensor, Tensor], None]:
    """(pool, pairs): kernels.reference.copy_blocks, or the same in Triton."""
    if device.type != "cuda":
        return reference.copy_blocks
    from fairlane.kernels.copy_blocks import copy_blocks

    return copy_blocks
