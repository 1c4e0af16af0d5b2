"""Sliding windows: what is visible, when blocks behind a window are given back, and which prefixes still count as cached."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.blockmgr.errors import NoFreeBlocks
from fairlane.blockmgr.groups import GroupKind
from fairlane.blockmgr.hashing import HashChain
from fairlane.blockmgr.manager import BlockManager, KVGroup

FULL = KVGroup.full()


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 30))
def test_dead_blocks_are_those_no_later_query_sees(window: int, block_size: int, position: int) -> None:
    group = KVGroup.sliding(window)
    seen = {key // block_size for query in range(position, position + 60) for key in range(max(0, query - window + 1), query + 1)}
    assert group.num_dead_blocks(position, block_size) == min(seen)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 10))
def test_a_block_dies_at_the_position_named(window: int, block_size: int, index: int) -> None:
    group = KVGroup.sliding(window)
    death = group.position_of_death(index, block_size)
    assert death is not None
    assert (group.num_dead_blocks(death - 1, block_size), group.num_dead_blocks(death, block_size)) == (index, index + 1)


def test_full_attention_never_lets_go() -> None:
    assert (FULL.num_dead_blocks(10**9, 16), FULL.position_of_death(0, 16)) == (0, None)


@pytest.mark.parametrize(("kind", "window"), [(GroupKind.FULL, 4), (GroupKind.WINDOW, None), (GroupKind.WINDOW, 0)])
def test_impossible_groups_are_refused(kind: GroupKind, window: int | None) -> None:
    with pytest.raises(ValueError, match="window"):
        KVGroup(kind, window)


def test_blocks_behind_the_window_are_given_back_and_their_entries_become_null() -> None:
    manager = BlockManager(10, 2, groups=(KVGroup.sliding(3),))
    manager.allocate(1, "a", 5)
    table = manager.block_table(1)
    seen = []
    for position in range(5, 9):
        # query p sees keys p-2 ..: at 5 keys 3.., so block 0 (0, 1) is dead; at 6 keys 4.., so block 1 (2, 3) too; at 8 keys 6..
        manager.grow(1, position + 1, position)
        seen.append([index for index, block in enumerate(manager.block_table(1)) if not block])
    assert seen == [[0], [0, 1], [0, 1], [0, 1, 2]]
    assert (manager.used_by("a"), len(manager.block_table(1)), manager.num_free_blocks) == (2, 5, 7)
    assert len(table) == 3


def test_a_window_sequence_goes_on_for_ever_in_a_small_pool() -> None:
    manager = BlockManager(4, 2, groups=(KVGroup.sliding(4),))
    manager.allocate(1, "a", 1)
    for position in range(1, 200):
        assert manager.num_new_blocks(1, position + 1, position) <= manager.num_free_blocks
        manager.grow(1, position + 1, position)
    manager.check_integrity()
    # query 199 sees keys 196..199: blocks 98 and 99 of the table are left
    assert [index for index, block in enumerate(manager.block_table(1)) if block] == [98, 99]


def test_what_a_growth_gives_back_counts_towards_what_it_needs() -> None:
    manager = BlockManager(3, 2, groups=(KVGroup.sliding(1),))
    manager.allocate(1, "a", 4)  # both blocks
    assert (manager.num_free_blocks, manager.num_new_blocks(1, 6, 4)) == (0, 0)
    growth = manager.grow(1, 6, 4)  # query 4 sees key 4 only: 2 blocks back, 1 taken
    assert (len(growth.block_ids[0]), manager.num_free_blocks, manager.block_table(1)[:2]) == (1, 1, [0, 0])


def test_a_growth_that_does_not_fit_gives_nothing_back_either() -> None:
    manager = BlockManager(3, 2, groups=(KVGroup.sliding(1),))
    manager.allocate(1, "a", 4)
    table = manager.block_table(1)
    with pytest.raises(NoFreeBlocks) as error:
        manager.grow(1, 10, 4)  # 3 more blocks, 2 given back
    assert (error.value.needed, error.value.free, manager.block_table(1)) == (3, 2, table)


def test_a_shared_block_behind_the_window_stays_with_its_other_holder() -> None:
    manager = BlockManager(8, 2, groups=(KVGroup.sliding(1),))
    manager.allocate(1, "a", 4)
    manager.fork(1, 2)
    manager.grow(2, 5, 4)
    assert (manager.block_table(1), manager.block_table(2)[:2], manager.used_by("a")) == ([1, 2], [0, 0], 3)


def test_only_the_window_group_gives_back() -> None:
    manager = BlockManager(20, 2, groups=(FULL, KVGroup.sliding(2)))
    manager.allocate(1, "a", 6)
    manager.grow(1, 7, 6)
    assert 0 not in manager.block_table(1, 0)
    assert [block == 0 for block in manager.block_table(1, 1)] == [True, True, False, False]  # query 6 sees keys 5, 6


def test_writing_where_the_window_has_passed_is_refused() -> None:
    manager = BlockManager(10, 2, groups=(KVGroup.sliding(1),))
    manager.allocate(1, "a", 4)
    manager.grow(1, 5, 4)
    with pytest.raises(ValueError, match="a window has passed"):
        manager.grow(1, 5, 3)
    assert manager.block_table(1)[:2] == [0, 0]


def computed(manager: BlockManager, seq_id: int, tokens: list[int], chunk: int) -> HashChain:
    """Prefills in chunks, committing after each, as a scheduler does."""
    chain = HashChain("a", manager.block_size)
    chain.extend(tokens)
    manager.allocate(seq_id, "a", min(chunk, len(tokens)))
    for start in range(0, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        manager.grow(seq_id, end, start)
        manager.commit(seq_id, chain, end)
    return chain


def test_a_hit_needs_only_what_the_next_token_sees() -> None:
    manager = BlockManager(30, 2, groups=(KVGroup.sliding(3),))
    tokens = list(range(100, 109))
    chain = computed(manager, 1, tokens, 9)
    manager.free(1)
    hit = manager.lookup(chain, 9)
    # token 8 sees keys 6, 7, 8: of blocks 0..3 only block 3 is needed
    assert (hit.num_tokens, [block != 0 for block in hit.block_ids[0]], hit.num_free) == (8, [False, False, False, True], 1)
    manager.allocate(2, "a", 9, hit)
    manager.check_integrity()
    assert (manager.used_by("a"), manager.block_table(2)[:4]) == (2, list(hit.block_ids[0]))


def test_a_gap_inside_the_window_shortens_the_hit() -> None:
    manager = BlockManager(30, 2, groups=(KVGroup.sliding(5),))
    tokens = list(range(100, 109))
    chain = computed(manager, 1, tokens, 9)
    missing = manager.block_table(1)[2]
    manager.pool.unregister(missing)
    # after 8 tokens the window of token 8 (keys 4..8) needs blocks 2, 3; after 4 tokens that of token 4 (keys 0..4) blocks 0, 1
    hit = manager.lookup(chain, 9)
    assert (hit.num_tokens, hit.block_ids[0]) == (4, tuple(manager.block_table(1)[:2]))


def test_a_hit_is_what_all_groups_agree_on() -> None:
    manager = BlockManager(40, 2, groups=(FULL, KVGroup.sliding(3), KVGroup.sliding(7)))
    tokens = list(range(100, 113))  # 6 full blocks
    chain = computed(manager, 1, tokens, 13)
    tables = [manager.block_table(1, group) for group in range(3)]
    manager.pool.unregister(tables[1][5])  # window 3 misses block 5: at most 5 blocks
    manager.pool.unregister(tables[2][3])  # window 7 at 5 blocks sees keys 4..10, needs 2, 3, 4: back to 3 blocks, needs 0, 1, 2
    hit = manager.lookup(chain, 13)
    # window 3 after 6 tokens: token 6 sees keys 4..6, so blocks 0 and 1 are not needed
    assert hit.block_ids == (tuple(tables[0][:3]), (0, 0, tables[1][2]), tuple(tables[2][:3]))


def test_shortening_for_one_group_can_uncover_a_gap_of_another() -> None:
    manager = BlockManager(40, 2, groups=(KVGroup.sliding(3), KVGroup.sliding(7)))
    tokens = list(range(100, 113))  # 6 full blocks
    chain = computed(manager, 1, tokens, 13)
    narrow, wide = manager.block_table(1, 0), manager.block_table(1, 1)
    for missing in (narrow[5], narrow[2], wide[3]):
        manager.pool.unregister(missing)
    hit = manager.lookup(chain, 13)
    # narrow: at most 5 blocks (token 10 sees keys 8..10, block 4); wide: 3 (token 6 sees 0..6, blocks 0..2);
    # narrow again: token 6 sees keys 4..6, block 2, which is missing: 2 blocks (token 4 sees 2..4, block 1)
    assert hit.block_ids == ((0, narrow[1]), (wide[0], wide[1]))


def test_blocks_released_before_their_commit_are_not_found() -> None:
    manager = BlockManager(30, 2, groups=(FULL, KVGroup.sliding(2)))
    tokens = list(range(100, 109))
    chain = HashChain("a", 2)
    chain.extend(tokens)
    manager.allocate(1, "a", 4)
    manager.grow(1, 4, 0)
    manager.grow(1, 8, 4)  # one step ahead: the window lets go of block 0 before step 1 has retired
    manager.commit(1, chain, 4)
    assert manager.block_table(1, 1)[0] == 0
    assert set(manager.pool.index[1].values()) == {manager.block_table(1, 1)[1]}
    manager.check_integrity()
