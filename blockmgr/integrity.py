"""Recounts every fact the block manager keeps incrementally, from the tables up, and names what disagrees. It repairs
nothing: a disagreement is a bug, and the evidence is worth more than a guess."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from fairlane.blockmgr.block_table import BlockTables
from fairlane.blockmgr.free_list import NULL_BLOCK
from fairlane.blockmgr.groups import KVGroup
from fairlane.blockmgr.pool import BlockPool


def find_faults(pool: BlockPool, sequences: Mapping[int, BlockTables], groups: Sequence[KVGroup], block_size: int) -> list[str]:
    """Every disagreement, in words with block and sequence ids; empty when the books are right."""
    return [
        *_null_block_faults(pool),
        *_free_list_faults(pool),
        *_index_faults(pool),
        *_table_faults(pool, sequences, groups, block_size),
        *_owner_faults(pool, sequences),
    ]


def _null_block_faults(pool: BlockPool) -> list[str]:
    if pool.ref_counts[NULL_BLOCK] or pool.hash_of[NULL_BLOCK] is not None:
        return ["the null block was given out or has a hash"]
    return []


def _free_list_faults(pool: BlockPool) -> list[str]:
    faults = []
    following, preceding = pool.free.next, pool.free.prev
    listed: list[int] = []
    shielded: list[int] = []
    for sentinel, found in ((NULL_BLOCK, listed), (pool.free.last, shielded)):
        block = following[sentinel]
        while block != sentinel and len(found) < pool.num_blocks:
            if not 0 < block < pool.num_blocks:
                return [f"the free list leads to {block}, which is no block"]
            found.append(block)
            block = following[block]
        if block != sentinel:
            return ["the free list does not come back to its beginning"]
        faults += [
            f"free list: block {after} does not point back to {before}"
            for before, after in zip([sentinel, *found], [*found, sentinel], strict=True)
            if preceding[after] != before
        ]
    listed += shielded
    if len(listed) != pool.free.size or len(shielded) != pool.free.num_last:
        faults.append(f"{pool.free.size} blocks counted as free, {len(listed)} on the free list")
    unheld = {block for block in range(1, pool.num_blocks) if not pool.ref_counts[block]}
    for block in sorted(unheld ^ set(listed)):
        faults.append(f"block {block} has ref_count {pool.ref_counts[block]} and is {'not ' * (block in unheld)}on the free list")
    if pool.shields is not None:
        faults += pool.shields.find_faults(shielded)
    known = [pool.hash_of[block] is not None for block in listed]
    if sum(known) != pool.num_cached:
        faults.append(f"{pool.num_cached} blocks counted as cached, {sum(known)} free blocks have a hash")
    if known != sorted(known):
        faults.append("a cached block would be evicted before a free block without a hash")
    return faults


def _index_faults(pool: BlockPool) -> list[str]:
    faults = []
    for group, index in enumerate(pool.index):
        for content, block in index.items():
            if pool.hash_of[block] != content or pool.group_of[block] != group:
                faults.append(f"the prefix index of group {group} names block {block}, which does not hold that content")
    num_hashed = sum(content is not None for content in pool.hash_of)
    num_indexed = sum(map(len, pool.index))
    if num_hashed != num_indexed:
        faults.append(f"{num_hashed} blocks have a hash, the prefix index has {num_indexed} entries")
    return faults


def _table_faults(pool: BlockPool, sequences: Mapping[int, BlockTables], groups: Sequence[KVGroup], block_size: int) -> list[str]:
    faults = []
    for seq_id, sequence in sequences.items():
        num_blocks = -(-sequence.num_tokens // block_size)
        if any(len(table) != num_blocks for table in sequence.tables) or sequence.capacity != num_blocks * block_size:
            faults.append(f"sequence {seq_id}: tables do not cover its {sequence.num_tokens} tokens exactly")
        for group, table, done in zip(groups, sequence.tables, sequence.num_released, strict=True):
            if [block == NULL_BLOCK for block in table] != [index < done for index in range(len(table))]:
                faults.append(f"sequence {seq_id}: null entries elsewhere than in the {done} released ones")
            if done and group.window is None:
                faults.append(f"sequence {seq_id}: a full-attention group gave blocks back")
            for block in table[sequence.private_from // block_size :]:
                if pool.ref_counts[block] != 1 or pool.hash_of[block] is not None:
                    faults.append(f"sequence {seq_id}: block {block} counts as private but is shared, known or null")
    return faults


def _owner_faults(pool: BlockPool, sequences: Mapping[int, BlockTables]) -> list[str]:
    owners: Counter[int] = Counter()
    places: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)
    domains: defaultdict[int, set[str]] = defaultdict(set)
    for sequence in sequences.values():
        for group, table in enumerate(sequence.tables):
            for index, block in enumerate(table):
                if block != NULL_BLOCK:
                    owners[block] += 1
                    places[block].add((group, index))
                    domains[block].add(sequence.domain)
    faults = []
    for block in range(1, pool.num_blocks):
        if pool.ref_counts[block] != owners[block]:
            faults.append(f"block {block}: ref_count {pool.ref_counts[block]}, {owners[block]} owners")
        if len(domains[block]) > 1:
            faults.append(f"block {block} is reachable from {len(domains[block])} cache domains")
        elif owners[block] and domains[block] != {pool.domain_of[block]}:
            faults.append(f"block {block} belongs to another cache domain than its owner")
        if len(places[block]) > 1:
            faults.append(f"block {block} stands at {len(places[block])} different table positions")
    recount = Counter(next(iter(domains[block])) for block in owners)
    if recount != Counter(pool.usage.counts):
        faults.append("blocks counted per domain differ from a recount")
    if pool.usage.accounts is not None:
        faults += pool.usage.accounts.find_faults(pool.usage.counts)
    return faults
