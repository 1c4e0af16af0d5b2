"""Linear layers of one to eight rows in Triton: y = x W^T + b in one launch, each weight read once, which is all that such a
product costs. Which layers take it, and up to how many rows, is worker/linear.py's decision.

Each program computes block_n outputs over all of K, so nothing is joined across programs: K is split across the threads of a
program, and its partial sums are added in a fixed order. Two kernels share that plan:

    vector   a row or two: weights go from memory to registers, all loads of a tile at once; float32 multiply-adds, then one sum
             over the threads
    dots     up to 8 rows: weights go through shared memory; each warp multiplies a part of K on tensor cores, then one sum over
             the warps

Programs are small and all, or nearly all, run at once: what is in flight for an SM is what its programs hold (32 KB each in the
vector kernel), and memory serves them alike, so that they end together although their number is no multiple of the SMs'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 8
MAX_VECTOR_ROWS = 2
_VECTOR = tl.constexpr(8)  # 16-bit values per 16-byte load; K is a multiple of it
_PADDED_ROWS = tl.constexpr(8)  # the least of a tensor core's instruction
_MIN_OUTPUTS, _MIN_K = 16, 16  # tl.dot's least extents
_MIN_PROGRAMS = 256  # about two per SM of a large GPU: fewer leave memory idle


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """dots: which kernel. block_n: outputs per program; block_k: values of K per iteration, shared by the warps. num_stages: 1
    loads to registers, which only the vector kernel does; more copy num_stages - 1 iterations ahead through shared memory.

    A row's bits depend on the configuration, not on the number of rows beside it. Raises ValueError for what no kernel takes.
    """

    dots: bool
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if any(size < 1 or size & (size - 1) for size in (self.block_n, self.block_k, self.num_warps)) or self.num_stages < 1:
            raise ValueError(f"block_n, block_k and num_warps must be powers of two, num_stages positive, got {self}")
        if self.block_k < _VECTOR.value:
            raise ValueError(f"block_k must be at least {_VECTOR.value}, got {self}")
        if self.dots and (self.block_n < _MIN_OUTPUTS or self.block_k < _MIN_K * self.num_warps or self.num_stages < 2):
            raise ValueError(f"dots take at least {_MIN_OUTPUTS} outputs, {_MIN_K} of K per warp and 2 stages, got {self}")


@triton.jit  # type: ignore[untyped-decorator]
def _row_sums(w, x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, K] and [K] -> [N, K / 8]: what one thread has loaded at once is added in that thread."""
    return tl.sum((w * x[None, :]).reshape(BLOCK_N, BLOCK_K // _VECTOR, _VECTOR), 2)


@triton.jit
def _store_row(out, cols, num_outputs, sums, bias_ptr):  # type: ignore[no-untyped-def]
    y = tl.sum(sums, 1)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < num_outputs, other=0.0).to(tl.float32)
    tl.store(out + cols, y.to(out.dtype.element_ty), mask=cols < num_outputs)


@triton.jit(do_not_specialize=["num_outputs", "x_vectors", "w_vectors", "stride_out"])  # type: ignore[untyped-decorator]
def _vector_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, bias_ptr, out_ptr, num_outputs, x_vectors, w_vectors, stride_out,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """x_vectors, w_vectors: from row to row of x and W, in vectors, which tells the compiler that every row is aligned."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the last output the last one is computed again, and not stored: no load needs a mask for it.
    w_rows = tl.minimum(cols, num_outputs - 1).to(tl.int64) * w_vectors * _VECTOR
    second = x_ptr + tl.cast(x_vectors, tl.int64) * _VECTOR
    inner = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K // _VECTOR], tl.float32)
    sums_2 = tl.zeros([BLOCK_N, BLOCK_K // _VECTOR], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + inner
        at = w_ptr + w_rows[:, None] + k[None, :]
        if K % BLOCK_K == 0:
            w = tl.load(at, eviction_policy="evict_first").to(tl.float32)
            x = tl.load(x_ptr + k).to(tl.float32)
            x_2 = tl.load(second + k).to(tl.float32) if ROWS == 2 else x
        else:
            w = tl.load(at, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
            x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
            x_2 = tl.load(second + k, mask=k < K, other=0.0).to(tl.float32) if ROWS == 2 else x
        sums += _row_sums(w, x, BLOCK_N, BLOCK_K)
        if ROWS == 2:
            sums_2 += _row_sums(w, x_2, BLOCK_N, BLOCK_K)
    _store_row(out_ptr, cols, num_outputs, sums, bias_ptr)
    if ROWS == 2:
        _store_row(out_ptr + tl.cast(stride_out, tl.int64), cols, num_outputs, sums_2, bias_ptr)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "x_vectors", "w_vectors", "stride_out"])  # type: ignore[untyped-decorator]
def _dots_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, bias_ptr, out_ptr, num_rows, num_outputs, x_vectors, w_vectors, stride_out,
    K: tl.constexpr, WARPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A batched product of WARPS parts of K, which the compiler gives to one warp each (checked in the generated code). Rows of x
    beyond num_rows are zeros, so one compilation serves any number, and each row is computed the same in all of them."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_rows = tl.minimum(cols, num_outputs - 1).to(tl.int64) * w_vectors * _VECTOR
    rows = tl.arange(0, _PADDED_ROWS)
    x_rows = rows.to(tl.int64) * x_vectors * _VECTOR
    part: tl.constexpr = BLOCK_K // WARPS
    inner = tl.arange(0, WARPS)[:, None] * part + tl.arange(0, part)[None, :]
    acc = tl.zeros([WARPS, BLOCK_N, _PADDED_ROWS], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + inner
        at_w = w_ptr + w_rows[None, :, None] + k[:, None, :]
        at_x = x_ptr + x_rows[None, None, :] + k[:, :, None]
        real = (rows < num_rows)[None, None, :]
        if K % BLOCK_K == 0:
            w = tl.load(at_w)
            x = tl.load(at_x, mask=real, other=0.0)
        else:
            w = tl.load(at_w, mask=(k < K)[:, None, :], other=0.0)
            x = tl.load(at_x, mask=real & (k < K)[:, :, None], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    y = tl.sum(acc, 0)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < num_outputs, other=0.0).to(tl.float32)[:, None]
    at = out_ptr + (rows.to(tl.int64) * stride_out)[None, :] + cols[:, None]
    tl.store(at, y.to(out_ptr.dtype.element_ty), mask=(rows < num_rows)[None, :] & (cols < num_outputs)[:, None])


# What a measurement (one H200) found better than the rule: (N, K, dots) -> configuration.
MEASURED: dict[tuple[int, int, bool], SkinnyConfig] = {
    (6144, 4096, False): SkinnyConfig(False, block_n=4, block_k=2048, num_warps=8, num_stages=1),
    (4096, 4096, False): SkinnyConfig(False, block_n=4, block_k=2048, num_warps=8, num_stages=1),
    (4096, 14336, False): SkinnyConfig(False, block_n=8, block_k=2048, num_warps=8, num_stages=1),
    (4096, 1024, False): SkinnyConfig(False, block_n=4, block_k=1024, num_warps=4, num_stages=1),
    (6144, 1024, False): SkinnyConfig(False, block_n=4, block_k=1024, num_warps=4, num_stages=1),
    (1024, 3072, False): SkinnyConfig(False, block_n=2, block_k=4096, num_warps=8, num_stages=1),
}


def config_for(num_rows: int, num_outputs: int, in_features: int) -> SkinnyConfig:
    """The offline choice; the same for 2 to 8 rows. Two rows are better off with the dots, measured."""
    dots = num_rows > 1
    if (num_outputs, in_features, dots) in MEASURED:
        return MEASURED[num_outputs, in_features, dots]
    return DOTS if dots else _vector_config(num_outputs, in_features)


DOTS = SkinnyConfig(dots=True, block_n=16, block_k=512, num_warps=4, num_stages=4)  # 72 KB: three programs per SM


def _vector_config(num_outputs: int, in_features: int) -> SkinnyConfig:
    """The longest stretch of K, up to 4096, that leaves at most a quarter of the loads idle in the last iteration and before, and
    outputs for eight 16-byte loads per thread; fewer of them where that leaves too few programs."""
    sizes = (size for size in (4096, 2048, 1024, 512) if 3 * size * triton.cdiv(in_features, size) <= 4 * in_features)
    block_k = next(sizes, min(1024, triton.next_power_of_2(in_features)))
    num_warps = 8 if block_k >= 2048 else 4
    block_n = max(1, min(16, 2048 * num_warps // block_k))
    while block_n > 1 and num_outputs < block_n * _MIN_PROGRAMS:
        block_n //= 2
    return SkinnyConfig(dots=False, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=1)


# Those first that are likeliest to win, for K of 1024 and more.
VECTOR_CANDIDATES: tuple[SkinnyConfig, ...] = (
    SkinnyConfig(False, block_n=4, block_k=4096, num_warps=8, num_stages=1),
    SkinnyConfig(False, block_n=8, block_k=2048, num_warps=8, num_stages=1),
    SkinnyConfig(False, block_n=4, block_k=2048, num_warps=8, num_stages=1),
    SkinnyConfig(False, block_n=2, block_k=4096, num_warps=8, num_stages=1),
    SkinnyConfig(False, block_n=8, block_k=1024, num_warps=4, num_stages=1),
    SkinnyConfig(False, block_n=4, block_k=1024, num_warps=4, num_stages=1),
    SkinnyConfig(False, block_n=16, block_k=512, num_warps=4, num_stages=4),
)
DOTS_CANDIDATES: tuple[SkinnyConfig, ...] = (
    DOTS,
    SkinnyConfig(True, block_n=16, block_k=512, num_warps=8, num_stages=4),
    SkinnyConfig(True, block_n=16, block_k=1024, num_warps=8, num_stages=3),
    SkinnyConfig(True, block_n=32, block_k=512, num_warps=8, num_stages=3),
)
CANDIDATES = VECTOR_CANDIDATES + DOTS_CANDIDATES


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, config: SkinnyConfig | None = None
) -> Tensor:
    """x W^T + b [M, N] for x [M, K] of up to MAX_ROWS rows, weight [N, K], bias [N], all of one dtype; summed in float32 and
    rounded once. Writes and returns out, which must not overlap the others.

    Columns must be contiguous; K, and the distances between rows of weight and of x (where it has several), multiples of 8. For
    speed also the first element of x and weight must lie at a multiple of 16 bytes. config: by default config_for's; the vector
    kernel takes up to MAX_VECTOR_ROWS rows. A row's bits do not depend on the rows beside it while config is the same.
    Nothing but a missing out is allocated. Raises ValueError for what does not fit.
    """
    rows, in_features, outputs = _check(x, weight, bias)
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device) if out is None else out
    if out.shape != (rows, outputs) or out.stride(1) != 1 or out.dtype != x.dtype:
        raise ValueError(f"out must be {[rows, outputs]} of {x.dtype}; it is {list(out.shape)} of {out.dtype}")
    config = config or config_for(rows, outputs, in_features)
    if not config.dots and rows > MAX_VECTOR_ROWS:
        raise ValueError(f"the vector kernel takes up to {MAX_VECTOR_ROWS} rows, got {rows}")
    if rows == 0:
        return out
    grid = (triton.cdiv(outputs, config.block_n),)
    # A single row's distance to the next says nothing.
    strides = x.stride(0) // 8 if rows > 1 else 0, weight.stride(0) // 8, out.stride(0) if rows > 1 else 0
    sizes = {"K": in_features, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.num_stages}
    sizes |= {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.dots:
        _dots_kernel[grid](x, weight, bias, out, rows, outputs, *strides, WARPS=config.num_warps, **sizes)
    else:
        _vector_kernel[grid](x, weight, bias, out, outputs, *strides, ROWS=rows, **sizes)
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
    """Rows, K and N."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.shape[0] > MAX_ROWS or weight.shape[0] == 0:
        raise ValueError(f"x must be [up to {MAX_ROWS}, K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}")
    rows, in_features = x.shape
    steps = in_features, weight.stride(0), x.stride(0) if rows > 1 else 0
    if in_features == 0 or x.stride(1) != 1 or weight.stride(1) != 1 or any(step % 8 for step in steps):
        raise ValueError(
            f"K and the distances between rows must be multiples of 8, columns contiguous; K is {in_features}, "
            f"strides are {x.stride()} and {weight.stride()}"
        )
    outputs = weight.shape[0]
    if weight.dtype != x.dtype or not x.dtype.is_floating_point:
        raise ValueError(f"x and weight must be of one floating-point type, got {x.dtype} and {weight.dtype}")
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != x.dtype or bias.stride(0) != 1):
        raise ValueError(f"bias must be [{outputs}] of {x.dtype}, contiguous; it is {list(bias.shape)} of {bias.dtype}")
    return rows, in_features, outputs
