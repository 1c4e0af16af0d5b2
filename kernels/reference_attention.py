"""Paged attention in torch: a plan made once per step, then one call per layer. It decides how sequences are grouped, gathered
and masked; sequences with one query token run batched, those with more (chunks, prefix hits) one by one through SDPA.

A sequence is padded to a length that depends on its own length only, and every batch element is computed by itself, so a
decode row's result does not depend on its companions. Keys that a query must not see may hold anything, NaN too: gathered
K and V are zeroed there before use, since 0 * NaN would poison the sum.

    cached positions   [first_block * BS .......... seq_len)  gathered, in whole blocks
                                      ^ tail of the last block, and what is before the window: zeroed, masked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Integers = Sequence[int] | np.ndarray | Tensor  # on the host, or copied there

_NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that are computed in one batch: `num_queries` query tokens each, `num_blocks` gathered blocks each.

    tokens: int64 [b * num_queries] rows of q. rows: int64 [2 * b * Hkv * num_blocks] of the cache seen as rows [BS * D].
    stale: int64, rows of the gathered [.., D] view to be zeroed. hidden: bool, broadcastable to [b, 1, num_queries, keys].
    """

    tokens: Tensor
    rows: Tensor
    stale: Tensor
    hidden: Tensor
    size: int
    num_queries: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where a step's queries find their keys; the same for all layers that share block tables and window.

    empty: rows of q that see no key at all; their output is 0.
    """

    groups: tuple[_Group, ...]
    empty: Tensor


class Workspace:
    """One growing buffer for gathered K and V. Fresh memory for every layer would cost more than the attention itself: the
    kernel hands out zeroed pages (measured 40 ms against 5 ms per step at batch 16)."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """A buffer [rows, columns] of like's dtype and device; its content is whatever the last use left."""
        needed, buffer = rows * columns, self._buffer
        if buffer is None or buffer.numel() < needed or buffer.dtype != like.dtype or buffer.device != like.device:
            buffer = self._buffer = torch.empty(needed + needed // 4, dtype=like.dtype, device=like.device)
        return buffer[:needed].view(rows, columns)


def plan_attention(
    query_start_loc: Integers,
    seq_lens: Integers,
    block_table: Tensor,
    kv: Tensor,
    window: int | None = None,
) -> AttentionPlan:
    """Plans a step on the host. query_start_loc [B + 1], seq_lens [B] (with the step's own tokens), block_table int [B, MB].

    kv: any layer's view [num_blocks, 2, Hkv, BS, D] of the cache. window W: key j is visible to query i iff i - W < j <= i.
    Entries of a table row beyond its sequence, or wholly before its window, are never read.
    """
    starts, lens = _host(query_start_loc), _host(seq_lens)
    table = _host(block_table).reshape(len(lens), -1)
    block_size = kv.shape[3]
    queries = np.diff(starts)
    queries_seen = np.minimum(queries, lens)  # a row before position 0 sees nothing
    first_query = lens - queries_seen
    first_key = np.maximum(first_query - window + 1, 0) if window is not None else np.zeros_like(lens)
    first_block = first_key // block_size
    num_blocks = -(-lens // block_size) - first_block
    empty = [row for s, n in zip(starts, queries - queries_seen, strict=False) for row in range(s, s + n)]
    members: dict[tuple[int, int, int], list[int]] = {}  # query tokens, blocks, which sequence (one by one) or -1 (batched)
    for index in np.flatnonzero(queries_seen > 0).tolist():
        count, blocks = int(queries_seen[index]), int(num_blocks[index])
        members.setdefault((1, _padded(blocks), -1) if count == 1 else (count, blocks, index), []).append(index)
    groups = []
    for (count, blocks, _), indices in members.items():
        chosen = np.asarray(indices)
        facts = (lens[chosen], first_query[chosen], first_block[chosen], num_blocks[chosen])
        groups.append(_group(starts[chosen + 1] - count, facts, table[chosen], count, blocks, kv, window))
    return AttentionPlan(tuple(groups), torch.tensor(empty, dtype=torch.int64, device=kv.device))


def paged_attention(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor | None = None,
    seq_lens: Integers | None = None,
    query_start_loc: Integers | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    plan: AttentionPlan | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """Attention of q [T, Hq, D] over one layer's cache kv [num_blocks, 2, Hkv, BS, D]; returns [T, Hq, D] in q's dtype.

    Either the plan, or block_table [B, MB], seq_lens [B] and query_start_loc [B + 1]: sequence b's queries are rows
    query_start_loc[b] .. query_start_loc[b + 1] and stand at the end of its seq_lens[b] cached tokens. A query that sees no
    key (seq_len 0) gives 0. softcap c: scores become c * tanh(score / c). Scores and sums are at least float32.
    """
    if plan is None:
        if block_table is None or seq_lens is None or query_start_loc is None:
            raise ValueError("paged_attention needs a plan, or block_table, seq_lens and query_start_loc")
        plan = plan_attention(query_start_loc, seq_lens, block_table, kv, window)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    workspace = workspace or Workspace()
    for group in plan.groups:
        k, v = _gather(kv, group, workspace)
        if group.tokens.numel() == q.shape[0]:  # the whole step, in order: nothing to pick or place
            return _attend(q, k, v, group, scale, softcap).to(q.dtype)
        rows = _attend(q.index_select(0, group.tokens), k, v, group, scale, softcap)
        out.index_copy_(0, group.tokens, rows.to(q.dtype))
    if plan.empty.numel():
        out.index_fill_(0, plan.empty, 0)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, group: _Group, scale: float, softcap: float | None) -> Tensor:
    """q [b * n, Hq, D], k and v [b, Hkv, keys, D]. The query heads that share a KV head become rows of one matrix."""
    b, n = group.size, group.num_queries
    hkv, dim = k.shape[1], k.shape[3]
    ratio = q.shape[1] // hkv
    packed = q.to(k.dtype).view(b, n, hkv, ratio, dim).permute(0, 2, 3, 1, 4).reshape(b, hkv, ratio * n, dim)
    if n > 1 and softcap is None:
        visible = ~group.hidden.expand(b, 1, n, -1).repeat(1, 1, ratio, 1)
        result = torch.nn.functional.scaled_dot_product_attention(packed, k, v, attn_mask=visible, scale=scale)
    else:
        scores = torch.matmul(packed * scale, k.transpose(-1, -2))
        if softcap is not None:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        by_query = scores.view(b, hkv, ratio, n, -1)
        by_query.masked_fill_(group.hidden.unsqueeze(1), float("-inf"))
        result = torch.matmul(torch.softmax(scores, dim=-1), v)
    return result.reshape(b, hkv, ratio, n, dim).permute(0, 3, 1, 2, 4).reshape(b * n, q.shape[1], dim)


def _gather(kv: Tensor, group: _Group, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """K and V of a group, [b, Hkv, keys, D] each, zero wherever the cache holds nothing valid for it."""
    _, _, hkv, block_size, dim = kv.shape
    slab = block_size * dim
    rows = torch.as_strided(kv, ((kv.shape[0] - 1) * (kv.stride(0) // slab) + 2 * hkv, slab), (slab, 1))
    gathered = workspace.take(group.rows.numel(), slab, kv)
    torch.index_select(rows, 0, group.rows, out=gathered)
    gathered.view(-1, dim).index_fill_(0, group.stale, 0)
    both = gathered.view(2, group.size, hkv, group.num_blocks * block_size, dim)
    both = both.to(torch.promote_types(kv.dtype, torch.float32))
    return both[0], both[1]


def _group(
    tokens: np.ndarray,
    facts: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    table: np.ndarray,
    num_queries: int,
    num_blocks: int,
    kv: Tensor,
    window: int | None,
) -> _Group:
    """tokens: each sequence's first row of q. facts: lens, first query's position, first block, own number of blocks."""
    lens, first_query, first_block, own_blocks = facts
    _, _, hkv, block_size, dim = kv.shape
    slab = block_size * dim
    if kv.stride()[1:] != (hkv * slab, slab, dim, 1) or kv.stride(0) % slab:
        raise ValueError(
            f"the cache's layer view must hold a block's [2, Hkv, BS, D] contiguously, its strides are {kv.stride()}"
        )
    column = np.arange(num_blocks)
    source = np.minimum(first_block[:, None] + column, max(table.shape[1] - 1, 0))
    blocks = np.where(column < own_blocks[:, None], np.take_along_axis(table, source, axis=1), _NULL_BLOCK).astype(np.int64)
    inner = np.arange(2 * hkv).reshape(2, 1, hkv, 1)
    rows = blocks[None, :, None, :] * (kv.stride(0) // slab) + inner
    key = first_block[:, None] * block_size + np.arange(num_blocks * block_size)
    query = first_query[:, None] + np.arange(num_queries)
    hidden = key[:, None, :] > query[:, :, None]
    unused = key >= lens[:, None]
    if window is not None:
        hidden |= key[:, None, :] <= query[:, :, None] - window
        unused |= key <= first_query[:, None] - window
    planes = np.arange(2).reshape(2, 1, 1, 1) * len(lens)
    stale_rows = (
        (planes + np.arange(len(lens)).reshape(1, -1, 1, 1)) * hkv + np.arange(hkv).reshape(1, 1, -1, 1)
    ) * unused.shape[1]
    stale = (stale_rows + np.arange(unused.shape[1]))[
        np.broadcast_to(unused[None, :, None, :], (2, len(lens), hkv, unused.shape[1]))
    ]
    device = kv.device
    return _Group(
        tokens=torch.from_numpy((tokens[:, None] + np.arange(num_queries)).reshape(-1).astype(np.int64)).to(device),
        rows=torch.from_numpy(rows.reshape(-1)).to(device),
        stale=torch.from_numpy(stale.astype(np.int64)).to(device),
        hidden=torch.from_numpy(hidden[:, None]).to(device),
        size=len(lens),
        num_queries=num_queries,
        num_blocks=num_blocks,
    )


def _padded(num_blocks: int) -> int:
    """Rounds up by less than a quarter, so that sequences of like lengths share a batch. A function of own length only."""
    step = max(1, (1 << (num_blocks.bit_length() - 1)) // 4)
    return -(-num_blocks // step) * step


def _host(values: Integers) -> np.ndarray:
    array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    return array.astype(np.int64, copy=False)
