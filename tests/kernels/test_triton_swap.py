"""Swapping on a GPU, in the interpreter: with its two streams on paper, run in any order that events allow, blocks come and go as
if each call were carried out at once, however little staging there is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import interpreted  # noqa: F401  (first: it makes Triton interpret)
from fairlane.kernels.copy_blocks import gather_blocks, scatter_blocks
from fairlane.worker import cuda_swap
from fairlane.worker.cuda_swap import CudaHostCache, PinnedBlocks, runs
from two_streams import TwoStreams

SHAPE = (2, 2, 1, 4, 4)
BLOCK_BYTES = 2 * 2 * 4 * 4 * 4
NUM_BLOCKS, NUM_HOST_BLOCKS = 7, 9
CPU = torch.device("cpu")


def queued(streams: TwoStreams, kernel: Callable[..., object]) -> Callable[..., None]:
    return lambda *arguments: streams.compute(lambda: kernel(*arguments))


class World:
    """A swapper over streams on paper, and the same pools as they should be."""

    def __init__(self, seed: int, piece_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams = TwoStreams(seed)
        monkeypatch.setattr(cuda_swap, "gather_blocks", queued(self.streams, gather_blocks))
        monkeypatch.setattr(cuda_swap, "scatter_blocks", queued(self.streams, scatter_blocks))
        self.pool = torch.arange(NUM_BLOCKS * BLOCK_BYTES // 4, dtype=torch.float32).reshape(NUM_BLOCKS, *SHAPE)
        cache: Any = SimpleNamespace(pool=self.pool, num_blocks=NUM_BLOCKS)
        self.host = PinnedBlocks(NUM_HOST_BLOCKS, SHAPE, torch.float32, CPU)
        self.host.pool.fill_(-1.0)
        self.swapper = CudaHostCache(cache, self.host, self.streams, piece_blocks * BLOCK_BYTES)  # type: ignore[arg-type]
        self.wanted_pool, self.wanted_host = self.pool.clone(), self.host.pool.clone()
        self.written = 0.0

    def swap_out(self, pairs: list[tuple[int, int]]) -> None:
        self.swapper.swap_out(pairs)
        for device, host in pairs:
            self.wanted_host[host] = self.wanted_pool[device]

    def swap_in(self, pairs: list[tuple[int, int]]) -> None:
        self.swapper.swap_in(pairs)
        for host, device in pairs:
            self.wanted_pool[device] = self.wanted_host[host]

    def write(self, blocks: list[int]) -> None:
        """A step's kernels write blocks, after reading others; what they write depends on all that is there."""
        self.written += 1000.0
        value = self.written

        def step(pool: Tensor) -> None:
            pool[blocks] = pool[1:].mean() + value

        self.streams.compute(lambda: step(self.pool))
        step(self.wanted_pool)

    def same(self) -> bool:
        self.streams.synchronize()
        return torch.equal(self.pool, self.wanted_pool) and torch.equal(self.host.pool, self.wanted_host)


blocks = st.lists(st.integers(1, NUM_BLOCKS - 1), max_size=6, unique=True)
hosts = st.permutations(range(NUM_HOST_BLOCKS))


@settings(max_examples=120, deadline=None)
@given(
    steps=st.lists(st.tuples(blocks, blocks, hosts, blocks), min_size=1, max_size=8),
    piece_blocks=st.sampled_from([1, 2, 5]),
    rings=st.sampled_from([(1, 1), (2, 1), (3, 2)]),
    seed=st.integers(0, 10**6),
)
def test_whatever_order_the_streams_run_in_it_is_as_if_each_call_were_carried_out_at_once(
    steps: list[tuple[list[int], list[int], list[int], list[int]]], piece_blocks: int, rings: tuple[int, int], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cuda_swap, "_PIECES_OUT", rings[0])
        monkeypatch.setattr(cuda_swap, "_PIECES_IN", rings[1])
        world = World(seed, piece_blocks, monkeypatch)
        for out, back, places, written in steps:
            world.swap_out(list(zip(out, places, strict=False)))
            # Host blocks of this step's own swap-out are not read in it; those of earlier steps are, and are used again later.
            world.swap_in(list(zip(places[len(out) :], back, strict=False)))
            world.write(written)
        assert world.same()


def test_blocks_go_out_and_come_back_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, 2, monkeypatch)
    first = world.pool[[1, 4, 6]].clone()
    world.swap_out([(1, 7), (4, 3), (6, 4)])
    world.write([1, 4, 6])
    world.swap_in([(3, 2), (7, 5), (4, 1)])
    assert world.same() and torch.equal(world.pool[[5, 2, 1]], first)


def test_neighbours_in_host_memory_are_one_copy() -> None:
    found = [(rows.start, rows.stop, host.start, host.stop) for rows, host in runs([4, 5, 6, 2, 9, 8])]
    assert (found, runs([])) == ([(0, 3, 4, 7), (3, 4, 2, 3), (4, 5, 9, 10), (5, 6, 8, 9)], [])


@pytest.mark.parametrize("pairs", [[(0, 1)], [(NUM_BLOCKS, 1)], [(1, NUM_HOST_BLOCKS)], [(1, -1)]])
def test_a_pair_that_names_no_block_is_refused(pairs: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(1, 2, monkeypatch)
    with pytest.raises(ValueError, match="cannot swap"):
        world.swapper.swap_out(pairs)
    with pytest.raises(ValueError, match="cannot swap"):
        world.swapper.swap_in([(host, device) for device, host in pairs])
    assert world.same()


def test_without_host_blocks_there_is_no_staging_and_every_swap_is_refused() -> None:
    cache: Any = SimpleNamespace(pool=torch.zeros(3, *SHAPE), num_blocks=3)
    swapper = CudaHostCache(cache, PinnedBlocks(0, SHAPE, torch.float32, CPU), TwoStreams(0))  # type: ignore[arg-type]
    assert sum(piece.nbytes for ring in (swapper._out, swapper._in) for piece, _ in ring._pieces) == 0
    with pytest.raises(ValueError, match="cannot swap"):
        swapper.swap_out([(1, 0)])
