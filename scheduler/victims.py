"""Whom an eviction takes: as few as will do, the lowest-ranked first, and among equals those whose recompute costs least for
what they give back. Who may be evicted for whom is the policy's word and the step's pass's business."""

from __future__ import annotations

from collections.abc import Callable

from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.kv_quotas import Losses
from fairlane.scheduler.policies.base import Policy, Rank
from fairlane.scheduler.request import Sequence

Order = tuple[Rank, float, int]


def victim_order(policy: Policy, blocks: BlockManager) -> Callable[[Sequence], Order]:
    """A key by which the first of several running sequences is evicted first."""

    def order(sequence: Sequence) -> Order:
        freed = blocks.freed_by(sequence.request_id)
        per_block = sequence.num_computed_tokens / freed if freed else float("inf")
        return (policy.victim_key(sequence), per_block, -sequence.arrival_index)

    return order


def cheapest(
    candidates: list[Sequence],
    blocks_missing: int,
    slots_missing: int,
    policy: Policy,
    blocks: BlockManager,
    losses: Losses | None = None,
) -> list[Sequence] | None:
    """The first of the candidates, in the order above, whose blocks and slots suffice; None if all would not do. losses: what
    KV quotas have to say: whose blocks a guarantee keeps, and which limits must get room too; the blocks that count for those
    go first.
    """
    in_order = sorted(candidates, key=victim_order(policy, blocks))
    if losses is not None and not losses.suffice:
        in_order.sort(key=lambda victim: not losses.helps(victim))
    victims: list[Sequence] = []
    held: dict[int, int] = {}
    for victim in in_order:
        enough = blocks_missing <= 0 and len(victims) >= slots_missing
        if enough and (losses is None or losses.suffice):
            break
        if losses is not None and not (losses.allows(victim) and (not enough or losses.helps(victim))):
            continue
        victims.append(victim)
        freed = blocks.freed_with(victim.request_id, held)
        blocks_missing -= freed
        if losses is not None:
            losses.take(victim, freed)
    enough = blocks_missing <= 0 and len(victims) >= slots_missing and (losses is None or losses.suffice)
    return victims if enough else None
