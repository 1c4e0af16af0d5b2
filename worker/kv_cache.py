"""The KV cache's memory: one pool of blocks with all layers of a block contiguous, so that a block is one copy when it is
swapped. Who owns which block is `blockmgr`'s business.

    pool[num_blocks, L, 2, Hkv, BS, D]     layers[l] = pool[:, l]  ->  [num_blocks, 2, Hkv, BS, D]
"""

from __future__ import annotations

import math

import torch

from fairlane.worker.errors import ModelLoadError
from fairlane.worker.models.config import ModelConfig
from fairlane.worker.ops import copy_blocks_for
from fairlane.worker.upload import to_device


class KVCache:
    """Block 0 is the null block: zero, never written, never allocated."""

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, *block_shape(config, block_size))
        self.pool = torch.empty(shape, dtype=dtype, device=device)  # not zeroed: a block may hold anything until it is written
        self.pool[0].zero_()
        self.layers = tuple(self.pool[:, layer] for layer in range(config.num_layers))
        self._copy_blocks = copy_blocks_for(device)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copies (source, destination) blocks in every layer; all sources are read first. Raises ValueError for bad ids."""
        if not pairs:
            return
        for source, destination in pairs:
            if not (0 < source < self.num_blocks and 0 < destination < self.num_blocks):
                raise ValueError(f"cannot copy block {source} to {destination}: ids must be in [1, {self.num_blocks})")
        self._copy_blocks(self.pool, to_device(torch.tensor(pairs, dtype=torch.int64), self.pool.device))


def block_shape(config: ModelConfig, block_size: int) -> tuple[int, ...]:
    """[L, 2, Hkv, BS, D]: one block, all layers."""
    return (config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block, all layers."""
    return math.prod(block_shape(config, block_size)) * dtype.itemsize


def num_blocks_for(kv_cache_bytes: int, config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Blocks that fit, the null block included. Raises ModelLoadError if not even one usable block does."""
    size = block_bytes(config, block_size, dtype)
    count = kv_cache_bytes // size
    if count < 2:
        needed = math.ceil(2 * size / (1 << 20))
        raise ModelLoadError(
            f"kv_cache of {kv_cache_bytes} bytes is too small: a block takes {size} bytes; set at least {needed}MiB"
        )
    return count
