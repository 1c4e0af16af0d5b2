"""Finding the longest cached prefix over all KV-cache groups, and checking later that it is still there. Read-only: taking
the blocks is the manager's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fairlane.blockmgr.errors import StaleHit
from fairlane.blockmgr.free_list import NULL_BLOCK
from fairlane.blockmgr.groups import KVGroup
from fairlane.blockmgr.hashing import HashChain
from fairlane.blockmgr.pool import BlockPool


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A cached prefix of whole blocks, as found at one moment.

    block_ids: per group, one entry per block of the prefix; 0 where the group's window no longer sees the block.
    num_free: how many of the blocks lay on the free list: taking the hit uses up that many free blocks.
    domain, hashes: what the blocks were found under; allocate() checks them again, so a hit that is no longer true is
    refused (StaleHit) and never shared by mistake.
    """

    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]
    num_free: int
    domain: str = ""
    hashes: tuple[bytes, ...] = field(default=(), repr=False)


def find_prefix(pool: BlockPool, groups: Sequence[KVGroup], chain: HashChain, max_blocks: int) -> PrefixHit:
    """The longest prefix, at most `max_blocks` blocks, whose keys and values every group still has as far as the first
    token after the prefix (and all later ones) can see them."""
    hashes = chain.hashes[:max_blocks]
    found: list[list[int]] = []  # per group; a full group's list ends at its first miss, a window group's has gaps
    num_blocks = len(hashes)
    for number, group in enumerate(groups):
        blocks = _known_blocks(pool, number, hashes[:num_blocks], chain.domain, stop_at_miss=group.window is None)
        found.append(blocks)
        num_blocks = min(num_blocks, len(blocks))
    num_blocks = _longest_covered(groups, found, num_blocks, chain.block_size)
    num_tokens = num_blocks * chain.block_size
    table_rows = []
    num_free = 0
    for group, blocks in zip(groups, found, strict=True):
        dead = group.num_dead_blocks(num_tokens, chain.block_size)
        visible = blocks[dead:num_blocks]
        num_free += pool.num_with_ref_count(visible, 0)
        table_rows.append((NULL_BLOCK,) * dead + tuple(visible))
    return PrefixHit(num_tokens, tuple(table_rows), num_free, chain.domain, tuple(hashes[:num_blocks]))


def may_be_longer(pool: BlockPool, groups: Sequence[KVGroup], chain: HashChain, num_blocks: int) -> bool:
    """Whether a cached prefix of more than num_blocks blocks is possible: False is sure, and costs next to nothing."""
    if num_blocks >= len(chain.hashes):
        return False
    full = next((number for number, group in enumerate(groups) if group.window is None), None)
    return full is None or chain.hashes[num_blocks] in pool.index[full]


def _known_blocks(pool: BlockPool, group: int, hashes: Sequence[bytes], domain: str, *, stop_at_miss: bool) -> list[int]:
    """The block known for each hash, NULL_BLOCK for none. The hash is salted with the domain already; comparing the owner
    too keeps tenants apart even where a hash would be wrong."""
    lookup, domain_of = pool.index[group].get, pool.domain_of
    blocks = []
    for content in hashes:
        block = lookup(content, NULL_BLOCK)
        if block != NULL_BLOCK and domain_of[block] != domain:
            block = NULL_BLOCK
        if block == NULL_BLOCK and stop_at_miss:
            break
        blocks.append(block)
    return blocks


def _longest_covered(groups: Sequence[KVGroup], found: Sequence[Sequence[int]], num_blocks: int, block_size: int) -> int:
    """Shortens the prefix until no window group misses a block that the token after the prefix sees.

    Shortening for one group moves the others' windows back, so it repeats until all agree; 0 blocks always does.
    """
    while True:
        before = num_blocks
        for group, blocks in zip(groups, found, strict=True):
            if group.window is not None:
                num_blocks = _longest_for_window(group, blocks, num_blocks, block_size)
        if num_blocks == before:
            return num_blocks


def _longest_for_window(group: KVGroup, blocks: Sequence[int], num_blocks: int, block_size: int) -> int:
    """Walks back from the end; each miss inside the window makes the block before it the new end."""
    end = index = num_blocks
    while index > group.num_dead_blocks(end * block_size, block_size):
        index -= 1
        if blocks[index] == NULL_BLOCK:
            end = index
    return end


def check_hit(pool: BlockPool, hit: PrefixHit, num_groups: int, block_size: int) -> None:
    """Raises StaleHit unless every block of the hit is still the one registered for its content, ValueError for a hit that
    is none of this manager's."""
    num_blocks = len(hit.hashes)
    if num_blocks * block_size != hit.num_tokens or [len(row) for row in hit.block_ids] != [num_blocks] * num_groups:
        raise ValueError("the prefix hit does not fit this manager's groups and block size")
    for group, row in enumerate(hit.block_ids):
        for block, content in zip(row, hit.hashes, strict=True):
            if block != NULL_BLOCK and not pool.holds(block, group, content):
                raise StaleHit(f"block {block} no longer holds what the prefix hit found there")
