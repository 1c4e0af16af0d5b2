"""What happens to a layer's q, k and v before attention, in one Triton launch: q and k are normed per head where the model asks
for it and rotated in place, K and V go to the paged cache. It decides how heads are tiled; slots are handed out elsewhere.

    qkv row:  | q heads ........ | k heads .. | v heads .. |        one program: one token, one tile of heads of one kind
    cache:    kv[slot // BS, 0 = K or 1 = V, head, slot % BS, :]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairlane.kernels.dependent import attention_options, let_next_start, wait_for_inputs

_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """heads: per program, a power of two. Fixed per head_dim: a norm's sum is taken in an order that depends on the warps."""

    heads: int
    num_warps: int


CANDIDATES = (RopeConfig(8, 2), RopeConfig(8, 4), RopeConfig(4, 1), RopeConfig(16, 4), RopeConfig(32, 8))


@cache
def default_config(head_dim: int) -> RopeConfig:
    """8 heads; 8 values of each half per thread: one 16-byte vector of a 16-bit type."""
    return RopeConfig(8, min(8, max(1, 8 * _padded_half(head_dim) // 256)))


@triton.jit  # type: ignore[untyped-decorator]
def _norm_halves(low, high, weight, columns, within, eps, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """RMSNorm of each head, given as two halves [heads, columns]; rounded before and after the weight, as the reference does."""
    dtype: tl.constexpr = low.dtype
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    squares = tl.fma(wide_low, wide_low, wide_high * wide_high)
    scale = tl.rsqrt(tl.sum(squares, axis=1) / (2 * HALF) + eps)[:, None]
    weight_low = tl.load(weight + columns, mask=within, other=0.0).to(tl.float32)[None, :]
    weight_high = tl.load(weight + HALF + columns, mask=within, other=0.0).to(tl.float32)[None, :]
    normed_low = ((wide_low * scale).to(dtype).to(tl.float32) * weight_low).to(dtype)
    normed_high = ((wide_high * scale).to(dtype).to(tl.float32) * weight_high).to(dtype)
    return normed_low, normed_high


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_halves(low, high, position, cos, sin, columns, within, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """(low cos - high sin, high cos + low sin), computed in float32. The products that are not rounded are named: new_tokens.py
    computes the same."""
    at = position.to(tl.int64) * HALF + columns
    cosines = tl.load(cos + at, mask=within, other=0.0)[None, :]
    sines = tl.load(sin + at, mask=within, other=0.0)[None, :]
    wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
    turned_low = tl.fma(wide_low, cosines, -wide_high * sines).to(low.dtype)
    turned_high = tl.fma(wide_high, cosines, wide_low * sines).to(low.dtype)
    return turned_low, turned_high


@triton.jit  # type: ignore[untyped-decorator]
def _write_halves(  # type: ignore[no-untyped-def]
    low, high, plane, slot, heads, columns, inside,
    stride_block, stride_head, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """To a slot of plane, one layer's K or V. slot is int64, as every product with a block id must be; negative: no write."""
    block = slot // BLOCK_SIZE
    row = plane + block * stride_block + (slot - block * BLOCK_SIZE) * (2 * HALF)
    at = row + heads.to(tl.int64)[:, None] * stride_head + columns[None, :]
    written = inside & (slot >= 0)
    tl.store(at, low.to(plane.dtype.element_ty), mask=written)
    tl.store(at + HALF, high.to(plane.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])  # type: ignore[untyped-decorator]
def _rope_norm_write_kernel(  # type: ignore[no-untyped-def]
    qkv, positions, slot_mapping, cos, sin, kv, q_norm, k_norm, eps,
    stride_token, stride_block, stride_kv, stride_head,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    q_tiles: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    within = columns < HALF
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    if tile < q_tiles:
        heads = tile * HEADS + tl.arange(0, HEADS)
        inside = (heads < NUM_HEADS)[:, None] & within[None, :]
        at = qkv + token * stride_token + heads[:, None] * (2 * HALF) + columns[None, :]
        low = tl.load(at, mask=inside, other=0.0)
        high = tl.load(at + HALF, mask=inside, other=0.0)
        if q_norm is not None:
            low, high = _norm_halves(low, high, q_norm, columns, within, eps, HALF)
        low, high = _rotate_halves(low, high, tl.load(positions + token), cos, sin, columns, within, HALF)
        tl.store(at, low, mask=inside)
        tl.store(at + HALF, high, mask=inside)
    elif tile < q_tiles + kv_tiles:
        heads = (tile - q_tiles) * HEADS + tl.arange(0, HEADS)
        inside = (heads < NUM_KV_HEADS)[:, None] & within[None, :]
        at = qkv + token * stride_token + (NUM_HEADS + heads[:, None]) * (2 * HALF) + columns[None, :]
        low = tl.load(at, mask=inside, other=0.0)
        high = tl.load(at + HALF, mask=inside, other=0.0)
        if k_norm is not None:
            low, high = _norm_halves(low, high, k_norm, columns, within, eps, HALF)
        low, high = _rotate_halves(low, high, tl.load(positions + token), cos, sin, columns, within, HALF)
        tl.store(at, low, mask=inside)
        tl.store(at + HALF, high, mask=inside)
        slot = tl.load(slot_mapping + token)
        _write_halves(low, high, kv, slot, heads, columns, inside, stride_block, stride_head, HALF, BLOCK_SIZE)
    else:
        heads = (tile - q_tiles - kv_tiles) * HEADS + tl.arange(0, HEADS)
        inside = (heads < NUM_KV_HEADS)[:, None] & within[None, :]
        at = qkv + token * stride_token + (NUM_HEADS + NUM_KV_HEADS + heads[:, None]) * (2 * HALF) + columns[None, :]
        low = tl.load(at, mask=inside, other=0.0)
        high = tl.load(at + HALF, mask=inside, other=0.0)
        slot = tl.load(slot_mapping + token)
        _write_halves(low, high, kv + stride_kv, slot, heads, columns, inside, stride_block, stride_head, HALF, BLOCK_SIZE)


def rope_norm_write(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    config: RopeConfig | None = None,
) -> Tensor:
    """Norms (where weights are given) and rotates q and k in place, writes K and V to the cache, returns q [T, Hq, D], a view.

    qkv [T, (Hq + 2 Hkv) * D], columns contiguous, changed in place. positions: int32 or int64 [T], each in [0, P), 0 in padding.
    slot_mapping: int64 [T], a slot at most once; negative: padding, the cache is not written. cos, sin: float32 [P, D / 2] by
    position. kv: one layer's view [num_blocks, 2, Hkv, BS, D], any strides so long as a head's slots are contiguous. q_norm,
    k_norm: [D] of qkv's dtype, applied per head before the rotation. Raises ValueError for what does not fit; ids that are out
    of range are not noticed.

        x1 = x[..., : D/2]   x2 = x[..., D/2 :]      (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    """
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    _check(qkv, positions, slot_mapping, (cos, sin), kv, num_heads, (q_norm, k_norm))
    tokens, half = qkv.shape[0], head_dim // 2
    config = config or default_config(head_dim)
    columns = _padded_half(head_dim)
    if tokens:
        tiles = -(-num_heads // config.heads) + 2 * -(-num_kv_heads // config.heads)
        _rope_norm_write_kernel[(tokens, tiles)](
            qkv, positions, slot_mapping, cos, sin, kv, q_norm, k_norm, float(eps),
            qkv.stride(0), kv.stride(0), kv.stride(1), kv.stride(2),
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=half, BLOCK_SIZE=block_size,
            HEADS=config.heads, COLUMNS=columns, **attention_options(qkv.device, tokens),
            num_warps=min(config.num_warps, max(1, config.heads * columns // 32)),
        )  # fmt: skip
    return qkv.view(tokens, num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]


def _padded_half(head_dim: int) -> int:
    return 1 << (head_dim // 2 - 1).bit_length()


def _check(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    tables: tuple[Tensor, Tensor],
    kv: Tensor,
    num_heads: int,
    norms: tuple[Tensor | None, Tensor | None],
) -> None:
    """Raises ValueError for what the kernel would misread."""
    _, planes, num_kv_heads, _, head_dim = kv.shape
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if planes != 2 or head_dim % 2 or kv.stride(4) != 1 or kv.stride(3) != head_dim:
        raise ValueError(f"kv must be [num_blocks, 2, Hkv, BS, D], D even, slots contiguous; it is {list(kv.shape)}")
    if qkv.dim() != 2 or qkv.shape[1] != width or qkv.stride(1) != 1:
        raise ValueError(f"qkv must be [T, {width}] with contiguous columns; it is {list(qkv.shape)}")
    for name, ids, dtypes in (("positions", positions, _INDEX_DTYPES), ("slot_mapping", slot_mapping, (torch.int64,))):
        if ids.shape != (qkv.shape[0],) or ids.dtype not in dtypes or not ids.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{qkv.shape[0]}] of {dtypes}; it is {list(ids.shape)} of {ids.dtype}")
    for table in tables:
        if table.dim() != 2 or table.shape[1] != head_dim // 2 or table.dtype != torch.float32 or not table.is_contiguous():
            raise ValueError(f"cos and sin must be contiguous float32 [P, {head_dim // 2}]; one is {list(table.shape)}")
    for norm in norms:
        if norm is not None and (norm.shape != (head_dim,) or norm.dtype != qkv.dtype or not norm.is_contiguous()):
            raise ValueError(f"a norm's weight must be contiguous [{head_dim}] of {qkv.dtype}; one is {list(norm.shape)}")
