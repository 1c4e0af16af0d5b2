"""Whom an eviction takes: as few as will do, the lowest-ranked first, and among equals those whose recompute costs least for
what they give back. Who may be evicted for whom is the policy's word, within the engine's guards; when somebody must be is the
step's pass's business."""

from __future__ import annotations

from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.policies.base import Policy, Rank
from fairlane.scheduler.request import Sequence

# Guard on policy evictions: after this many a sequence is immune.
MAX_EVICTIONS = 3


def is_immune(victim: Sequence) -> bool:
    """Whatever the policy says: after three evictions for rank, and before some progress."""
    return victim.num_evictions >= MAX_EVICTIONS or victim.num_chunks == 0


def may_evict(policy: Policy, candidate: Sequence, victim: Sequence) -> bool:
    """Whether a waiting candidate may take a running victim's blocks."""
    return not is_immune(victim) and policy.may_preempt(candidate, victim)


def cheapest(
    candidates: list[Sequence], blocks_missing: int, slots_missing: int, policy: Policy, blocks: BlockManager
) -> list[Sequence] | None:
    """The first of the candidates, in the order above, whose blocks and slots suffice; None if all would not do."""

    def order(sequence: Sequence) -> tuple[Rank, float, int]:
        freed = blocks.freed_by(sequence.request_id)
        per_block = sequence.num_computed_tokens / freed if freed else float("inf")
        return (policy.victim_key(sequence), per_block, -sequence.arrival_index)

    victims: list[Sequence] = []
    held: dict[int, int] = {}
    for victim in sorted(candidates, key=order):
        if blocks_missing <= 0 and len(victims) >= slots_missing:
            break
        victims.append(victim)
        blocks_missing -= blocks.freed_with(victim.request_id, held)
    enough = blocks_missing <= 0 and len(victims) >= slots_missing
    return victims if enough else None
