"""What rope_norm_write does to the tokens of a decode step, as a part of the attention kernel: a program that attends for one KV
head of a sequence turns the query heads it needs itself, and the one that sees the sequence's last key writes that key and its
value first. The arithmetic, its order and its roundings are rope_norm_write's, so every bit is. It decides nothing about who
computes what (decode_sched.py) or whether a step is computed so (rope_decode.py).

    rows of the tile    0 .. G-1 the query heads of a KV head     G its new key     the others 0
    qkv row             | q heads ........ | k heads .. | v heads .. |

A key is turned like a query, so it is one more row of the same tile; as a row of q it attends too, which nobody stores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class NewTokens:
    """A step's new tokens, one per sequence: rope_norm_write's arguments. qkv [B, (Hq + 2 Hkv) * D] is only read. slot_mapping
    int64 [B]: where the cache has the key at positions[b], of the sequence's own; negative: nothing is written. positions [b]
    is seq_lens[b] - 1 where there are keys. The norms are both there or neither."""

    qkv: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


@triton.jit  # type: ignore[untyped-decorator]
def _columns(dims, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of each column of a head: whether it is in the lower half, its partner in the rotation (a column of the other half), and
    the column of cos and sin. Neighbours stay neighbours, which the compiler must be told to load them as vectors."""
    half: tl.constexpr = HEAD_DIM // 2
    unit: tl.constexpr = min(8, half & -half)
    lower = dims < half
    partner = tl.where(lower, dims + half, dims - half)
    angle = tl.where(lower, dims, dims - half)
    partner = tl.max_contiguous(tl.multiple_of(partner, unit), unit)
    return lower, partner, tl.max_contiguous(tl.multiple_of(angle, unit), unit)


@triton.jit  # type: ignore[untyped-decorator]
def read_new(  # type: ignore[no-untyped-def]
    qkv_row, place, kv_head, positions, slot_mapping, group, dims,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """What turn_and_write works on, so that it is on its way early: position, slot, the tile [M, D] and its columns' partners, of
    which both are loaded so that no value has to change threads, and the value [D]. group [M] and dims [D, padded] are ranges."""
    _, partner, _ = _columns(dims, HEAD_DIM)
    within = dims < HEAD_DIM
    position = tl.load(positions + place)
    heads = tl.where(group < GROUP, kv_head * GROUP + group, NUM_KV_HEADS * GROUP + kv_head)
    rows = qkv_row + heads[:, None] * HEAD_DIM
    inside = (group <= GROUP)[:, None] & within[None, :]
    x = tl.load(rows + dims[None, :], mask=inside, other=0.0)
    other = tl.load(rows + partner[None, :], mask=inside, other=0.0)
    value = tl.load(qkv_row + (NUM_KV_HEADS * (GROUP + 1) + kv_head) * HEAD_DIM + dims, mask=within, other=0.0)
    return position, tl.load(slot_mapping + place), x, other, value


@triton.jit  # type: ignore[untyped-decorator]
def turn_and_write(  # type: ignore[no-untyped-def]
    new, keys, end, cos, sin, q_norm, k_norm, eps, stride_block, stride_plane, group, dims,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The tile q [M, D], normed and rotated, of what read_new has read, for an item whose keys end before `end`. Where that is
    the end of the sequence the new key and value are in the cache, and this program sees them, when this returns. keys: where
    the KV head's keys begin in block 0."""
    position, slot, x, other, value = new
    half: tl.constexpr = HEAD_DIM // 2
    lower, partner, angle = _columns(dims, HEAD_DIM)
    within = dims < HEAD_DIM
    every = tl.zeros_like(group)[:, None]
    inside = (group <= GROUP)[:, None] & within[None, :]
    at = position.to(tl.int64) * half + (every + angle[None, :])
    cosines = tl.load(cos + at, mask=inside, other=0.0)
    sines = tl.load(sin + at, mask=inside, other=0.0)
    lower = lower[None, :]
    wide, wide_other = x.to(tl.float32), other.to(tl.float32)
    if q_norm is not None:
        # As tiles, each row of which is the same: a vector would have to be handed from thread to thread.
        is_query = (group < GROUP)[:, None] & within[None, :]
        is_key = (group == GROUP)[:, None] & within[None, :]
        q_weight = tl.load(q_norm + (every + dims[None, :]), mask=is_query, other=0.0)
        k_weight = tl.load(k_norm + (every + dims[None, :]), mask=is_key, other=0.0)
        q_weight_other = tl.load(q_norm + (every + partner[None, :]), mask=is_query, other=0.0)
        k_weight_other = tl.load(k_norm + (every + partner[None, :]), mask=is_key, other=0.0)
        low, high = tl.where(lower, wide, wide_other), tl.where(lower, wide_other, wide)
        squares = tl.where(lower, tl.fma(low, low, high * high), 0.0)
        scale = tl.rsqrt(tl.sum(squares, axis=1) / (2 * half) + eps)[:, None]
        weight = tl.where(is_query, q_weight, k_weight).to(tl.float32)
        weight_other = tl.where(is_query, q_weight_other, k_weight_other).to(tl.float32)
        wide = ((wide * scale).to(x.dtype).to(tl.float32) * weight).to(x.dtype).to(tl.float32)
        wide_other = ((wide_other * scale).to(x.dtype).to(tl.float32) * weight_other).to(x.dtype).to(tl.float32)
    turned = tl.fma(wide, cosines, tl.where(lower, -wide_other, wide_other) * sines).to(x.dtype)

    written = within & ((end == position + 1) & (slot >= 0))
    block = slot // BLOCK_SIZE
    key = keys + block * stride_block + (slot - block * BLOCK_SIZE) * HEAD_DIM
    key_row = (group == GROUP)[:, None] & written[None, :]
    tl.store(key + (tl.zeros_like(group)[:, None] + dims[None, :]), turned, mask=key_row)
    tl.store(key + stride_plane + dims, value, mask=written)
    tl.debug_barrier()  # the threads that copy the tile to shared memory are others than those that stored it
    return turned


def check_new_tokens(new: NewTokens, kv: Tensor, num_heads: int, batch: int) -> None:
    """Raises ValueError for what the kernel would misread."""
    _, _, num_kv_heads, _, head_dim = kv.shape
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if new.qkv.shape != (batch, width) or new.qkv.stride(1) != 1 or new.qkv.dtype != kv.dtype or head_dim % 2:
        raise ValueError(f"qkv must be {kv.dtype} [{batch}, {width}], D even, columns contiguous; it is {list(new.qkv.shape)}")
    for name, ids, dtypes in (
        ("positions", new.positions, (torch.int32, torch.int64)),
        ("slot_mapping", new.slot_mapping, (torch.int64,)),
    ):
        if ids.shape != (batch,) or ids.dtype not in dtypes or not ids.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{batch}] of {dtypes}; it is {list(ids.shape)} of {ids.dtype}")
    for table in (new.cos, new.sin):
        if table.dim() != 2 or table.shape[1] != head_dim // 2 or table.dtype != torch.float32 or not table.is_contiguous():
            raise ValueError(f"cos and sin must be contiguous float32 [P, {head_dim // 2}]; one is {list(table.shape)}")
    if (new.q_norm is None) != (new.k_norm is None):
        raise ValueError("the norms of q and k must be both given or neither")
    for norm in (new.q_norm, new.k_norm):
        if norm is not None and (norm.shape != (head_dim,) or norm.dtype != new.qkv.dtype or not norm.is_contiguous()):
            raise ValueError(f"a norm's weight must be contiguous [{head_dim}] of {new.qkv.dtype}; one is {list(norm.shape)}")
