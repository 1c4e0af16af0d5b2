"""A decode step's inputs, made on the device from the state that stays there, and sampled tokens put back into it: what lets a
step start before the host has seen the last one's tokens. Launch sizes follow from the batch's and the table's shapes alone, so
that a CUDA graph can replay them; who runs is in `slots`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairlane.kernels.reference_step import DecodeInputs, SlotState


@dataclass(frozen=True, slots=True)
class StepConfig:
    """tile: table entries per program; rows: tokens per program of store_sampled. Powers of two; neither changes a result."""

    tile: int = 1024
    rows: int = 128
    num_warps: int = 4


DEFAULT = StepConfig()
CANDIDATES = (DEFAULT, StepConfig(tile=512), StepConfig(tile=2048), StepConfig(tile=4096, num_warps=8))


@triton.jit(do_not_specialize=["num_slots", "stride_state"])  # type: ignore[untyped-decorator]
def _step_prep_kernel(  # type: ignore[no-untyped-def]
    slots, last_token, num_tokens, table, num_slots, stride_state,
    input_ids, positions, slot_mapping, seq_lens, out_table, stride_out,
    MAX_BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tiles: tl.constexpr = (MAX_BLOCKS + TILE - 1) // TILE
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    slot = tl.load(slots + row).to(tl.int64)
    named = (slot >= 0) & (slot < num_slots)
    length = tl.maximum(tl.load(num_tokens + slot, mask=named, other=0).to(tl.int32), 0)
    live = length > 0
    state_row = table + slot * stride_state
    columns = tile * TILE + tl.arange(0, TILE)
    used = (columns < tl.cdiv(length, BLOCK_SIZE)) & (columns < MAX_BLOCKS)
    written = used | ((length == 0) & (columns < MAX_BLOCKS))
    tl.store(out_table + row * stride_out + columns, tl.load(state_row + columns, mask=used, other=0), mask=written)
    if tile == 0:
        last = tl.maximum(length - 1, 0)
        block = tl.load(state_row + last // BLOCK_SIZE, mask=live & (last // BLOCK_SIZE < MAX_BLOCKS), other=0).to(tl.int64)
        tl.store(input_ids + row, tl.load(last_token + slot, mask=live, other=0))
        tl.store(positions + row, last)
        tl.store(slot_mapping + row, tl.where(block > 0, block * BLOCK_SIZE + last % BLOCK_SIZE, -1))
        tl.store(seq_lens + row, length)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "stride_tokens", "max_tokens"])  # type: ignore[untyped-decorator]
def _store_sampled_kernel(  # type: ignore[no-untyped-def]
    slots, sampled, token_ids, num_tokens, last_token, num_rows, num_slots, stride_tokens, max_tokens, ROWS: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + rows, mask=rows < num_rows, other=-1).to(tl.int64)
    named = (slot >= 0) & (slot < num_slots)
    token = tl.load(sampled + rows, mask=named, other=0)
    count = tl.load(num_tokens + slot, mask=named, other=-1)
    room = (count >= 0) & (count < max_tokens)
    tl.store(token_ids + slot * stride_tokens + count, token, mask=room)
    tl.store(num_tokens + slot, count + 1, mask=room)
    tl.store(last_token + slot, token, mask=room)


def step_prep(slots: Tensor, state: SlotState, block_size: int, *, out: DecodeInputs, config: StepConfig = DEFAULT) -> None:
    """What the reference's `step_prep` does, on the device: slots int32 [B] -> out. Raises ValueError for what does not fit."""
    rows, max_blocks = out.block_table.shape
    num_slots = len(state.num_tokens)
    _require(slots, "slots", (rows,), torch.int32)
    _require(out.seq_lens, "seq_lens", (rows,), torch.int32)
    _require(out.slot_mapping, "slot_mapping", (rows,), torch.int64)
    for name in ("input_ids", "positions"):
        _require(getattr(out, name), name, (rows,), torch.int32, torch.int64)
    for name in ("num_tokens", "last_token"):
        _require(getattr(state, name), name, (num_slots,), torch.int32, torch.int64)
    for table, lines in ((state.block_table, num_slots), (out.block_table, rows)):
        if table.shape != (lines, max_blocks) or max_blocks == 0 or table.stride(1) != 1 or table.dtype != torch.int32:
            raise ValueError(f"a block table must be int32 {[lines, max_blocks]}; it is {table.dtype} {list(table.shape)}")
    if rows:
        tile = min(config.tile, triton.next_power_of_2(max_blocks))
        _step_prep_kernel[(rows * triton.cdiv(max_blocks, tile),)](
            slots, state.last_token, state.num_tokens, state.block_table, num_slots, state.block_table.stride(0),
            out.input_ids, out.positions, out.slot_mapping, out.seq_lens, out.block_table, out.block_table.stride(0),
            MAX_BLOCKS=max_blocks, BLOCK_SIZE=block_size, TILE=tile, num_warps=config.num_warps,
        )  # fmt: skip


def store_sampled(
    slots: Tensor, sampled: Tensor, token_ids: Tensor, num_tokens: Tensor, last_token: Tensor, *, config: StepConfig = DEFAULT
) -> None:
    """What the reference's `store_sampled` does, on the device; sampled may be int32 or int64, whatever the state holds.

    Raises ValueError for what does not fit. That no slot is there twice is the caller's word.
    """
    rows, num_slots = len(slots), len(num_tokens)
    _require(slots, "slots", (rows,), torch.int32)
    _require(sampled, "sampled", (rows,), torch.int32, torch.int64)
    for name, vector in (("num_tokens", num_tokens), ("last_token", last_token)):
        _require(vector, name, (num_slots,), torch.int32, torch.int64)
    if token_ids.shape[0] != num_slots or token_ids.stride(1) != 1 or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token_ids must be integers of {num_slots} slots; it is {token_ids.dtype} {list(token_ids.shape)}")
    if rows:
        _store_sampled_kernel[(triton.cdiv(rows, config.rows),)](
            slots, sampled, token_ids, num_tokens, last_token, rows, num_slots, token_ids.stride(0), token_ids.shape[1],
            ROWS=config.rows, num_warps=config.num_warps,
        )  # fmt: skip


def _require(vector: Tensor, name: str, shape: tuple[int, ...], *dtypes: torch.dtype) -> None:
    if vector.shape != shape or vector.dtype not in dtypes or not vector.is_contiguous():
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be contiguous {wanted} {list(shape)}; it is {vector.dtype} {list(vector.shape)}")
