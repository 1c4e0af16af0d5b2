"""Policies that others install: found by name in the entry point group `fairlane.policies`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from fairlane.scheduler.policies.base import Policy
from fairlane.scheduler.policies.guard import GuardedPolicy
from fairlane.scheduler.tenancy import PolicySnapshot

GROUP = "fairlane.policies"

PolicyFactory = Callable[[PolicySnapshot], Policy]


class PolicyUnavailable(Exception):
    """No policy of that name can be made here; the text says why."""


def make_plugin(snapshot: PolicySnapshot) -> GuardedPolicy:
    """The policy that the snapshot names, guarded. Raises PolicyUnavailable."""
    name = snapshot.plugin
    found = entry_points(group=GROUP, name=name)
    if not found:
        installed = ", ".join(sorted(point.name for point in entry_points(group=GROUP))) or "none"
        raise PolicyUnavailable(f"no policy {name!r} is installed at the worker ({GROUP}); installed: {installed}")
    try:
        factory: PolicyFactory = next(iter(found)).load()
        return GuardedPolicy(factory(snapshot), snapshot)
    except Exception as error:
        raise PolicyUnavailable(f"policy {name!r} cannot be made: {type(error).__name__}: {error}") from error
