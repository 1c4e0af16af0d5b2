"""Attention of decodes to the leading keys that several of them share, in Triton: the shared K and V are read once per tile of
sequences, not once per sequence. It computes the items that a DecodeWorkspace has scheduled for its PrefixGroups and writes the
same partial results, into the same places, as the decode kernel would; that one computes the other chunks, and decode_combine.py
joins them all.

    q [M rows = members x query heads of a KV head; D]  x  K, V [BLOCK_N keys of one shared chunk; D]  ->  acc [M, D]

Every key of an item is seen by every member that the item is computed for, so there is no mask over keys, and no slot is read
that holds no token: a chunk counts as shared only if it lies within the member's own length. A persistent grid takes the items
in turn, KV heads fastest. Block ids are loaded one tile ahead, as in paged_decode.py.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairlane.kernels.decode_tuning import padded
from fairlane.kernels.prefix_groups import PrefixGroups

_LOG2_E = math.log2(math.e)


@triton.jit  # type: ignore[untyped-decorator]
def _slab_rows(  # type: ignore[no-untyped-def]
    base, ids, columns, dims, start, stride_block, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Addresses [BLOCK_N, D] of the keys start .. start + BLOCK_N - 1, in blocks `ids`. The id is widened first: a block's offset
    soon exceeds 2**31."""
    keys = columns if BLOCK_N % BLOCK_SIZE == 0 else start + columns  # the former is the same in every tile
    return base + (ids.to(tl.int64) * stride_block + (keys & (BLOCK_SIZE - 1)) * HEAD_DIM)[:, None] + dims[None, :]


@triton.jit(do_not_specialize=["stride_table", "stride_info"], do_not_specialize_on_alignment=["table_ptr"])  # type: ignore[untyped-decorator]
def _prefix_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    kv_ptr,
    table_ptr,
    info_ptr,
    items_ptr,
    num_items_ptr,
    part_o_ptr,
    part_lse_ptr,
    stride_q_batch,
    stride_q_head,
    stride_block,
    stride_plane,
    stride_kv_head,
    stride_table,
    stride_info,
    factor,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MEMBERS: tl.constexpr,
    M: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    # The first record, read before it is known whether there is one; later ones while the item before them is computed.
    record = items_ptr + program // NUM_KV_HEADS * 4
    next_tile, next_begin, next_end, next_number = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    num_tasks = tl.load(num_items_ptr) * NUM_KV_HEADS
    rows = tl.arange(0, M)
    place = rows // GROUP
    in_tile = place < MEMBERS
    dims = tl.arange(0, PADDED_DIM)
    in_dim = (dims < HEAD_DIM)[None, :]
    columns = tl.arange(0, BLOCK_N)
    for task in range(program, num_tasks, programs):
        tile, begin, end, number = next_tile, next_begin, next_end, next_number
        kv_head = task % NUM_KV_HEADS
        cell = info_ptr + tile * MEMBERS + place
        member = tl.load(cell, mask=in_tile, other=-1)
        first_row = tl.load(cell + stride_info, mask=in_tile, other=0)
        size = tl.load(cell + 2 * stride_info, mask=in_tile, other=0)
        covered = tl.load(cell + 3 * stride_info, mask=in_tile, other=0)
        more = task + programs < num_tasks
        record = items_ptr + (task + programs) // NUM_KV_HEADS * 4
        next_tile = tl.load(record, mask=more, other=0)
        next_begin = tl.load(record + 1, mask=more, other=0)
        next_end = tl.load(record + 2, mask=more, other=0)
        next_number = tl.load(record + 3, mask=more, other=0)

        mine = (member >= 0) & (size == end - begin) & (number < covered)
        # Whoever shares the keys has their blocks in its table.
        table = table_ptr + tl.max(tl.where(mine, member, 0), 0).to(tl.int64) * stride_table
        ids = tl.load(table + (begin + columns) // BLOCK_SIZE)
        heads = kv_head * GROUP + rows % GROUP
        wanted = mine[:, None] & in_dim
        q_rows = member.to(tl.int64) * stride_q_batch + heads * stride_q_head
        q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=wanted, other=0.0)

        base = kv_ptr + tl.cast(kv_head, tl.int64) * stride_kv_head
        peak = tl.full([M], -float("inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, PADDED_DIM], tl.float32)
        for start in range(begin, end, BLOCK_N):
            slots = _slab_rows(base, ids, columns, dims, start, stride_block, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
            if PADDED_DIM == HEAD_DIM:
                k = tl.load(slots)
                v = tl.load(slots + stride_plane)
            else:
                k = tl.load(slots, mask=in_dim, other=0.0)
                v = tl.load(slots + stride_plane, mask=in_dim, other=0.0)
            ahead = start + BLOCK_N + columns
            ids = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
            if SOFTCAP:
                scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))  # cap * tanh
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            decay = tl.exp2(peak - new_peak)
            shares = tl.exp2(scores - new_peak[:, None])
            total = total * decay + tl.sum(shares, 1)
            acc = tl.dot(shares.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            peak = new_peak

        slot = (first_row + number).to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
        tl.store(part_o_ptr + slot[:, None] * HEAD_DIM + dims[None, :], acc / total[:, None], mask=wanted)
        tl.store(part_lse_ptr + slot, peak + tl.log2(total), mask=mine)


def prefix_decode(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    groups: PrefixGroups,
    part_o: Tensor,
    part_lse: Tensor,
    softcap: float | None = None,
) -> None:
    """Writes the partial results of the chunks that members of the groups share; all other rows of part_o and part_lse keep what
    they hold. The groups must be scheduled for this step (DecodeWorkspace.schedule with cascade).

    q [B, Hq, D] in kv's dtype, any strides but the last, which must be 1; kv [num_blocks, 2, Hkv, BS, D], a layer's view of the
    cache, [BS, D] contiguous; block_table int32 [B, MB], in which the members of a group have the same block ids for what they
    share. part_o float32 [rows, Hq, D], part_lse float32 [rows, Hq], contiguous: an item's result, and the logarithm to base 2 of
    its softmax's denominator. softcap c makes scores c * tanh(score / c).

    Each member's row is computed from its own q and the keys alone, whoever else is in the tile and wherever it stands there.
    Nothing is allocated, read on the host or waited for, and the launch depends on shapes only. Raises ValueError for arguments
    that do not fit together.
    """
    _check(q, kv, block_table, groups, part_o, part_lse)
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    tuning, group_size = groups.tuning, num_heads // num_kv_heads
    # scores * factor are exponents of 2; with a softcap, exponents of the tanh.
    factor, cap = (scale * _LOG2_E, 0.0) if softcap is None else (2 * _LOG2_E * scale / softcap, softcap * _LOG2_E)
    _prefix_kernel[(groups.num_programs,)](
        q,
        kv,
        block_table,
        groups.info,
        groups.items,
        groups.num_items,
        part_o,
        part_lse,
        *q.stride()[:2],
        *kv.stride()[:3],
        block_table.stride(0),
        groups.info.stride(0),
        factor,
        cap,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group_size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        MEMBERS=groups.members_per_tile,
        M=tuning.rows(group_size),
        PADDED_DIM=padded(head_dim),
        BLOCK_N=tuning.block_n,
        SOFTCAP=softcap is not None,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def _check(q: Tensor, kv: Tensor, block_table: Tensor, groups: PrefixGroups, part_o: Tensor, part_lse: Tensor) -> None:
    if kv.dim() != 5 or kv.shape[1] != 2 or kv.shape[3] not in (8, 16, 32, 64) or kv.stride()[3:] != (kv.shape[4], 1):
        raise ValueError(f"kv must be [num_blocks, 2, Hkv, 8 to 64, D], [BS, D] contiguous, got {list(kv.shape)}, {kv.stride()}")
    num_heads, head_dim = kv.shape[2] * groups.group_size, kv.shape[4]
    if q.dim() != 3 or tuple(q.shape[1:]) != (num_heads, head_dim) or q.stride(2) != 1 or q.dtype != kv.dtype:
        raise ValueError(f"q must be {kv.dtype} [B, {num_heads}, {head_dim}], dense along D, got {q.dtype} {list(q.shape)}")
    if q.shape[0] > groups.max_batch or block_table.shape[0] != q.shape[0]:
        raise ValueError(
            f"{q.shape[0]} queries, block_table {list(block_table.shape)}, groups of at most {groups.max_batch} rows"
        )
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError("block_table must be int32 and its rows contiguous")
    if part_o.shape[1:] != (num_heads, head_dim) or part_lse.shape != part_o.shape[:2]:
        raise ValueError(f"part_o and part_lse must be [rows, {num_heads}, {head_dim}] and [rows, {num_heads}]")
    if not part_o.dtype == part_lse.dtype == torch.float32 or not (part_o.is_contiguous() and part_lse.is_contiguous()):
        raise ValueError("part_o and part_lse must be contiguous float32")
