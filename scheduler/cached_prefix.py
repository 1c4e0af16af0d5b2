"""What a waiting sequence would find in the prefix cache, and how much of it need not be computed."""

from __future__ import annotations

from fairlane.blockmgr.manager import BlockManager, PrefixHit
from fairlane.scheduler.request import Sequence


def look_up(blocks: BlockManager, sequence: Sequence) -> PrefixHit | None:
    """A fact about this moment; None for one that does not look. What is not hashed yet of its tokens is hashed."""
    if not (blocks.enable_prefix_caching and sequence.request.cache_mode.reads):
        return None  # hashing costs more than a lookup
    if sequence.num_computed_tokens:
        return None  # swapped out: all it had comes back, bit by bit
    sequence.chain.extend(sequence.token_ids)
    return blocks.lookup(sequence.chain, sequence.num_tokens)


def num_present(sequence: Sequence, hit: PrefixHit | None) -> int:
    """Tokens of a waiting sequence that need not be computed: swapped out, or in the prefix cache."""
    return sequence.num_computed_tokens if hit is None else hit.num_tokens
