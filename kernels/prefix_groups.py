"""Which sequences of a decode step share their leading KV blocks, and the memory in which that reaches the device and becomes
items of work. Who shares what is the caller's knowledge; how the shared keys are attended is prefix_decode.py's business.

    rows of the batch    0 1 2 3 4 5 6 7          two groups: {0, 2, 3, 6, 7} share 1024 tokens, {1, 4} share 512
    tiles of up to 4     [0 2 3] [6 7] [1 4]      a tile's members become the rows of one matrix
    row_shared           1024 512 1024 1024 512 0 1024 1024
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fairlane.kernels.decode_tuning import ChunkRule
from fairlane.kernels.prefix_tuning import PrefixTuning

INFO_FIELDS = 4  # member, its first partial row, its chunk size, how many of its chunks are shared
_ALIGN = 4  # int32 elements: 16 bytes


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """rows: of the batch, at least two. shared: the first `shared` tokens of each lie in the same blocks."""

    rows: Sequence[int] | np.ndarray
    shared: int


class PrefixGroups:
    """Device memory for any step's groups, all int32 at fixed addresses, so that a captured step computes the latest ones.

    members [T, R]: tiles of batch rows, -1 where there is none. row_shared [max_batch]: tokens that a row shares with its group,
    0 for none. Written by the schedule, for all layers: chunk_sizes, covered [max_batch], how a row is cut and how many of its
    chunks are shared; info [4, T, R], that of each member, beside its first partial row; items [max_items, 4] of (tile, begin,
    end, chunk's number); num_items [1].
    """

    def __init__(
        self,
        max_batch: int,
        max_items: int,
        group_size: int,
        device: torch.device,
        *,
        tuning: PrefixTuning,
        chunks: ChunkRule,
        num_programs: int,
    ) -> None:
        """max_items: partial results there is room for. chunks: the decode attention's. num_programs: of the persistent grid.
        Raises ValueError for chunks that do not hold whole tiles of keys."""
        if any(size % tuning.block_n for size in chunks.sizes):
            raise ValueError(f"chunks of {chunks.sizes} keys do not hold whole tiles of {tuning.block_n}")
        self.max_batch, self.group_size = max_batch, group_size
        self.tuning, self.num_programs = tuning, num_programs
        self.members_per_tile = tuning.members_per_tile(group_size)
        self.max_tiles = max(1, max_batch // 2)  # each has two members at least
        first_tile = -(-max_batch // _ALIGN) * _ALIGN
        self._table = torch.full((first_tile + self.max_tiles * self.members_per_tile,), -1, dtype=torch.int32, device=device)
        self.row_shared = self._table[:max_batch].zero_()
        self.members = self._table[first_tile:].view(self.max_tiles, self.members_per_tile)
        self.chunk_sizes, self.covered = (torch.zeros(max_batch, dtype=torch.int32, device=device) for _ in range(2))
        self.info = torch.zeros(INFO_FIELDS, self.max_tiles, self.members_per_tile, dtype=torch.int32, device=device)
        # Every program reads its first record before it knows how many there are.
        self.items = torch.zeros(max(max_items, num_programs + 1), 4, dtype=torch.int32, device=device)
        self.num_items = torch.zeros(1, dtype=torch.int32, device=device)
        self.stream = torch.cuda.Stream(device) if tuning.concurrent and device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def fill(self, groups: Sequence[PrefixGroup]) -> None:
        """Makes these the groups of the schedules to come, without waiting for those in flight. Raises ValueError, and changes
        nothing, for a row that is named twice or lies outside the batch."""
        shared = np.zeros(self.max_batch, dtype=np.int32)
        tiles = np.full(tuple(self.members.shape), -1, dtype=np.int32)
        used = 0
        for group in groups:
            rows = np.asarray(group.rows, dtype=np.int64)
            if not rows.size or rows.min() < 0 or rows.max() >= self.max_batch or group.shared < 0:
                raise ValueError(f"a group needs rows in [0, {self.max_batch}) and a length, got {rows.tolist()}, {group.shared}")
            if len(np.unique(rows)) != len(rows) or shared[rows].any():
                raise ValueError(f"a row is in two places of the groups: {rows.tolist()}")
            for tile in np.array_split(rows, -(-len(rows) // self.members_per_tile)):
                if len(tile) > 1 and group.shared:  # alone, a row gains nothing here
                    tiles[used, : len(tile)] = tile
                    shared[tile] = group.shared
                    used += 1
        table = np.full(self._table.shape[0], -1, dtype=np.int32)
        table[: self.max_batch] = shared
        table[-tiles.size :] = tiles.ravel()
        host = torch.from_numpy(table)
        self._table.copy_(host.pin_memory() if self._table.is_cuda else host, non_blocking=True)
