"""Attention, written out in float64 straight from its definition, and the hostile paged caches to try ops on: blocks shuffled,
every slot that holds no token NaN, unused table entries pointing at poisoned blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LAYERS, LAYER = 3, 1  # the pool has neighbours on both sides of the layer under test


@dataclass(frozen=True, slots=True)
class PagedCase:
    """Sequences whose last query_lens[b] tokens are queries. keys, values: the dense truth, one [seq_len, Hkv, D] each."""

    q: Tensor
    pool: Tensor
    block_table: Tensor
    seq_lens: list[int]
    query_start_loc: list[int]
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def kv(self) -> Tensor:
        return self.pool[:, LAYER]


def make_case(
    lens: list[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spare_entries: int = 2,
) -> PagedCase:
    """lens: (seq_len, query_len) of each sequence."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-seq_len // block_size) for seq_len, _ in lens]
    num_blocks = 1 + sum(needed) + 3
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    pool = torch.full((num_blocks, LAYERS, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    pool[0] = 0.0
    poisoned = order[-1]  # never handed out
    table = torch.full((len(lens), max(needed, default=0) + spare_entries), poisoned, dtype=torch.int32)
    keys, values = [], []
    for row, (seq_len, _) in enumerate(lens):
        keys.append(torch.randn(seq_len, num_kv_heads, head_dim, generator=generator).to(dtype))
        values.append(torch.randn(seq_len, num_kv_heads, head_dim, generator=generator).to(dtype))
        blocks = [order.pop(0) for _ in range(needed[row])]
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for position in range(seq_len):
            block, offset = blocks[position // block_size], position % block_size
            pool[block, LAYER, 0, :, offset] = keys[row][position]
            pool[block, LAYER, 1, :, offset] = values[row][position]
    starts = [0]
    for _, query_len in lens:
        starts.append(starts[-1] + query_len)
    q = torch.randn(starts[-1], num_heads, head_dim, generator=generator).to(dtype)
    return PagedCase(q, pool, table, [seq_len for seq_len, _ in lens], starts, keys, values)


def dense_attention(case: PagedCase, scale: float, window: int | None = None, softcap: float | None = None) -> Tensor:
    """[T, Hq, D] in float64: one query at a time, one head at a time."""
    num_heads = case.q.shape[1]
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    for row, seq_len in enumerate(case.seq_lens):
        begin, end = case.query_start_loc[row], case.query_start_loc[row + 1]
        for token in range(begin, end):
            position = seq_len - (end - token)
            low = 0 if window is None else max(0, position - window + 1)
            if position < 0:
                continue
            for head in range(num_heads):
                kv_head = head * case.keys[row].shape[1] // num_heads
                keys = case.keys[row][low : position + 1, kv_head].double()
                scores = keys @ case.q[token, head].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[token, head] = torch.softmax(scores, dim=0) @ case.values[row][low : position + 1, kv_head].double()
    return out
