"""KV blocks in host memory, as a step moves them: the port, what a CPU worker does, and the order of a step's block moves. Which
block goes where is `blockmgr`'s business, a GPU's copies are cuda_swap.py's."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fairlane.scheduler.output import ScheduleOutput
from fairlane.worker.kv_cache import KVCache

Pairs = list[tuple[int, int]]


class HostCache(Protocol):
    """Takes effect in the order of calls, seen from the steps; neither call waits for a device. Raises ValueError for bad ids."""

    @property
    def num_blocks(self) -> int: ...

    def swap_out(self, pairs: Pairs) -> None:
        """(device block, host block): the device block, as it is after all that was launched before, goes to the host."""

    def swap_in(self, pairs: Pairs) -> None:
        """(host block, device block): the device block is there for all that is launched after."""


def move_blocks(output: ScheduleOutput, cache: KVCache, host: HostCache) -> None:
    """A step's block moves, before it computes. A block that is swapped out or copied from may be a destination of what follows,
    never the other way round."""
    if output.swap_out:
        host.swap_out(output.swap_out)
    cache.copy(output.copies)
    if output.swap_in:
        host.swap_in(output.swap_in)


def check_pairs(devices: list[int], hosts: list[int], cache: KVCache, num_host_blocks: int) -> None:
    """Raises ValueError if an id names no block."""
    if not 0 < min(devices) <= max(devices) < cache.num_blocks or not 0 <= min(hosts) <= max(hosts) < num_host_blocks:
        raise ValueError(
            f"cannot swap blocks {devices} and host blocks {hosts}: there are {cache.num_blocks - 1} and {num_host_blocks}"
        )


class CpuHostCache:
    """A second pool beside the cache's: the same memory, but the CPU worker swaps as a GPU's does."""

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self._cache = cache
        self._pool: Tensor = torch.empty((num_blocks, *cache.pool.shape[1:]), dtype=cache.pool.dtype)

    @property
    def num_blocks(self) -> int:
        return len(self._pool)

    def swap_out(self, pairs: Pairs) -> None:
        if pairs:
            devices, hosts = (list(column) for column in zip(*pairs, strict=True))
            check_pairs(devices, hosts, self._cache, self.num_blocks)
            self._pool[hosts] = self._cache.pool[devices]

    def swap_in(self, pairs: Pairs) -> None:
        if pairs:
            hosts, devices = (list(column) for column in zip(*pairs, strict=True))
            check_pairs(devices, hosts, self._cache, self.num_blocks)
            self._cache.pool[devices] = self._pool[hosts]
