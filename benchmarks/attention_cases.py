"""The attention cases: decode and prefill over a paged cache whose blocks are shuffled and belong to one sequence each, but for
what a case says is shared. A case's input sets are the layers of one pool, as in the engine; what holds no token is NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np
import sdpa_peer
import torch
from gpu_timing import Call
from kernel_case import Bench, Case, World, worst_row
from kernel_targets import CASCADE, DECODE, PREFILL
from torch import Tensor

from fairlane.kernels import decode_tuning, prefill_tuning, prefix_tuning
from fairlane.kernels.decode_sched import DecodeWorkspace, max_items_for
from fairlane.kernels.decode_tuning import DecodeTuning
from fairlane.kernels.paged_decode import paged_decode
from fairlane.kernels.paged_prefill import paged_prefill
from fairlane.kernels.prefill_sched import plan_prefill
from fairlane.kernels.prefill_tuning import PrefillConfig
from fairlane.kernels.prefix_groups import PrefixGroup
from fairlane.kernels.prefix_tuning import PrefixTuning

NAN = float("nan")
NOWHERE = 2**31 - 1
SPARE_BLOCKS = 3
CHECKED_SEQUENCES, CHECKED_QUERIES = 4, 48
K = 1024


@dataclass(frozen=True)
class Geometry:
    """A model's attention."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def kv_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        return 2 * tokens * self.num_kv_heads * self.head_dim * dtype.itemsize

    def shrunk(self) -> Geometry:
        """For the interpreter."""
        return replace(self, num_heads=2 * self.group_size, num_kv_heads=2, head_dim=32)


class PagedPool:
    """pool [num_blocks, layers, 2, Hkv, BS, D], its blocks shuffled among sequences of the given lengths; block_table [B, MB].
    shared: tokens, whole blocks, for which all sequences have the first one's blocks."""

    def __init__(self, world: World, geometry: Geometry, lens: Sequence[int], layers: int, shared: int = 0) -> None:
        self.geometry, self.lens = geometry, lens
        size = geometry.block_size
        common = shared // size
        needed = [-(-n // size) - (common if row else 0) for row, n in enumerate(lens)]
        order = torch.randperm(sum(needed) + SPARE_BLOCKS, device=world.device) + 1
        shape = (len(order) + 1, layers, 2, geometry.num_kv_heads, size, geometry.head_dim)
        self.pool = world.normal(*shape)
        self.pool[0] = 0.0
        self.pool[order[sum(needed) :]] = NAN
        width = -(-max(lens) // size) + 1
        self.block_table = torch.full((len(lens), width), NOWHERE, dtype=torch.int32, device=world.device)
        for row, (begin, count) in enumerate(zip(accumulate([0, *needed]), needed, strict=False)):
            first = common if row else 0
            self.block_table[row, :first] = self.block_table[0, :first]
            self.block_table[row, first : first + count] = order[begin : begin + count]
            if lens[row] % size:
                self.pool[order[begin + count - 1], :, :, :, lens[row] % size :] = NAN

    def kv(self, layer: int) -> Tensor:
        return self.pool[:, layer]

    def tokens(self, row: int, layer: int) -> Tensor:
        """Keys and values of a sequence, in order: float64 [2, Hkv, n, D]."""
        position = torch.arange(self.lens[row], device=self.pool.device)
        blocks = self.block_table[row, position // self.geometry.block_size].long()
        slots = position % self.geometry.block_size
        return self.kv(layer).permute(0, 3, 1, 2, 4)[blocks, slots].permute(1, 2, 0, 3).double()


def exact_attention(q: Tensor, tokens: Tensor, positions: Tensor, geometry: Geometry) -> Tensor:
    """float64 [N, Hq, D]: q [N, Hq, D], the query tokens at these positions, over tokens [2, Hkv, n, D]."""
    heads = q.double().unflatten(1, (geometry.num_kv_heads, geometry.group_size))  # type: ignore[no-untyped-call]
    scores = torch.einsum("nhgd,hkd->nhgk", heads, tokens[0]) * geometry.scale
    hidden = torch.arange(tokens.shape[2], device=q.device) > positions[:, None]
    scores.masked_fill_(hidden[:, None, None, :], -torch.inf)
    return torch.einsum("nhgk,hkd->nhgd", scores.softmax(-1), tokens[1]).flatten(1, 2)


class DecodeBench(Bench):
    """One layer's attention of one query per sequence; the schedule, made once per step for all layers, is not timed.

    bounded: the caller knows the longest sequence, and says so. shared: tokens of a prefix that all sequences share; its bytes
    count once.
    """

    def __init__(self, world: World, lens: Sequence[int], geometry: Geometry, bounded: bool = True, shared: int = 0) -> None:
        self._world, self._bounded = world, bounded
        self._geometry = geometry.shrunk() if world.tiny else geometry
        smallest = world.size(shared, 512) + 40
        self._lens = [world.size(n, smallest + 7 * row) for row, n in enumerate(lens[: world.size(len(lens), 3)])]
        self._shared = world.size(shared, 512)
        read = self._shared + sum(n - self._shared for n in self._lens)
        self.bytes_moved = float(self._geometry.kv_bytes(read, world.dtype))
        short = bounded and max(lens) <= 64
        self.candidates = decode_tuning.SHORT_CANDIDATES if short else decode_tuning.CANDIDATES
        if shared:
            self.candidates = ()  # these are for sequences on their own
        sets = world.sets(self.bytes_moved)
        self._paged = PagedPool(world, self._geometry, self._lens, sets, self._shared)
        self._q = world.normal(sets, len(self._lens), self._geometry.num_heads, self._geometry.head_dim)
        self._out = torch.full_like(self._q, NAN)
        self._seq_lens = torch.tensor(self._lens, dtype=torch.int32, device=world.device)

    def calls(self, config: DecodeTuning | None = None) -> Sequence[Call]:
        workspace = self._workspace(config)
        return [partial(self._attend, workspace, layer) for layer in range(len(self._q))]

    def error(self, config: DecodeTuning | None = None) -> float:
        self._out[0] = NAN
        self._attend(self._workspace(config), 0)
        if not bool(torch.isfinite(self._out[0]).all()):
            return float("inf")
        rows = {0, len(self._lens) // 2, len(self._lens) - 1, self._lens.index(max(self._lens))}
        return max(self._row_error(row) for row in sorted(rows)[:CHECKED_SEQUENCES])

    def peers(self) -> Mapping[str, Sequence[Call]]:
        if len(set(self._lens)) > 1 or self._shared:
            return {}
        g = self._geometry
        return sdpa_peer.calls(
            self._world, len(self._lens), (g.num_heads, g.num_kv_heads), (1, self._lens[0]), g.head_dim, self.bytes_moved
        )

    def _row_error(self, row: int) -> float:
        last = torch.tensor([self._lens[row] - 1], device=self._q.device)
        exact = exact_attention(self._q[0, row : row + 1], self._paged.tokens(row, 0), last, self._geometry)
        return worst_row(self._out[0, row : row + 1], exact)

    def _workspace(self, tuning: DecodeTuning | None) -> DecodeWorkspace:
        g, batch = self._geometry, len(self._lens)
        tuning = tuning or decode_tuning.tuning_for(g.head_dim, g.group_size, self._world.dtype, g.block_size)
        workspace = DecodeWorkspace(
            batch,
            max_items_for(batch, max(self._lens) if self._bounded else 8 * K, tuning),
            g.num_heads,
            g.num_kv_heads,
            g.head_dim,
            self._world.device,
            self._world.dtype,
            block_size=g.block_size,
            tuning=tuning,
        )
        workspace.schedule(self._seq_lens, max_seq_len=max(self._lens) if self._bounded else None)
        return workspace

    def _attend(self, workspace: DecodeWorkspace, layer: int) -> None:
        paged_decode(
            self._q[layer],
            self._paged.kv(layer),
            self._paged.block_table,
            self._seq_lens,
            scale=self._geometry.scale,
            workspace=workspace,
            out=self._out[layer],
        )


class CascadeBench(DecodeBench):
    """The same, with the prefix that all sequences share computed once per tile of them."""

    def __init__(self, world: World, lens: Sequence[int], geometry: Geometry, shared: int) -> None:
        super().__init__(world, lens, geometry, bounded=False, shared=shared)
        self.candidates = prefix_tuning.CANDIDATES

    def _workspace(self, tuning: PrefixTuning | None) -> DecodeWorkspace:  # type: ignore[override]  # of its own candidates
        g, batch, dtype = self._geometry, len(self._lens), self._world.dtype
        decode = decode_tuning.tuning_for(g.head_dim, g.group_size, dtype, g.block_size)
        workspace = DecodeWorkspace(
            batch,
            max_items_for(batch, 8 * K, decode),
            g.num_heads,
            g.num_kv_heads,
            g.head_dim,
            self._world.device,
            dtype,
            block_size=g.block_size,
            tuning=decode,
            prefix=tuning or prefix_tuning.tuning_for(g.head_dim, dtype),
        )
        assert workspace.groups is not None
        workspace.groups.fill([PrefixGroup(range(batch), self._shared)])
        workspace.schedule(self._seq_lens, cascade=True)
        return workspace


class PrefillBench(Bench):
    """One layer's attention of the last `queries` tokens of each of `batch` sequences of seq_len tokens."""

    def __init__(self, world: World, batch: int, queries: int, seq_len: int, geometry: Geometry) -> None:
        self._world = world
        self._geometry = geometry.shrunk() if world.tiny else geometry
        self._queries, self._seq_len = (world.size(queries, 20), world.size(seq_len, 20 + min(seq_len - queries, 13)))
        self._lens = [self._seq_len] * world.size(batch, 2)
        g, rows = self._geometry, self._queries * len(self._lens)
        visible = self._queries * (self._seq_len - self._queries) + self._queries * (self._queries + 1) // 2
        self.flops = 4.0 * visible * len(self._lens) * g.num_heads * g.head_dim
        moved = g.kv_bytes(sum(self._lens), world.dtype) + 2 * rows * g.num_heads * g.head_dim * world.dtype.itemsize
        self.bytes_moved = float(moved)
        self.candidates = (self._tuning().long, *prefill_tuning.CANDIDATES)
        sets = world.sets(self.bytes_moved)
        self._paged = PagedPool(world, g, self._lens, sets)
        self._q = world.normal(sets, rows, g.num_heads, g.head_dim)
        self._out = torch.full_like(self._q, NAN)

    def calls(self, config: PrefillConfig | None = None) -> Sequence[Call]:
        g = self._geometry
        tuning = self._tuning() if config is None else replace(self._tuning(), long=config)
        starts = np.arange(len(self._lens) + 1) * self._queries
        plan = plan_prefill(starts, np.array(self._lens), g.num_heads, g.num_kv_heads, tuning=tuning, device=self._world.device)

        def attend(layer: int) -> None:
            kv, table = self._paged.kv(layer), self._paged.block_table
            paged_prefill(self._q[layer], kv, table, plan, scale=g.scale, out=self._out[layer])

        return [partial(attend, layer) for layer in range(len(self._q))]

    def error(self, config: PrefillConfig | None = None) -> float:
        self._out[0] = NAN
        self.calls(config)[0]()
        if not bool(torch.isfinite(self._out[0]).all()):
            return float("inf")
        return max(self._sequence_error(row) for row in {0, len(self._lens) - 1})

    def peers(self) -> Mapping[str, Sequence[Call]]:
        g = self._geometry
        return sdpa_peer.calls(
            self._world,
            len(self._lens),
            (g.num_heads, g.num_kv_heads),
            (self._queries, self._seq_len),
            g.head_dim,
            self.bytes_moved,
        )

    def _tuning(self) -> prefill_tuning.PrefillTuning:
        return prefill_tuning.tuning_for(self._geometry.head_dim, self._geometry.group_size, self._world.dtype)

    def _sequence_error(self, row: int) -> float:
        chosen = torch.randperm(self._queries, device=self._q.device)[:CHECKED_QUERIES]
        chosen[:2] = torch.tensor([0, self._queries - 1])
        at = row * self._queries + chosen
        positions = self._seq_len - self._queries + chosen
        exact = exact_attention(self._q[0, at], self._paged.tokens(row, 0), positions, self._geometry)
        return worst_row(self._out[0, at], exact)


_DECODE_LENS: dict[str, list[int]] = {
    "1x1k": [K],
    "1x8k": [8 * K],
    "1x32k": [32 * K],
    "1x128k": [128 * K],
    "8x1k": [K] * 8,
    "8x4k": [4 * K] * 8,
    "32x1k": [K] * 32,
    "32x4k": [4 * K] * 32,
    "64x4k": [4 * K] * 64,
    "8x32k": [32 * K] * 8,
    "256x64": [64] * 256,
    "32x4k MHA": [4 * K] * 32,
    "1x128k+31x4k": [128 * K, *[4 * K] * 31],
}
_SHARED = {
    "64x(4k shared + 256)": (64, 4 * K, 256),
    "8x(4k shared + 256)": (8, 4 * K, 256),
    "256x(1k shared + 256)": (256, K, 256),
}
_PREFILL_SHAPES = {
    "4x512": (4, 512, 512),
    "2x2048": (2, 2 * K, 2 * K),
    "1x8192": (1, 8 * K, 8 * K),
    "2x(512 on 4096)": (2, 512, 4 * K + 512),
    "8x1000 MHA": (8, 1000, 1000),
}


def decode_cases(block_size: int) -> list[Case]:
    cases = []
    for name, lens in _DECODE_LENS.items():
        geometry = Geometry(num_kv_heads=32 if "MHA" in name else 8, block_size=block_size)
        prepare = partial(DecodeBench, lens=lens, geometry=geometry)
        cases.append(Case("decode", "paged_decode", name, prepare, DECODE[name], block_size))
    # The same batch where no graph may count on its being short.
    unknown = partial(DecodeBench, lens=[64] * 256, geometry=Geometry(block_size=block_size), bounded=False)
    cases.append(Case("decode", "paged_decode", "256x64, unbounded", unknown, None, block_size))
    return cases


def cascade_cases(block_size: int) -> list[Case]:
    """A prompt that many sequences share, read once and, for comparison, by each of them: from the L2 cache, mostly."""
    cases = []
    for name, (batch, shared, own) in _SHARED.items():
        lens, geometry = [shared + own] * batch, Geometry(block_size=block_size)
        once = partial(CascadeBench, lens=lens, geometry=geometry, shared=shared)
        each = partial(DecodeBench, lens=lens, geometry=geometry, bounded=False, shared=shared)
        cases.append(Case("cascade", "prefix_decode", name, once, CASCADE.get(name), block_size))
        cases.append(Case("cascade", "paged_decode", f"{name}, each", each, None, block_size))
    return cases


def prefill_cases(block_size: int) -> list[Case]:
    cases = []
    for name, (batch, queries, seq_len) in _PREFILL_SHAPES.items():
        geometry = Geometry(num_kv_heads=32 if "MHA" in name else 8, block_size=block_size)
        prepare = partial(PrefillBench, batch=batch, queries=queries, seq_len=seq_len, geometry=geometry)
        cases.append(Case("prefill", "paged_prefill", name, prepare, PREFILL.get(name), block_size))
    return cases
