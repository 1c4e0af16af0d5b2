"""Who is charged for which block, how full blocks are, and whether a corrupted book is noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fairlane.blockmgr.errors import IntegrityError
from fairlane.blockmgr.hashing import HashChain
from fairlane.blockmgr.manager import BlockManager, KVGroup


def prefix(manager: BlockManager, domain: str, num_tokens: int) -> HashChain:
    chain = HashChain(domain, manager.block_size)
    chain.extend(list(range(num_tokens)))
    return chain


def test_a_block_counts_once_for_its_domain_however_many_sequences_share_it() -> None:
    manager = BlockManager(20, 4)
    manager.allocate(1, "a", 9)  # 3
    manager.commit(1, prefix(manager, "a", 9), 9)
    manager.allocate(2, "a", 9, manager.lookup(prefix(manager, "a", 9), 9))  # shares 2, takes 1
    manager.fork(1, 3)  # takes none
    manager.allocate(4, "b", 5)  # 2
    counted = (manager.used_by("a"), manager.used_by("b"), manager.used_by("c"), manager.num_used_blocks)
    assert (counted, manager.domains()) == ((4, 2, 0, 6), {"a": 4, "b": 2})


def test_a_neighbours_exit_never_changes_what_a_domain_is_charged() -> None:
    manager = BlockManager(20, 4)
    manager.allocate(1, "group", 8)
    manager.fork(1, 2)
    manager.allocate(3, "a", 8)
    charged = []
    for leaving in (1, 2):
        charged.append((manager.used_by("a"), manager.used_by("group")))
        manager.free(leaving)
    assert (charged, manager.domains()) == ([(2, 2), (2, 2)], {"a": 2})


def test_free_cached_blocks_count_for_nobody() -> None:
    manager = BlockManager(20, 4)
    manager.allocate(1, "a", 8)
    manager.commit(1, prefix(manager, "a", 8), 8)
    manager.free(1)
    assert (manager.num_cached_blocks, manager.domains(), manager.block_utilization_ratio()) == (2, {}, 0.0)


def test_utilization_is_used_over_usable() -> None:
    manager = BlockManager(9, 4)
    manager.allocate(1, "a", 8)
    assert manager.block_utilization_ratio() == 2 / 8


def test_fragmentation_is_unused_over_allocated_slots() -> None:
    manager = BlockManager(20, 4)
    empty = manager.fragmentation_rate()
    manager.allocate(1, "a", 5)  # 8 slots, 3 unused
    manager.allocate(2, "b", 8)  # 8 slots, 0 unused
    manager.allocate(3, "b", 1)  # 4 slots, 3 unused
    rates = [manager.fragmentation_rate(domain) for domain in (None, "a", "b", "c")]
    assert (empty, rates) == (0.0, [6 / 20, 3 / 8, 3 / 12, 0.0])


def test_the_slots_of_a_shared_block_count_once() -> None:
    manager = BlockManager(20, 4)
    manager.allocate(1, "a", 5)
    manager.fork(1, 2)
    shared = manager.fragmentation_rate()  # 2 blocks: 8 slots, 3 unused
    manager.grow(2, 6, 5)  # 3 blocks: 12 slots, 3 + 2 unused
    assert (shared, manager.fragmentation_rate()) == (3 / 8, 5 / 12)


def test_growth_fills_slots() -> None:
    manager = BlockManager(20, 4)
    manager.allocate(1, "a", 1)
    rates = []
    for num_tokens in (2, 3, 4, 5):
        manager.grow(1, num_tokens, num_tokens - 1)
        rates.append(manager.fragmentation_rate())
    assert rates == [2 / 4, 1 / 4, 0.0, 3 / 8]


def busy_manager() -> BlockManager:
    """Two domains, a fork, a prefix hit, cached free blocks, a window."""
    manager = BlockManager(30, 4, groups=(KVGroup.full(), KVGroup.sliding(4)))
    manager.allocate(1, "a", 9)
    manager.commit(1, prefix(manager, "a", 9), 9)
    manager.grow(1, 10, 9)
    manager.fork(1, 2)
    manager.allocate(3, "b", 6)
    manager.commit(3, prefix(manager, "b", 6), 6)
    manager.allocate(4, "b", 6)
    manager.free(3)
    return manager


def corrupt(change: Callable[[BlockManager], object]) -> str:
    manager = busy_manager()
    manager.check_integrity()
    change(manager)
    with pytest.raises(IntegrityError) as error:
        manager.check_integrity()
    return str(error.value)


def lose_free_block(manager: BlockManager) -> None:
    manager.pool.free.pop_many(1)


def break_back_link(manager: BlockManager) -> None:
    manager.pool.free.prev[manager.pool.free.next[0]] = 17


def miscount_free(manager: BlockManager) -> None:
    manager.pool.free.size += 1


def add_reference(manager: BlockManager) -> None:
    manager.pool.ref_counts[manager.block_table(4)[0]] += 1


def drop_index_entry(manager: BlockManager) -> None:
    manager.pool.index[0].popitem()


def swap_index_entries(manager: BlockManager) -> None:
    index = manager.pool.index[0]
    first, second, *_ = index
    index[first], index[second] = index[second], index[first]


def share_over_domains(manager: BlockManager) -> None:
    manager._sequences[4].tables[0][0] = manager.block_table(1)[0]


def charge_wrongly(manager: BlockManager) -> None:
    manager.pool.usage.counts["a"] += 1


def use_null_block(manager: BlockManager) -> None:
    manager.pool.ref_counts[0] = 1


def shorten_table(manager: BlockManager) -> None:
    manager._sequences[4].tables[0].pop()


def null_an_entry(manager: BlockManager) -> None:
    manager._sequences[4].tables[0][0] = 0


def miscount_cached(manager: BlockManager) -> None:
    manager.pool.num_cached -= 1


def claim_privacy(manager: BlockManager) -> None:
    manager._sequences[1].private_from = 0


def swap_positions(manager: BlockManager) -> None:
    table = manager._sequences[2].tables[0]
    table[0], table[1] = table[1], table[0]


def relabel_domain(manager: BlockManager) -> None:
    manager.pool.domain_of[manager.block_table(4)[0]] = "a"


def change_shared_growth(manager: BlockManager) -> None:
    manager.grow(4, 6, 5).block_ids[0].append(1)


def cached_block_first(manager: BlockManager) -> None:
    cached = manager.pool.free.prev[0]
    manager.pool.free.remove(cached)
    manager.pool.free.push_front_many([cached])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_free_block, "is not on the free list"),
        (break_back_link, "does not point back"),
        (miscount_free, "blocks counted as free"),
        (add_reference, "owners"),
        (drop_index_entry, "prefix index has"),
        (swap_index_entries, "does not hold that content"),
        (share_over_domains, "reachable from 2 cache domains"),
        (charge_wrongly, "counted per domain"),
        (use_null_block, "null block"),
        (shorten_table, "do not cover"),
        (null_an_entry, "null entries elsewhere"),
        (miscount_cached, "counted as cached"),
        (claim_privacy, "counts as private"),
        (swap_positions, "different table positions"),
        (relabel_domain, "another cache domain than its owner"),
        (change_shared_growth, "empty growth was changed"),
        (cached_block_first, "evicted before a free block"),
    ],
)
def test_a_corrupted_book_is_named(change: Callable[[BlockManager], object], message: str) -> None:
    assert message in corrupt(change)
