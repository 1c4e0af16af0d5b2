"""Paths of the ownership tree: "organisation", "organisation/tenant", "organisation/tenant/member". Says what a path may look
like and what lies above and below it; which nodes there are is the policy's."""

from __future__ import annotations

import re

MAX_DEPTH = 3
MEMBER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@:+=-]{0,127}")


def lineage(path: str) -> tuple[str, ...]:
    """A node and its ancestors, the organisation first: "a/b/c" gives a, a/b, a/b/c. Every ancestor's cap binds."""
    parts = path.split("/")
    return tuple("/".join(parts[: end + 1]) for end in range(len(parts)))


def is_below(path: str, ancestor: str) -> bool:
    """Whether `path` is `ancestor` or anything under it."""
    return path == ancestor or path.startswith(f"{ancestor}/")


def is_well_formed(path: str) -> bool:
    """One to three names. A member's is its SaaS's own id of a customer, hence the wider alphabet: up to 128 letters, digits
    and . _ @ : + = -."""
    parts = path.split("/")
    return len(parts) <= MAX_DEPTH and all(MEMBER.fullmatch(part) for part in parts)
