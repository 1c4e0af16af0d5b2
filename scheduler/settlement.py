"""When nobody who waits could be let in, and until when that is sure: a step need not ask again before. Whatever gives
something back (a sequence that ends or is evicted, a seat of one whose last token is still out) or swaps the policy ends it;
here is what else does."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf

from fairlane.scheduler.census import Census
from fairlane.scheduler.policies.base import Policy
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.running import RunningSet

# Where counters alone change who goes first, or who may evict, it is asked again after so many steps.
RECHECK_STEPS = 16


class Shortage(Enum):
    """Why nobody gets in."""

    REQUESTS = "nobody waits"
    SLOTS = "every slot is taken"
    ROOM = "nobody who may go next fits into the free blocks, or the seats are taken by those before it"


@dataclass(frozen=True, slots=True)
class Settlement:
    """Holds before until_step and before until_s, as long as nothing is given back."""

    shortage: Shortage
    until_step: float
    until_s: float

    @classmethod
    def after(cls, step_id: int, policy: Policy, census: Census, running: RunningSet) -> Settlement:
        """What the step found."""
        if not policy.num_waiting():
            return cls(Shortage.REQUESTS, inf, inf)
        shortage = Shortage.ROOM if running.has_free_slot else Shortage.SLOTS
        shortest_lease = running.shortest_lease()
        rank_counts = shortage is Shortage.ROOM or any(
            # Whoever ranks before a head with the right to evict is not evicted.
            policy.could_preempt(tier, census.running_by_tier)
            for tier in census.waiting_by_tier
        )
        drifts = policy.leads_evict or (policy.ranks_change and rank_counts)
        steps = min(shortest_lease, RECHECK_STEPS) if drifts else shortest_lease
        # Ageing and missed deadlines bring others to the front: without a slot, and without a right to evict, it changes nothing.
        return cls(shortage, step_id + steps, policy.next_change_s() if rank_counts else inf)

    def holds(self, step_id: int, now_s: float) -> bool:
        """Whether the step after step_id need not ask."""
        return step_id < self.until_step and now_s < self.until_s

    def outlasts_arrival(self, sequence: Sequence, policy: Policy, census: Census) -> bool:
        """Whether a newcomer changes nothing: it would have to evict, and has no right to."""
        if census.quotas is not None and census.quotas.may_claim(sequence):
            return False
        return self.shortage is Shortage.SLOTS and not policy.could_preempt(sequence.request.tier, census.running_by_tier)

    @property
    def only_a_slot_helps(self) -> bool:
        """Whether it changes nothing that somebody waits no more, or needs fewer blocks."""
        return self.shortage is Shortage.SLOTS
