"""Whom an eviction takes: the lowest-ranked first, and among equals those that cost least for the blocks they give. Who may be
evicted for whom is the policy's word and the step's pass's business; what an eviction costs is swaps.py's.

Blocks beyond those that are missing are worth nothing: whoever gave them has to get them again. So a score is cost over
min(freed, still missing), taken anew after each choice, and whoever turns out to be superfluous is spared.
"""

from __future__ import annotations

from collections import defaultdict
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
    groups: defaultdict[Rank, list[Sequence]] = defaultdict(list)
    for candidate in candidates:
        groups[policy.victim_key(candidate)].append(candidate)
    victims: list[Sequence] = []
    for key in sorted(groups):
        if _freed(victims, blocks) >= blocks_missing and len(victims) >= slots_missing:
            break
        victims = _add_cheapest(victims, groups[key], blocks_missing, slots_missing, blocks, cost_of)
    enough = _freed(victims, blocks) >= blocks_missing and len(victims) >= slots_missing
    return victims if enough else None


def _add_cheapest(
    before: list[Sequence],
    group: list[Sequence],
    blocks_missing: int,
    slots_missing: int,
    blocks: BlockManager,
    cost_of: CostOf,
) -> list[Sequence]:
    """Those before, and of a group of equals the cheapest that suffice with them, or all of it."""
    costs = {sequence: cost_of(sequence) for sequence in group}
    alone = {sequence: blocks.freed_by(sequence.request_id) for sequence in group}
    left = sorted(group, key=lambda sequence: -sequence.arrival_index)
    chosen: list[Sequence] = []
    held: dict[int, int] = {}
    missing = blocks_missing - sum(blocks.freed_with(victim.request_id, held) for victim in before)
    while left and (missing > 0 or len(before) + len(chosen) < slots_missing):
        useful = max(1, missing)
        best = min(left, key=lambda sequence: _per_block(costs[sequence], min(alone[sequence], useful)))
        left.remove(best)
        chosen.append(best)
        missing -= blocks.freed_with(best.request_id, held)
    spare = -missing
    for sequence in sorted(chosen, key=lambda sequence: -costs[sequence]):
        if alone[sequence] > spare or len(before) + len(chosen) <= slots_missing:
            continue
        others = [*before, *(other for other in chosen if other is not sequence)]
        freed = _freed(others, blocks)  # without him, what he shares with them stays
        if freed >= blocks_missing:
            chosen.remove(sequence)
            spare = freed - blocks_missing
    return [*before, *chosen]


def _freed(sequences: list[Sequence], blocks: BlockManager) -> int:
    """Blocks that become free if all of them are evicted."""
    held: dict[int, int] = {}
    return sum(blocks.freed_with(sequence.request_id, held) for sequence in sequences)


def _per_block(cost_s: float, num_blocks: int) -> tuple[bool, float]:
    """Who frees nothing comes last, for the sake of his slot."""
    return (num_blocks == 0, cost_s / (num_blocks or 1))
