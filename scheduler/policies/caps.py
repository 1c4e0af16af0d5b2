"""`max_running`: how many sequences of a node, and of everything below it, hold KV at once; and who is kept out by the engine:
nodes whose limit on KV cache is reached, nodes and tiers whose `ceil` binds. Counts are over all tiers and bands, so they stand
apart from the queues; a queue that finds a node full parks it here and is called when room comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from fairlane.scheduler.tenancy import NodeShare

T = TypeVar("T")
_TIER = "tier "


def tier_gate(tier: str) -> str:
    """What a tier is called where a node goes by its path; no path is like it."""
    return _TIER + tier


def tier_of_gate(gate: str) -> str | None:
    """None: it is a node's."""
    return gate.removeprefix(_TIER) if gate.startswith(_TIER) else None


def gate_places(gate: str, tiers: Iterable[str] | None) -> list[tuple[str, ...]]:
    """Names from the root of a waiting tree to a tier or node; a node's requests come in several tiers. tiers: None, where the
    tree does not begin with them."""
    tier = tier_of_gate(gate)
    if tier is not None:
        return [(tier,)]
    names = tuple(gate.split("/"))
    return [names] if tiers is None else [(name, *names) for name in tiers]


def prefixes(path: str) -> Iterable[str]:
    """ "a/b/c" -> "a", "a/b", "a/b/c"."""
    end = path.find("/")
    while end >= 0:
        yield path[:end]
        end = path.find("/", end + 1)
    yield path


class RunningCaps:
    """Counts by path, kept only while they are not zero."""

    def __init__(self, shares: dict[str, NodeShare]) -> None:
        self._shares = shares
        self._capped = any(s.max_running is not None or s.member_max_running is not None for s in shares.values())
        self._counts: dict[str, int] = {}
        self._held: set[str] = set()
        self._shut: set[str] = set()
        self._parked: dict[str, dict[int, tuple[Any, Callable[[Any], None]]]] = {}

    def add(self, path: str) -> None:
        for prefix in prefixes(path):
            self._counts[prefix] = self._counts.get(prefix, 0) + 1

    def remove(self, path: str) -> None:
        """One sequence of the path gave its KV back; wakes who waited for that."""
        for prefix in prefixes(path):
            count = self._counts[prefix] - 1
            if count:
                self._counts[prefix] = count
            else:
                del self._counts[prefix]
            self._wake(prefix)

    def hold(self, path: str) -> None:
        """The node is full until let_go(), whatever runs."""
        self._held.add(path)

    def let_go(self, path: str) -> None:
        self._held.discard(path)
        self._wake(path)

    def shut(self, gate: str) -> None:
        """Nobody of the tier or node may go until reopen()."""
        self._shut.add(gate)

    def reopen(self, gate: str) -> None:
        self._shut.discard(gate)
        self._wake(gate)

    def is_shut(self, gate: str) -> bool:
        return gate in self._shut

    def bars(self, path: str) -> bool:
        """Whether a `max_running` or a `ceil`, of the node or one above it, keeps it from running."""
        return any(prefix in self._shut or self.has_max_running(prefix) for prefix in prefixes(path))

    def _wake(self, path: str) -> None:
        for waiter, wake in self._parked.pop(path, {}).values():
            wake(waiter)

    def is_full(self, path: str) -> bool:
        return path in self._held or path in self._shut or (self._capped and self.has_max_running(path))

    def keeps_out(self, path: str) -> bool:
        """Whether the node or one above it is full."""
        return any(self.is_full(prefix) for prefix in prefixes(path))

    def has_max_running(self, path: str) -> bool:
        """Whether as many run as may."""
        if not self._capped:
            return False
        cap = self._cap(path)
        return cap is not None and self._counts.get(path, 0) >= cap

    def park(self, path: str, waiter: T, wake: Callable[[T], None]) -> None:
        """Calls wake(waiter) once, when the path has room again."""
        self._parked.setdefault(path, {})[id(waiter)] = (waiter, wake)

    def _cap(self, path: str) -> int | None:
        share = self._shares.get(path)
        if share is not None:
            return share.max_running
        parent = self._shares.get(path.rpartition("/")[0])
        return None if parent is None else parent.member_max_running
