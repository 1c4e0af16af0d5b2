"""Sizes of the prefix attention: an offline table by head_dim and dtype, and what a benchmark should try. It decides nothing
else; nothing is tuned at run time. Where sequences are cut is in the decode attention's table (decode_tuning.py).

What drives the choice: a tile of 64 rows or more takes wgmma, which has several times mma's rate; each tile reads its keys again,
from the L2 cache, so more rows mean less traffic there, and fewer tiles to fill the SMs with.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fairlane.kernels.decode_tuning import padded


@dataclass(frozen=True, slots=True)
class PrefixTuning:
    """block_m: rows of a tile (members of a group times the query heads of a KV head), at least two members' whatever it says.
    block_n: keys per iteration. num_warps, num_stages as Triton takes them. programs_per_sm: of the persistent grid.
    concurrent: the shared keys are computed beside the others, on a second stream. beside: programs per SM of the decode kernel
    then; None: as many as alone, which leave this one no room until they are through."""

    block_m: int = 64
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    programs_per_sm: int = 2
    concurrent: bool = False
    beside: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name} must be a power of two of at least 16, got {size}")
        if min(self.num_warps, self.num_stages, self.programs_per_sm, 1 if self.beside is None else self.beside) < 1:
            raise ValueError(f"counts must be positive, got {self}")

    def members_per_tile(self, group_size: int) -> int:
        """Sequences whose rows share a tile. group_size: query heads of a KV head."""
        return max(2, self.block_m // group_size)

    def rows(self, group_size: int) -> int:
        """The tile's extent."""
        return padded(self.members_per_tile(group_size) * group_size)


# Half precision, by padded head_dim: 64 rows to a warpgroup.
_HALF = {
    16: PrefixTuning(),
    32: PrefixTuning(),
    64: PrefixTuning(),
    # Measured on an H200, 64 sequences that share 4k tokens: alone on its stream it takes 1.08 times as long, 64 keys 1.03 times.
    128: PrefixTuning(block_n=32, concurrent=True),
    256: PrefixTuning(block_n=32, num_stages=2, programs_per_sm=1),
}
# float32 is computed exactly, without tensor cores: small tiles, so that they fit in registers.
_SINGLE = PrefixTuning(32, 16, num_warps=8, num_stages=1, programs_per_sm=1)


def tuning_for(head_dim: int, dtype: torch.dtype) -> PrefixTuning:
    """The table's entry. Raises ValueError for a head_dim over 256, or a dtype that is not fp32, fp16 or bf16."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"the prefix attention computes float32, float16 and bfloat16, not {dtype}")
    if padded(head_dim) not in _HALF:
        raise ValueError(f"the prefix attention takes head_dim up to 256, got {head_dim}")
    return _SINGLE if dtype == torch.float32 else _HALF[padded(head_dim)]


# For head_dim 128 in half precision; those first that are likeliest to win. As many run at once as they ask for: registers per
# thread, as compiled for sm90, stand beside them.
CANDIDATES: tuple[PrefixTuning, ...] = (
    PrefixTuning(),  # 255, none spilled
    PrefixTuning(concurrent=True),
    PrefixTuning(block_m=128, num_warps=8, programs_per_sm=1),  # 252
    PrefixTuning(block_m=128, num_warps=8, programs_per_sm=1, concurrent=True),
    PrefixTuning(num_stages=2),  # 255
    PrefixTuning(block_n=32, num_stages=4),  # 202
    PrefixTuning(block_n=32, num_stages=3, concurrent=True),
    PrefixTuning(block_m=128, num_warps=8, num_stages=2, programs_per_sm=1),  # 252
    PrefixTuning(block_n=128, num_stages=2, programs_per_sm=1),  # 255, some spilled
    PrefixTuning(block_m=32),  # 168, mma instead of wgmma
    PrefixTuning(block_n=32, programs_per_sm=1, concurrent=True, beside=3),
    PrefixTuning(block_n=32, programs_per_sm=1, concurrent=True, beside=2),
    PrefixTuning(programs_per_sm=1, concurrent=True, beside=3),
    PrefixTuning(block_m=128, num_warps=8, programs_per_sm=1, concurrent=True, beside=2),
)
