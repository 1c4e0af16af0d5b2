"""Joins the partial results of sequences that were split into several items. It leaves alone the rows of all others, which the
attention kernels have already written, and decides nothing about where a sequence is cut (decode_sched.py).

    out = sum_i 2^(lse_i - max) o_i / sum_i 2^(lse_i - max)      over the sequence's rows, in their order

The loop is pipelined even where it runs once: without asynchronous copies the compiler loads row after row, each load waiting
for the one before (checked in the generated code), and the kernel is nothing but latency.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(  # type: ignore[no-untyped-def]
    part_o_ptr,
    part_lse_ptr,
    cu_items_ptr,
    out_ptr,
    stride_out_batch,
    stride_out_head,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    first = tl.load(cu_items_ptr + sequence)
    count = tl.load(cu_items_ptr + sequence + 1) - first
    if count == 0:
        return
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
    row = out_ptr + sequence.to(tl.int64) * stride_out_batch + head * stride_out_head
    tl.store(row + dims, (acc / total).to(out_ptr.dtype.element_ty), mask=in_dim)


def decode_combine(
    part_o: Tensor,
    part_lse: Tensor,
    cu_items: Tensor,
    out: Tensor,
    *,
    rows_at_once: int = 16,
    num_stages: int = 3,
    num_warps: int = 4,
) -> None:
    """Writes out [B, Hq, D] for the sequences with several items; the other rows keep what they hold.

    part_o float32 [rows, Hq, D], each item's result; part_lse float32 [rows, Hq], the logarithm to base 2 of its softmax's
    denominator; both contiguous. cu_items int32 [.. B + 1]: sequence b's rows are cu_items[b] .. cu_items[b + 1]. num_stages:
    at least 2; rows_at_once, a power of two, num_stages and num_warps matter for speed only, within rounding.
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
        ROWS=rows_at_once,
        STAGES=num_stages,
        num_warps=num_warps,
    )
