"""The block copy kernels, run by Triton's interpreter: each result compared bit by bit with what plain indexing gives, over the
whole pool; chains, cycles, padding, buffers too small for one go, and blocks beyond an int32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels.copy_blocks import (
    CANDIDATES,
    CopyConfig,
    _gather_kernel,
    _scatter_kernel,
    copy_blocks,
    gather_blocks,
    scatter_blocks,
)

COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: too much for huge ones
TINY = CopyConfig(chunk_bytes=64, num_warps=1)
SHAPE = (3, 2, 1, 4, 5)  # 120 elements: 8 chunks of 16 float32, the last one half full
CHUNKS = 8


def make_pool(num_blocks: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(num_blocks)
    pool = torch.randn(num_blocks, *SHAPE, generator=generator).to(dtype)
    pool[0] = 0.0
    pool[1, 0] = float("nan")  # an unwritten part is copied as it is
    return pool


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(bits(x), bits(y))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_source_is_read_before_any_destination_is_written(data: st.DataObject) -> None:
    num_blocks = 7
    destinations = data.draw(st.lists(st.integers(1, num_blocks - 1), min_size=1, max_size=4, unique=True))
    sources = data.draw(st.lists(st.integers(1, num_blocks - 1), min_size=len(destinations), max_size=len(destinations)))
    pairs = torch.tensor(
        list(zip(sources, destinations, strict=True)), dtype=data.draw(st.sampled_from([torch.int32, torch.int64]))
    )
    pool = make_pool(num_blocks)
    expected = pool.clone()
    for source, destination in pairs.tolist():
        expected[destination] = pool[source]
    room = data.draw(st.sampled_from([1, 3, CHUNKS, 20])) * len(pairs) * 16 + data.draw(st.integers(0, 15))
    workspace = torch.full((room + 32,), float("nan"))
    copy_blocks(pool, pairs, workspace=workspace[16:-16], config=TINY)
    assert same(pool, expected) and bool(workspace[:16].isnan().all()) and bool(workspace[-16:].isnan().all())


@pytest.mark.parametrize("room", [1, CHUNKS])
def test_a_cycle_turns_and_a_chain_moves_up(room: int) -> None:
    pool = make_pool(7)
    expected = pool[[0, 3, 1, 2, 4, 4, 5]]
    pairs = torch.tensor([[1, 2], [2, 3], [3, 1], [4, 5], [5, 6]])
    copy_blocks(pool, pairs, workspace=torch.empty(room * 5 * 16), config=TINY)
    assert same(pool, expected)


def test_without_a_workspace_it_makes_one() -> None:
    pool = make_pool(4)
    expected = pool[[0, 1, 3, 2]]
    copy_blocks(pool, torch.tensor([[2, 3], [3, 2]]))
    assert same(pool, expected)


def test_a_pair_of_negatives_is_padding() -> None:
    pool = make_pool(4)
    expected = pool[[0, 1, 1, 3]]
    copy_blocks(pool, torch.tensor([[-1, -1], [1, 2], [-1, -1]]), config=TINY)
    assert same(pool, expected)


def test_copying_nothing_changes_nothing() -> None:
    pool = make_pool(3)
    before = pool.clone()
    copy_blocks(pool, torch.empty(0, 2, dtype=torch.int64))
    scatter_blocks(pool, torch.empty(0, dtype=torch.int64), torch.empty(0, *SHAPE))
    assert same(pool, before) and gather_blocks(pool, torch.empty(0, dtype=torch.int64), torch.empty(0, *SHAPE)).shape[0] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("config", [TINY, *CANDIDATES])
def test_gather_and_scatter_move_whole_blocks_bit_by_bit(dtype: torch.dtype, config: CopyConfig) -> None:
    pool, ids = make_pool(6, dtype), torch.tensor([5, 1, 3], dtype=torch.int32)
    memory = torch.full((5, *SHAPE), float("nan"), dtype=dtype)
    out = memory[1:-1]
    got = gather_blocks(pool, ids, out, config=config)
    assert got is out and same(out, pool[ids.long()]) and bool(memory[[0, -1]].isnan().all())
    other = make_pool(9, dtype)
    expected = other.clone()
    expected[[2, 8, 4]] = pool[ids.long()]
    scatter_blocks(other, torch.tensor([2, 8, 4]), out, config=config)
    assert same(other, expected)


def test_padding_ids_move_nothing() -> None:
    pool, ids = make_pool(4), torch.tensor([-1, 2, -1])
    out = torch.full((3, *SHAPE), 7.0)
    gather_blocks(pool, ids, out, config=TINY)
    expected = torch.full((3, *SHAPE), 7.0)
    expected[1] = pool[2]
    before = pool.clone()
    scatter_blocks(pool, ids, out + 1, config=TINY)
    before[2] += 1
    assert same(out, expected) and same(pool, before)


def test_a_flat_buffer_will_do() -> None:
    pool = make_pool(4)
    out = torch.empty(240)
    gather_blocks(pool, torch.tensor([3, 2]), out.view(2, 120), config=TINY)
    assert same(out.view(2, *SHAPE), pool[[3, 2]])


def test_one_layer_of_each_block_can_be_moved() -> None:
    pool = make_pool(4)
    layer, expected = pool[:, 1], pool.clone()
    expected[2, 1] = pool[3, 1]
    copy_blocks(layer, torch.tensor([[3, 2]]), config=TINY)
    assert same(pool, expected)


def test_blocks_further_apart_than_an_int32_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Block 3 starts 2^31 bytes after block 1. Wrapped, that is 2^31 before it: memory of ours too, and not what block 3 holds.
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    storage = torch.empty(2**32 + 2**30 + 96, dtype=torch.int8)  # committed page by page, as it is touched
    pool = storage.as_strided((3, 96), (2**30 + 1, 1), 2**31)
    for place in (0, 2**30 + 1, 2**31, 2**31 + 2):
        storage[place : place + 96] = 0
    pool[:] = torch.arange(288, dtype=torch.int16).to(torch.int8).view(3, 96)
    first, last = pool[0].clone(), pool[2].clone()
    out = gather_blocks(pool, torch.tensor([2]), torch.empty(1, 96, dtype=torch.int8), config=TINY)
    copy_blocks(pool, torch.tensor([[0, 2], [2, 0]]), config=TINY)
    assert torch.equal(out[0], last) and torch.equal(pool[2], first) and torch.equal(pool[0], last)


def test_a_buffer_longer_than_an_int32_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel itself, on rows of 64 bytes that lie 2^30 apart: row 2 starts beyond 2^31.
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    storage = torch.empty(5 * 2**30, dtype=torch.int8)
    rows = storage[2**31 :].view(3, 2**30)[:, :64]
    rows.zero_()
    storage[:64] = 0  # where a wrapped row 2 would go
    pool, ids = torch.arange(64, dtype=torch.int8).repeat(2, 1), torch.tensor([-1, -1, 1])
    _gather_kernel[(3,)](pool, ids, rows, 64, 1, 2**30, 0, 1, SIZE=64, CHUNK=64, num_warps=1)
    moved = torch.zeros_like(pool)
    _scatter_kernel[(3,)](moved, ids, rows, 64, 1, 2**30, 0, 1, SIZE=64, CHUNK=64, num_warps=1)
    assert torch.equal(rows[2], pool[1]) and not bool(rows[:2].any()) and torch.equal(moved[1], pool[1])


def bad_calls() -> dict[str, Callable[[], object]]:
    pool, ids, out = make_pool(4), torch.tensor([1, 2]), torch.empty(2, *SHAPE)
    pairs = torch.tensor([[1, 2]])
    return {
        "blocks apart": lambda: gather_blocks(pool.transpose(4, 5), ids, out),
        "float ids": lambda: gather_blocks(pool, ids.float(), out),
        "two dimensions of ids": lambda: gather_blocks(pool, pairs, out),
        "too few blocks": lambda: gather_blocks(pool, ids, out[:1]),
        "dtype": lambda: scatter_blocks(pool, ids, out.half()),
        "buffer apart": lambda: scatter_blocks(pool, ids, torch.empty(2, 3, 2, 1, 5, 4).transpose(4, 5)),
        "pairs": lambda: copy_blocks(pool, ids),
        "workspace dtype": lambda: copy_blocks(pool, pairs, workspace=torch.empty(9999).half()),
        "workspace too small": lambda: copy_blocks(pool, pairs, workspace=torch.empty(15), config=TINY),
    }


@pytest.mark.parametrize("what", sorted(bad_calls()))
def test_what_does_not_fit_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        bad_calls()[what]()
