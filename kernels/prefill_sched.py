"""Which tiles a step's prefill attention computes, and in what order: made once per step on the host, which decided the query
lengths anyway, and used by every layer. How a tile is computed is paged_prefill.py's business.

A sequence is cut from its own first query on, by a configuration chosen by its own number of queries, so that nothing of it
depends on companions. Sequences run one after the other, tiles with most keys first: those that run at the same time read the
same keys, which the L2 cache has then. The sequence whose shortest tile is longest runs first, so that the last tiles to start
are the shortest of all and no SM works alone for long: few queries behind a long context have no short tiles to end with.

    tiles int32 [N, 4]:   sequence   first row of q   tokens (0: nothing to do)   position of its first query (may be negative)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fairlane.kernels.prefill_tuning import PrefillConfig, PrefillTuning

_FIELDS = 4
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Tiles of one configuration: one launch. tiles: int32 [N, 4] on the device, those without tokens last."""

    config: PrefillConfig
    tiles: Tensor


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """At most two launches. It fits every layer with the same block table and group_size (Hq / Hkv), whatever its window.

    num_rows, num_sequences: how many rows q and the block table must have at least.
    """

    groups: tuple[TileGroup, ...]
    group_size: int
    num_rows: int
    num_sequences: int


class TileBuffers:
    """Device memory for the tiles of any step of up to max_tokens rows and max_num_seqs sequences, for steps that are captured
    in a CUDA graph: every plan made in it has the same addresses and grids, and a replay computes the latest one."""

    def __init__(
        self, max_tokens: int, max_num_seqs: int, group_size: int, tuning: PrefillTuning, device: torch.device | str
    ) -> None:
        self.group_size = group_size
        self.tuning = tuning
        per_tile = tuning.long.tokens_per_tile(group_size)
        most_short = tuning.short.tokens_per_tile(group_size)  # queries of a sequence that fits in one short tile
        sequences = min(max_num_seqs + 1, max_tokens)  # one more for the rows of padding
        long_sequences = min(sequences, max_tokens // (most_short + 1))
        self.capacities = (
            (max_tokens + long_sequences * (per_tile - 1)) // per_tile if long_sequences else 0,
            sequences if most_short else 0,
        )
        self.tiles = torch.zeros(sum(self.capacities), _FIELDS, dtype=torch.int32, device=device)


def plan_prefill(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    num_heads: int,
    num_kv_heads: int,
    *,
    tuning: PrefillTuning,
    device: torch.device | str,
    sequences: np.ndarray | None = None,
    window: int | None = None,
    padded_rows: int | None = None,
    buffers: TileBuffers | None = None,
) -> PrefillPlan:
    """Plans the prefill attention of a step, without waiting for the device.

    query_start_loc [B + 1], seq_lens [B]: of all the step's sequences; sequence b's queries are rows query_start_loc[b] ..
    query_start_loc[b + 1] and stand at the end of its seq_lens[b] tokens. sequences: the indices to plan, None for all; the
    others' rows are left alone. window: the layers', if they share one; it affects the order only. padded_rows: rows from
    query_start_loc[-1] up to this number are set to 0. buffers: where the tiles go, for a captured step; it invalidates the
    plans made in it before. Raises ValueError for bad arguments, or when the step exceeds the buffers.
    """
    starts, lens = np.asarray(query_start_loc, np.int64), np.asarray(seq_lens, np.int64)
    group_size = _group_size(num_heads, num_kv_heads, tuning, buffers)
    _check_step(starts, lens, padded_rows)
    chosen = np.arange(len(lens)) if sequences is None else np.asarray(sequences, np.int64)
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < len(lens)):
        raise ValueError(f"sequences must be indices below {len(lens)}, got {chosen.min()} .. {chosen.max()}")
    queries = starts[chosen + 1] - starts[chosen]
    jobs = np.stack([chosen, starts[chosen], queries, lens[chosen] - queries], axis=1)
    if padded_rows is not None and padded_rows > starts[-1]:
        padding = padded_rows - starts[-1]
        jobs = np.concatenate([jobs, [[0, starts[-1], padding, -padding]]])
    short = jobs[:, 2] * group_size <= tuning.short.block_m
    tiles = [
        _cut(jobs[picked], config.tokens_per_tile(group_size), window)
        for picked, config in ((~short, tuning.long), (short, tuning.short))
    ]
    return PrefillPlan(
        groups=_place(tiles, tuning, device) if buffers is None else _refill(tiles, buffers),
        group_size=group_size,
        num_rows=int((jobs[:, 1] + jobs[:, 2]).max(initial=0)),
        num_sequences=int(chosen.max(initial=-1)) + 1,
    )


def _group_size(num_heads: int, num_kv_heads: int, tuning: PrefillTuning, buffers: TileBuffers | None) -> int:
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
    group_size = num_heads // num_kv_heads
    if not tuning.long.tokens_per_tile(group_size):
        raise ValueError(f"{group_size} query heads for one KV head do not fit in a tile of {tuning.long.block_m} rows")
    if buffers is not None and (buffers.tuning, buffers.group_size) != (tuning, group_size):
        raise ValueError("the buffers were made for another tuning or group size")
    return group_size


def _check_step(starts: np.ndarray, lens: np.ndarray, padded_rows: int | None) -> None:
    if starts.ndim != 1 or lens.ndim != 1 or len(starts) != len(lens) + 1:
        raise ValueError(f"query_start_loc must be [B + 1] and seq_lens [B], got {starts.shape} and {lens.shape}")
    if starts[0] < 0 or (np.diff(starts) < 0).any() or (lens < 0).any():
        raise ValueError("query_start_loc must not decrease, and no length may be negative")
    if max(starts[-1], lens.max(initial=0), padded_rows or 0) > _INT32_MAX // 2:
        raise ValueError("rows and lengths must be below 2**30")


def _cut(jobs: np.ndarray, per_tile: int, window: int | None) -> np.ndarray:
    """Tiles [N, 4] of jobs [n, 4]: the same fields, for whole sequences. Job after job, by the keys of their shortest tile and
    then of their longest, most first; of each, the longest tile first. Ties keep the jobs' order."""
    if not len(jobs) or not per_tile:
        return np.empty((0, _FIELDS), np.int64)
    counts = -(-jobs[:, 2] // per_tile)
    job = np.repeat(np.arange(len(jobs)), counts)
    tiles = np.repeat(jobs, counts, axis=0)
    done = per_tile * (np.arange(len(tiles)) - np.repeat(np.cumsum(counts) - counts, counts))
    tiles[:, 1] += done
    tiles[:, 3] += done
    tiles[:, 2] = np.minimum(tiles[:, 2] - done, per_tile)
    end = np.maximum(tiles[:, 2] + tiles[:, 3], 0)
    keys = end if window is None else end - np.clip(tiles[:, 3] - window + 1, 0, end)
    fewest, most = np.full(len(jobs), _INT32_MAX, np.int64), np.zeros(len(jobs), np.int64)
    np.minimum.at(fewest, job, keys)
    np.maximum.at(most, job, keys)
    ordered: np.ndarray = tiles[np.lexsort((-keys, job, -most[job], -fewest[job]))]
    return ordered


def _place(tiles: list[np.ndarray], tuning: PrefillTuning, device: torch.device | str) -> tuple[TileGroup, ...]:
    """Fresh tensors of exactly the tiles there are; no launch for nothing."""
    placed = _pinned(np.concatenate(tiles), torch.device(device)).to(device, non_blocking=True)
    return _groups(tuning, placed, [len(part) for part in tiles])


def _refill(tiles: list[np.ndarray], buffers: TileBuffers) -> tuple[TileGroup, ...]:
    filled = np.zeros(tuple(buffers.tiles.shape), np.int64)
    first = 0
    for part, capacity in zip(tiles, buffers.capacities, strict=True):
        if len(part) > capacity:
            raise ValueError(f"the step has {len(part)} tiles where the buffers hold {capacity}")
        filled[first : first + len(part)] = part
        first += capacity
    buffers.tiles.copy_(_pinned(filled, buffers.tiles.device), non_blocking=True)
    return _groups(buffers.tuning, buffers.tiles, buffers.capacities)


def _groups(tuning: PrefillTuning, tiles: Tensor, sizes: Sequence[int]) -> tuple[TileGroup, ...]:
    parts = tiles[: sizes[0]], tiles[sizes[0] :]
    return tuple(TileGroup(config, part) for config, part in zip((tuning.long, tuning.short), parts, strict=True) if len(part))


def _pinned(values: np.ndarray, device: torch.device) -> Tensor:
    """Host memory that a copy may read while the host goes on: torch hands it out again only once that copy is over."""
    host = torch.from_numpy(values.astype(np.int32))
    return host.pin_memory() if device.type == "cuda" else host
