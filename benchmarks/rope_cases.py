"""What a decode step does between a layer's first product and its attention's result: norm, rope, cache write and attention, in
one kernel and in two. Up to how many rows the former is faster decides the decode tuning's fuse_rope_rows; that the bits are the
same is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from attention_cases import NAN, DecodeBench, Geometry, K, exact_attention
from gpu_timing import Call
from kernel_case import Case, World, worst_row
from torch import Tensor

from fairlane.kernels import decode_tuning
from fairlane.kernels.decode_sched import DecodeWorkspace
from fairlane.kernels.decode_tuning import DecodeTuning
from fairlane.kernels.new_tokens import NewTokens
from fairlane.kernels.rope_decode import rope_decode

ANY_ROWS = 2**31
_SMALL = Geometry(num_heads=16)  # Qwen3-0.6B's, which norms q and k
_SHAPES = {
    "1x1k": ([K], Geometry()),
    "8x1k": ([K] * 8, Geometry()),
    "8x4k": ([4 * K] * 8, Geometry()),
    "32x1k": ([K] * 32, Geometry()),
    "64x576": ([576] * 64, Geometry()),
    "128x600 MHA": ([600] * 128, Geometry(num_kv_heads=32)),
    "1x1k 0.6B": ([K], _SMALL),
    "32x1k 0.6B": ([K] * 32, _SMALL),
}


class RopeDecodeBench(DecodeBench):
    """One layer's, under the schedule of a graph that may not count on a longest sequence. The new tokens are the last of each
    sequence. normed: whether q and k are."""

    def __init__(self, world: World, lens: Sequence[int], geometry: Geometry, fused: bool, normed: bool) -> None:
        super().__init__(world, lens, geometry, bounded=False)
        self.candidates = ()  # paged_decode's
        g, size, last = self._geometry, self._geometry.block_size, self._seq_lens.long() - 1
        blocks = self._paged.block_table.gather(1, (last // size)[:, None])[:, 0].long()
        self._fused, self._place = fused, (blocks, last % size)
        frequencies = 500000.0 ** -torch.linspace(0, 1, g.head_dim // 2, device=world.device)
        angles = torch.outer(torch.arange(8 * K, device=world.device), frequencies)
        tables = angles.cos(), angles.sin()
        q_norm, k_norm = (world.normal(g.head_dim) if normed else None for _ in range(2))
        self._new = [
            NewTokens(qkv, last, blocks * size + last % size, *tables, q_norm, k_norm, 1e-6)
            for qkv in world.normal(len(self._q), len(self._lens), (g.num_heads + 2 * g.num_kv_heads) * g.head_dim)
        ]

    def calls(self, config: DecodeTuning | None = None) -> Sequence[Call]:
        workspace = self._workspace_of(self._fused)
        return [partial(self._run, workspace, layer, new) for layer, new in enumerate(self._new)]

    def error(self, config: DecodeTuning | None = None) -> float:
        """Infinite too where the two ways differ by a bit."""
        kv, (blocks, offsets) = self._paged.kv(0).permute(0, 3, 1, 2, 4), self._place
        found: list[list[Tensor]] = []
        for fused in (True, False):
            kv[blocks, offsets] = NAN
            self._out[0] = NAN
            new = replace(self._new[0], qkv=self._new[0].qkv.clone())
            self._run(self._workspace_of(fused), 0, new)
            found.append([self._out[0].clone(), kv[blocks, offsets]])
        if not all(torch.equal(one, two) for one, two in zip(*found, strict=True)):
            return float("inf")  # NaN equals nothing
        g = self._geometry
        q = new.qkv[:, : g.num_heads * g.head_dim].view(self._q[0].shape)  # as the kernel of its own left it
        errors = []
        for row in sorted({0, len(self._lens) - 1}):
            last = torch.tensor([self._lens[row] - 1], device=q.device)
            exact = exact_attention(q[row : row + 1], self._paged.tokens(row, 0), last, g)
            errors.append(worst_row(self._out[0, row : row + 1], exact))
        return max(errors)

    def peers(self) -> Mapping[str, Sequence[Call]]:
        return {}  # the other case of the shape is what this is compared with

    def _workspace_of(self, fused: bool) -> DecodeWorkspace:
        g = self._geometry
        tuning = decode_tuning.tuning_for(g.head_dim, g.group_size, self._world.dtype, g.block_size)
        return self._workspace(replace(tuning, fuse_rope_rows=ANY_ROWS if fused else 0))

    def _run(self, workspace: DecodeWorkspace, layer: int, new: NewTokens) -> None:
        rope_decode(
            new,
            self._paged.kv(layer),
            self._paged.block_table,
            self._seq_lens,
            num_heads=self._geometry.num_heads,
            scale=self._geometry.scale,
            workspace=workspace,
            out=self._out[layer],
        )


def rope_cases(block_size: int) -> list[Case]:
    """Each shape in one kernel and in two, next to each other."""
    cases = []
    for name, (lens, shape) in _SHAPES.items():
        for fused in (True, False):
            geometry = replace(shape, block_size=block_size)
            prepare = partial(RopeDecodeBench, lens=lens, geometry=geometry, fused=fused, normed=shape is _SMALL)
            how = "in one" if fused else "in two"
            cases.append(Case("rope", "rope_decode", f"{name}, {how}", prepare, None, block_size))
    return cases
