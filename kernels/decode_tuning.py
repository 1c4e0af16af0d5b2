"""Sizes of the decode attention: an offline table by head_dim, group size, dtype and block_size, and what a benchmark should
try. It decides nothing else; nothing is tuned at run time and nothing here looks at a batch, so that a row's bits depend on its
own sequence only.

What drives the choice: an SM must keep about 40 KB of K and V in flight to draw its share of HBM bandwidth (32 KB/us, about 1 us
away), while the programs beside it hide what each of them waits for between two items. A program keeps num_stages - 1 tiles of K
and V in shared memory, and its grid should not exceed what runs at once, in shared memory or in registers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

_SHARED_MEMORY_PER_SM = 228 * 1024  # of Hopper
_RESERVED = 1024 + 128  # of it, per program: the driver's, and exchange between warps
_MIN_DOT = 16  # tl.dot's least extent


@dataclass(frozen=True, slots=True)
class ChunkRule:
    """Keys per item, by the number of keys that a sequence's query sees: all of them up to `whole`, sizes[0] up to limits[0],
    sizes[1] up to limits[1], else sizes[2]. Partial results cost about 4 * group_size / chunk of the bytes of K and V, so long
    sequences take large chunks; short ones take small ones, because they are too few to fill the GPU otherwise."""

    sizes: tuple[int, int, int] = (256, 512, 1024)
    limits: tuple[int, int] = (8192, 32768)
    whole: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.limits[0] <= self.limits[1] or min(self.sizes) < 1 or self.whole < 0:
            raise ValueError(f"chunk limits must ascend and sizes be positive, got {self}")

    def chunk(self, keys: int) -> int:
        """The chunk size of a sequence whose query sees `keys` keys."""
        if keys <= self.whole:
            return max(keys, 1)
        if keys <= self.limits[0]:
            return self.sizes[0]
        return self.sizes[1] if keys <= self.limits[1] else self.sizes[2]

    def num_chunks(self, keys: int) -> int:
        return -(-keys // self.chunk(keys))

    def max_chunks(self, max_keys: int) -> int:
        """The most chunks of any sequence whose query sees at most max_keys keys."""
        return max(self.num_chunks(min(max_keys, limit)) for limit in (*self.limits, max_keys))


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """block_n: keys per tile. num_warps, num_stages: of the persistent kernel, as Triton takes them. programs_per_sm: of its
    grid. short_*: the short kernel's, short_heads being KV heads per program. combine_*: how the combining
    kernel joins partial results (decode_combine's arguments). fuse_rope_rows: sequences in a step up to which the persistent
    kernel does rope_norm_write's work too (rope_decode.py); 0: never. It changes no bit."""

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 3
    short_heads: int = 2
    short_stages: int = 3
    combine_rows: int = 16
    combine_few: int = 16
    combine_few_heads: int = 4
    combine_stages: int = 3
    combine_warps: int = 4
    fuse_rope_rows: int = 64
    chunks: ChunkRule = field(default_factory=ChunkRule)

    def __post_init__(self) -> None:
        if self.block_n < _MIN_DOT or self.block_n & (self.block_n - 1):
            raise ValueError(f"block_n must be a power of two of at least {_MIN_DOT}, got {self.block_n}")
        if any(size % self.block_n for size in self.chunks.sizes):
            raise ValueError(f"chunks of {self.chunks.sizes} keys do not hold whole tiles of {self.block_n}")
        if min(self.num_warps, self.num_stages, self.programs_per_sm, self.short_heads, self.short_stages) < 1:
            raise ValueError(f"counts must be positive, got {self}")
        if self.fuse_rope_rows < 0:
            raise ValueError(f"fuse_rope_rows must not be negative, got {self.fuse_rope_rows}")

    def programs_that_fit(self, head_dim: int, group_size: int, dtype: torch.dtype) -> int:
        """programs_per_sm, or fewer where shared memory holds fewer at once: each has its tiles of K and V, q and the shares."""
        dim, rows = padded(head_dim), padded(group_size)
        tiles = max(1, self.num_stages - 1) * 2 * self.block_n * dim
        needed = (tiles + rows * (dim + self.block_n)) * dtype.itemsize + _RESERVED
        return max(1, min(self.programs_per_sm, _SHARED_MEMORY_PER_SM // needed))


def padded(extent: int) -> int:
    """The tile extent that holds `extent` elements: a power of two that tl.dot takes."""
    return max(_MIN_DOT, 1 << (extent - 1).bit_length())


# By padded head_dim and bytes per element: 32 KB of K and V per tile, two tiles ahead, three programs per SM.
_BY_SIZE = {
    (16, 2): DecodeTuning(),
    (32, 2): DecodeTuning(),
    (64, 2): DecodeTuning(block_n=128),
    # Measured on an H200. Four programs per SM beat five by 1 to 2 % where sequences see thousands of keys and lose 1 % at 600.
    # One item of 384 keys takes as long as two and joining them. From 2048 keys on, items of 512 spare partial results: 64x4k
    # 268 -> 259 us; 8k alone takes 21 instead of 17.
    (128, 2): DecodeTuning(block_n=32, programs_per_sm=4, chunks=ChunkRule((256, 512, 1024), (2048, 32768), whole=384)),
    (256, 2): DecodeTuning(block_n=32),
    (16, 4): DecodeTuning(),
    (32, 4): DecodeTuning(),
    (64, 4): DecodeTuning(),
    (128, 4): DecodeTuning(block_n=32),
    (256, 4): DecodeTuning(block_n=16),
}

# What a measurement found better than the priors: (head_dim, group size, dtype, block_size) -> tuning. Without groups every query
# head has keys of its own, so that a few sequences fill the GPU with half the items: 128, 64 and 8 mixed sequences of 200 to 2200
# keys take 2, 2 and 7 % less on an H200, 16 take 1 % more, one alone 22 µs instead of 17.
_UNGROUPED = replace(_BY_SIZE[128, 2], chunks=ChunkRule((512, 512, 1024), (2048, 32768), whole=512))
MEASURED: dict[tuple[int, int, torch.dtype, int], DecodeTuning] = {
    (128, 1, dtype, 16): _UNGROUPED for dtype in (torch.bfloat16, torch.float16)
}


def tuning_for(head_dim: int, group_size: int, dtype: torch.dtype, block_size: int) -> DecodeTuning:
    """The tuning of a model's decode attention. Raises ValueError for a head_dim over 256, or a dtype that is not fp32, fp16
    or bf16."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the decode attention computes float32, float16 and bfloat16, not {dtype}")
    measured = MEASURED.get((head_dim, group_size, dtype, block_size))
    if measured is not None:
        return measured
    prior = _BY_SIZE.get((padded(head_dim), dtype.itemsize))
    if prior is None:
        raise ValueError(f"the decode attention takes head_dim up to 256, got {head_dim}")
    return prior


_FINE, _COARSE = ChunkRule((128, 256, 1024), (4096, 32768)), ChunkRule((512, 512, 1024))

# For head_dim 128 in half precision; those first that are likeliest to win. Other geometries scale block_n (see _BY_SIZE).
# Each runs programs_per_sm at once: registers per thread, as compiled for sm90, stand beside them.
CANDIDATES: tuple[DecodeTuning, ...] = (
    DecodeTuning(),  # 120
    DecodeTuning(num_stages=4, programs_per_sm=2),  # 120
    DecodeTuning(block_n=32, num_stages=4, programs_per_sm=4),  # 96
    DecodeTuning(programs_per_sm=2),  # 120
    DecodeTuning(num_warps=8),  # 78
    DecodeTuning(block_n=32, num_stages=3, programs_per_sm=5),  # 80
    DecodeTuning(block_n=128, num_warps=8, num_stages=2, programs_per_sm=2),  # 128
    DecodeTuning(block_n=128, num_warps=8, num_stages=3, programs_per_sm=1),  # 150
    DecodeTuning(chunks=_COARSE),
    DecodeTuning(chunks=_FINE),
)

# The short kernel's, to be tried on batches of sequences of at most block_n keys.
SHORT_CANDIDATES: tuple[DecodeTuning, ...] = (
    DecodeTuning(short_heads=2, short_stages=3),
    DecodeTuning(short_heads=1, short_stages=2),
    DecodeTuning(short_heads=4, short_stages=3),
    DecodeTuning(short_heads=4, short_stages=2),
)

# The combining kernel's, to be tried on few long sequences (many partial results each) and many short ones.
COMBINE_CANDIDATES: tuple[DecodeTuning, ...] = (
    DecodeTuning(),
    DecodeTuning(combine_few_heads=2, combine_warps=2),
    DecodeTuning(combine_few_heads=8),
    DecodeTuning(combine_few_heads=1, combine_warps=1),
    DecodeTuning(combine_few_heads=4, combine_warps=2),
    DecodeTuning(combine_few=8),
    DecodeTuning(combine_few=32),
    DecodeTuning(combine_few=0),  # one program per head whatever the length
)
