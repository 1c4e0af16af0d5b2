"""RMSNorm in Triton: of a tensor's rows, of the residual stream as it takes a layer's output in, or of some of its rows only. One
program computes one row, and its shape follows from the row's width alone, so that a row's result never depends on its company.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairlane.kernels.dependent import launch_options, let_next_start, wait_for_inputs

MAX_WIDTH = 16384  # a program holds its whole row in registers


@dataclass(frozen=True, slots=True)
class NormConfig:
    """How a row is spread. num_warps: of the one program that computes it."""

    num_warps: int


CANDIDATES = (NormConfig(2), NormConfig(4), NormConfig(8), NormConfig(16))


def default_config(width: int) -> NormConfig:
    """16 values per thread (two 16-byte vectors of a 16-bit type), up to 16 warps. By the width alone: see above."""
    return NormConfig(min(16, max(1, _tile(width) // 512)))


@triton.jit  # type: ignore[untyped-decorator]
def _normalise(wide, weight, eps, dtype: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """wide float32 [TILE], 0 beyond WIDTH. Rounds to dtype before the weight is applied and after, as the reference does."""
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)
    return ((wide * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _rmsnorm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, eps, stride_x, stride_out, WIDTH: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_inputs(DEPENDENT)
    wide = tl.load(x + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    let_next_start(DEPENDENT)
    tl.store(out + row * stride_out + columns, _normalise(wide, scales, eps, out.dtype.element_ty, WIDTH), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_rmsnorm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, out, eps, stride_x, stride_residual, stride_out,
    WIDTH: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    at_residual = residual + row * stride_residual + columns
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_inputs(DEPENDENT)
    added = tl.load(x + row * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    total = (tl.load(at_residual, mask=inside, other=0.0).to(tl.float32) + added).to(residual.dtype.element_ty)
    let_next_start(DEPENDENT)
    tl.store(at_residual, total, mask=inside)
    normed = _normalise(total.to(tl.float32), scales, eps, out.dtype.element_ty, WIDTH)
    tl.store(out + row * stride_out + columns, normed, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _join_add_rmsnorm_kernel(  # type: ignore[no-untyped-def]
    parts, residual, weight, out, eps, num_rows, stride_residual, stride_out,
    SPLITS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    dtype: tl.constexpr = residual.dtype.element_ty
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_inputs(DEPENDENT)
    added = tl.load(parts + row * WIDTH + columns, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        added += tl.load(parts + (num_rows.to(tl.int64) * split + row) * WIDTH + columns, mask=inside, other=0.0)
    at_residual = residual + row * stride_residual + columns
    before = tl.load(at_residual, mask=inside, other=0.0).to(tl.float32)
    let_next_start(DEPENDENT)
    total = (before + added.to(dtype).to(tl.float32)).to(dtype)  # rounded where a product of its own would have been
    tl.store(at_residual, total, mask=inside)
    normed = _normalise(total.to(tl.float32), scales, eps, out.dtype.element_ty, WIDTH)
    tl.store(out + row * stride_out + columns, normed, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["rows"])  # type: ignore[untyped-decorator]
def _gather_add_rmsnorm_kernel(  # type: ignore[no-untyped-def]
    x, residual, rows, weight, out, residual_out, eps,
    stride_x, stride_residual, stride_out, stride_residual_out, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    columns = tl.arange(0, TILE)
    inside = columns < WIDTH
    known = inside & (row >= 0)
    added = tl.load(x + row * stride_x + columns, mask=known, other=0.0).to(tl.float32)
    before = tl.load(residual + row * stride_residual + columns, mask=known, other=0.0).to(tl.float32)
    total = (before + added).to(residual_out.dtype.element_ty)
    scales = tl.load(weight + columns, mask=inside, other=0.0)
    tl.store(residual_out + place * stride_residual_out + columns, total, mask=inside)
    normed = _normalise(total.to(tl.float32), scales, eps, out.dtype.element_ty, WIDTH)
    tl.store(out + place * stride_out + columns, normed, mask=inside)


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, config: NormConfig | None = None) -> Tensor:
    """x / rms(x) * weight over the last dimension of x [..., N], N <= 16384, in x's dtype; statistics in float32.

    weight [N], of x's dtype. out: like x, where the result goes; it may be x itself. Columns must be contiguous; rows
    may lie apart where x is a matrix. Raises ValueError for shapes, dtypes or strides that do not fit.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    if out.shape != x.shape:
        raise ValueError(f"out is {list(out.shape)} for rows {list(x.shape)}")
    rows, results = (x, out) if x.dim() == 2 else (_as_rows(x), _as_rows(out))
    _check(weight, rows, results)
    if rows.shape[0]:
        tile, num_warps = _launch_shape(weight.shape[0], config)
        strides = rows.stride(0), results.stride(0)
        _rmsnorm_kernel[(rows.shape[0],)](
            rows,
            weight,
            results,
            float(eps),
            *strides,
            WIDTH=weight.shape[0],
            TILE=tile,
            num_warps=num_warps,
            **launch_options(x.device),
        )
    return out


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, config: NormConfig | None = None
) -> Tensor:
    """Adds x [T, N] to residual [T, N] in place and returns rmsnorm(residual) [T, N]. All of one dtype; N <= 16384.

    The sum is rounded to the dtype before it is normed, so that a later layer reads what this one normed. out: where the result
    goes; it may be x, not residual. Columns must be contiguous, rows need not. Raises ValueError for what does not fit.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    _check(weight, x, residual, out)
    if not x.shape == residual.shape == out.shape:
        raise ValueError(f"x is {list(x.shape)}, residual {list(residual.shape)}, out {list(out.shape)}")
    if x.shape[0]:
        tile, num_warps = _launch_shape(weight.shape[0], config)
        strides = x.stride(0), residual.stride(0), out.stride(0)
        _add_rmsnorm_kernel[(x.shape[0],)](
            x,
            residual,
            weight,
            out,
            float(eps),
            *strides,
            WIDTH=weight.shape[0],
            TILE=tile,
            num_warps=num_warps,
            **launch_options(x.device),
        )
    return out


def join_add_rmsnorm(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None, config: NormConfig | None = None
) -> Tensor:
    """add_rmsnorm of the sum over the first dimension of parts, float32 [S, T, N], contiguous, as split_linear leaves them.

    Summed in order of S, then rounded to residual's dtype, as if the product had been one. Otherwise as add_rmsnorm.
    """
    out = torch.empty_like(residual, memory_format=torch.contiguous_format) if out is None else out
    _check(weight, residual, out)
    if parts.dim() != 3 or parts.shape[0] < 1 or not parts.shape[1:] == residual.shape == out.shape:
        raise ValueError(f"parts are {list(parts.shape)}, residual {list(residual.shape)}, out {list(out.shape)}")
    if parts.dtype != torch.float32 or not parts.is_contiguous():
        raise ValueError(f"parts must be contiguous float32; they are {parts.dtype} by {parts.stride()}")
    rows = residual.shape[0]
    if rows:
        tile, num_warps = _launch_shape(weight.shape[0], config)
        sizes = {"SPLITS": parts.shape[0], "WIDTH": weight.shape[0], "TILE": tile, "num_warps": num_warps}
        sizes |= launch_options(residual.device)
        strides = residual.stride(0), out.stride(0)
        _join_add_rmsnorm_kernel[(rows,)](parts, residual, weight, out, float(eps), rows, *strides, **sizes)
    return out


def gather_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    rows: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    config: NormConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """add_rmsnorm of x[rows] and residual[rows]: returns (normed [S, N], the sum [S, N]); x and residual [T, N] stay as they are.

    rows: int [S], contiguous, each in [0, T), or negative for padding: nothing is read, both results are 0 there. out,
    residual_out: where the results go; they may not overlap x, residual or each other. Otherwise as add_rmsnorm.
    """
    shape = (rows.shape[0], weight.shape[0])
    out = x.new_empty(shape) if out is None else out
    residual_out = x.new_empty(shape) if residual_out is None else residual_out
    _check(weight, x, residual, out, residual_out)
    if x.shape != residual.shape or not out.shape == residual_out.shape == shape:
        raise ValueError(f"x is {list(x.shape)}, residual {list(residual.shape)}, results {list(out.shape)} for {shape}")
    if rows.dtype not in (torch.int32, torch.int64) or not rows.is_contiguous():
        raise ValueError("rows must be contiguous int32 or int64")
    if shape[0]:
        tile, num_warps = _launch_shape(shape[1], config)
        strides = x.stride(0), residual.stride(0), out.stride(0), residual_out.stride(0)
        _gather_add_rmsnorm_kernel[(shape[0],)](
            x, residual, rows, weight, out, residual_out, float(eps), *strides, WIDTH=shape[1], TILE=tile, num_warps=num_warps
        )  # fmt: skip
    return out, residual_out


def _tile(width: int) -> int:
    """Never fewer values than threads: two threads that load one value, one of them late, would race with the store in place."""
    return max(128, 1 << (width - 1).bit_length())


@cache
def _launch_shape(width: int, config: NormConfig | None) -> tuple[int, int]:
    """Values and warps of one program; cached, since a launch is short."""
    tile = _tile(width)
    return tile, min((config or default_config(width)).num_warps, tile // 32)


def _as_rows(x: Tensor) -> Tensor:
    if not x.is_contiguous():
        raise ValueError(f"rows of {x.dim()} dimensions must be contiguous; they are {list(x.shape)} by {list(x.stride())}")
    return x.view(-1, x.shape[-1])


def _check(weight: Tensor, *tensors: Tensor) -> None:
    width = weight.shape[0]
    if weight.dim() != 1 or weight.stride(0) != 1 or not 0 < width <= MAX_WIDTH:
        raise ValueError(f"weight must be contiguous [N], 0 < N <= {MAX_WIDTH}; it is {list(weight.shape)}")
    for tensor in tensors:
        if tensor.dim() != 2 or tensor.shape[1] != width or tensor.stride(1) != 1:
            raise ValueError(f"rows must be [T, {width}] with contiguous columns; they are {list(tensor.shape)}")
        if tensor.dtype != weight.dtype:
            raise ValueError(f"rows are {tensor.dtype}, weight is {weight.dtype}")
