"""Weighted fair shares of the worker's cost, over tiers, organisations, tenants and members, whatever their priorities. The
algorithm is wait_tree.py's; this says that all tiers are one band, that a gap of θ gives the right to evict, and that steps are
short enough for the tiers' ttft_target."""

from __future__ import annotations

from math import inf

from fairlane.scheduler.policies.bands import BandPolicy
from fairlane.scheduler.policies.deadlines import step_towards
from fairlane.scheduler.tenancy import PolicySnapshot, WithinTier


class FairPolicy(BandPolicy):
    """Whoever got least for its weight goes first."""

    name = "fair"
    ages = False

    def __init__(self, snapshot: PolicySnapshot) -> None:
        super().__init__(snapshot, {tier.name: 0 for tier in snapshot.tiers}, WithinTier.FAIR)
        self._deadlines.bound_steps(min((step_towards(tier.ttft_target_s) for tier in snapshot.tiers), default=inf))
