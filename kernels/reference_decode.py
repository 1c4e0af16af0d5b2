"""Paged attention of sequences with one query token each, in torch: all of them in a few calls. It decides how they are batched
and where their keys are gathered; sequences with more query tokens are reference_attention.py's business.

Calls on small tensors cost more than the arithmetic here, so what can be done once is done once: one gather, one fill and one
mask for the whole step, buffers and views made at the step's first layer and used by all of them. Three calls remain for
each batch of sequences of like lengths. A sequence is padded to a length that depends on its own length only, and every batch
element is computed by itself, so that a result does not depend on companions.

    gathered   | batch 0: [2, b0, Hkv, keys0, D] | batch 1: [2, b1, Hkv, keys1, D] | ...     scores likewise [b, Hq, keys]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_NULL_BLOCK = 0


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


@dataclass(frozen=True, slots=True)
class Members:
    """Facts about some sequences, one entry each, on the host: length, first query's position, first block gathered, blocks
    gathered, and the block table's row."""

    lens: np.ndarray
    first_query: np.ndarray
    first_block: np.ndarray
    num_blocks: np.ndarray
    table: np.ndarray

    def pick(self, indices: np.ndarray) -> Members:
        return Members(*(getattr(self, name)[indices] for name in Members.__slots__))


@dataclass(slots=True)
class DecodePlan:
    """Where the single queries of a step find their keys; the same for all layers that share block tables and window.

    tokens: int64 [b], rows of q, batch by batch; in_order: they are 0, 1, ... rows: int64, of the cache seen as rows [BS * D].
    stale: int64, rows of the gathered [.., D] view to be zeroed. batches: (sequences, keys) each; hidden: bool [b, 1, keys] each.
    """

    tokens: Tensor
    in_order: bool
    rows: Tensor
    stale: Tensor
    batches: tuple[tuple[int, int], ...]
    hidden: tuple[Tensor, ...]
    bound: _Bound | None = None


def plan_decode(tokens: np.ndarray, members: Members, kv: Tensor, window: int | None) -> DecodePlan:
    """tokens [b]: each sequence's row of q. members: of the same sequences, none of them empty."""
    padded = _padded(members.num_blocks)
    order = np.argsort(padded, kind="stable")
    sizes, counts = np.unique(padded, return_counts=True)
    rows, stale, hidden, base, first = [], [], [], 0, 0
    for num_blocks, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        chosen = members.pick(order[first : first + count])
        rows.append(cache_rows(chosen, num_blocks, kv).reshape(-1))
        unused = unused_keys(chosen, num_blocks, kv.shape[3], window)
        stale.append(base + stale_rows(unused, kv.shape[2]))
        hidden.append(torch.from_numpy(unused[:, None]).to(kv.device))
        base += 2 * kv.shape[2] * unused.size
        first += count
    tokens = tokens[order]
    batches = tuple((count, size * kv.shape[3]) for size, count in zip(sizes.tolist(), counts.tolist(), strict=True))
    return DecodePlan(
        tokens=torch.from_numpy(tokens.astype(np.int64)).to(kv.device),
        in_order=bool((tokens == np.arange(len(tokens))).all()),
        rows=torch.from_numpy(np.concatenate(rows)).to(kv.device),
        stale=torch.from_numpy(np.concatenate(stale)).to(kv.device),
        batches=batches,
        hidden=tuple(hidden),
    )


def decode_attention(
    q: Tensor, kv: Tensor, plan: DecodePlan, scale: float, softcap: float | None, workspace: Workspace
) -> Tensor:
    """Results [b, Hq, D] of q's rows plan.tokens, in that order; valid until the plan's next use."""
    bound = plan.bound
    if bound is None or not bound.fits(q, kv):
        bound = plan.bound = _Bound(plan, q, kv, workspace)
    bound.gather(kv)
    bound.q.copy_(q if plan.in_order and len(plan.tokens) == len(q) else q.index_select(0, plan.tokens)).mul_(scale)
    for query, keys, scores, _, _, _ in bound.views:
        torch.bmm(query, keys, out=scores)
    if softcap is not None:
        bound.scores.div_(softcap).tanh_().mul_(softcap)
    bound.scores.add_(bound.mask)
    for _, _, scores, shares, values, out in bound.views:
        torch.softmax(scores, dim=-1, out=shares)
        torch.bmm(shares, values, out=out)
    return bound.out


class _Bound:
    """A plan's buffers and the views into them, for one shape of q. They keep their memory alive."""

    def __init__(self, plan: DecodePlan, q: Tensor, kv: Tensor, workspace: Workspace) -> None:
        _, self._heads, dim = q.shape
        hkv, ratio = kv.shape[2], self._heads // kv.shape[2]
        dtype = torch.promote_types(kv.dtype, torch.float32)
        self._stale = plan.stale
        self._rows = plan.rows
        self._gathered = workspace.take(plan.rows.numel(), kv.shape[3] * dim, kv)
        self._dtype = kv.dtype
        self._wide = self._gathered if dtype == kv.dtype else torch.empty_like(self._gathered, dtype=dtype)
        self.q = torch.empty(len(plan.tokens), self._heads, dim, dtype=dtype, device=q.device)
        self.out = torch.empty_like(self.q)
        sizes = [b * self._heads * keys for b, keys in plan.batches]
        self.scores = torch.empty(sum(sizes), dtype=dtype, device=q.device)
        shares = torch.empty_like(self.scores)
        self.mask = torch.zeros_like(self.scores)
        self.views = []
        first, base, place = 0, 0, 0
        keys_and_values = self._wide.view(-1)
        for (b, keys), size, hidden in zip(plan.batches, sizes, plan.hidden, strict=True):
            k, v = keys_and_values[base : base + 2 * b * hkv * keys * dim].view(2, b * hkv, keys, dim)
            one = slice(place, place + size)
            self.mask[one].view(b, self._heads, keys).masked_fill_(hidden, float("-inf"))
            shape = (b * hkv, ratio, keys)
            query, out = (t[first : first + b].view(b * hkv, ratio, dim) for t in (self.q, self.out))
            self.views.append((query, k.transpose(1, 2), self.scores[one].view(shape), shares[one].view(shape), v, out))
            first, base, place = first + b, base + 2 * b * hkv * keys * dim, place + size

    def fits(self, q: Tensor, kv: Tensor) -> bool:
        return q.shape[1] == self._heads and kv.dtype == self._dtype

    def gather(self, kv: Tensor) -> None:
        """K and V of every sequence, zero wherever the cache holds nothing valid for it."""
        torch.index_select(as_slabs(kv), 0, self._rows, out=self._gathered)
        self._gathered.view(-1, kv.shape[4]).index_fill_(0, self._stale, 0)
        if self._wide is not self._gathered:
            self._wide.copy_(self._gathered)


# -- the cache as rows, shared with reference_attention.py ----------------------------------------------------------------


def as_slabs(kv: Tensor) -> Tensor:
    """A layer's view of the cache as rows [BS * D], one for each block, plane and head (and for other layers' between them)."""
    num_blocks, _, hkv, block_size, dim = kv.shape
    slab = block_size * dim
    if kv.stride()[1:] != (hkv * slab, slab, dim, 1) or kv.stride(0) % slab:
        raise ValueError(
            f"the cache's layer view must hold a block's [2, Hkv, BS, D] contiguously, its strides are {kv.stride()}"
        )
    return torch.as_strided(kv, ((num_blocks - 1) * (kv.stride(0) // slab) + 2 * hkv, slab), (slab, 1))


def cache_rows(members: Members, num_blocks: int, kv: Tensor) -> np.ndarray:
    """Rows of as_slabs(kv) that hold the members' keys: int64 [2, b, Hkv, num_blocks], the null block's beyond their own."""
    _, _, hkv, block_size, dim = kv.shape
    column = np.arange(num_blocks)
    source = np.minimum(members.first_block[:, None] + column, max(members.table.shape[1] - 1, 0))
    own = column < members.num_blocks[:, None]
    blocks = np.where(own, np.take_along_axis(members.table, source, axis=1), _NULL_BLOCK).astype(np.int64)
    inner = np.arange(2 * hkv).reshape(2, 1, hkv, 1)
    rows: np.ndarray = blocks[None, :, None, :] * (kv.stride(0) // (block_size * dim)) + inner
    return rows


def unused_keys(members: Members, num_blocks: int, block_size: int, window: int | None) -> np.ndarray:
    """bool [b, num_blocks * BS]: gathered keys that none of a member's queries sees."""
    key = members.first_block[:, None] * block_size + np.arange(num_blocks * block_size)
    unused = key >= members.lens[:, None]
    if window is not None:
        unused |= key <= members.first_query[:, None] - window
    return np.asarray(unused)


def stale_rows(unused: np.ndarray, hkv: int) -> np.ndarray:
    """Rows of a gathered [2, b, Hkv, keys, D] seen as [.., D] that unused [b, keys] names: int64."""
    return np.flatnonzero(np.broadcast_to(unused[None, :, None, :], (2, len(unused), hkv, unused.shape[1])))


def _padded(num_blocks: np.ndarray) -> np.ndarray:
    """Rounds up, so that sequences of like lengths share a batch: by less than half for up to 32 blocks, where a batch's calls
    cost more than the padding, by less than a quarter beyond. A function of own length only."""
    parts = np.where(num_blocks > 32, 4, 2)
    step = np.maximum(1, (1 << np.log2(num_blocks).astype(np.int64)) // parts)
    return np.asarray(-(-num_blocks // step) * step)
