"""Linear layers of one row in Triton: y = x W^T + b in one launch, each weight read once, which is all that such a product costs.
Which layers take it is worker/linear.py's decision; thin_linear.py has the kernels for more rows.

Each program computes block_n outputs over all of K, so nothing is joined across programs: weights go from memory to registers,
all loads of a tile at once, K split across the threads; float32 multiply-adds, then one sum over the threads in a fixed order.

Programs are small and all, or nearly all, run at once: what is in flight for an SM is what its programs hold (32 KB each), and
memory serves them alike, so that they end together although their number is no multiple of the SMs'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairlane.kernels.dependent import launch_options, let_next_start, wait_for_inputs

_VECTOR = tl.constexpr(8)  # 16-bit values per 16-byte load; K is a multiple of it
_MIN_PROGRAMS = 256  # about two per SM of a large GPU: fewer leave memory idle


@dataclass(frozen=True, slots=True)
class SkinnyConfig:
    """block_n: outputs per program; block_k: values of K per iteration. num_stages: 1 loads to registers; more copy
    num_stages - 1 iterations ahead through shared memory.

    The result's last bits depend on it. Raises ValueError for what the kernel does not take.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if any(size < 1 or size & (size - 1) for size in (self.block_n, self.block_k, self.num_warps)) or self.num_stages < 1:
            raise ValueError(f"block_n, block_k and num_warps must be powers of two, num_stages positive, got {self}")
        if self.block_k < _VECTOR.value:
            raise ValueError(f"block_k must be at least {_VECTOR.value}, got {self}")


@triton.jit  # type: ignore[untyped-decorator]
def _row_sums(w, x, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # type: ignore[no-untyped-def]
    """[N, K] and [K] -> [N, K / 8]: what one thread has loaded at once is added in that thread."""
    return tl.sum((w * x[None, :]).reshape(BLOCK_N, BLOCK_K // _VECTOR, _VECTOR), 2)


@triton.jit(do_not_specialize=["num_outputs", "w_vectors"])  # type: ignore[untyped-decorator]
def _skinny_kernel(  # type: ignore[no-untyped-def]
    x, weight, bias, out, num_outputs, w_vectors,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """w_vectors: from row to row of the weight, in vectors, which tells the compiler that every row is aligned."""
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the last output the last one is computed again, and not stored: no load needs a mask for it.
    w_rows = tl.minimum(cols, num_outputs - 1).to(tl.int64) * w_vectors * _VECTOR
    inner = tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K // _VECTOR], tl.float32)
    wait_for_inputs(DEPENDENT)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k = start + inner
        at = weight + w_rows[:, None] + k[None, :]
        if K % BLOCK_K == 0:
            tile = tl.load(at, eviction_policy="evict_first").to(tl.float32)
            values = tl.load(x + k).to(tl.float32)
        else:
            tile = tl.load(at, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
            values = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        sums += _row_sums(tile, values, BLOCK_N, BLOCK_K)
    let_next_start(DEPENDENT)
    y = tl.sum(sums, 1)
    if bias is not None:
        y += tl.load(bias + cols, mask=cols < num_outputs, other=0.0).to(tl.float32)
    tl.store(out + cols, y.to(out.dtype.element_ty), mask=cols < num_outputs)


# What a measurement (one H200) found better than the rule: (N, K) -> configuration.
MEASURED: dict[tuple[int, int], SkinnyConfig] = {
    (6144, 4096): SkinnyConfig(block_n=4, block_k=2048, num_warps=8, num_stages=1),
    (4096, 4096): SkinnyConfig(block_n=4, block_k=2048, num_warps=8, num_stages=1),
    (4096, 14336): SkinnyConfig(block_n=8, block_k=2048, num_warps=8, num_stages=1),
    (4096, 1024): SkinnyConfig(block_n=4, block_k=1024, num_warps=4, num_stages=1),
    (6144, 1024): SkinnyConfig(block_n=4, block_k=1024, num_warps=4, num_stages=1),
    (1024, 3072): SkinnyConfig(block_n=2, block_k=4096, num_warps=8, num_stages=1),
}


def config_for(num_outputs: int, in_features: int) -> SkinnyConfig:
    """The offline choice. By rule the longest stretch of K, up to 4096, that leaves at most a quarter of the loads idle in the
    last iteration and before, and outputs for eight 16-byte loads per thread; fewer where that leaves too few programs."""
    if (num_outputs, in_features) in MEASURED:
        return MEASURED[num_outputs, in_features]
    sizes = (size for size in (4096, 2048, 1024, 512) if 3 * size * triton.cdiv(in_features, size) <= 4 * in_features)
    block_k = next(sizes, min(1024, triton.next_power_of_2(in_features)))
    num_warps = 8 if block_k >= 2048 else 4
    block_n = max(1, min(16, 2048 * num_warps // block_k))
    while block_n > 1 and num_outputs < block_n * _MIN_PROGRAMS:
        block_n //= 2
    return SkinnyConfig(block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=1)


# Those first that are likeliest to win, for K of 1024 and more.
CANDIDATES: tuple[SkinnyConfig, ...] = (
    SkinnyConfig(block_n=4, block_k=4096, num_warps=8, num_stages=1),
    SkinnyConfig(block_n=8, block_k=2048, num_warps=8, num_stages=1),
    SkinnyConfig(block_n=4, block_k=2048, num_warps=8, num_stages=1),
    SkinnyConfig(block_n=2, block_k=4096, num_warps=8, num_stages=1),
    SkinnyConfig(block_n=8, block_k=1024, num_warps=4, num_stages=1),
    SkinnyConfig(block_n=4, block_k=1024, num_warps=4, num_stages=1),
    SkinnyConfig(block_n=16, block_k=512, num_warps=4, num_stages=4),
)


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, config: SkinnyConfig | None = None
) -> Tensor:
    """x W^T + b [1, N] for x [1, K], weight [N, K], bias [N], all of one dtype; summed in float32 and rounded once. Writes and
    returns out, which must not overlap the others.

    Columns must be contiguous, K and the distance between rows of weight multiples of 8. For speed also the first element of x
    and weight must lie at a multiple of 16 bytes. config: by default config_for's. Nothing but a missing out is allocated. Raises
    ValueError for what does not fit.
    """
    in_features, outputs = _check(x, weight, bias)
    out = torch.empty((1, outputs), dtype=x.dtype, device=x.device) if out is None else out
    if out.shape != (1, outputs) or out.stride(1) != 1 or out.dtype != x.dtype:
        raise ValueError(f"out must be {[1, outputs]} of {x.dtype}; it is {list(out.shape)} of {out.dtype}")
    config = config or config_for(outputs, in_features)
    sizes = {"K": in_features, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.num_stages}
    sizes |= {"num_warps": config.num_warps, "num_stages": config.num_stages, **launch_options(x.device)}
    _skinny_kernel[(triton.cdiv(outputs, config.block_n),)](x, weight, bias, out, outputs, weight.stride(0) // 8, **sizes)
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    """K and N."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape != (1, weight.shape[1]) or weight.shape[0] == 0:
        raise ValueError(f"x must be [1, K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}")
    outputs, in_features = weight.shape
    columns_apart = x.stride(1) != 1 or weight.stride(1) != 1
    if in_features == 0 or columns_apart or in_features % 8 or weight.stride(0) % 8:
        raise ValueError(
            f"K and the distance between weight's rows must be multiples of 8, columns contiguous; K is {in_features}, "
            f"strides are {x.stride()} and {weight.stride()}"
        )
    if weight.dtype != x.dtype or not x.dtype.is_floating_point:
        raise ValueError(f"x and weight must be of one floating-point type, got {x.dtype} and {weight.dtype}")
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != x.dtype or bias.stride(0) != 1):
        raise ValueError(f"bias must be [{outputs}] of {x.dtype}, contiguous; it is {list(bias.shape)} of {bias.dtype}")
    return in_features, outputs
