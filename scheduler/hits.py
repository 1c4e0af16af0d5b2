"""What a waiting sequence need not compute: found in the prefix cache, or swapped out and on its way back."""

from __future__ import annotations

from fairlane.blockmgr.manager import BlockManager, PrefixHit
from fairlane.scheduler.request import Sequence


def lookup(sequence: Sequence, blocks: BlockManager) -> PrefixHit | None:
    """None for one that may not read the cache, and for one that was swapped out: all it had comes back, bit by bit."""
    if not (blocks.enable_prefix_caching and sequence.request.cache_mode.reads):
        return None  # hashing costs more than a lookup
    if sequence.num_computed_tokens:
        return None
    sequence.chain.extend(sequence.token_ids)
    return blocks.lookup(sequence.chain, sequence.num_tokens)


def num_present(sequence: Sequence, hit: PrefixHit | None) -> int:
    """Its tokens that need not be computed."""
    return sequence.num_computed_tokens if hit is None else hit.num_tokens
