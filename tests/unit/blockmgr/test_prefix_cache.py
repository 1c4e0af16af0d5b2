"""What a lookup finds, for whom, and what is evicted when. block_size is 2: tokens (0, 1), (2, 3), ... share blocks."""

from __future__ import annotations

import random

import pytest

from fairlane.blockmgr.errors import NoFreeBlocks, StaleHit
from fairlane.blockmgr.hashing import HashChain
from fairlane.blockmgr.manager import BlockManager, PrefixHit

PROMPT = [10, 11, 12, 13, 14, 15, 16]  # 3 full blocks and one token


def chain_of(tokens: list[int], domain: str = "a", extra_keys: tuple[bytes, ...] = ()) -> HashChain:
    chain = HashChain(domain, 2, extra_keys)
    chain.extend(tokens)
    return chain


def run(manager: BlockManager, seq_id: int, tokens: list[int], domain: str = "a") -> HashChain:
    """Admits a sequence without looking anything up, computes all of it and commits."""
    chain = chain_of(tokens, domain)
    manager.allocate(seq_id, domain, len(tokens))
    manager.grow(seq_id, len(tokens), 0)
    manager.commit(seq_id, chain, len(tokens))
    return chain


def cached_tokens(manager: BlockManager, tokens: list[int], domain: str = "a") -> int:
    return manager.lookup(chain_of(tokens, domain), len(tokens)).num_tokens


def test_nothing_is_found_before_the_commit() -> None:
    manager = BlockManager(10, 2)
    manager.allocate(1, "a", 7)
    manager.grow(1, 7, 0)
    before = cached_tokens(manager, PROMPT)
    manager.commit(1, chain_of(PROMPT), 5)  # tokens 0..4: 2 full blocks
    assert (before, cached_tokens(manager, PROMPT)) == (0, 4)


def test_a_hit_is_the_longest_common_prefix_in_whole_blocks() -> None:
    manager = BlockManager(10, 2)
    run(manager, 1, PROMPT)
    same = [cached_tokens(manager, [*PROMPT[:n], 99, 99, 99]) for n in range(8)]
    assert same == [0, 0, 2, 2, 4, 4, 6, 6]


def test_one_token_is_always_left_to_compute() -> None:
    manager = BlockManager(10, 2)
    run(manager, 1, PROMPT)
    assert [cached_tokens(manager, PROMPT[:n]) for n in range(1, 8)] == [0, 0, 2, 2, 4, 4, 6]


def test_lookup_changes_nothing() -> None:
    manager = BlockManager(10, 2)
    run(manager, 1, PROMPT)
    manager.free(1)
    before = list(manager.pool.free)
    hit = manager.lookup(chain_of(PROMPT), 7)
    assert (hit.num_tokens, list(manager.pool.free), manager.num_used_blocks) == (6, before, 0)


def test_a_hit_on_running_blocks_takes_only_the_rest() -> None:
    manager = BlockManager(6, 2)
    run(manager, 1, PROMPT)  # 4 of 5 blocks
    hit = manager.lookup(chain_of(PROMPT), 7)
    assert (hit.num_free, manager.num_blocks_to_allocate(7, hit)) == (0, 1)
    manager.allocate(2, "a", 7, hit)
    assert manager.block_table(2)[:3] == manager.block_table(1)[:3]
    assert (manager.num_free_blocks, manager.used_by("a"), manager.freed_by(2)) == (0, 5, 1)


def test_a_hit_on_free_blocks_uses_those_up_too() -> None:
    manager = BlockManager(6, 2)
    run(manager, 1, PROMPT)
    table = manager.block_table(1)
    manager.free(1)
    hit = manager.lookup(chain_of(PROMPT), 7)
    assert (hit.num_free, manager.num_blocks_to_allocate(7, hit), manager.num_cached_blocks) == (3, 4, 3)
    manager.allocate(2, "a", 7, hit)
    assert (manager.block_table(2)[:3], manager.num_free_blocks, manager.num_cached_blocks) == (table[:3], 1, 0)


def test_a_hit_that_fits_only_without_its_own_blocks_does_not_fit() -> None:
    manager = BlockManager(6, 2)
    run(manager, 1, PROMPT)
    manager.free(1)  # 5 free, 3 of them the hit
    tokens = [*PROMPT[:6], *range(50, 56)]  # 6 blocks: 3 hit, 3 fresh, but only 2 others are free
    hit = manager.lookup(chain_of(tokens), 12)
    with pytest.raises(NoFreeBlocks) as error:
        manager.allocate(2, "a", 12, hit)
    assert (error.value.needed, error.value.free, manager.num_cached_blocks, manager.num_free_blocks) == (6, 5, 3, 5)


def test_a_hit_is_not_evicted_by_the_fresh_blocks_of_its_own_allocation() -> None:
    manager = BlockManager(5, 2)
    run(manager, 1, PROMPT)
    manager.free(1)  # free: 1 uncached, 3 cached
    hit = manager.lookup(chain_of([*PROMPT[:2], 9]), 3)
    run(manager, 2, [7])  # takes the uncached one: only cached ones are left
    manager.allocate(3, "a", 5, hit)
    assert (manager.block_table(3)[0], cached_tokens(manager, PROMPT[:3])) == (hit.block_ids[0][0], 2)


def test_another_domain_finds_nothing_and_the_own_repeat_does() -> None:
    rng = random.Random(1)
    manager = BlockManager(1000, 2)
    outcomes = set()
    for number in range(100):
        prompt = [rng.randrange(50_000) for _ in range(9)]
        run(manager, number, prompt, f"tenant-{number}")
        other = cached_tokens(manager, prompt, f"tenant-{number + 1}")
        longer_name = cached_tokens(manager, prompt, f"tenant-{number}0")
        outcomes.add((other, longer_name, cached_tokens(manager, prompt, f"tenant-{number}")))
    assert outcomes == {(0, 0, 8)}


def test_extra_keys_keep_the_same_tokens_of_one_domain_apart() -> None:
    manager = BlockManager(10, 2)
    run(manager, 1, PROMPT)
    adapter = chain_of(PROMPT, "a", (b"adapter-1",))
    assert manager.lookup(adapter, 7).num_tokens == 0


def test_a_hit_of_another_domain_is_refused() -> None:
    manager = BlockManager(10, 2)
    run(manager, 1, PROMPT)
    hit = manager.lookup(chain_of(PROMPT), 7)
    with pytest.raises(ValueError, match="one cache domain"):
        manager.allocate(2, "b", 7, hit)
    assert not manager.has(2)


def test_even_a_wrong_hash_does_not_cross_domains() -> None:
    manager = BlockManager(10, 2)
    run(manager, 1, PROMPT, "victim")
    forged = HashChain("thief", 2)
    forged.hashes = list(chain_of(PROMPT, "victim").hashes)
    assert manager.lookup(forged, 7).num_tokens == 0


def test_a_chain_of_another_domain_is_not_committed() -> None:
    manager = BlockManager(10, 2)
    manager.allocate(1, "a", 7)
    with pytest.raises(ValueError, match="domain"):
        manager.commit(1, chain_of(PROMPT, "b"), 7)
    assert cached_tokens(manager, PROMPT, "b") == 0


def test_a_chain_over_other_blocks_is_refused() -> None:
    manager = BlockManager(10, 2)
    with pytest.raises(ValueError, match="blocks of 3"):
        manager.lookup(HashChain("a", 3), 7)
    assert manager.num_used_blocks == 0


def test_more_computed_tokens_than_slots_are_refused() -> None:
    manager = BlockManager(10, 2)
    manager.allocate(1, "a", 3)
    with pytest.raises(ValueError, match="only 4 slots"):
        manager.commit(1, chain_of(PROMPT), 6)
    assert cached_tokens(manager, PROMPT) == 0


def test_committing_again_or_less_changes_nothing() -> None:
    manager = BlockManager(10, 2)
    chain = run(manager, 1, PROMPT)
    before = dict(manager.pool.index[0])
    for num_tokens in (7, 6, 2, 0):
        manager.commit(1, chain, num_tokens)
    assert manager.pool.index[0] == before


def test_a_commit_goes_as_far_as_the_chain_reaches_and_later_on() -> None:
    manager = BlockManager(10, 2)
    chain = chain_of(PROMPT[:3])
    manager.allocate(1, "a", 7)
    manager.commit(1, chain, 6)
    early = cached_tokens(manager, PROMPT)
    chain.extend(PROMPT)
    manager.commit(1, chain, 6)
    assert (early, cached_tokens(manager, PROMPT)) == (2, 6)


def test_the_first_block_registered_for_a_content_stays() -> None:
    manager = BlockManager(10, 2)
    run(manager, 1, PROMPT)
    run(manager, 2, PROMPT)
    assert manager.lookup(chain_of(PROMPT), 7).block_ids == (tuple(manager.block_table(1)[:3]),)
    manager.free(2)
    assert manager.num_cached_blocks == 0  # the duplicates are worth nothing


def test_uncached_blocks_are_used_up_before_cached_ones() -> None:
    manager = BlockManager(8, 2)
    run(manager, 1, PROMPT)  # 3 full, 1 partial; 3 untouched
    manager.free(1)
    manager.allocate(2, "b", 8)  # exactly the 4 uncached ones
    assert cached_tokens(manager, PROMPT) == 6


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    manager = BlockManager(5, 2)
    run(manager, 1, PROMPT)
    manager.free(1)  # 1 uncached, 3 cached
    left = []
    for num_blocks in (1, 2, 3, 4):
        manager.allocate(2, "b", 2 * num_blocks)
        manager.free(2)
        left.append(cached_tokens(manager, PROMPT))
    assert left == [6, 4, 2, 0]


def test_the_least_recently_freed_prefix_is_evicted_first() -> None:
    manager = BlockManager(7, 2)
    old, new = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10]  # 2 full + 1 partial block each
    run(manager, 1, old)
    run(manager, 2, new)
    manager.free(1)
    manager.free(2)
    manager.allocate(3, "a", 5, manager.lookup(chain_of(old), 5))  # using it again makes `old` the younger one
    manager.free(3)
    manager.allocate(4, "b", 8)  # 2 uncached, 2 evicted
    assert (cached_tokens(manager, old), cached_tokens(manager, new)) == (4, 0)


def test_a_hit_that_was_evicted_since_is_refused_and_changes_nothing() -> None:
    manager = BlockManager(5, 2)
    run(manager, 1, PROMPT)
    manager.free(1)
    hit = manager.lookup(chain_of(PROMPT), 7)
    manager.allocate(2, "b", 4)  # 1 uncached, and the end of the hit
    manager.free(2)
    before = list(manager.pool.free)
    with pytest.raises(StaleHit):
        manager.allocate(3, "a", 7, hit)
    assert (list(manager.pool.free), manager.has(3), manager.num_used_blocks) == (before, False, 0)


def test_a_hit_stays_true_while_others_free() -> None:
    manager = BlockManager(6, 2)
    run(manager, 1, PROMPT)
    hit = manager.lookup(chain_of(PROMPT), 7)
    manager.free(1)
    needed = manager.num_blocks_to_allocate(7, hit)
    manager.allocate(2, "a", 7, hit)
    assert (hit.num_free, needed, manager.num_used_blocks) == (0, 4, 4)


def test_a_hit_made_for_other_groups_is_refused() -> None:
    manager = BlockManager(6, 2)
    with pytest.raises(ValueError, match="does not fit"):
        manager.allocate(1, "a", 5, PrefixHit(2, ((1,), (2,)), 0, "a", (b"h",)))
    assert not manager.has(1)


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    manager = BlockManager(8, 2)
    chain = run(manager, 1, PROMPT)
    table = manager.block_table(1)
    manager.free(1)
    manager.allocate(1, "a", 7, manager.lookup(chain, 7))
    assert manager.block_table(1)[:3] == table[:3]


def test_forget_takes_back_everything_the_failed_sequence_holds_shared_or_not() -> None:
    manager = BlockManager(10, 2)
    run(manager, 1, PROMPT)
    manager.allocate(2, "a", 3, manager.lookup(chain_of(PROMPT[:3]), 3))  # shares the first block
    manager.forget(1)
    manager.free(1)
    assert (cached_tokens(manager, PROMPT), manager.num_cached_blocks) == (0, 0)


def test_writing_over_a_known_block_makes_it_unknown() -> None:
    manager = BlockManager(10, 2)
    run(manager, 1, PROMPT)
    table = manager.block_table(1)
    manager.grow(1, 4, 3)  # token 3 again: block 1 is about to change, blocks 0 and 2 are not
    other = chain_of([10, 11, 12, 77])
    manager.commit(1, other, 4)
    assert (cached_tokens(manager, PROMPT), cached_tokens(manager, [10, 11, 12, 77, 0]), manager.block_table(1)) == (2, 4, table)


def test_writing_over_a_known_block_somebody_else_holds_copies_it() -> None:
    manager = BlockManager(10, 2)
    run(manager, 1, PROMPT)
    manager.allocate(2, "a", 7, manager.lookup(chain_of(PROMPT), 7))
    growth = manager.grow(2, 4, 3)
    assert growth.copies == [(manager.block_table(1)[1], manager.block_table(2)[1])]
    assert cached_tokens(manager, PROMPT) == 6


def test_reset_makes_nothing_findable_for_good() -> None:
    manager = BlockManager(12, 2)
    run(manager, 1, [1, 2, 3])
    chain = run(manager, 2, PROMPT)
    manager.free(1)
    manager.reset_prefix_cache()
    manager.grow(2, 9, 7)
    chain.extend([*PROMPT, 17, 18])
    manager.commit(2, chain, 8)  # computed on top of what was reset
    manager.fork(2, 3)
    manager.commit(3, chain, 8)
    found = [cached_tokens(manager, [1, 2, 3]), cached_tokens(manager, [*PROMPT, 17, 18])]
    run(manager, 4, PROMPT)  # finds the stale fourth block again if it was registered
    again = [cached_tokens(manager, PROMPT), cached_tokens(manager, [*PROMPT, 17, 18])]
    assert (found, manager.num_cached_blocks, again) == ([0, 0], 0, [6, 6])


def test_with_caching_off_nothing_is_kept_or_found() -> None:
    manager = BlockManager(10, 2, enable_prefix_caching=False)
    run(manager, 1, PROMPT)
    found = cached_tokens(manager, PROMPT)
    manager.free(1)
    assert (found, manager.num_cached_blocks, manager.pool.index) == (0, 0, ({},))
