"""Policies rank and plan; they never see blocks or tensors. `make_policy` builds the one a snapshot names."""

from __future__ import annotations

from fairlane.scheduler.policies.bands import BandPolicy
from fairlane.scheduler.policies.base import Policy
from fairlane.scheduler.policies.fair import FairPolicy
from fairlane.scheduler.policies.fcfs import FCFSPolicy
from fairlane.scheduler.policies.plugins import PolicyUnavailable, make_plugin
from fairlane.scheduler.policies.vip import VIPPolicy
from fairlane.scheduler.tenancy import PolicySnapshot, TiersPolicy

__all__ = ["BandPolicy", "FCFSPolicy", "FairPolicy", "Policy", "PolicyUnavailable", "VIPPolicy", "make_policy"]

_POLICIES = {TiersPolicy.FCFS: FCFSPolicy, TiersPolicy.VIP: VIPPolicy, TiersPolicy.FAIR: FairPolicy}


def make_policy(snapshot: PolicySnapshot, previous: Policy | None = None) -> Policy:
    """A fresh policy object for the snapshot, with no sequences in it, that carries on the previous one's counters. Raises
    PolicyUnavailable if it names one that is not installed."""
    if snapshot.plugin:
        return make_plugin(snapshot)
    policy = _POLICIES[snapshot.tiers_policy](snapshot)
    if isinstance(previous, BandPolicy):
        policy.take_over(previous)
    return policy
