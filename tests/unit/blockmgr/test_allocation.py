"""Allocating, growing, forking, copying on write and freeing, with block_size 4 unless said otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fairlane.blockmgr.errors import NoFreeBlocks
from fairlane.blockmgr.manager import BlockManager, KVGroup


def manager_of(num_blocks: int, *, groups: tuple[KVGroup, ...] = (KVGroup.full(),)) -> BlockManager:
    return BlockManager(num_blocks, 4, groups=groups)


def state(manager: BlockManager) -> object:
    """Everything a failed operation must leave alone."""
    tables = {
        seq_id: [manager.block_table(seq_id, group) for group in range(len(manager.groups))]
        for seq_id in (1, 2, 3)
        if manager.has(seq_id)
    }
    counts = {seq_id: manager.num_tokens_of(seq_id) for seq_id in tables}
    return tables, counts, list(manager.pool.free), list(manager.pool.ref_counts), manager.domains()


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_sequence_gets_as_many_blocks_as_its_tokens_fill(num_tokens: int, blocks: int) -> None:
    manager = manager_of(10)
    manager.allocate(1, "a", num_tokens)
    assert (len(manager.block_table(1)), manager.blocks_for(num_tokens), manager.num_used_blocks) == (blocks, blocks, blocks)


def test_the_null_block_is_never_given_out() -> None:
    manager = manager_of(4)
    manager.allocate(1, "a", 12)
    assert sorted(manager.block_table(1)) == [1, 2, 3]


def test_every_group_has_a_table_of_its_own() -> None:
    manager = manager_of(7, groups=(KVGroup.full(), KVGroup.sliding(100)))
    manager.allocate(1, "a", 9)  # 3 blocks x 2 groups
    blocks = manager.block_table(1, 0) + manager.block_table(1, 1)
    assert (sorted(blocks), manager.num_free_blocks) == ([1, 2, 3, 4, 5, 6], 0)


def test_what_does_not_fit_changes_nothing() -> None:
    manager = manager_of(4)
    manager.allocate(1, "a", 5)
    before = state(manager)
    with pytest.raises(NoFreeBlocks) as error:
        manager.allocate(2, "a", 5)
    assert (error.value.needed, error.value.free, state(manager)) == (2, 1, before)


def test_growth_inside_the_last_block_takes_nothing() -> None:
    manager = manager_of(4)
    manager.allocate(1, "a", 5)
    for num_tokens in (6, 7, 8):
        growth = manager.grow(1, num_tokens, num_tokens - 1)
        assert (growth.block_ids, growth.copies, growth.replaced) == ([[]], [], [])
        assert not growth
    assert (manager.num_tokens_of(1), manager.num_free_blocks) == (8, 1)


def test_growth_over_the_end_appends_blocks() -> None:
    manager = manager_of(6)
    manager.allocate(1, "a", 4)
    assert manager.num_new_blocks(1, 10) == 2  # ceil(10 / 4) - 1
    growth = manager.grow(1, 10, 4)
    assert (growth.block_ids, manager.block_table(1), bool(growth)) == ([[2, 3]], [1, 2, 3], True)


def test_growth_that_does_not_fit_changes_nothing() -> None:
    manager = manager_of(4)
    manager.allocate(1, "a", 4)
    manager.allocate(2, "b", 4)
    before = state(manager)
    with pytest.raises(NoFreeBlocks) as error:
        manager.grow(1, 12, 4)
    assert (error.value.needed, error.value.free, state(manager)) == (2, 1, before)


def test_a_chunk_inside_what_was_allocated_does_not_shrink_the_table() -> None:
    manager = manager_of(4)
    manager.allocate(1, "a", 12)
    manager.grow(1, 4, 0)
    assert (manager.num_tokens_of(1), len(manager.block_table(1))) == (12, 3)


def test_a_fork_takes_no_block_and_counts_once() -> None:
    manager = manager_of(4)
    manager.allocate(1, "a", 6)
    manager.fork(1, 2)
    assert manager.block_table(2) == manager.block_table(1)
    assert (manager.num_free_blocks, manager.used_by("a"), manager.freed_by(1), manager.freed_by(2)) == (1, 2, 0, 0)


def test_the_first_writer_into_a_shared_block_gets_a_copy_and_the_last_one_keeps_the_original() -> None:
    manager = manager_of(5)
    manager.allocate(1, "a", 6)  # blocks 1, 2; tokens 4, 5 are in block 2
    manager.fork(1, 2)
    manager.fork(1, 3)
    assert [manager.num_new_blocks(seq_id, 7) for seq_id in (1, 2, 3)] == [1, 1, 1]
    first, second = manager.grow(2, 7, 6), manager.grow(1, 7, 6)
    assert (first.copies, first.replaced, first.block_ids) == ([(2, 3)], [(0, 1, 3)], [[]])
    assert (second.copies, second.replaced) == ([(2, 4)], [(0, 1, 4)])
    assert manager.num_new_blocks(3, 7) == 0
    assert not manager.grow(3, 7, 6)
    assert [manager.block_table(seq_id) for seq_id in (1, 2, 3)] == [[1, 4], [1, 3], [1, 2]]


def test_a_shared_block_that_is_written_from_its_first_slot_is_exchanged_without_a_copy() -> None:
    manager = manager_of(6)
    manager.allocate(1, "a", 8)  # allocated ahead; only tokens 0..3 are computed
    manager.fork(1, 2)
    growth = manager.grow(2, 8, 4)
    assert (growth.copies, growth.replaced, manager.block_table(2)) == ([], [(0, 1, 3)], [1, 3])


def test_a_fork_at_a_block_border_appends_and_copies_nothing() -> None:
    manager = manager_of(6)
    manager.allocate(1, "a", 8)
    manager.fork(1, 2)
    growth = manager.grow(2, 9, 8)
    assert (growth.copies, growth.replaced, growth.block_ids) == ([], [], [[3]])


def test_copy_on_write_without_a_free_block_changes_nothing() -> None:
    manager = manager_of(3)
    manager.allocate(1, "a", 6)
    manager.fork(1, 2)
    before = state(manager)
    with pytest.raises(NoFreeBlocks):
        manager.grow(2, 7, 6)
    assert state(manager) == before


def test_copy_on_write_covers_every_group() -> None:
    manager = manager_of(9, groups=(KVGroup.full(), KVGroup.full()))
    manager.allocate(1, "a", 6)  # [1, 2], [3, 4]
    manager.fork(1, 2)
    growth = manager.grow(2, 7, 6)
    assert (growth.copies, growth.replaced) == ([(2, 5), (4, 6)], [(0, 1, 5), (1, 1, 6)])


def test_a_fork_of_a_fork_shares_until_the_last_one_leaves() -> None:
    manager = manager_of(4)
    manager.allocate(1, "a", 12)
    manager.fork(1, 2)
    manager.fork(2, 3)
    manager.free(1)
    manager.free(2)
    assert (manager.num_free_blocks, manager.freed_by(3)) == (0, 3)
    manager.free(3)
    assert manager.num_free_blocks == 3


def test_freed_blocks_are_used_before_untouched_ones() -> None:
    manager = manager_of(10)
    manager.allocate(1, "a", 8)
    manager.free(1)
    manager.allocate(2, "a", 8)
    assert sorted(manager.block_table(2)) == [1, 2]  # warm in caches, and the untouched end of the pool stays untouched


def test_a_table_is_handed_out_as_a_copy() -> None:
    manager = manager_of(4)
    manager.allocate(1, "a", 8)
    manager.block_table(1).append(99)
    assert manager.block_table(1) == [1, 2]


def test_freeing_twice_is_an_error() -> None:
    manager = manager_of(4)
    manager.allocate(1, "a", 4)
    manager.free(1)
    with pytest.raises(KeyError):
        manager.free(1)
    assert manager.num_free_blocks == 3


def test_unknown_sequences_are_errors_everywhere() -> None:
    manager = manager_of(4)
    calls: list[Callable[[], object]] = [
        lambda: manager.grow(9, 1, 0),
        lambda: manager.num_new_blocks(9, 1),
        lambda: manager.fork(9, 1),
        lambda: manager.forget(9),
        lambda: manager.block_table(9),
        lambda: manager.num_tokens_of(9),
        lambda: manager.freed_by(9),
    ]
    for call in calls:
        with pytest.raises(KeyError):
            call()
    assert not manager.has(9)


def test_a_known_sequence_is_not_allocated_or_forked_onto() -> None:
    manager = manager_of(6)
    manager.allocate(1, "a", 4)
    manager.allocate(2, "a", 4)
    before = state(manager)
    with pytest.raises(ValueError, match="sequence 1"):
        manager.allocate(1, "a", 4)
    with pytest.raises(ValueError, match="sequence 2"):
        manager.fork(1, 2)
    assert state(manager) == before


@pytest.mark.parametrize(("num_tokens", "write_from"), [(5, -1), (5, 6)])
def test_impossible_write_ranges_are_refused(num_tokens: int, write_from: int) -> None:
    manager = manager_of(6)
    manager.allocate(1, "a", 4)
    before = state(manager)
    with pytest.raises(ValueError, match="cannot write"):
        manager.grow(1, num_tokens, write_from)
    assert state(manager) == before


def test_no_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="0 tokens"):
        manager_of(4).allocate(1, "a", 0)


@pytest.mark.parametrize(("num_blocks", "block_size", "groups"), [(1, 4, 1), (4, 0, 1), (4, 4, 0)])
def test_impossible_pools_are_refused(num_blocks: int, block_size: int, groups: int) -> None:
    with pytest.raises(ValueError, match="need 2 blocks"):
        BlockManager(num_blocks, block_size, groups=(KVGroup.full(),) * groups)
