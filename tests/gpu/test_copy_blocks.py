"""Block copies on the device, bit by bit over the whole pool: long cycles, blocks and buffers beyond an int32, swap out and in,
graph replay with padding, and launches that neither allocate nor compile again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton import knobs

from device import cuda
from fairlane.kernels.copy_blocks import CANDIDATES, CopyConfig, copy_blocks, gather_blocks, scatter_blocks

SHAPE = (4, 2, 8, 16, 128)  # 128 Ki values a block


def make_pool(num_blocks: int, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random bits, NaNs among them; the null block is zero."""
    generator = torch.Generator(cuda).manual_seed(num_blocks)
    words = torch.randint(-(2**15), 2**15, (num_blocks, *shape), generator=generator, device=cuda, dtype=torch.int16)
    words[0] = 0
    return words.view(dtype) if dtype.itemsize == 2 else words.to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.element_size() == 2 else x


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(bits(x), bits(y))


@pytest.mark.parametrize("workspace_blocks", [None, 600, 37, 1])
def test_one_long_cycle_turns(workspace_blocks: int | None) -> None:
    pool = make_pool(500)
    order = torch.randperm(499, generator=torch.Generator().manual_seed(1)) + 1
    pairs = torch.stack([order, order.roll(-1)], dim=1).to(cuda)
    expected = pool.clone()
    bits(expected)[pairs[:, 1]] = bits(pool)[pairs[:, 0]]
    values = None if workspace_blocks is None else max(workspace_blocks * 2**17, 499 * 8192)
    workspace = None if values is None else torch.empty(values, dtype=pool.dtype, device=cuda)
    copy_blocks(pool, pairs, workspace=workspace)
    assert same(pool, expected)


@pytest.mark.parametrize("config", CANDIDATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_candidate_copies_blocks_of_odd_sizes(config: CopyConfig, dtype: torch.dtype) -> None:
    pool = make_pool(9, (3, 2, 3, 8, 80), dtype)  # 11520 values: chunks end inside
    pairs = torch.tensor([[1, 2], [2, 1], [-1, -1], [2, 8], [7, 3]], device=cuda)
    expected = pool.clone()
    for source, destination in ((1, 2), (2, 1), (2, 8), (7, 3)):
        expected[destination] = pool[source]
    copy_blocks(pool, pairs, config=config)
    assert same(pool, expected)


def test_swapped_out_and_in_again_elsewhere_is_the_same() -> None:
    pool, away, home = make_pool(64), torch.tensor([5, 63, 1, 17], device=cuda), torch.tensor([9, 2, 30, 40], device=cuda)
    staging = torch.empty(4, *SHAPE, dtype=pool.dtype, device=cuda)
    expected = pool.clone()
    bits(expected)[home] = bits(pool)[away]
    host = gather_blocks(pool, away, staging).to("cpu", copy=True)
    staging.zero_()
    staging.copy_(host)
    scatter_blocks(pool, home, staging)
    assert same(pool, expected)


def test_blocks_and_buffers_beyond_an_int32_of_values() -> None:
    # A block of 2^20 values: block 2048 starts at 2^31 in the pool, row 2048 in the buffer.
    pool = torch.full((4200, 2**20), 7, dtype=torch.int16, device=cuda)
    pool += torch.arange(4200, dtype=torch.int16, device=cuda)[:, None]
    ids = torch.arange(4199, 4199 - 2100, -1, device=cuda)
    buffer = torch.zeros(2100, 2**20, dtype=torch.int16, device=cuda)
    gather_blocks(pool, ids, buffer)
    gathered = bool((buffer == ids[:, None] + 7).all())
    pool.zero_()
    scatter_blocks(pool, ids, buffer)
    scattered = bool((pool[2100:] == torch.arange(2107, 4207, device=cuda)[:, None]).all()) and not bool(pool[:2100].any())
    copy_blocks(pool, torch.tensor([[4199, 2100], [2100, 4199], [2101, 1]], device=cuda))
    ends = pool[[1, 2100, 4199]]
    assert gathered and scattered and bool((ends == torch.tensor([[2108], [4206], [2107]], device=cuda)).all())


def test_replay_equals_eager_with_new_pairs_and_padding() -> None:
    pool, pairs = make_pool(50), torch.full((8, 2), -1, dtype=torch.int64, device=cuda)
    workspace = torch.empty(8 * 2**17, dtype=pool.dtype, device=cuda)
    pairs[0] = torch.tensor([3, 4], device=cuda)
    copy_blocks(pool, pairs, workspace=workspace)  # compiles before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_blocks(pool, pairs, workspace=workspace)
    pool = pool.copy_(make_pool(50))
    pairs[:5] = torch.tensor([[1, 2], [2, 3], [3, 1], [-1, -1], [9, 49]], device=cuda)
    expected = pool.clone()
    for source, destination in ((1, 2), (2, 3), (3, 1), (9, 49)):
        expected[destination] = pool[source]
    graph.replay()
    assert same(pool, expected)


def test_a_warm_launch_allocates_nothing_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, compiled = make_pool(50), []
    ids, pairs = torch.arange(1, 17, device=cuda), torch.arange(1, 33, device=cuda).view(16, 2)
    workspace, staging = torch.empty(2**19, dtype=pool.dtype, device=cuda), torch.empty(16, *SHAPE, dtype=pool.dtype, device=cuda)

    def step(count: int) -> None:
        gather_blocks(pool, ids[:count], staging[:count])
        scatter_blocks(pool, ids[16 - count :], staging[:count])
        copy_blocks(pool, pairs[:count], workspace=workspace)

    for count in (16, 8, 1):
        step(count)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["fn"].name))
    for count in (2, 3, 7, 15):
        step(count)
    assert (compiled, torch.cuda.memory_stats()["allocation.all.allocated"] - before) == ([], 0)
