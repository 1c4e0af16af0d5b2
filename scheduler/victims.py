"""Whom an eviction takes: the lowest-ranked first, and among equals those that cost least for the blocks they give. Who may be
evicted for whom is the policy's word, within the engine's guards; when somebody must be is the step's pass's business, and what
an eviction costs is swaps.py's.

Blocks beyond those that are missing are worth nothing: whoever gave them has to get them again. So a score is cost over
min(freed, still missing), taken anew after each choice, and in the end whoever turns out to be superfluous is spared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING

from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.events import PreemptionKind, PreemptionReason
from fairlane.scheduler.kv_quotas import KVQuotas, Losses
from fairlane.scheduler.policies.base import Policy, Rank
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.stalls import evicted

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler

# Guard on policy evictions, and on those of whoever rests for a ceil: after this many a sequence is immune.
MAX_EVICTIONS = 3
_FOR_QUOTAS = frozenset({PreemptionReason.KV_GUARANTEE, PreemptionReason.KV_LIMIT})
# Who had more KV cache than was its own, or kept what it might not use, pays for its recompute itself.
_BORROWED = _FOR_QUOTAS | {PreemptionReason.CEIL}
# What an eviction is counted for.
_GUARDED = frozenset({PreemptionReason.HIGHER_RANK, PreemptionReason.CEIL})

CostOf = Callable[[Sequence], float]
# (candidates, blocks missing, slots missing, policy, blocks, cost of evicting one, what quotas say) -> victims; None if all would
# not do.
VictimRule = Callable[[list[Sequence], int, int, Policy, BlockManager, CostOf, Losses | None], "list[Sequence] | None"]
Order = tuple[Rank, float, int]


def is_immune(victim: Sequence) -> bool:
    """Whatever the policy says: after three evictions for rank, and before some progress."""
    return victim.num_evictions >= MAX_EVICTIONS or victim.num_chunks == 0


def may_evict(policy: Policy, quotas: KVQuotas | None, candidate: Sequence, victim: Sequence) -> bool:
    """Whether a waiting candidate may take a running victim's blocks."""
    if is_immune(victim) or not policy.may_preempt(candidate, victim):
        return False
    return quotas is None or quotas.may_lose(victim, candidate)


def resting(scheduler: Scheduler, gainer: Sequence, sequences: Iterable[Sequence]) -> list[Sequence]:
    """Of those that run, the ones whose ceil keeps them from being placed, and that may be evicted for that alone, whatever their
    rank: who may not run keeps nobody of its own or a higher band from it. Guarded like evictions for rank."""
    if not scheduler.ceilings.shut:
        return []
    policy, quotas = scheduler.policy, scheduler.census.quotas
    return [
        one
        for one in sequences
        if scheduler.ceilings.rests(one)
        and not is_immune(one)
        and one.num_computed_tokens >= one.lease_until_tokens
        and policy.may_take(gainer, one)
        and (quotas is None or quotas.may_lose(one, gainer))
    ]


def evictable_for(
    scheduler: Scheduler, head: Sequence, unplaced: Iterable[Sequence], running: Iterable[Sequence]
) -> list[Sequence]:
    """Whose blocks a waiting head may take: by the policy, of those that rank after it; and of all, of who rests."""
    found = [one for one in unplaced if may_evict(scheduler.policy, scheduler.census.quotas, head, one)]
    return found + [one for one in resting(scheduler, head, running) if one not in found]


def evict(
    scheduler: Scheduler, victim: Sequence, gainer: Sequence, reason: PreemptionReason, now_s: float, *, ranks_after: bool
) -> None:
    """The victim gives its blocks and slot to the gainer, waits again, and is told. ranks_after: a gainer that grows."""
    if scheduler.ceilings.rests(victim):  # is that all the right that the gainer has?
        by_rank = scheduler.policy.may_preempt(gainer, victim) if reason is PreemptionReason.HIGHER_RANK else ranks_after
        if reason not in _FOR_QUOTAS and not by_rank:
            reason = PreemptionReason.CEIL
    if reason is PreemptionReason.HIGHER_RANK and scheduler.shadow is not None:
        scheduler.shadow.evicted(gainer, victim)
    victim.num_evictions += reason in _GUARDED
    kind = scheduler.requeue(victim)
    # One that is swapped in the middle of a recompute still owes that to whoever caused it.
    if kind is PreemptionKind.RECOMPUTED or victim.num_computed_tokens >= victim.recompute_until:
        victim.evicted_by = victim.payer if reason in _BORROWED else gainer.payer
    evicted(victim, kind, reason, now_s, scheduler.delta)
    scheduler.decisions.evicted(victim, kind, reason, now_s, gainer.payer)


def victim_order(policy: Policy, blocks: BlockManager, cost_of: CostOf) -> Callable[[Sequence], Order]:
    """A key by which the first of several running sequences is evicted first, where all that each frees is of use."""

    def order(sequence: Sequence) -> Order:
        freed = blocks.freed_by(sequence.request_id)
        per_block = cost_of(sequence) / freed if freed else inf
        return (policy.victim_key(sequence), per_block, -sequence.arrival_index)

    return order


def cheapest(
    candidates: list[Sequence],
    blocks_missing: int,
    slots_missing: int,
    policy: Policy,
    blocks: BlockManager,
    cost_of: CostOf,
    losses: Losses | None = None,
) -> list[Sequence] | None:
    """Candidates whose blocks and slots suffice, in the order above; None if those of all would not do. losses: what KV quotas
    have to say: whose blocks a guarantee keeps, and which limits must get room too; the blocks that count for those go first.
    """
    alone = {sequence: blocks.freed_by(sequence.request_id) for sequence in candidates}
    if len(candidates) < slots_missing or (sum(alone.values()) < blocks_missing and _freed(candidates, blocks) < blocks_missing):
        return None
    keys = {sequence: policy.victim_key(sequence) for sequence in candidates}
    costs = {sequence: cost_of(sequence) for sequence in candidates}
    left = sorted(candidates, key=lambda sequence: -sequence.arrival_index)
    victims: list[Sequence] = []
    held: dict[int, int] = {}
    missing = blocks_missing
    while True:
        enough = missing <= 0 and len(victims) >= slots_missing
        if enough and (losses is None or losses.suffice):
            break
        left = left if losses is None else [sequence for sequence in left if losses.allows(sequence)]
        useful = [sequence for sequence in left if not enough or (losses is not None and losses.short(sequence) > 0)]
        if not useful:
            return None

        def order(sequence: Sequence, missing: int = missing) -> tuple[bool, Rank, bool, float]:
            short = 0 if losses is None else losses.short(sequence)
            freed = min(alone[sequence], max(1, missing, short))
            # Who frees nothing has his slot to give.
            return not short, keys[sequence], not freed, costs[sequence] / (freed or 1)

        best = min(useful, key=order)
        left.remove(best)
        victims.append(best)
        freed = blocks.freed_with(best.request_id, held)
        missing -= freed
        if losses is not None:
            losses.take(best, freed)
    for sequence in sorted(victims, key=lambda victim: (keys[victim], costs[victim]), reverse=True):
        others = [victim for victim in victims if victim is not sequence]
        if len(others) >= slots_missing and alone[sequence] <= -missing:
            freed = _freed(others, blocks, losses)  # without him, what he shares with them stays
            if freed >= blocks_missing and (losses is None or losses.suffice):
                victims, missing = others, blocks_missing - freed
    return victims


def _freed(sequences: list[Sequence], blocks: BlockManager, losses: Losses | None = None) -> int:
    """Blocks that become free if all of them, and nobody else, are evicted; losses become those."""
    held: dict[int, int] = {}
    freed = [(sequence, blocks.freed_with(sequence.request_id, held)) for sequence in sequences]
    if losses is not None:
        losses.retake(freed)
    return sum(count for _, count in freed)
