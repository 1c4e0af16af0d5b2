"""Cuts a decode step's sequences into items of attention work, on the device, once per step for all layers. How long a chunk is
follows from the sequence's own length alone, so a sequence is split in the same places whatever its companions; where its items
stand in the list is a matter of speed. The attention itself is paged_decode.py's business.

    keys that sequence b's query sees   [low ........ len)      low = max(0, len - window)
    its chunks                          [low, low+c) [low+c, low+2c) ...  the last one shorter
    items int32 [.., 4]                 (b, begin, end, row)    row: of the partial results; -1: b has one item, writes `out`

Full chunks come first in the list, those of the longest sequences before others, then what is left of each sequence, the
longest first, so that short items fill the gaps at the end of the launch. A sequence whose partial results would not fit in the
buffers is left whole: slower, never wrong.

With prefix groups, chunks that lie wholly in what a sequence shares with its group are not listed here: their partial results,
the first of its rows, are prefix_decode.py's to write. Where a sequence is cut is the same with and without.
"""

from __future__ import annotations

from enum import Enum

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairlane.kernels.decode_tuning import ChunkRule, DecodeTuning, tuning_for
from fairlane.kernels.prefix_groups import PrefixGroups
from fairlane.kernels.prefix_sched import prefix_sched
from fairlane.kernels.prefix_tuning import PrefixTuning

NO_WINDOW = 2**31 - 1  # a window wider than any sequence
_WRITE = 64  # items written at once


@triton.jit(do_not_specialize=["batch", "max_rows", "window"], do_not_specialize_on_alignment=["seq_lens_ptr", "row_shared_ptr"])  # type: ignore[untyped-decorator]
def _sched_kernel(  # type: ignore[no-untyped-def]
    seq_lens_ptr,
    cu_items_ptr,
    items_ptr,
    num_items_ptr,
    row_shared_ptr,
    chunk_sizes_ptr,
    covered_ptr,
    batch,
    max_rows,
    window,
    CHUNK_0: tl.constexpr,
    CHUNK_1: tl.constexpr,
    CHUNK_2: tl.constexpr,
    LIMIT_0: tl.constexpr,
    LIMIT_1: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    WRITE: tl.constexpr,
    PREFIX: tl.constexpr,
):
    """Program b lists sequence b's items. Each looks at all lengths, which is cheaper than a second launch would be."""
    mine = tl.program_id(0)
    index = tl.arange(0, BLOCK_B)
    real = index < batch
    lens = tl.maximum(tl.load(seq_lens_ptr + index, mask=real, other=0), 0)
    keys = tl.minimum(lens, window)
    chunk = tl.where(keys <= LIMIT_0, CHUNK_0, tl.where(keys <= LIMIT_1, CHUNK_1, CHUNK_2))
    chunk = tl.where(keys <= WHOLE, tl.maximum(keys, 1), chunk)
    chunks = (keys + chunk - 1) // chunk
    rows = tl.where(chunks > 1, chunks, 0)
    rows = tl.where(tl.cumsum(rows, 0) <= max_rows, rows, 0)
    covered = tl.zeros_like(rows)
    if PREFIX:
        shared = tl.minimum(tl.load(row_shared_ptr + index, mask=real, other=0), lens)
        covered = tl.where(rows > 0, shared // chunk, 0)
    # An empty sequence too has an item: its output must be written.
    count = tl.where(real, tl.where(rows > 0, rows - covered, 1), 0)

    here = index == mine
    my_len = tl.sum(tl.where(here, lens, 0), 0)
    my_keys = tl.sum(tl.where(here, keys, 0), 0)
    my_rows = tl.sum(tl.where(here, rows, 0), 0)
    my_chunk = tl.where(my_rows > 0, tl.sum(tl.where(here, chunk, 0), 0), my_keys)
    my_covered = tl.sum(tl.where(here, covered, 0), 0)
    first_row = tl.sum(tl.where(index < mine, rows, 0), 0)
    # All items of a sequence but its last are full chunks; the last ones come behind all of those. (A group may cover the last.)
    full = tl.maximum(count - 1, 0)
    before = (keys > my_keys) | ((keys == my_keys) & (index < mine))
    first_full = tl.sum(tl.where(before, full, 0), 0)
    rest = tl.where(rows > 0, keys - (rows - 1) * chunk, keys)
    my_rest = tl.sum(tl.where(here, rest, 0), 0)
    longer = (count > 0) & ((rest > my_rest) | ((rest == my_rest) & (index < mine)))
    place_of_last = tl.sum(full, 0) + tl.sum(tl.where(longer, 1, 0), 0)

    tl.store(cu_items_ptr + mine + 1, first_row + my_rows)
    if mine == 0:
        tl.store(cu_items_ptr, 0)
        tl.store(num_items_ptr, tl.sum(count, 0))
    if PREFIX:
        tl.store(chunk_sizes_ptr + mine, my_chunk)
        tl.store(covered_ptr + mine, my_covered)
    my_count = tl.maximum(my_rows, 1)
    for base in range(my_covered, my_count, WRITE):
        number = base + tl.arange(0, WRITE)
        begin = my_len - my_keys + number * my_chunk
        inside = number < my_count
        last = number == my_count - 1
        record = items_ptr + tl.where(last, place_of_last, first_full + number - my_covered) * 4
        tl.store(record, mine + tl.zeros_like(number), mask=inside)
        tl.store(record + 1, begin, mask=inside)
        tl.store(record + 2, tl.minimum(begin + my_chunk, my_len), mask=inside)
        tl.store(record + 3, tl.where(my_rows > 0, first_row + number, -1), mask=inside)


def decode_sched(
    seq_lens: Tensor,
    cu_items: Tensor,
    items: Tensor,
    num_items: Tensor,
    *,
    chunks: ChunkRule,
    max_rows: int,
    max_batch: int,
    window: int | None = None,
    groups: PrefixGroups | None = None,
) -> None:
    """Lists the items of a step. Everything is int32 on one device; nothing is read on the host.

    seq_lens [B], the step's own token counted; at most max_batch of them. Written: cu_items [.. B + 1], the first partial row of
    each sequence (cu_items[b] == cu_items[b + 1] where b needs none, having one item); items [max_rows + max_batch, 4]; num_items
    [1]. max_rows: partial rows there are. window W: the query at len - 1 sees keys len - W .. len - 1. groups: whose shared
    chunks are left out, not with a window; their chunk_sizes and covered are written. Raises ValueError.
    """
    if groups is not None and window is not None:
        raise ValueError("prefix groups do not go with a window: it hides the leading keys")
    batch = seq_lens.shape[0]
    if batch == 0:
        num_items.zero_()
        return
    _sched_kernel[(batch,)](
        seq_lens,
        cu_items,
        items,
        num_items,
        seq_lens if groups is None else groups.row_shared,
        seq_lens if groups is None else groups.chunk_sizes,
        seq_lens if groups is None else groups.covered,
        batch,
        max_rows,
        NO_WINDOW if window is None else window,
        CHUNK_0=chunks.sizes[0],
        CHUNK_1=chunks.sizes[1],
        CHUNK_2=chunks.sizes[2],
        LIMIT_0=chunks.limits[0],
        LIMIT_1=chunks.limits[1],
        WHOLE=chunks.whole,
        BLOCK_B=max(16, triton.next_power_of_2(max_batch)),
        WRITE=_WRITE,
        PREFIX=groups is not None,
        num_warps=4,
    )


class Form(Enum):
    """Which kernels a step's attention takes."""

    SPLIT = "split"  # the persistent kernel, then the combining one
    WHOLE = "whole"  # the persistent kernel alone: no sequence is split
    SHORT = "short"  # the short kernel alone


class DecodeSchedule:
    """One window's items. cu_items, items, num_items: as decode_sched writes them. tickets [2]: how many items
    programs of a launch have drawn and how many programs have left; 0 between launches. form, batch and cascade (whether the
    prefix groups' chunks are left to prefix_decode): of the last schedule()."""

    def __init__(self, max_batch: int, max_items: int, capacity: int, device: torch.device) -> None:
        self.cu_items = torch.zeros(max_batch + 1, dtype=torch.int32, device=device)
        self.items = torch.zeros(max(capacity, max_items + max_batch), 4, dtype=torch.int32, device=device)
        self.num_items = torch.zeros(1, dtype=torch.int32, device=device)
        self.tickets = torch.zeros(2, dtype=torch.int32, device=device)
        self.form = Form.SPLIT
        self.batch: int | None = None
        self.cascade = False


class DecodeWorkspace:
    """The decode attention's buffers, made once and used by every layer of every step, and the step's schedule.

    Layers share the partial results, so they must run one after another on one stream. Everything has a fixed address: a
    schedule and the attention that follows it may be captured in a CUDA graph.
    """

    def __init__(
        self,
        max_batch: int,
        max_items: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        block_size: int = 16,
        windows: frozenset[int | None] = frozenset({None}),
        tuning: DecodeTuning | None = None,
        num_programs: int | None = None,
        prefix: PrefixTuning | None = None,
    ) -> None:
        """max_items: partial results there is room for, each num_heads * (head_dim + 1) floats; `max_items_for` says how many
        a model needs. windows: those of the model's layers. num_programs: of the persistent kernel; by default what the tuning
        says for the device. prefix: makes room for prefix groups, to be filled by the caller. Raises ValueError for sizes that do
        not go together."""
        if max_batch < 1 or max_items < 0:
            raise ValueError(f"max_batch must be positive and max_items not negative, got {max_batch} and {max_items}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads cannot share {num_kv_heads} KV heads evenly")
        if any(window is not None and window < 1 for window in windows):
            raise ValueError(f"a window must be at least 1, got {sorted(w for w in windows if w is not None)}")
        group_size = num_heads // num_kv_heads
        self.tuning = tuning or tuning_for(head_dim, group_size, dtype, block_size)
        self.max_batch, self.max_items = max_batch, max_items
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.dtype, self.block_size = dtype, block_size
        per_sm = self.tuning.programs_that_fit(head_dim, group_size, dtype)
        self.num_programs = self.programs_beside = num_programs or per_sm * _num_sms(device)
        self.part_o = torch.empty(max_items, num_heads, head_dim, dtype=torch.float32, device=device)
        self.part_lse = torch.empty(max_items, num_heads, dtype=torch.float32, device=device)
        # Every program reads its first record before it knows how many there are.
        capacity = self.num_programs // num_kv_heads + 1
        self._schedules = {window: DecodeSchedule(max_batch, max_items, capacity, device) for window in windows}
        self.groups: PrefixGroups | None = None
        if prefix is not None:
            programs = num_programs or prefix.programs_per_sm * _num_sms(device)
            if prefix.beside is not None and num_programs is None:
                self.programs_beside = min(self.num_programs, prefix.beside * _num_sms(device))
            self.groups = PrefixGroups(
                max_batch, max_items, group_size, device, tuning=prefix, chunks=self.tuning.chunks, num_programs=programs
            )

    def schedule(
        self, seq_lens: Tensor, window: int | None = None, *, max_seq_len: int | None = None, cascade: bool = False
    ) -> None:
        """Cuts a step's sequences into items, for all layers with this window. seq_lens int32 [B] on the device, 0 for padding
        rows. Launches at most one kernel, with cascade two.

        max_seq_len: no sequence is longer, which the caller must know for every use of a graph that captures this call. It
        saves launches: where no sequence is split nothing is combined, and where none sees more than one tile of keys one
        small kernel does it all. It never changes the bits of a row. Should it be wrong, what is not combined stays right but
        is slow, and rows of the small kernel that see too much become NaN. cascade: chunks that rows share with their prefix
        group are computed once per tile of it, where no window hides them. Raises ValueError.
        """
        plan = self.schedule_of(window)
        batch = seq_lens.shape[0]
        if batch > self.max_batch or seq_lens.dtype != torch.int32 or not seq_lens.is_contiguous():
            raise ValueError(f"seq_lens must be contiguous int32 of at most {self.max_batch}, got {seq_lens.dtype} [{batch}]")
        plan.batch = batch
        plan.form = self._form(window, max_seq_len)
        if cascade and self.groups is None:
            raise ValueError("the workspace was made without room for prefix groups")
        groups = self.groups if cascade and window is None and plan.form is Form.SPLIT and self.max_items else None
        plan.cascade = groups is not None
        if plan.form is Form.SHORT:
            return
        decode_sched(
            seq_lens,
            plan.cu_items,
            plan.items,
            plan.num_items,
            chunks=self.tuning.chunks,
            max_rows=self.max_items if plan.form is Form.SPLIT else 0,
            max_batch=self.max_batch,
            window=window,
            groups=groups,
        )
        if groups is not None:
            prefix_sched(groups, plan.cu_items, chunks=self.tuning.chunks)

    def schedule_of(self, window: int | None) -> DecodeSchedule:
        """Raises ValueError for a window that the workspace was not made for."""
        plan = self._schedules.get(window)
        if plan is None:
            known = ", ".join(sorted(str(known) for known in self._schedules))
            raise ValueError(f"the workspace was made for windows {known}, not for {window}")
        return plan

    def _form(self, window: int | None, max_seq_len: int | None) -> Form:
        bounds = [bound for bound in (window, max_seq_len) if bound is not None]
        if not bounds:
            return Form.SPLIT
        keys = min(bounds)
        if keys <= self.tuning.block_n:
            return Form.SHORT
        return Form.WHOLE if self.tuning.chunks.max_chunks(keys) == 1 else Form.SPLIT


def max_items_for(max_batch: int, max_model_len: int, tuning: DecodeTuning, window: int | None = None) -> int:
    """Partial results of the worst batch: max_batch sequences of whichever length up to max_model_len is cut most often."""
    keys = max_model_len if window is None else min(window, max_model_len)
    chunks = tuning.chunks.max_chunks(keys)
    return max_batch * chunks if chunks > 1 else 0


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
