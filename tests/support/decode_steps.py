"""Decode steps on the device for the attention's tests: slots that hold no token are NaN, table entries that must not be followed
lead nowhere. The oracle is the definition, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from device import cuda

NOWHERE = 2**31 - 1
NAN = float("nan")
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}  # of ||error|| / ||exact||


@dataclass(frozen=True)
class Geometry:
    """A model's attention, and how its cache is laid out."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    layers: int = 2


LLAMA = Geometry()


@dataclass(frozen=True)
class Step:
    """A decode step: q [B, Hq, D], the pool [num_blocks, L, 2, Hkv, BS, D], of which layer 1 counts, and who has which blocks."""

    shape: Geometry
    lens: list[int]
    q: Tensor
    pool: Tensor
    table: Tensor

    @property
    def kv(self) -> Tensor:
        return self.pool[:, 1]

    @property
    def seq_lens(self) -> Tensor:
        return torch.tensor(self.lens, dtype=torch.int32, device=self.q.device)

    def pick(self, rows: list[int]) -> Step:
        return replace(self, lens=[self.lens[row] for row in rows], q=self.q[rows], table=self.table[rows])


def make_step(lens: list[int], shape: Geometry = LLAMA, *, seed: int = 0, num_blocks: int = 0) -> Step:
    """num_blocks: of a pool larger than needed; the blocks used are its last ones."""
    generator = torch.Generator(cuda).manual_seed(seed)
    size, dim, heads = shape.block_size, shape.head_dim, shape.num_kv_heads
    needed = [-(-n // size) for n in lens]
    num_blocks = max(num_blocks, sum(needed) + 4)
    order = (num_blocks - 1 - torch.randperm(sum(needed) + 2, generator=generator, device=cuda)).int()
    pool = torch.empty(num_blocks, shape.layers, 2, heads, size, dim, dtype=shape.dtype, device=cuda)
    pool[:, 1] = NAN
    table = torch.full((len(lens), max(needed, default=0) + 2), NOWHERE, dtype=torch.int32, device=cuda)
    for row, (n, count) in enumerate(zip(lens, needed, strict=True)):
        table[row, :count], order = order[:count], order[count:]
        position = torch.arange(n, device=cuda)
        blocks = table[row, position // size].long()
        fresh = torch.randn(n, 2, heads, dim, generator=generator, device=cuda).to(shape.dtype)
        pool[:, 1].permute(0, 3, 1, 2, 4)[blocks, position % size] = fresh
    q = torch.randn(len(lens), shape.num_heads, dim, generator=generator, device=cuda).to(shape.dtype)
    return Step(shape, lens, q, pool, table)


def exact(step: Step, window: int | None = None, softcap: float | None = None) -> Tensor:
    """[B, Hq, D] in float64, from the definition."""
    shape = step.shape
    out = torch.zeros(step.q.shape, dtype=torch.float64, device=step.q.device)
    for row, n in enumerate(step.lens):
        if n == 0:
            continue
        position = torch.arange(0 if window is None else max(0, n - window), n, device=step.q.device)
        blocks = step.table[row, position // shape.block_size].long()
        seen = step.kv.permute(0, 3, 1, 2, 4)[blocks, position % shape.block_size].double()  # [n, 2, Hkv, D]
        q = step.q[row].double().view(shape.num_kv_heads, -1, shape.head_dim)
        scores = torch.einsum("hgd,nhd->hgn", q, seen[:, 0]) * shape.head_dim**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out[row] = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), seen[:, 1]).reshape(out[row].shape)
    return out


def share(step: Step, rows: Sequence[int], shared: int) -> None:
    """Makes the first `shared` tokens of these rows the first row's, block for block; whole blocks only. The others' own blocks
    are left to nobody, and NaN."""
    assert shared % step.shape.block_size == 0 and all(step.lens[row] >= shared for row in rows)
    blocks = shared // step.shape.block_size
    for row in rows[1:]:
        step.kv[step.table[row, :blocks].long()] = NAN
        step.table[row, :blocks] = step.table[rows[0], :blocks]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def error(found: Tensor, step: Step, window: int | None = None, softcap: float | None = None) -> float:
    """The worst row's ||error|| / ||exact||; NaN becomes infinite. Rows that are exactly 0 must be so."""
    truth = exact(step, window, softcap)
    difference = (found.double() - truth).flatten(1).norm(dim=1)
    norm = truth.flatten(1).norm(dim=1)
    return float(torch.where(norm > 0, difference / norm, difference * 1e9).nan_to_num(nan=float("inf")).max())
