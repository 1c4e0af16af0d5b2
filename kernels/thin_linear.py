"""Linear layers of few rows in Triton: y = x W^T, each weight read once for every 128 rows. A decode step spends most of its time
in them, waiting for memory, so they are built around the weights' way to the SM: W is the product's tall operand (64
of its rows fill a tensor core's instruction, where the batch would leave it half empty), and the copy engine brings in W and x
several tiles ahead.

Three forms, by what happens to the result:

    thin_linear     y [M, N]; for layers with enough outputs to give every SM some
    split_linear    partial products [S, M, N] of S stretches of K, for layers with few outputs; join_add_rmsnorm (add_rmsnorm.py)
                    sums them as it reads them, so that no kernel runs for the sum alone
    gated_linear    silu(gate) * up [M, N / 2] of a weight whose rows are gate's, then up's: neither half is ever written

More rows than a tile of x holds are taken tile by tile, by programs side by side, so that a weight is read from memory about
once; for many rows cuBLAS is faster. Which layers take which form, and up to how many rows, is worker/linear.py's decision.

A row's bits depend on the weight's shape alone: not on the rows beside it, nor on their number, nor on the tiles' sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fairlane.kernels.dependent import launch_options, let_next_start, wait_for_inputs

_MIN_ROWS, _MAX_ROWS = 16, 128  # of a tile of x
_FULL = 100  # programs that keep the memory of a large GPU busy
_MIN_STRETCH = 512  # values of K: a shorter part costs more to write and sum than it saves
_ROOMY = (9, 10)  # major compute capabilities with 228 KiB of shared memory to an SM; a desktop's 12 has 100
_DEEP, _SHALLOW = 200_000, 100_000  # of them: of a program alone on an SM, and of one of two


@dataclass(frozen=True, slots=True)
class ThinConfig:
    """block_n: rows of W per program (gated_linear: of each half). block_k: values of K per iteration. num_stages: iterations
    under way at once. None of them changes a bit of the result. Raises ValueError for what no kernel takes."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        if any(size < 1 or size & (size - 1) for size in (self.block_n, self.block_k, self.num_warps)) or self.num_stages < 1:
            raise ValueError(f"block_n, block_k and num_warps must be powers of two, num_stages positive, got {self}")
        if self.block_n < 16 or self.block_k < 16:
            raise ValueError(f"block_n and block_k must be at least 16, got {self}")

    def shared_bytes(self, num_rows: int, *, gated: bool, itemsize: int = 2) -> int:
        """Of a program's tiles of W and x."""
        return self.num_stages * self.block_k * (self.block_n * (1 + gated) + padded_rows(num_rows)) * itemsize


def padded_rows(num_rows: int) -> int:
    """Rows of a tile of x where there are so many: 16, 32, 64 or 128, for each of which a kernel is compiled."""
    return min(_MAX_ROWS, max(_MIN_ROWS, 1 << (num_rows - 1).bit_length()))


def num_splits(num_outputs: int, in_features: int) -> int:
    """How many stretches split_linear cuts K into: enough to keep the memory busy, none too short. It follows from the weight's
    shape alone, so that a row has the same bits in a batch of any size."""
    splits = 1
    while splits < 8 and splits * triton.cdiv(num_outputs, 64) < _FULL and in_features >= 2 * splits * _MIN_STRETCH:
        splits *= 2
    return splits


# What a sweep on one H200 found better than the rule: (gated, N, K, padded rows) -> configuration.
MEASURED: dict[tuple[bool, int, int, int], ThinConfig] = {
    (True, 28672, 4096, 16): ThinConfig(64, 128, 4, 3),
    (True, 28672, 4096, 32): ThinConfig(64, 128, 4, 4),
    (True, 28672, 4096, 64): ThinConfig(64, 128, 4, 4),
    **{(False, 128256, 4096, rows): ThinConfig(64, 128, 4, 3) for rows in (16, 32)},
    (False, 128256, 4096, 64): ThinConfig(128, 64, 8, 4),
    (False, 128256, 4096, 128): ThinConfig(128, 64, 8, 3),
    **{(False, 151936, 1024, rows): ThinConfig(128, 64, 4, 3) for rows in (16, 32, 64)},
    (False, 151936, 1024, 128): ThinConfig(128, 64, 8, 6),
    **{(False, 12288, 4096, rows): ThinConfig(64, 128, 4, 4) for rows in (16, 32)},
    (False, 12288, 4096, 64): ThinConfig(128, 128, 4, 4),
    (False, 12288, 4096, 128): ThinConfig(128, 64, 8, 6),
    (True, 22016, 4096, 16): ThinConfig(128, 128, 8, 3),
}

CANDIDATES = tuple(
    ThinConfig(block_n, block_k, num_warps, num_stages)
    for block_n, num_warps in ((64, 4), (128, 4), (128, 8))
    for block_k in (64, 128)
    for num_stages in (3, 4, 6, 8)
)


def config_for(num_rows: int, num_outputs: int, in_features: int, *, splits: int = 1, gated: bool = False) -> ThinConfig:
    """The offline choice. A program alone on its SM copies as far ahead as shared memory allows; where there are more programs
    than SMs, two share one."""
    rows = padded_rows(num_rows)
    if (gated, num_outputs, in_features, rows) in MEASURED:
        return MEASURED[gated, num_outputs, in_features, rows]
    room = _DEEP if splits * triton.cdiv(num_outputs // (1 + gated), 64) <= 132 else _SHALLOW
    block_k = 128 if room == _DEEP else 64
    per_stage = ThinConfig(64, block_k, 4, 1).shared_bytes(rows, gated=gated)
    return ThinConfig(64, block_k, 4, min(6, room // per_stage))


@triton.jit  # type: ignore[untyped-decorator]
def _store(out, first_row, columns, values, num_rows, num_outputs, stride_out, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """values [BLOCK_N, ROWS] to rows first_row .. of out [M, N]."""
    rows = first_row + tl.arange(0, ROWS)
    at = out + rows[None, :].to(tl.int64) * stride_out + columns[:, None]
    tl.store(at, values.to(out.dtype.element_ty), mask=(columns < num_outputs)[:, None] & (rows < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "in_features", "stride_out"])  # type: ignore[untyped-decorator]
def _linear_kernel(  # type: ignore[no-untyped-def]
    w_tiles, x_tiles, bias, out, num_rows, num_outputs, in_features, stride_out,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    first_row, first = tl.program_id(0) * ROWS, tl.program_id(1) * BLOCK_N
    wait_for_inputs(DEPENDENT)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for k in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        acc = tl.dot(w_tiles.load([first, k]), x_tiles.load([first_row, k]).T, acc, input_precision="ieee")
    let_next_start(DEPENDENT)
    columns = first + tl.arange(0, BLOCK_N)
    if bias is not None:
        acc += tl.load(bias + columns, mask=columns < num_outputs, other=0.0).to(tl.float32)[:, None]
    _store(out, first_row, columns, acc, num_rows, num_outputs, stride_out, ROWS)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "in_features", "stretch"])  # type: ignore[untyped-decorator]
def _split_kernel(  # type: ignore[no-untyped-def]
    w_tiles, x_tiles, parts, num_rows, num_outputs, in_features, stretch,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    first_row, first, split = tl.program_id(0) * ROWS, tl.program_id(1) * BLOCK_N, tl.program_id(2)
    wait_for_inputs(DEPENDENT)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    start = split * stretch
    for k in tl.range(start, tl.minimum(start + stretch, in_features), BLOCK_K, num_stages=STAGES):
        acc = tl.dot(w_tiles.load([first, k]), x_tiles.load([first_row, k]).T, acc, input_precision="ieee")
    let_next_start(DEPENDENT)
    part = parts + split.to(tl.int64) * num_rows * num_outputs
    _store(part, first_row, first + tl.arange(0, BLOCK_N), acc, num_rows, num_outputs, num_outputs, ROWS)


@triton.jit(do_not_specialize=["num_rows", "num_outputs", "in_features", "stride_out"])  # type: ignore[untyped-decorator]
def _gated_kernel(  # type: ignore[no-untyped-def]
    w_tiles, x_tiles, out, num_rows, num_outputs, in_features, stride_out,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """num_outputs: of each half. A tile that reaches beyond its half computes rows of the other, or zeros, and stores none."""
    first_row, first = tl.program_id(0) * ROWS, tl.program_id(1) * BLOCK_N
    wait_for_inputs(DEPENDENT)
    gate = tl.zeros([BLOCK_N, ROWS], tl.float32)
    up = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for k in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        x = x_tiles.load([first_row, k]).T
        gate = tl.dot(w_tiles.load([first, k]), x, gate, input_precision="ieee")
        up = tl.dot(w_tiles.load([num_outputs + first, k]), x, up, input_precision="ieee")
    let_next_start(DEPENDENT)
    dtype: tl.constexpr = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)  # rounded where the product alone and silu_mul round
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    _store(out, first_row, first + tl.arange(0, BLOCK_N), activated * up, num_rows, num_outputs, stride_out, ROWS)


def thin_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None, config: ThinConfig | None = None
) -> Tensor:
    """x W^T + b [M, N] for x [M, K], weight [N, K], bias [N], all of one dtype; summed in float32 and rounded once.
    Writes and returns out, which must not overlap the others.

    Columns must be contiguous; the first elements of x and weight, and the distances between their rows, must lie at multiples of
    16 bytes. Nothing but a missing out is allocated. Raises ValueError for what does not fit.
    """
    rows, in_features, outputs = _check(x, weight)
    out = x.new_empty((rows, outputs)) if out is None else out
    _check_out(out, (rows, outputs), x)
    if bias is not None and (bias.shape != (outputs,) or bias.dtype != x.dtype or bias.stride(0) != 1):
        raise ValueError(f"bias must be [{outputs}] of {x.dtype}, contiguous; it is {list(bias.shape)} of {bias.dtype}")
    if rows:
        config = config or config_for(rows, outputs, in_features)
        _linear_kernel[(_row_tiles(rows), triton.cdiv(outputs, config.block_n))](
            *_tiles(x, weight, config), bias, out, rows, outputs, in_features, out.stride(0), **_sizes(rows, config, x.device)
        )
    return out


def split_linear(x: Tensor, weight: Tensor, *, parts: Tensor | None = None, config: ThinConfig | None = None) -> Tensor:
    """Partial products, float32 [S, M, N], whose sum in order of S is x W^T; S is num_splits(N, K). parts: where they go,
    contiguous; S may also be another number, at the price of other bits. Otherwise as thin_linear."""
    rows, in_features, outputs = _check(x, weight)
    if parts is None:
        parts = torch.empty((num_splits(outputs, in_features), rows, outputs), dtype=torch.float32, device=x.device)
    if parts.dim() != 3 or parts.shape[1:] != (rows, outputs) or parts.dtype != torch.float32 or not parts.is_contiguous():
        raise ValueError(
            f"parts must be contiguous float32 [S, {rows}, {outputs}]; they are {list(parts.shape)} of {parts.dtype}"
        )
    if rows:
        splits = parts.shape[0]
        config = config or config_for(rows, outputs, in_features, splits=splits)
        # In whole 128s, whatever the tile, so that no tile size moves a cut.
        stretch = triton.cdiv(triton.cdiv(in_features, splits), max(128, config.block_k)) * max(128, config.block_k)
        _split_kernel[(_row_tiles(rows), triton.cdiv(outputs, config.block_n), splits)](
            *_tiles(x, weight, config), parts, rows, outputs, in_features, stretch, **_sizes(rows, config, x.device)
        )
    return parts


def gated_linear(x: Tensor, weight: Tensor, *, out: Tensor | None = None, config: ThinConfig | None = None) -> Tensor:
    """silu(gate) * up [M, N / 2], where x W^T holds gate in its first N / 2 columns and up in the others. Rounded to the dtype
    where thin_linear followed by silu_mul rounds. Otherwise as thin_linear."""
    rows, in_features, both = _check(x, weight)
    if both % 2:
        raise ValueError(f"weight must hold two halves; it has {both} rows")
    outputs = both // 2
    out = x.new_empty((rows, outputs)) if out is None else out
    _check_out(out, (rows, outputs), x)
    if rows:
        config = config or config_for(rows, both, in_features, gated=True)
        _gated_kernel[(_row_tiles(rows), triton.cdiv(outputs, config.block_n))](
            *_tiles(x, weight, config), out, rows, outputs, in_features, out.stride(0), **_sizes(rows, config, x.device)
        )
    return out


def _row_tiles(rows: int) -> int:
    return -(-rows // padded_rows(rows))


def _tiles(x: Tensor, weight: Tensor, config: ThinConfig) -> tuple[TensorDescriptor, TensorDescriptor]:
    """For the copy engine; beyond the tensors' edges it fills in zeros."""
    row = x.stride(0) if x.shape[0] > 1 else x.shape[1] + -x.shape[1] % 8  # a single row's distance to the next says nothing
    return (
        TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [config.block_n, config.block_k]),
        TensorDescriptor(x, list(x.shape), [row, 1], [padded_rows(x.shape[0]), config.block_k]),
    )


def _sizes(rows: int, config: ThinConfig, device: torch.device) -> dict[str, int]:
    return {
        "ROWS": padded_rows(rows),
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
        **launch_options(device),
    }


@cache
def has_room(device: torch.device) -> bool:
    """Whether a GPU's shared memory holds the tiles that config_for chooses: Hopper's and data-centre Blackwell's do."""
    return torch.cuda.get_device_capability(device)[0] in _ROOMY


def takes(weight: Tensor) -> bool:
    """Whether these kernels read such a weight [N, K]: 16-bit, rows at multiples of 16 bytes, on a GPU that has room."""
    if weight.device.type == "cuda" and not has_room(weight.device):
        return False
    aligned = weight.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0 and weight.stride(0) % 8 == 0 and weight.stride(1) == 1
    return weight.dtype in (torch.float16, torch.bfloat16) and aligned


def _check(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Rows, K and N."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or 0 in weight.shape:
        raise ValueError(f"x must be [M, K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}")
    if weight.dtype != x.dtype or not x.dtype.is_floating_point:
        raise ValueError(f"x and weight must be of one floating-point type, got {x.dtype} and {weight.dtype}")
    for name, tensor in (("x", x), ("weight", weight)):
        steps = tensor.data_ptr(), tensor.stride(0) * tensor.element_size() if tensor.shape[0] > 1 else 0
        if tensor.stride(1) != 1 or any(step % 16 for step in steps):
            raise ValueError(f"{name}'s columns must be contiguous, its rows at multiples of 16 bytes; strides {tensor.stride()}")
    return x.shape[0], x.shape[1], weight.shape[0]


def _check_out(out: Tensor, shape: tuple[int, int], x: Tensor) -> None:
    if out.shape != shape or out.stride(1) != 1 or out.dtype != x.dtype:
        raise ValueError(f"out must be {list(shape)} of {x.dtype}, columns contiguous; it is {list(out.shape)} of {out.dtype}")
