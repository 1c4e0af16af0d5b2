"""Attention of sequences with many query tokens (whole prompts, chunks, prompts behind a cached prefix) over the paged cache, in
Triton. It computes the tiles a PrefillPlan lists and writes their rows only: which sequences those are, how they are cut and in
what order they run is prefill_sched.py's business, tile sizes are prefill_tuning.py's.

One program computes BLOCK_M // G tokens of one sequence with the G query heads of one KV head, as rows of one matrix. It visits
the keys that every row sees first, in a loop without mask, then those at the edges, in tiles of BLOCK_N keys (with in_order and a
window there are edges only, so that keys are walked as they stand):

    row r  =  token r // G, head r % G        keys   [begin .. full_begin)  [full_begin .. full_end)  [full_end .. end)
                                                      window's edge          no mask                   causal edge
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairlane.kernels.prefill_sched import PrefillPlan, TileGroup

_LOG2_E = math.log2(math.e)
_MIN_DOT = 16  # tl.dot's least extent
_BLOCK_SIZES = (8, 16, 32, 64)
_LONGEST = 2**30  # no position reaches it; a window of this size hides nothing


@triton.jit  # type: ignore[untyped-decorator]
def _slots(  # type: ignore[no-untyped-def]
    ids, keys, stride_block, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Offsets int64 [BLOCK_N] of the keys' slots. The id is widened first: a block's offset soon exceeds 2**31."""
    inner = tl.arange(0, BLOCK_N) if BLOCK_N % BLOCK_SIZE == 0 else keys  # the former is the same in every tile
    return ids.to(tl.int64) * stride_block + inner % BLOCK_SIZE * HEAD_DIM


@triton.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    base, ids, keys, dims, stride_block, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """[BLOCK_N, PADDED_DIM] of K or V, for keys that are all valid."""
    pointers = base + _slots(ids, keys, stride_block, BLOCK_SIZE, BLOCK_N, HEAD_DIM)[:, None] + dims[None, :]
    if dims.shape[0] == HEAD_DIM:
        return tl.load(pointers)
    return tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(q, k, unit, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """q k^T, float32 [M, N]; with a softcap its tanh(.. * scale / cap), where unit = 2 log2(e) scale / cap."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP:
        scores = 1.0 - 2.0 / (tl.exp2(scores * unit) + 1.0)
    return scores


@triton.jit
def _weigh(scores, peak, total, factor):  # type: ignore[no-untyped-def]
    """One tile of keys in the running softmax: its shares [M, N], the decay of what was summed before, new peak and total.
    factor > 0 makes exponents of 2 of scores; those hidden are -inf. peak is finite from the start, so a row that has seen
    nothing yet keeps total = 0 and no NaN arises."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
    shares = tl.exp2(scores * factor - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    return shares, decay, new_peak, total * decay + tl.sum(shares, 1)


@triton.jit
def _add(acc, decay, shares, v):  # type: ignore[no-untyped-def]
    return tl.dot(shares.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["stride_table", "window"], do_not_specialize_on_alignment=["table_ptr", "tiles_ptr"]
)
def _prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    kv_ptr,
    table_ptr,
    tiles_ptr,
    out_ptr,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    stride_block,
    stride_plane,
    stride_kv_head,
    stride_table,
    factor,
    unit,
    window,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OVERLAP: tl.constexpr,
    IN_ORDER: tl.constexpr,
):
    tile = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    sequence = tl.load(tiles_ptr + tile * 4)  # before the branch, so that the program waits for memory once
    first_row = tl.load(tiles_ptr + tile * 4 + 1)
    tokens = tl.load(tiles_ptr + tile * 4 + 2)
    position = tl.load(tiles_ptr + tile * 4 + 3)
    if tokens == 0:
        return
    table = table_ptr + sequence.to(tl.int64) * stride_table

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, PADDED_DIM)
    token, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    mine = (token < tokens)[:, None] & (dims < HEAD_DIM)[None, :]
    q_rows = (first_row + token).to(tl.int64) * stride_q_token + head * stride_q_head
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=mine, other=0.0)

    end = tl.maximum(position + tokens, 0)
    full_end = tl.maximum(position + 1, 0) // BLOCK_N * BLOCK_N
    oldest, full_begin = 0, 0
    if WINDOW:
        oldest = tl.maximum(position - window + 1, 0)
        full_begin = tl.cdiv(tl.maximum(position + tokens - window, 0), BLOCK_N) * BLOCK_N
        # Where the window's edge ends depends on the tile's last token; in order, every tile up to the causal edge is one of it.
        full_begin = full_end if IN_ORDER else tl.minimum(full_begin, full_end)

    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], -3.0e38, tl.float32)
    k_base = kv_ptr + kv_head.to(tl.int64) * stride_kv_head
    v_base = k_base + stride_plane
    lanes = tl.arange(0, BLOCK_N)

    # A tile's block ids are loaded one iteration ahead: loads of K and V that wait for another load would not be pipelined.
    keys = full_begin + lanes
    k_ids = tl.load(table + keys // BLOCK_SIZE, mask=keys < full_end, other=0)
    if OVERLAP:
        # The product with V lags one tile behind, so that it runs while the CUDA cores weigh the next tile. The first one adds
        # 0 times the first V tile; the last V tile is used after the loop. The lagging shares are kept in float32: in half
        # precision ptxas would serialize the tensor cores' instructions.
        v_ids = tl.load(table + keys // BLOCK_SIZE, mask=keys < full_end, other=0)
        shares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        decay = tl.full([BLOCK_M], 1.0, tl.float32)
        for start in tl.range(full_begin, full_end, BLOCK_N):
            keys = start + lanes
            k = _load(k_base, k_ids, keys, dims, stride_block, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
            lagging = tl.maximum(start - BLOCK_N, full_begin) + lanes
            v = _load(v_base, v_ids, lagging, dims, stride_block, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
            v_ids = tl.load(table + keys // BLOCK_SIZE)
            k_ids = tl.load(table + (tl.minimum(start + BLOCK_N, full_end - BLOCK_N) + lanes) // BLOCK_SIZE)
            scores = _scores(q, k, unit, SOFTCAP)
            acc = _add(acc, decay, shares, v)
            shares, decay, peak, total = _weigh(scores, peak, total, factor)
        keys = full_end - BLOCK_N + lanes
        slots = _slots(v_ids, keys, stride_block, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
        there = (keys >= full_begin)[:, None] & (dims < HEAD_DIM)[None, :]  # no key, where there is no full tile
        acc = _add(acc, decay, shares, tl.load(v_base + slots[:, None] + dims[None, :], mask=there, other=0.0))
    else:
        for start in tl.range(full_begin, full_end, BLOCK_N):
            k = _load(k_base, k_ids, start + lanes, dims, stride_block, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
            v = _load(v_base, k_ids, start + lanes, dims, stride_block, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
            k_ids = tl.load(table + (tl.minimum(start + BLOCK_N, full_end - BLOCK_N) + lanes) // BLOCK_SIZE)
            shares, decay, peak, total = _weigh(_scores(q, k, unit, SOFTCAP), peak, total, factor)
            acc = _add(acc, decay, shares, v)

    # The edges. Entries of the table for keys that no row of the tile sees may be stale, and their slots may hold NaN.
    begin = oldest // BLOCK_N * BLOCK_N
    before = full_begin - begin  # keys up to here lie at the window's edge, the others after the gap of full tiles
    keys = tl.where(before > 0, begin, full_end) + lanes
    ids = tl.load(table + keys // BLOCK_SIZE, mask=(keys >= oldest) & (keys < end), other=0)
    for walked in tl.range(0, before + end - full_end, BLOCK_N):
        keys = tl.where(walked < before, begin + walked, full_end + walked - before) + lanes
        slots = _slots(ids, keys, stride_block, BLOCK_SIZE, BLOCK_N, HEAD_DIM)
        following = walked + BLOCK_N
        later = tl.where(following < before, begin + following, full_end + following - before) + lanes
        ids = tl.load(table + later // BLOCK_SIZE, mask=later < end, other=0)
        valid = ((keys >= oldest) & (keys < end))[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_base + slots[:, None] + dims[None, :], mask=valid, other=0.0)
        v = tl.load(v_base + slots[:, None] + dims[None, :], mask=valid, other=0.0)
        distance = (position + token)[:, None] - keys[None, :]
        visible = (distance >= 0) & (distance < window) if WINDOW else distance >= 0
        scores = tl.where(visible, _scores(q, k, unit, SOFTCAP), float("-inf"))
        shares, decay, peak, total = _weigh(scores, peak, total, factor)
        acc = _add(acc, decay, shares, v)

    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    out_rows = (first_row + token).to(tl.int64) * stride_out_token + head * stride_out_head
    tl.store(out_ptr + out_rows[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mine)


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    plan: PrefillPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of the plan's sequences; returns out [T, Hq, D], in which it writes their rows only.

    q [T, Hq, D], any strides but 1 along D; kv: one layer's view [num_blocks, 2, Hkv, BS, D] of the cache, its slabs [BS, D]
    contiguous, already holding the step's own keys and values; block_table: int32 or int64 [B, MB]. All on one device, q, kv
    and out of one dtype (float16, bfloat16, float32). Key j is visible to the query at position i iff i - window < j <= i;
    a query that sees none (before position 0, an empty sequence) gives exactly 0. softcap c: scores become c tanh(score / c).

    Table entries beyond a sequence, or wholly before the window of the step's first query, are never followed. out defaults to
    zeros and must not overlap q or kv. With out given nothing is allocated, and nothing is read on the host.
    Raises ValueError for shapes, strides, dtypes or options outside this contract.
    """
    if out is None:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    _check(q, kv, block_table, plan, out)
    if scale <= 0 or (softcap is not None and softcap <= 0) or (window is not None and window < 1):
        raise ValueError(f"scale, softcap and window must be positive, got {scale}, {softcap}, {window}")
    for group in plan.groups:
        _launch(q, kv, block_table, group, out, scale, window, softcap)
    return out


def _launch(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    group: TileGroup,
    out: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    config = group.config
    _prefill_kernel[(group.tiles.shape[0] * num_kv_heads,)](
        q,
        kv,
        block_table,
        group.tiles,
        out,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        kv.stride(0),
        kv.stride(1),
        kv.stride(2),
        block_table.stride(0),
        (scale if softcap is None else softcap) * _LOG2_E,
        0.0 if softcap is None else 2.0 * _LOG2_E * scale / softcap,
        0 if window is None else min(window, _LONGEST),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=q.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=max(_MIN_DOT, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        OVERLAP=config.overlap,
        IN_ORDER=config.in_order,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _check(q: Tensor, kv: Tensor, block_table: Tensor, plan: PrefillPlan, out: Tensor) -> None:
    """Raises ValueError for what the kernel would read or write wrongly."""
    if kv.dim() != 5 or kv.shape[1] != 2 or kv.shape[3] not in _BLOCK_SIZES:
        raise ValueError(f"kv must be [num_blocks, 2, Hkv, BS, D] with BS in {_BLOCK_SIZES}, got {tuple(kv.shape)}")
    num_kv_heads, block_size, head_dim = kv.shape[2:]
    if kv.stride(4) != 1 or kv.stride(3) != head_dim:
        raise ValueError(f"kv's slabs [{block_size}, {head_dim}] must be contiguous, its strides are {kv.stride()}")
    if q.dim() != 3 or q.shape[1] != num_kv_heads * plan.group_size or q.shape[2] != head_dim:
        wanted = f"[T, {num_kv_heads * plan.group_size}, {head_dim}]"
        raise ValueError(f"q must be {wanted} for this cache and plan, got {tuple(q.shape)}")
    if out.shape != q.shape or q.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError(f"out must be of q's shape {tuple(q.shape)}, both dense along D, got {tuple(out.shape)}")
    if not q.dtype == kv.dtype == out.dtype:
        raise ValueError(f"q, kv and out must be of one dtype, got {q.dtype}, {kv.dtype}, {out.dtype}")
    if q.shape[0] < plan.num_rows:
        raise ValueError(f"the plan reaches row {plan.num_rows}, q has {q.shape[0]}")
    if block_table.dim() != 2 or block_table.dtype not in (torch.int32, torch.int64) or block_table.stride(1) != 1:
        raise ValueError("block_table must be int32 or int64 [B, MB], dense along its rows")
    if block_table.shape[0] < plan.num_sequences:
        raise ValueError(f"the plan reaches sequence {plan.num_sequences - 1}, block_table has {block_table.shape[0]} rows")
