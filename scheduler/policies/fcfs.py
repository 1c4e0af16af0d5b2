"""First come, first served: one band by arrival, nobody evicts for rank. The baseline the others are measured against."""

from __future__ import annotations

from fairlane.scheduler.policies.bands import BandPolicy
from fairlane.scheduler.policies.base import Rank
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.tenancy import PolicySnapshot, WithinTier


class FCFSPolicy(BandPolicy):
    """Rank = arrival. Blocks are taken only by a running sequence that must grow, from the latest arrival. Running caps,
    `ceil` and a caller's `order` hold here too; where a tier has a `ceil`, `order` is among a tenant's requests of one tier."""

    name = "fcfs"
    ages = False

    def __init__(self, snapshot: PolicySnapshot) -> None:
        by_tier = any(tier.ceil is not None for tier in snapshot.tiers)  # to keep a whole tier out
        band = {tier.name: 0 for tier in snapshot.tiers}
        super().__init__(snapshot, band, WithinTier.FCFS, by_tier=by_tier, minimums=False)

    def victim_key(self, sequence: Sequence) -> Rank:
        return (-sequence.place,)
