"""A decode step's inputs from the state that stays on the device, in plain torch: what the kernels of step_prep.py must compute.
It decides nothing about who runs: batch rows name slots, and a row that names none is padding.

    num_tokens[slot]   tokens known, the last sampled one included; that one is the step's input, at position num_tokens - 1
    block_table[slot]  block ids; 0, the null block, where the sequence has none
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotState:
    """By slot, S of them. last_token, num_tokens: [S], int32 or int64. block_table: int32 [S, MB]."""

    last_token: Tensor
    num_tokens: Tensor
    block_table: Tensor


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """By batch row, B of them, at fixed addresses. input_ids, positions: [B], int32 or int64. slot_mapping: [B], int64.
    seq_lens: [B], int32. block_table: int32 [B, MB]."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    block_table: Tensor

    @classmethod
    def allocate(cls, rows: int, max_blocks: int, device: torch.device | str) -> DecodeInputs:
        """All rows padding."""
        ids, positions, mapping = (torch.full((rows,), fill, dtype=torch.int64, device=device) for fill in (0, 0, -1))
        lens = torch.zeros(rows, dtype=torch.int32, device=device)
        return cls(ids, positions, mapping, lens, torch.zeros(rows, max_blocks, dtype=torch.int32, device=device))


def step_prep(slots: Tensor, state: SlotState, block_size: int, *, out: DecodeInputs) -> None:
    """The inputs of one decode step of the rows slots, int32 [B].

    A slot outside [0, S) or without tokens is a padding row: input 0, position 0, slot_mapping -1, seq_len 0, a table row of null
    blocks. Of the other rows' tables only the ceil(seq_len / block_size) entries in use are written. slot_mapping is -1 too where
    the position has no block: the null block must never be written.
    """
    max_blocks = state.block_table.shape[1]
    for row, slot in enumerate(slots.tolist()):
        length = int(state.num_tokens[slot]) if 0 <= slot < len(state.num_tokens) else 0
        live, last = length > 0, max(length - 1, 0)
        block = int(state.block_table[slot, last // block_size]) if live and last // block_size < max_blocks else 0
        out.input_ids[row] = state.last_token[slot] if live else 0
        out.positions[row] = last
        out.slot_mapping[row] = block * block_size + last % block_size if block > 0 else -1
        out.seq_lens[row] = max(length, 0)
        used = -(-length // block_size)
        out.block_table[row, : used if live else max_blocks] = state.block_table[slot, :used] if live else 0


def store_sampled(slots: Tensor, sampled: Tensor, token_ids: Tensor, num_tokens: Tensor, last_token: Tensor) -> None:
    """Appends sampled [B] to the sequences of slots, int32 [B], no slot twice: token_ids [S, N] and num_tokens, last_token [S].

    Rows whose slot is outside [0, S) are skipped, and so are sequences that are full: their steps ran ahead of their end.
    """
    for slot, token in zip(slots.tolist(), sampled.tolist(), strict=True):
        if 0 <= slot < len(num_tokens) and 0 <= int(num_tokens[slot]) < token_ids.shape[1]:
            token_ids[slot, int(num_tokens[slot])] = token
            num_tokens[slot] += 1
            last_token[slot] = token
