"""Policies rank and plan; they never see blocks or tensors. `make_policy` builds the one a snapshot names."""

from __future__ import annotations

from fairlane.scheduler.policies.base import Policy
from fairlane.scheduler.policies.fcfs import FCFSPolicy
from fairlane.scheduler.policies.vip import VIPPolicy
from fairlane.scheduler.tenancy import PolicySnapshot, TiersPolicy

__all__ = ["FCFSPolicy", "Policy", "VIPPolicy", "make_policy"]


def make_policy(snapshot: PolicySnapshot) -> Policy:
    """A fresh policy object for the snapshot, with no sequences in it."""
    match snapshot.tiers_policy:
        case TiersPolicy.FCFS:
            return FCFSPolicy()
        case TiersPolicy.VIP:
            return VIPPolicy(snapshot.tiers)
