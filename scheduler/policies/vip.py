"""Priority bands: a higher tier goes first, evicts lower ones when blocks are short, and is protected inside the step.

Two things keep lower tiers alive. Patience: a waiting request ranks one band higher after each patience waited, but never
gains the right to evict. Minimum share: while a tier with waiting work got less than its `min` of the last ten seconds'
cost, its head goes first and part of the step's tokens is kept for it. What was admitted either way holds a lease: no
eviction for priority until it has come some tokens further.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import ceil

from fairlane.scheduler.policies.base import BatchView, Rank, StepPlan
from fairlane.scheduler.policies.share_window import ShareWindow
from fairlane.scheduler.policies.waiting import WaitingHeap
from fairlane.scheduler.request import RequestId, Sequence
from fairlane.scheduler.tenancy import Shaping, Tier

# Lower tiers' part of the step's tokens for prefill while a protected tier is in the batch.
LOWER_PREFILL_SHARE = {Shaping.BALANCED: 0.5, Shaping.STRICT: 0.25}


class VIPPolicy:
    """Waiting rank (band after ageing, arrival); running rank (own band, arrival).

    lease_tokens: how many tokens beyond those it had at admission an aged or minimum-share admission may compute before it
    can be evicted for priority again.
    """

    name = "vip"

    def __init__(self, tiers: tuple[Tier, ...], lease_tokens: int = 256) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        priorities = sorted({tier.priority for tier in tiers})
        self._band = {tier.name: priorities.index(tier.priority) for tier in tiers}
        self._top_band = len(priorities) - 1
        self._guaranteed = tuple(tier for tier in tiers if tier.min_share)
        self._lease_tokens = lease_tokens
        # One heap per (tier, bands risen): few of them, so that peek() is a minimum over their heads.
        self._heaps: dict[tuple[str, int], WaitingHeap] = {}
        self._risen: dict[RequestId, int] = {}
        self._promotions: list[tuple[float, int, Sequence, int]] = []
        self._window = ShareWindow()
        self._below_min: frozenset[str] = frozenset()

    # -- time ----------------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        self._window.advance(now_s)
        self._below_min = frozenset(t.name for t in self._guaranteed if self._window.is_below(t.name, t.min_share))
        while self._promotions and self._promotions[0][0] <= now_s:
            due_s, _, sequence, risen = heappop(self._promotions)
            if self._risen.get(sequence.request_id) == risen:
                self._promote(sequence, risen, due_s)

    def _promote(self, sequence: Sequence, risen: int, due_s: float) -> None:
        self._heap(sequence, risen).remove(sequence)
        self._enter(sequence, risen + 1, due_s)

    def _enter(self, sequence: Sequence, risen: int, since_s: float) -> None:
        tier = self._tiers[sequence.request.tier]
        self._risen[sequence.request_id] = risen
        self._heap(sequence, risen).push(sequence)
        if tier.patience_s is not None and self._band[tier.name] + risen < self._top_band:
            heappush(self._promotions, (since_s + tier.patience_s, sequence.arrival_index, sequence, risen))

    def _heap(self, sequence: Sequence, risen: int) -> WaitingHeap:
        return self._heaps.setdefault((sequence.request.tier, risen), WaitingHeap())

    # -- the step's shape ----------------------------------------------------------------------------------------------

    def plan(self, view: BatchView) -> StepPlan:
        plan = StepPlan(token_budget=view.token_budget)
        backlogged = {t.name for t in self._guaranteed if view.prefilling.get(t.name) or self._waits(t.name)}
        self._window.set_backlogged(backlogged)
        for name in self._below_min & backlogged:
            plan.reserved[name] = ceil(self._tiers[name].min_share * view.token_budget)
        protected = self._protected_tier(view)
        if protected is None:
            return plan
        plan.protected_priority = protected.priority
        plan.pause_lower = True
        share = LOWER_PREFILL_SHARE.get(protected.shaping)
        if share is not None:
            plan.lower_prefill_cap = int(share * view.token_budget)
        return plan

    def _protected_tier(self, view: BatchView) -> Tier | None:
        present = [
            tier
            for tier in self._tiers.values()
            if tier.shaping is not Shaping.OFF and (view.running.get(tier.name) or self._waits(tier.name))
        ]
        return max(present, key=lambda tier: tier.priority, default=None)

    def _waits(self, tier: str) -> bool:
        return any(name == tier and len(heap) for (name, _), heap in self._heaps.items())

    # -- order ---------------------------------------------------------------------------------------------------------

    def rank(self, sequence: Sequence) -> Rank:
        return self._waiting_rank(sequence.request.tier, self._risen.get(sequence.request_id), sequence.arrival_index)

    def _waiting_rank(self, tier: str, risen: int | None, arrival_index: int) -> Rank:
        if risen is None:  # running: its own band, whatever let it in
            return (-self._band[tier], arrival_index)
        if tier in self._below_min:
            return (-self._top_band - 1, arrival_index)
        return (-self._band[tier] - risen, arrival_index)

    def priority(self, sequence: Sequence) -> int:
        return self._tiers[sequence.request.tier].priority

    def may_preempt(self, candidate: Sequence, victim: Sequence) -> bool:
        if victim.num_computed_tokens < victim.lease_until_tokens:
            return False
        return self._band[candidate.request.tier] > self._band[victim.request.tier]

    def victim_key(self, sequence: Sequence) -> Rank:
        return (self._band[sequence.request.tier],)

    # -- the waiting queue ---------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence, now_s: float) -> None:
        self._enter(sequence, 0, now_s)

    def peek(self) -> Sequence | None:
        best: Sequence | None = None
        best_rank: Rank = ()
        for (tier, risen), heap in self._heaps.items():
            head = heap.peek()
            if head is None:
                continue
            rank = self._waiting_rank(tier, risen, head.arrival_index)
            if best is None or rank < best_rank:
                best, best_rank = head, rank
        return best

    def pop(self, sequence: Sequence) -> None:
        self.remove(sequence)

    def skip(self, sequence: Sequence) -> None:
        self._heap(sequence, self._risen[sequence.request_id]).skip()

    def remove(self, sequence: Sequence) -> None:
        self._heap(sequence, self._risen.pop(sequence.request_id)).remove(sequence)

    def end_step(self) -> None:
        for heap in self._heaps.values():
            heap.restore()

    def num_waiting(self) -> int:
        return len(self._risen)

    def position(self, sequence: Sequence) -> int:
        own = self.rank(sequence)
        before = sum(len(heap) for (tier, risen), heap in self._heaps.items() if self._waiting_rank(tier, risen, -1)[0] <= own[0])
        return before - 1

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def on_admit(self, sequence: Sequence, now_s: float) -> None:
        """Called before pop(): an admission by age or minimum share gets its lease."""
        if self._risen.get(sequence.request_id) or sequence.request.tier in self._below_min:
            sequence.lease_until_tokens = sequence.num_tokens + self._lease_tokens

    def on_charge(self, sequence: Sequence, cost: int) -> None:
        self._window.add(sequence.request.tier, cost)
