"""Attention of sequences with one query token each over the paged cache, in Triton. It computes the items that a DecodeWorkspace
has scheduled and writes results or partial results; where sequences are cut is decode_sched.py's business, tile sizes are
decode_tuning.py's, keys that several sequences share prefix_decode.py's, joining partial results decode_combine.py's.

A persistent grid takes the items, KV heads fastest: a program begins with the one of its number, then draws the next that is
left. Which program computes an item changes no bit of it. The G query heads that share a KV head are the rows of one tile:

    q [M >= 16 rows, of which G count; D]  x  K, V [BLOCK_N keys of one chunk; D]  ->  acc [M, D], running max and sum

A key's address takes its block's id, and that load would stall the loop: each iteration loads the ids of the next one's keys
and carries them, so that copies of K and V run num_stages - 1 tiles ahead (checked in the generated code: an id loaded in the
same iteration halves the number of tiles in flight).

Given a step's new tokens as the product left them, a program turns the q it needs itself, and the one with a sequence's last key
puts that into the cache first (new_tokens.py; rope_decode.py says why no other can miss it).
"""

from __future__ import annotations

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairlane.kernels.decode_combine import decode_combine
from fairlane.kernels.decode_sched import NO_WINDOW, DecodeWorkspace, Form
from fairlane.kernels.decode_tuning import padded
from fairlane.kernels.dependent import attention_options, let_next_start, wait_for_inputs
from fairlane.kernels.new_tokens import NewTokens, check_new_tokens, read_new, turn_and_write
from fairlane.kernels.prefix_decode import prefix_decode

_LOG2_E = math.log2(math.e)
_BLOCK_SIZES = (8, 16, 32, 64)


@triton.jit  # type: ignore[untyped-decorator]
def _tile(  # type: ignore[no-untyped-def]
    base,
    ids,
    keys,
    end,
    stride_block,
    stride_plane,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """K and V [N, D] of the keys at positions `keys`, in blocks `ids`; zero from `end` on, where the cache may hold NaN. The id
    is widened first: a block's offset soon exceeds 2**31."""
    dims = tl.arange(0, PADDED_DIM)
    rows = base + (ids.to(tl.int64) * stride_block + (keys & (BLOCK_SIZE - 1)) * HEAD_DIM)[:, None] + dims[None, :]
    mask = (keys < end)[:, None] & (dims < HEAD_DIM)[None, :]
    k = tl.load(rows, mask=mask, other=0.0)
    v = tl.load(rows + stride_plane, mask=mask, other=0.0)
    return k, v


@triton.jit  # type: ignore[untyped-decorator]
def _absorb(q, k, v, visible, state, factor, cap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Takes one tile of keys, at least one of them visible, into the state (peak [M], shares [M, N], acc [M, D]) of a running
    softmax with exponents of 2. Shares are summed over N once, in the end, which spares an exchange between warps per tile."""
    peak, total, acc = state
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * factor
    if SOFTCAP:
        scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))  # cap * tanh
    scores = tl.where(visible[None, :], scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    decay = tl.exp2(peak - new_peak)
    shares = tl.exp2(scores - new_peak[:, None])
    total = total * decay[:, None] + shares
    acc = tl.dot(shares.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_peak, total, acc


@triton.jit  # type: ignore[untyped-decorator]
def _empty_state(M: tl.constexpr, BLOCK_N: tl.constexpr, PADDED_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    return (
        tl.full([M], -float("inf"), tl.float32),
        tl.zeros([M, BLOCK_N], tl.float32),
        tl.zeros([M, PADDED_DIM], tl.float32),
    )


@triton.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["table_ptr", "positions_ptr", "slot_mapping_ptr"])  # type: ignore[untyped-decorator]
def _decode_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    kv_ptr,
    table_ptr,
    items_ptr,
    num_items_ptr,
    tickets_ptr,
    out_ptr,
    part_o_ptr,
    part_lse_ptr,
    stride_q_batch,
    stride_q_head,
    stride_out_batch,
    stride_out_head,
    stride_block,
    stride_plane,
    stride_kv_head,
    stride_table,
    factor,
    cap,
    positions_ptr,
    slot_mapping_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """positions_ptr and what follows: of new tokens that are to be turned and written first; None where that has been done."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    wait_for_inputs(DEPENDENT)
    # The first record, read before it is known whether there is one; later ones while the item before them is computed.
    record = items_ptr + program // NUM_KV_HEADS * 4
    next_sequence, next_begin, next_end, next_row = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    num_tasks = tl.load(num_items_ptr) * NUM_KV_HEADS
    group = tl.arange(0, M)
    dims = tl.arange(0, PADDED_DIM)
    columns = tl.arange(0, BLOCK_N)
    wanted = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    task = program
    while task < num_tasks:
        sequence, begin, end, row = next_sequence, next_begin, next_end, next_row
        kv_head = task % NUM_KV_HEADS
        heads = kv_head * GROUP + group
        place = sequence.to(tl.int64)
        q_row = q_ptr + place * stride_q_batch
        if positions_ptr is None:
            q = tl.load(q_row + heads[:, None] * stride_q_head + dims[None, :], mask=wanted, other=0.0)
        else:
            new = read_new(
                q_row, place, kv_head, positions_ptr, slot_mapping_ptr, group, dims, NUM_KV_HEADS, GROUP, HEAD_DIM
            )  # fmt: skip
        table = table_ptr + place * stride_table
        keys = begin + columns
        ids = tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0)
        following = programs + tl.atomic_add(tickets_ptr, 1, sem="relaxed")
        more = following < num_tasks
        record = items_ptr + following // NUM_KV_HEADS * 4
        next_sequence = tl.load(record, mask=more, other=0)
        next_begin = tl.load(record + 1, mask=more, other=0)
        next_end = tl.load(record + 2, mask=more, other=0)
        next_row = tl.load(record + 3, mask=more, other=0)

        base = kv_ptr + tl.cast(kv_head, tl.int64) * stride_kv_head
        if positions_ptr is not None:
            q = turn_and_write(
                new, base, end, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps, stride_block, stride_plane, group, dims,
                GROUP, HEAD_DIM, BLOCK_SIZE,
            )  # fmt: skip
        peak, total, acc = _empty_state(M, BLOCK_N, PADDED_DIM)
        for start in range(begin, end, BLOCK_N):
            keys = start + columns
            k, v = _tile(base, ids, keys, end, stride_block, stride_plane, HEAD_DIM, PADDED_DIM, BLOCK_SIZE)
            ahead = keys + BLOCK_N
            ids = tl.load(table + ahead // BLOCK_SIZE, mask=ahead < end, other=0)
            peak, total, acc = _absorb(q, k, v, keys < end, (peak, total, acc), factor, cap, SOFTCAP)

        sums = tl.sum(total, 1)
        result = acc / tl.where(sums > 0, sums, 1.0)[:, None]  # an empty sequence: 0
        if row < 0:
            at = out_ptr + place * stride_out_batch + heads[:, None] * stride_out_head + dims[None, :]
            tl.store(at, result.to(out_ptr.dtype.element_ty), mask=wanted)
        else:
            slot = row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads
            tl.store(part_o_ptr + slot[:, None] * HEAD_DIM + dims[None, :], result, mask=wanted)
            tl.store(part_lse_ptr + slot, peak + tl.log2(sums), mask=group < GROUP)
        task = following
    if tl.atomic_add(tickets_ptr + 1, 1, sem="acq_rel") == programs - 1:  # the last to leave: all tickets are drawn
        tl.store(tickets_ptr, 0)
        tl.store(tickets_ptr + 1, 0)
    let_next_start(DEPENDENT)


@triton.jit(do_not_specialize=["stride_table", "window"], do_not_specialize_on_alignment=["table_ptr", "seq_lens_ptr"])  # type: ignore[untyped-decorator]
def _short_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    kv_ptr,
    table_ptr,
    seq_lens_ptr,
    out_ptr,
    stride_q_batch,
    stride_q_head,
    stride_out_batch,
    stride_out_head,
    stride_block,
    stride_plane,
    stride_kv_head,
    stride_table,
    window,
    factor,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    M: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program takes HEADS KV heads of a sequence that sees at most BLOCK_N keys: the one tile that _decode_kernel would take,
    with the same arithmetic, so the same bits. Copies of a head's K and V run beside the computation of the one before."""
    first = tl.program_id(0) * HEADS
    sequence = tl.program_id(1).to(tl.int64)
    wait_for_inputs(DEPENDENT)
    end = tl.load(seq_lens_ptr + sequence)
    begin = tl.maximum(end - window, 0)
    group = tl.arange(0, M)
    dims = tl.arange(0, PADDED_DIM)
    wanted = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_row = q_ptr + sequence * stride_q_batch + dims[None, :]
    out_row = out_ptr + sequence * stride_out_batch + dims[None, :]
    past = tl.minimum(first + HEADS, NUM_KV_HEADS)
    if end <= 0:
        for kv_head in range(first, past):
            at = out_row + (kv_head * GROUP + group)[:, None] * stride_out_head
            tl.store(at, tl.zeros([M, PADDED_DIM], out_ptr.dtype.element_ty), mask=wanted)
        past = first
    keys = begin + tl.arange(0, BLOCK_N)
    ids = tl.load(table_ptr + sequence * stride_table + keys // BLOCK_SIZE, mask=keys < end, other=0)
    valid = tl.where(end - begin > BLOCK_N, float("nan"), 1.0)
    for kv_head in range(first, past):
        heads = (kv_head * GROUP + group)[:, None]
        q = tl.load(q_row + heads * stride_q_head, mask=wanted, other=0.0)
        base = kv_ptr + tl.cast(kv_head, tl.int64) * stride_kv_head
        k, v = _tile(base, ids, keys, end, stride_block, stride_plane, HEAD_DIM, PADDED_DIM, BLOCK_SIZE)
        state = _empty_state(M, BLOCK_N, PADDED_DIM)
        _, total, acc = _absorb(q, k, v, keys < end, state, factor, cap, SOFTCAP)
        result = acc / (tl.sum(total, 1) * valid)[:, None]
        tl.store(out_row + heads * stride_out_head, result.to(out_ptr.dtype.element_ty), mask=wanted)
    let_next_start(DEPENDENT)


def paged_decode(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    workspace: DecodeWorkspace,
    out: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    new: NewTokens | None = None,
) -> Tensor:
    """Attention of one query token per sequence, which is the last of its seq_lens[b] cached tokens. Writes and returns out.

    q, out [B, Hq, D] in kv's dtype, any strides but the last, which must be 1; kv [num_blocks, 2, Hkv, BS, D], a layer's view of
    the cache, [BS, D] contiguous; block_table int32 [B, MB]; seq_lens int32 [B]. workspace.schedule(seq_lens, window) must have
    been called for this step. Key j is visible iff max(0, len - window) <= j < len; softcap c makes scores c * tanh(score / c).
    Row b is 0 where seq_lens[b] is 0. Entries of block_table and slots of the cache beyond what a row sees are never used.

    A row's bits depend on its own q, keys, values and length only, and on how many of its chunks a prefix group has taken over
    (schedule's cascade).

    new: q is new.qkv's, [B, Hq, D] as the product gave it, and neither q nor the cache has been through rope_norm_write: this
    does its work, all but changing qkv, with the same bits. Only in forms that `takes_new_tokens` allows.

    Nothing is allocated, read on the host or waited for, and the
    launches depend on shapes and the schedule's max_seq_len only. Raises ValueError for arguments that do not fit together.
    """
    _check(q, kv, block_table, seq_lens, window, workspace, out)
    batch, num_heads, head_dim = q.shape
    if batch == 0:
        return out
    if new is not None:
        _check_new(new, q, kv, window, workspace)
    plan, tuning = workspace.schedule_of(window), workspace.tuning
    num_kv_heads, block_size = kv.shape[2], kv.shape[3]
    # scores * factor are exponents of 2; with a softcap, exponents of the tanh.
    factor, cap = (scale * _LOG2_E, 0.0) if softcap is None else (2 * _LOG2_E * scale / softcap, softcap * _LOG2_E)
    strides = (*q.stride()[:2], *out.stride()[:2], *kv.stride()[:3], block_table.stride(0))
    sizes = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "M": padded(num_heads // num_kv_heads),
        "PADDED_DIM": padded(head_dim),
        "BLOCK_N": tuning.block_n,
        "SOFTCAP": softcap is not None,
        "num_warps": tuning.num_warps,
        **attention_options(q.device, batch),
    }
    if plan.form is Form.SHORT:
        _short_kernel[(triton.cdiv(num_kv_heads, tuning.short_heads), batch)](
            q, kv, block_table, seq_lens, out, *strides, NO_WINDOW if window is None else window, factor, cap,
            HEADS=tuning.short_heads, num_stages=tuning.short_stages, **sizes,
        )  # fmt: skip
        return out
    joined = _start_prefixes(q, kv, block_table, workspace, scale, softcap) if plan.cascade else None
    _decode_kernel[(workspace.programs_beside if plan.cascade else workspace.num_programs,)](
        q, kv, block_table, plan.items, plan.num_items, plan.tickets, out, workspace.part_o, workspace.part_lse,
        *strides, factor, cap, *_arguments(new), num_stages=tuning.num_stages, **sizes,
    )  # fmt: skip
    if joined is not None:
        torch.cuda.current_stream(q.device).wait_stream(joined)
    if plan.form is Form.SPLIT:
        decode_combine(
            workspace.part_o,
            workspace.part_lse,
            plan.cu_items,
            out,
            rows_at_once=tuning.combine_rows,
            few=tuning.combine_few,
            few_heads=tuning.combine_few_heads,
            num_stages=tuning.combine_stages,
            num_warps=tuning.combine_warps,
        )
    return out


def takes_new_tokens(workspace: DecodeWorkspace, window: int | None) -> bool:
    """Whether paged_decode can be given new tokens under the last schedule: if the persistent kernel computes every key, and its
    tiles of query heads have a row to spare for the key."""
    plan = workspace.schedule_of(window)
    group_size = workspace.num_heads // workspace.num_kv_heads
    return plan.form is not Form.SHORT and not plan.cascade and group_size < padded(group_size)


def _arguments(new: NewTokens | None) -> tuple[Tensor | float | None, ...]:
    if new is None:
        return (None,) * 6 + (0.0,)
    return (new.positions, new.slot_mapping, new.cos, new.sin, new.q_norm, new.k_norm, float(new.eps))


def _start_prefixes(
    q: Tensor, kv: Tensor, block_table: Tensor, workspace: DecodeWorkspace, scale: float, softcap: float | None
) -> torch.cuda.Stream | None:
    """Launches the prefix groups' part; returns the stream that must be waited for, if it is not the current one."""
    groups = workspace.groups
    assert groups is not None  # the schedule has seen to it
    attend = partial(
        prefix_decode,
        q,
        kv,
        block_table,
        scale=scale,
        groups=groups,
        part_o=workspace.part_o,
        part_lse=workspace.part_lse,
        softcap=softcap,
    )
    if groups.stream is None:
        attend()
        return None
    groups.stream.wait_stream(torch.cuda.current_stream(q.device))
    with torch.cuda.stream(groups.stream):
        attend()
    return groups.stream


def _check_new(new: NewTokens, q: Tensor, kv: Tensor, window: int | None, workspace: DecodeWorkspace) -> None:
    batch, num_heads, head_dim = q.shape
    check_new_tokens(new, kv, num_heads, batch)
    rows_apart = batch > 1 and q.stride(0) != new.qkv.stride(0)
    if q.data_ptr() != new.qkv.data_ptr() or rows_apart or (num_heads > 1 and q.stride(1) != head_dim):
        raise ValueError("with new tokens q must be the query heads of their qkv")
    if not takes_new_tokens(workspace, window):
        raise ValueError("this schedule's kernels take no new tokens")


def _check(
    q: Tensor, kv: Tensor, block_table: Tensor, seq_lens: Tensor, window: int | None, workspace: DecodeWorkspace, out: Tensor
) -> None:
    expected = (workspace.num_heads, workspace.head_dim)
    if q.dim() != 3 or tuple(q.shape[1:]) != expected or out.shape != q.shape:
        raise ValueError(f"q and out must be [B, {expected[0]}, {expected[1]}], got {list(q.shape)} and {list(out.shape)}")
    if not q.dtype == kv.dtype == out.dtype == workspace.dtype:
        raise ValueError(f"q, kv and out must be {workspace.dtype}, got {q.dtype}, {kv.dtype} and {out.dtype}")
    if q.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("the last dimension of q and out must be contiguous")
    block_size, head_dim = kv.shape[3:]
    inner = (2, workspace.num_kv_heads, workspace.block_size, workspace.head_dim)
    if tuple(kv.shape[1:]) != inner or block_size not in _BLOCK_SIZES:
        raise ValueError(f"kv must be [num_blocks, *{inner}] with a block size of {_BLOCK_SIZES}, got {list(kv.shape)}")
    if kv.stride()[3:] != (head_dim, 1):
        raise ValueError(f"kv's last two dimensions must be contiguous, its strides are {kv.stride()}")
    batch = q.shape[0]
    if seq_lens.shape != (batch,) or block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(f"{batch} queries, but seq_lens {list(seq_lens.shape)} and block_table {list(block_table.shape)}")
    if seq_lens.dtype != torch.int32 or block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError("seq_lens and block_table must be int32, and rows of block_table contiguous")
    if workspace.schedule_of(window).batch != batch:
        raise ValueError(f"{batch} queries, but the last schedule is of {workspace.schedule_of(window).batch} sequences")
