"""Swapping on the device: bit by bit what it would be if each call were carried out at once, with steps that keep one stream or
the other busy, more blocks than staging holds, and host blocks used again and again. A warm call waits for nothing."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from device import cuda
from fairlane.worker.cuda_swap import CudaHostCache, PinnedBlocks
from fairlane.worker.side_stream import SideStream
from fairlane.worker.upload import to_device

SHAPE = (4, 2, 8, 16, 128)  # 256 KiB a block
BLOCK_BYTES = 4 * 2 * 8 * 16 * 128 * 2
NUM_BLOCKS, NUM_HOST_BLOCKS = 300, 400


class World:
    """A swapper, and what its pools should hold, kept on the device and on the host."""

    def __init__(self, piece_blocks: int) -> None:
        bits = torch.randint(-(2**15), 2**15, (NUM_BLOCKS, *SHAPE), device=cuda, dtype=torch.int16)
        self.pool = bits.view(torch.bfloat16)  # NaNs among them
        cache: Any = SimpleNamespace(pool=self.pool, num_blocks=NUM_BLOCKS)
        self.host = PinnedBlocks(NUM_HOST_BLOCKS, SHAPE, torch.bfloat16, cuda)
        self.swapper = CudaHostCache(cache, self.host, SideStream(cuda), piece_blocks * BLOCK_BYTES)
        self.wanted_pool = bits.clone()
        self.wanted_host = torch.zeros(NUM_HOST_BLOCKS, *SHAPE, device=cuda, dtype=torch.int16)
        self.filled: set[int] = set()

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        self.swapper.swap_out(pairs)
        if pairs:
            devices, hosts = (uploaded(list(column)) for column in zip(*pairs, strict=True))
            self.wanted_host[hosts] = self.wanted_pool[devices]
            self.filled |= {host for _, host in pairs}

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        self.swapper.swap_in(pairs)
        if pairs:
            hosts, devices = (uploaded(list(column)) for column in zip(*pairs, strict=True))
            self.wanted_pool[devices] = self.wanted_host[hosts]

    def write(self, blocks: list[int], value: int) -> None:
        for pool in (words(self.pool), self.wanted_pool):
            pool[uploaded(blocks)] = value

    def same(self) -> bool:
        torch.cuda.synchronize()
        filled = sorted(self.filled)
        return torch.equal(words(self.pool), self.wanted_pool) and torch.equal(
            words(self.host.pool)[filled], self.wanted_host.cpu()[filled]
        )


def uploaded(ids: list[int]) -> Tensor:
    """Without waiting for the device, which would hide that a stream does not wait."""
    return to_device(torch.tensor(ids), cuda)


def words(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


@pytest.mark.parametrize("busy", [0, 2_000_000])  # cycles for which the compute stream is held up, now and then
@pytest.mark.parametrize("piece_blocks", [3, 16, 200])
def test_it_is_as_if_each_call_were_carried_out_at_once(piece_blocks: int, busy: int) -> None:
    world, random = World(piece_blocks), Random(piece_blocks)
    for step in range(60):
        blocks = random.sample(range(1, NUM_BLOCKS), 120)
        fresh = random.sample(range(NUM_HOST_BLOCKS), random.choice([0, 1, 40, 120]))
        first = random.randrange(NUM_HOST_BLOCKS - 60)
        fresh = random.choice([fresh, list(range(first, first + 60))])
        known = sorted(world.filled - set(fresh))
        back = random.sample(known, min(len(known), random.choice([0, 1, 50, 100])))
        if busy and step % 3 == 0:
            torch.cuda._sleep(busy)
        world.swap_out(list(zip(blocks, fresh, strict=False)))
        world.swap_in(list(zip(back, random.sample(range(1, NUM_BLOCKS), len(back)), strict=True)))
        world.write(random.sample(range(1, NUM_BLOCKS), 30), step)
    assert world.same()


def test_host_memory_is_pinned_while_somebody_has_it() -> None:
    host = PinnedBlocks(3, SHAPE, torch.bfloat16, cuda)
    pool = host.pool
    before = pool.is_pinned()
    del host
    assert (before, pool.is_pinned()) == (True, False)


def test_a_warm_call_waits_for_nothing_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world, compiled = World(16), []
    world.swapper.swap_out([(1, 0)])
    world.swapper.swap_in([(0, 1)])
    torch.cuda.synchronize()
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["fn"].name))
    pairs = [(block, block + 50) for block in range(2, 60)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for count in (2, 3, 16, 58):
            world.swapper.swap_out(pairs[:count])
            world.swapper.swap_in([(host, block + 100) for block, host in pairs[:count]])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    moved = torch.equal(words(world.pool)[102:160], words(world.pool)[2:60])
    assert (compiled, moved) == ([], True)
