"""Who may start a request now: per-node caps on requests in flight, one name space of request ids per tenant, and the drain
switch. A ticket is the right to be in flight; rates and queue order are not decided here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from fairlane.errors import FairlaneError
from fairlane.gateway.auth import Identity
from fairlane.gateway.policy.model import Node

# Clients that were refused together should not come back together.
_RETRY_S = 1.0
_JITTER = 0.5


def retry_after_s() -> float:
    """One second, give or take half of it."""
    return _RETRY_S * (1 + random.uniform(-_JITTER, _JITTER))  # noqa: S311 - spreads load, guards nothing


class Ticket:
    """One admitted request. Release it exactly once the request is over; releasing again does nothing."""

    __slots__ = ("_admission", "_cancelled_by", "_on_cancel", "_paths", "_released", "node", "request_id", "tier")

    def __init__(self, admission: Admission, node: str, request_id: str, tier: str) -> None:
        self._admission = admission
        self._paths = _lineage(node)
        self._released = False
        self.node = node
        self.request_id = request_id
        self.tier = tier
        self._cancelled_by: FairlaneError | None = None
        self._on_cancel: Callable[[FairlaneError], None] | None = None

    def cancel(self, error: FairlaneError) -> None:
        """Ends the request with `error`: now if it is running, else as soon as it asks to run."""
        if self._cancelled_by is None:
            self._cancelled_by = error
        if self._on_cancel is not None:
            self._on_cancel(error)

    def on_cancel(self, callback: Callable[[FairlaneError], None]) -> None:
        """Who to tell of a cancellation; raises it if it has come already."""
        if self._cancelled_by is not None:
            raise self._cancelled_by
        self._on_cancel = callback

    def release(self) -> None:
        if not self._released:
            self._released = True
            self._admission._release(self, self._paths)


class Admission:
    """Counts requests in flight. Single-threaded: the event loop's."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self._nodes = nodes
        self._tickets: dict[tuple[str, str], Ticket] = {}
        self._in_flight: dict[str, int] = {}
        self._tiers: dict[str, int] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    def replace(self, nodes: Mapping[str, Node]) -> None:
        """New caps; who is in flight stays, also above a lowered cap."""
        self._nodes = nodes

    def admit(self, identity: Identity, request_id: str, tier: str) -> Ticket:
        """A ticket, or DRAINING, REQUEST_ID_IN_USE or MAX_IN_FLIGHT; a refusal leaves no trace."""
        if self.draining:
            raise FairlaneError("DRAINING", "this gateway is shutting down", retry_after_s=retry_after_s())
        key = (identity.node, request_id)
        if key in self._tickets:
            raise FairlaneError("REQUEST_ID_IN_USE", "a request with this request_id is in flight")
        ticket = Ticket(self, identity.node, request_id, tier)
        for path in ticket._paths:
            self._check_cap(path)
        for path in ticket._paths:
            self._in_flight[path] = self._in_flight.get(path, 0) + 1
        self._tiers[tier] = self._tiers.get(tier, 0) + 1
        self._tickets[key] = ticket
        self._idle.clear()
        return ticket

    def find(self, identity: Identity, request_id: str) -> Ticket:
        """The caller's own request of that id, exactly; REQUEST_NOT_FOUND for anything else, foreign ones included."""
        ticket = self._tickets.get((identity.node, request_id))
        if ticket is None:
            raise FairlaneError("REQUEST_NOT_FOUND", "no request with this request_id is in flight")
        return ticket

    def in_flight(self) -> int:
        return len(self._tickets)

    def in_flight_by_node(self) -> dict[str, int]:
        return dict(sorted(self._in_flight.items()))

    def in_flight_by_tier(self) -> dict[str, int]:
        return dict(sorted(self._tiers.items()))

    def cancel_all(self, error: FairlaneError) -> None:
        """Ends every request in flight with `error`."""
        for ticket in tuple(self._tickets.values()):
            ticket.cancel(error)

    async def wait_idle(self) -> None:
        """Returns once no request is in flight."""
        await self._idle.wait()

    def _check_cap(self, path: str) -> None:
        node = self._nodes.get(path)
        if node is None or node.max_in_flight is None or self._in_flight.get(path, 0) < node.max_in_flight:
            return
        raise FairlaneError(
            "MAX_IN_FLIGHT",
            f"{path} has {node.max_in_flight} requests in flight, its most",
            metadata={"node": path, "limit": str(node.max_in_flight)},
            retry_after_s=retry_after_s(),
        )

    def _release(self, ticket: Ticket, paths: tuple[str, ...]) -> None:
        del self._tickets[(ticket.node, ticket.request_id)]
        for path in paths:
            _decrement(self._in_flight, path)
        _decrement(self._tiers, ticket.tier)
        if not self._tickets:
            self._idle.set()


def _decrement(counts: dict[str, int], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _lineage(path: str) -> tuple[str, ...]:
    """A node and its ancestors: "a/b/c" gives a, a/b, a/b/c. Every ancestor's cap binds."""
    parts = path.split("/")
    return tuple("/".join(parts[: end + 1]) for end in range(len(parts)))
