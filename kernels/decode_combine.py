"""Joins the partial results of sequences that were split into several items. It leaves alone the rows of all others, which the
attention kernels have already written, and decides nothing about where a sequence is cut (decode_sched.py).

    out = sum_i 2^(lse_i - max) o_i / sum_i 2^(lse_i - max)      over the sequence's rows, in their order

A sequence with few rows is joined by one program for several heads, in which every thread adds up cells of its own, so that most
programs of a large batch leave at once. One with many is joined by one program per head, in a pipelined loop: without
asynchronous copies the compiler would load row after row, each load waiting for the one before (checked in the generated code).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fairlane.kernels.dependent import attention_options, let_next_start, wait_for_inputs


@triton.jit  # type: ignore[untyped-decorator]
def _join_many(  # type: ignore[no-untyped-def]
    part_o_ptr, part_lse_ptr, out, first, count, head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Partial results first .. first + count - 1 of one head, ROWS at a time."""
    dims = tl.arange(0, PADDED_DIM)
    in_dim = dims < HEAD_DIM
    peak = -float("inf")
    total = 0.0
    acc = tl.zeros([PADDED_DIM], tl.float32)
    for base in tl.range(0, count, ROWS, num_stages=STAGES):
        number = base + tl.arange(0, ROWS)
        inside = number < count
        place = (first + number).to(tl.int64) * NUM_HEADS + head
        lse = tl.load(part_lse_ptr + place, mask=inside, other=-float("inf"))
        part = tl.load(part_o_ptr + place[:, None] * HEAD_DIM + dims[None, :], mask=inside[:, None] & in_dim[None, :], other=0.0)
        new_peak = tl.maximum(peak, tl.max(lse, 0))  # finite: an item has at least one key
        weight = tl.exp2(lse - new_peak)
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(weight[:, None] * part, 0)
        peak = new_peak
    tl.store(out + dims, (acc / total).to(out.dtype.element_ty), mask=in_dim)


@triton.jit  # type: ignore[untyped-decorator]
def _row(part_o_ptr, part_lse_ptr, row, valid, heads, cell, real, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """One partial result of several heads: lse [HEADS] and values [HEADS, D]; -inf and 0 where there is none."""
    place = row.to(tl.int64) * NUM_HEADS
    lse = tl.load(part_lse_ptr + place + heads, mask=(heads < NUM_HEADS) & valid, other=-float("inf"))
    part = tl.load(part_o_ptr + place * HEAD_DIM + cell, mask=real & valid, other=0.0)
    return lse, part


@triton.jit  # type: ignore[untyped-decorator]
def _join_few(  # type: ignore[no-untyped-def]
    part_o_ptr, part_lse_ptr, out, stride_out_head, first, count, head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The same for the heads head .. head + HEADS - 1. Four rows are on their way at once, each thread adds up its own cells."""
    heads = head + tl.arange(0, HEADS)
    dims = tl.arange(0, PADDED_DIM)
    cell = heads[:, None] * HEAD_DIM + dims[None, :]
    real = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    peak = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, PADDED_DIM], tl.float32)
    for base in range(0, count, 4):
        row = first + base
        lse_0, part_0 = _row(part_o_ptr, part_lse_ptr, row, base < count, heads, cell, real, NUM_HEADS, HEAD_DIM)
        lse_1, part_1 = _row(part_o_ptr, part_lse_ptr, row + 1, base + 1 < count, heads, cell, real, NUM_HEADS, HEAD_DIM)
        lse_2, part_2 = _row(part_o_ptr, part_lse_ptr, row + 2, base + 2 < count, heads, cell, real, NUM_HEADS, HEAD_DIM)
        lse_3, part_3 = _row(part_o_ptr, part_lse_ptr, row + 3, base + 3 < count, heads, cell, real, NUM_HEADS, HEAD_DIM)
        new_peak = tl.maximum(tl.maximum(tl.maximum(lse_0, lse_1), tl.maximum(lse_2, lse_3)), peak)
        safe = tl.where(heads < NUM_HEADS, new_peak, 0.0)  # finite where a head is real: an item has at least one key
        decay = tl.exp2(peak - safe)
        weight_0, weight_1 = tl.exp2(lse_0 - safe), tl.exp2(lse_1 - safe)
        weight_2, weight_3 = tl.exp2(lse_2 - safe), tl.exp2(lse_3 - safe)
        total = total * decay + ((weight_0 + weight_1) + (weight_2 + weight_3))
        acc = acc * decay[:, None] + (
            (weight_0[:, None] * part_0 + weight_1[:, None] * part_1) + (weight_2[:, None] * part_2 + weight_3[:, None] * part_3)
        )
        peak = new_peak
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + heads[:, None] * stride_out_head + dims[None, :], result, mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
    part_o_ptr, part_lse_ptr, cu_items_ptr, out_ptr, stride_out_batch, stride_out_head,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    FEW: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    wait_for_inputs(DEPENDENT)
    let_next_start(DEPENDENT)
    first = tl.load(cu_items_ptr + sequence)
    count = tl.load(cu_items_ptr + sequence + 1) - first
    if count == 0:
        return
    out = out_ptr + sequence.to(tl.int64) * stride_out_batch
    if count <= FEW:
        if head % HEADS == 0:
            _join_few(
                part_o_ptr, part_lse_ptr, out, stride_out_head, first, count, head, NUM_HEADS, HEAD_DIM, PADDED_DIM, HEADS
            )  # fmt: skip
    else:
        _join_many(
            part_o_ptr, part_lse_ptr, out + head * stride_out_head, first, count, head,
            NUM_HEADS, HEAD_DIM, PADDED_DIM, ROWS, STAGES,
        )  # fmt: skip


def decode_combine(
    part_o: Tensor,
    part_lse: Tensor,
    cu_items: Tensor,
    out: Tensor,
    *,
    rows_at_once: int = 16,
    few: int = 16,
    few_heads: int = 4,
    num_stages: int = 3,
    num_warps: int = 4,
) -> None:
    """Writes out [B, Hq, D] for the sequences with several items; the other rows keep what they hold.

    part_o float32 [rows, Hq, D], each item's result; part_lse float32 [rows, Hq], the logarithm to base 2 of its softmax's
    denominator; both contiguous. cu_items int32 [.. B + 1]: sequence b's rows are cu_items[b] .. cu_items[b + 1]. num_stages:
    at least 2. Sequences of up to `few` rows are joined four rows of few_heads heads at a time, others rows_at_once rows of one
    head; powers of two that, like num_stages and num_warps, matter for speed only, within rounding.
    """
    batch, num_heads, head_dim = out.shape
    if batch == 0 or part_o.shape[0] == 0:
        return
    _combine_kernel[(num_heads, batch)](
        part_o,
        part_lse,
        cu_items,
        out,
        out.stride(0),
        out.stride(1),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        FEW=few,
        HEADS=min(few_heads, triton.next_power_of_2(num_heads)),
        ROWS=rows_at_once,
        STAGES=num_stages,
        num_warps=num_warps,
        **attention_options(out.device, batch),
    )
