"""The gated activation in Triton: silu(gate) * up, in tiles of one row. It decides the tile; where gate and up come from (one
matrix product whose rows hold both) is the model's business."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SiluConfig:
    """tile: values of a row per program, a power of two. Each value stands alone, so that no tile changes a result."""

    tile: int
    num_warps: int


DEFAULT = SiluConfig(tile=1024, num_warps=4)  # 8 values per thread: one 16-byte vector of a 16-bit type from each half
CANDIDATES = (DEFAULT, SiluConfig(2048, 4), SiluConfig(2048, 8), SiluConfig(4096, 8))


@triton.jit  # type: ignore[untyped-decorator]
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up, out, stride_gate_up, stride_out, WIDTH: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    # One grid dimension, a row's tiles next to each other: the second dimension of a grid ends at 65535.
    tiles: tl.constexpr = (WIDTH + TILE - 1) // TILE
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    columns = (program % tiles) * TILE + tl.arange(0, TILE)
    inside = columns < WIDTH
    at = gate_up + row * stride_gate_up + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)  # rounded here, as the reference does
    tl.store(out + row * stride_out + columns, (activated * up).to(dtype), mask=inside)


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None, config: SiluConfig = DEFAULT) -> Tensor:
    """silu(gate) * up [T, N], where gate_up [T, 2N] holds gate in its first N columns; computed in float32.

    out: [T, N] of gate_up's dtype, where the result goes; it may be gate_up[:, :N]. Columns must be contiguous, rows need not.
    Raises ValueError for what does not fit.
    """
    tokens, both = gate_up.shape
    width = both // 2
    out = torch.empty((tokens, width), dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    if both != 2 * width or width == 0 or gate_up.stride(1) != 1:
        raise ValueError(f"gate_up must be [T, 2N] with contiguous columns; it is {list(gate_up.shape)}")
    if out.shape != (tokens, width) or out.stride(1) != 1 or out.dtype != gate_up.dtype:
        raise ValueError(f"out must be {[tokens, width]} of {gate_up.dtype}; it is {list(out.shape)} of {out.dtype}")
    if tokens:
        grid = (tokens * -(-width // config.tile),)
        strides = gate_up.stride(0), out.stride(0)
        _silu_mul_kernel[grid](gate_up, out, *strides, WIDTH=width, TILE=config.tile, num_warps=config.num_warps)
    return out
