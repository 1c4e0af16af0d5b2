"""Names of cache domains: who shares prefixes, and which accounts blocks count for. A domain is what the policy gave the
request's node (tenant:org/name, member:org/tenant/name, group:name, public), framed with the partition that the client asked
for."""

from __future__ import annotations

import re

from fairlane.scheduler.policies.caps import prefixes

_FRAME = re.compile(r"(\d+):")
_PRIVATE = frozenset({"tenant", "member"})


def framed(domain: str, partition: str) -> str:
    """Length-framed, so that no choice of partition can spell another tenant's domain."""
    return f"{len(domain)}:{domain}{len(partition)}:{partition}"


def unframed(name: str) -> str:
    """The domain without the partition; a name that is not framed is one."""
    match = _FRAME.match(name)
    return name if match is None else name[match.end() : match.end() + int(match[1])]


def account_names(name: str) -> tuple[str, ...]:
    """Accounts that the domain's blocks count for: of a private one its node's, then those of the nodes above it; a group's or
    the public one is an account of its own."""
    domain = unframed(name)
    kind, _, path = domain.partition(":")
    return tuple(prefixes(path))[::-1] if kind in _PRIVATE else (domain,)
