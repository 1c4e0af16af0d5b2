"""Whom an eviction takes: the lowest-ranked first, and among equals those that cost least for the blocks they give. Who may be
evicted for whom is the policy's word and the step's pass's business; what an eviction costs is swaps.py's.

Blocks beyond those that are missing are worth nothing: whoever gave them has to get them again. So a score is cost over
min(freed, still missing), taken anew after each choice, and in the end whoever turns out to be superfluous is spared.
"""

from __future__ import annotations

from collections.abc import Callable

from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.policies.base import Policy, Rank
from fairlane.scheduler.request import Sequence

CostOf = Callable[[Sequence], float]
# (candidates, blocks missing, slots missing, policy, blocks, cost of evicting one) -> victims; None if all would not do.
VictimRule = Callable[[list[Sequence], int, int, Policy, BlockManager, CostOf], "list[Sequence] | None"]


def cheapest(
    candidates: list[Sequence], blocks_missing: int, slots_missing: int, policy: Policy, blocks: BlockManager, cost_of: CostOf
) -> list[Sequence] | None:
    """Candidates whose blocks and slots suffice, in the order above; None if those of all would not do."""
    if len(candidates) < slots_missing or _freed(candidates, blocks) < blocks_missing:
        return None
    keys = {sequence: policy.victim_key(sequence) for sequence in candidates}
    costs = {sequence: cost_of(sequence) for sequence in candidates}
    alone = {sequence: blocks.freed_by(sequence.request_id) for sequence in candidates}
    left = sorted(candidates, key=lambda sequence: -sequence.arrival_index)
    victims: list[Sequence] = []
    held: dict[int, int] = {}
    missing = blocks_missing
    while missing > 0 or len(victims) < slots_missing:
        useful = max(1, missing)

        def order(sequence: Sequence, useful: int = useful) -> tuple[Rank, bool, float]:
            freed = min(alone[sequence], useful)
            return keys[sequence], not freed, costs[sequence] / (freed or 1)  # who frees nothing has his slot to give

        best = min(left, key=order)
        left.remove(best)
        victims.append(best)
        missing -= blocks.freed_with(best.request_id, held)
    for sequence in sorted(victims, key=lambda victim: (keys[victim], costs[victim]), reverse=True):
        others = [victim for victim in victims if victim is not sequence]
        if len(others) >= slots_missing and alone[sequence] <= -missing:
            freed = _freed(others, blocks)  # without him, what he shares with them stays
            if freed >= blocks_missing:
                victims, missing = others, blocks_missing - freed
    return victims


def _freed(sequences: list[Sequence], blocks: BlockManager) -> int:
    """Blocks that become free if all of them are evicted."""
    held: dict[int, int] = {}
    return sum(blocks.freed_with(sequence.request_id, held) for sequence in sequences)
