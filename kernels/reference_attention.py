"""Paged attention in torch: a plan made once per step, then one call per layer. It decides which sequences are computed in
batches (one query token each: reference_decode.py) and computes the others (chunks, prefix hits) one by one through SDPA.

Keys that a query must not see may hold anything, NaN too: gathered K and V are zeroed there before use, since 0 * NaN would
poison the sum.

    cached positions   [first_block * BS .......... seq_len)  gathered, in whole blocks
                                      ^ tail of the last block, and what is before the window: zeroed, masked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fairlane.kernels.reference_decode import (
    DecodePlan,
    Members,
    Workspace,
    as_slabs,
    cache_rows,
    decode_attention,
    plan_decode,
    stale_rows,
    unused_keys,
)

__all__ = ["AttentionPlan", "Workspace", "paged_attention", "plan_attention"]

Integers = Sequence[int] | np.ndarray | Tensor  # on the host, or copied there


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with several query tokens.

    tokens: its rows of q. rows: int64 [2 * Hkv * blocks] of the cache seen as rows [BS * D]. stale: int64, rows of the
    gathered [.., D] view to be zeroed. visible: bool [num_queries, keys].
    """

    tokens: slice
    rows: Tensor
    stale: Tensor
    visible: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where a step's queries find their keys; the same for all layers that share block tables and window.

    empty: rows of q that see no key at all; their output is 0.
    """

    decode: DecodePlan | None
    chunks: tuple[_Chunk, ...]
    empty: Tensor


def plan_attention(
    query_start_loc: Integers,
    seq_lens: Integers,
    block_table: Tensor,
    kv: Tensor,
    window: int | None = None,
) -> AttentionPlan:
    """Plans a step on the host. query_start_loc [B + 1], seq_lens [B] (with the step's own tokens), block_table int [B, MB].

    kv: any layer's view [num_blocks, 2, Hkv, BS, D] of the cache. window W: key j is visible to query i iff i - W < j <= i.
    Entries of a table row beyond its sequence, or wholly before its window, are never read. Raises ValueError for a cache that
    does not hold a block contiguously.
    """
    as_slabs(kv)
    starts, lens = _host(query_start_loc), _host(seq_lens)
    table = _host(block_table).reshape(len(lens), -1)
    block_size = kv.shape[3]
    queries = np.diff(starts)
    queries_seen = np.minimum(queries, lens)  # a row before position 0 sees nothing
    first_query = lens - queries_seen
    first_key = np.maximum(first_query - window + 1, 0) if window is not None else np.zeros_like(lens)
    first_block = first_key // block_size
    num_blocks = -(-lens // block_size) - first_block
    members = Members(lens, first_query, first_block, num_blocks, table)
    single = np.flatnonzero(queries_seen == 1)
    decode = plan_decode(starts[single + 1] - 1, members.pick(single), kv, window) if len(single) else None
    chunks = [_plan_chunk(starts[i + 1], members.pick(np.array([i])), kv, window) for i in np.flatnonzero(queries_seen > 1)]
    empty = [row for s, n in zip(starts, queries - queries_seen, strict=False) for row in range(s, s + n)]
    return AttentionPlan(decode, tuple(chunks), torch.tensor(empty, dtype=torch.int64, device=kv.device))


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
    workspace = workspace or Workspace()
    decoded = None
    if plan.decode is not None:
        decoded = decode_attention(q, kv, plan.decode, scale, softcap, workspace)
        if plan.decode.in_order and len(decoded) == len(q):
            return decoded.to(q.dtype, copy=True)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if decoded is not None and plan.decode is not None:
        out.index_copy_(0, plan.decode.tokens, decoded.to(q.dtype))
    for chunk in plan.chunks:
        out[chunk.tokens] = _attend(q[chunk.tokens], kv, chunk, scale, softcap, workspace)
    if plan.empty.numel():
        out.index_fill_(0, plan.empty, 0)
    return out


def _attend(q: Tensor, kv: Tensor, chunk: _Chunk, scale: float, softcap: float | None, workspace: Workspace) -> Tensor:
    """q [n, Hq, D] of one sequence -> [n, Hq, D]. The query heads that share a KV head become rows of one matrix."""
    k, v = _gather(kv, chunk, workspace)
    hkv, _, dim = k.shape
    n, ratio = len(q), q.shape[1] // hkv
    packed = q.to(k.dtype).view(n, hkv, ratio, dim).permute(1, 2, 0, 3).reshape(1, hkv, ratio * n, dim)
    if softcap is None:
        visible = chunk.visible.repeat(ratio, 1)
        result = torch.nn.functional.scaled_dot_product_attention(packed, k[None], v[None], attn_mask=visible, scale=scale)
    else:
        scores = torch.matmul(packed * scale, k.transpose(-1, -2)).div_(softcap).tanh_().mul_(softcap)
        scores.view(hkv, ratio, n, -1).masked_fill_(~chunk.visible, float("-inf"))
        result = torch.matmul(torch.softmax(scores, dim=-1), v)
    return result.reshape(hkv, ratio, n, dim).permute(2, 0, 1, 3).reshape(n, q.shape[1], dim)


def _gather(kv: Tensor, chunk: _Chunk, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """K and V of a sequence, [Hkv, keys, D] each, zero wherever the cache holds nothing valid for it."""
    _, _, hkv, block_size, dim = kv.shape
    gathered = workspace.take(chunk.rows.numel(), block_size * dim, kv)
    torch.index_select(as_slabs(kv), 0, chunk.rows, out=gathered)
    gathered.view(-1, dim).index_fill_(0, chunk.stale, 0)
    both = gathered.view(2, hkv, -1, dim).to(torch.promote_types(kv.dtype, torch.float32))
    return both[0], both[1]


def _plan_chunk(end: int, member: Members, kv: Tensor, window: int | None) -> _Chunk:
    """end: the row of q after the sequence's last. member: of this one sequence."""
    block_size, num_blocks = kv.shape[3], int(member.num_blocks[0])
    num_queries = int(member.lens[0] - member.first_query[0])
    query = member.first_query[0] + np.arange(num_queries)[:, None]
    key = member.first_block[0] * block_size + np.arange(num_blocks * block_size)
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    stale = stale_rows(unused_keys(member, num_blocks, block_size, window), kv.shape[2])
    return _Chunk(
        tokens=slice(int(end) - num_queries, int(end)),
        rows=torch.from_numpy(cache_rows(member, num_blocks, kv).reshape(-1)).to(kv.device),
        stale=torch.from_numpy(stale).to(kv.device),
        visible=torch.from_numpy(visible).to(kv.device),
    )


def _host(values: Integers) -> np.ndarray:
    array = values.cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    return array.astype(np.int64, copy=False)
