"""Whom an eviction takes: as few as will do, the lowest-ranked first, and among equals those whose recompute costs least for
what they give back. Who may be evicted for whom is the policy's word, within the engine's guards; when somebody must be is the
step's pass's business."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.events import PreemptionKind, PreemptionReason
from fairlane.scheduler.kv_quotas import KVQuotas, Losses
from fairlane.scheduler.policies.base import Policy, Rank
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.stalls import evicted

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler

# Guard on policy evictions: after this many a sequence is immune.
MAX_EVICTIONS = 3
# Who had more KV cache than was its own pays for its recompute itself.
_BORROWED = frozenset({PreemptionReason.KV_GUARANTEE, PreemptionReason.KV_LIMIT})


def is_immune(victim: Sequence) -> bool:
    """Whatever the policy says: after three evictions for rank, and before some progress."""
    return victim.num_evictions >= MAX_EVICTIONS or victim.num_chunks == 0


def may_evict(policy: Policy, quotas: KVQuotas | None, candidate: Sequence, victim: Sequence) -> bool:
    """Whether a waiting candidate may take a running victim's blocks."""
    if is_immune(victim) or not policy.may_preempt(candidate, victim):
        return False
    return quotas is None or quotas.may_lose(victim, candidate)


def evict(scheduler: Scheduler, victim: Sequence, gainer: Sequence, reason: PreemptionReason, now_s: float) -> None:
    """The victim gives its blocks and slot to the gainer, waits again, and is told."""
    if reason is PreemptionReason.HIGHER_RANK:
        if scheduler.shadow is not None:
            scheduler.shadow.evicted(gainer, victim)
        victim.num_evictions += 1
    kind = scheduler.requeue(victim)
    # One that is swapped in the middle of a recompute still owes that to whoever caused it.
    if kind is PreemptionKind.RECOMPUTED or victim.num_computed_tokens >= victim.recompute_until:
        victim.evicted_by = victim.payer if reason in _BORROWED else gainer.payer
    evicted(victim, kind, reason, now_s, scheduler.delta)
    scheduler.decisions.evicted(victim, kind, reason, now_s, gainer.payer)


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
