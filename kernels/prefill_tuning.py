"""Tile sizes of the prefill attention: offline tables by head_dim, group size and dtype, and what a benchmark should try. It
decides nothing else; nothing is tuned at run time, so that a row's result depends on its own sequence only.

Two configurations serve a model. A sequence whose rows (query tokens times the heads of a KV head) fit in `short` runs there;
a `long` tile would be mostly empty. Both see only the sequence's own length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """block_m: rows of a tile (tokens * heads); block_n: keys per iteration; both powers of two, at least 16. num_warps and
    num_stages as Triton takes them; overlap: the product with V lags one tile behind and runs beside the next tile's
    exponentials, for BLOCK_N more registers' worth of shares. in_order: keys are walked from the first to the last even where a
    window hides some, which takes a mask for each; else the tiles that need none come before those at the window's edge."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    overlap: bool = False
    in_order: bool = False

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two of at least 16, got {size}")

    def tokens_per_tile(self, group_size: int) -> int:
        """Query tokens of one tile, 0 if not even one token's heads fit."""
        return self.block_m // group_size


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """The two configurations of a model's prefill attention."""

    long: PrefillConfig
    short: PrefillConfig

    def config_for(self, num_queries: int, group_size: int) -> PrefillConfig:
        return self.short if num_queries * group_size <= self.short.block_m else self.long


_SHORT = PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)  # two programs to an SM

# Half precision, by head_dim rounded up to a power of two. 64 rows per warpgroup (4 warps) is what wgmma wants, 128 rows what the
# L2 cache can feed. At most 255 registers per thread bound the rest: these compile for sm90 without spilling (with overlap 230
# for 64 keys at head_dim 128; 128 keys would spill).
_HALF = {
    64: PrefillTuning(PrefillConfig(128, 128, num_warps=8, num_stages=3, overlap=True), _SHORT),
    128: PrefillTuning(PrefillConfig(128, 64, num_warps=8, num_stages=2, overlap=True), _SHORT),  # measured on an H200
    256: PrefillTuning(PrefillConfig(128, 32, num_warps=8, num_stages=3), PrefillConfig(64, 32, num_warps=4, num_stages=2)),
}
# float32 is computed exactly, without tensor cores: small tiles, so that they fit in registers.
_SINGLE = PrefillTuning(PrefillConfig(32, 16, num_warps=8, num_stages=1), PrefillConfig(16, 16, num_warps=4, num_stages=1))

# What a measurement found better, in half precision, by head_dim and group size. Without groups every query head has keys of its
# own, and two programs of 64 rows on an SM hide each other's waits: an H200 takes 7 and 10 % less for two steps of chat prompts.
MEASURED: dict[tuple[int, int], PrefillTuning] = {(128, 1): PrefillTuning(_SHORT, _SHORT)}

# Replacements for `long` at head_dim 128 worth measuring, likeliest gain first.
CANDIDATES: tuple[PrefillConfig, ...] = (
    PrefillConfig(128, 64, num_warps=8, num_stages=3, overlap=True),
    PrefillConfig(128, 128, num_warps=8, num_stages=2),
    PrefillConfig(128, 64, num_warps=8, num_stages=3),
    PrefillConfig(64, 64, num_warps=4, num_stages=3),
    PrefillConfig(128, 32, num_warps=8, num_stages=4, overlap=True),
)


def invariant(tuning: PrefillTuning) -> PrefillTuning:
    """The tuning under which a row has the same bits in whichever configuration, and so however its sequence is cut into chunks:
    keys are walked in the same tiles from the first one on, and a row's place in its tile does not matter."""
    long = replace(tuning.long, in_order=True)
    return PrefillTuning(long, replace(tuning.short, block_n=long.block_n, in_order=True))


def tuning_for(head_dim: int, group_size: int, dtype: torch.dtype) -> PrefillTuning:
    """The table's entry. Raises ValueError for a head_dim over 256, a group that no tile holds, or a dtype that is not a
    16- or 32-bit float."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"no prefill attention for {dtype}; there is: float16, bfloat16, float32")
    if not 1 <= head_dim <= 256:
        raise ValueError(f"head_dim must be in [1, 256], got {head_dim}")
    if dtype != torch.float32 and (head_dim, group_size) in MEASURED:
        return MEASURED[head_dim, group_size]
    padded = max(64, 1 << (head_dim - 1).bit_length())
    tuning = _SINGLE if dtype == torch.float32 else _HALF[padded]
    while group_size > tuning.long.block_m and tuning.long.block_m < 128:
        tuning = PrefillTuning(replace(tuning.long, block_m=tuning.long.block_m * 2), tuning.short)
    if not 1 <= group_size <= tuning.long.block_m:
        raise ValueError(f"{group_size} query heads for one KV head do not fit in a tile of {tuning.long.block_m} rows")
    return tuning
