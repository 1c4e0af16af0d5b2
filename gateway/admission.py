"""Who may start a request now: caps on requests in flight and waiting along the ownership tree, one name space of request ids per
node, and the drain switch. A ticket is the right to be in flight; rates and queue order are not decided here."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fairlane.clock import Clock
from fairlane.errors import FairlaneError
from fairlane.gateway.auth import Identity
from fairlane.gateway.members import Members
from fairlane.gateway.policy.effective import Cap
from fairlane.gateway.tree import MAX_DEPTH, lineage

# Clients that were refused together should not come back together.
_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
_JITTER = 0.5


def retry_after_s(wait_s: float = _RETRY_S) -> float:
    """The wait, within a second and a minute, give or take half of it."""
    wait_s = min(max(wait_s, _RETRY_S), _LONGEST_RETRY_S)
    return wait_s * (1 + random.uniform(-_JITTER, _JITTER))  # noqa: S311 - spreads load, guards nothing


@dataclass(frozen=True, slots=True)
class Limits:
    """What the policy in force at its admission says about one request.

    caps: of its node and of every ancestor. tier_max_queue: waiting requests of its whole tier. max_members: known members of
    its tenant; None: it is no member's request.
    """

    caps: tuple[Cap, ...] = ()
    tier_max_queue: int | None = None
    max_members: int | None = None


class Ticket:
    """One admitted request. Release it exactly once the request is over; releasing again does nothing."""

    __slots__ = (
        "_admission",
        "_cancelled_by",
        "_on_cancel",
        "_released",
        "admitted_s",
        "identity",
        "node",
        "paths",
        "request_id",
        "started",
        "tier",
        "worker_id",
    )

    def __init__(self, admission: Admission, identity: Identity, request_id: str, tier: str, now_s: float) -> None:
        self._admission = admission
        self._released = False
        self._cancelled_by: FairlaneError | None = None
        self._on_cancel: Callable[[FairlaneError], None] | None = None
        self.identity = identity
        self.node = identity.node
        self.paths = lineage(identity.node)
        self.request_id = request_id
        self.tier = tier
        self.admitted_s = now_s
        self.started = False
        self.worker_id: int | None = None  # what the worker calls it, once it was given it

    def start(self) -> None:
        """Its first step runs: it waits no longer. Calling again does nothing."""
        if not self.started and not self._released:
            self.started = True
            self._admission._end_waiting(self)

    def waits(self, estimated_s: float) -> None:
        """The worker has queued it, and thinks that its first step will be so much later."""
        self._admission._estimated_waits[self.tier] = estimated_s

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
            if not self.started:
                self._admission._end_waiting(self)
            self._released = True
            self._admission._release(self)


class Admission:
    """Counts requests in flight, by path, so that a new policy finds the counts as they are. Single-threaded: the event loop's.

    A request waits from its admission until its first step, wherever it is meanwhile.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tickets: dict[tuple[str, str], Ticket] = {}
        self._in_flight: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._tiers: dict[str, int] = {}
        self._waiting_tiers: dict[str, int] = {}
        self._estimated_waits: dict[str, float] = {}  # by tier: the last that the worker told of
        self._idle = asyncio.Event()
        self._idle.set()
        self.members = Members(clock, self._in_flight)
        self.draining = False

    def admit(self, identity: Identity, request_id: str, tier: str, limits: Limits) -> Ticket:
        """A ticket, or DRAINING, REQUEST_ID_IN_USE, MAX_IN_FLIGHT, QUEUE_FULL or MAX_MEMBERS; a refusal leaves no trace."""
        if self.draining:
            raise FairlaneError("DRAINING", "this gateway is shutting down", retry_after_s=retry_after_s())
        key = (identity.node, request_id)
        if key in self._tickets:
            raise FairlaneError("REQUEST_ID_IN_USE", "a request with this request_id is in flight")
        wait_s = self._estimated_waits.get(tier, _RETRY_S)  # until who was queued last gets in: then the queue is another
        for cap in limits.caps:
            _check("MAX_IN_FLIGHT", "in flight", cap.path, cap.max_in_flight, self._in_flight.get(cap.path, 0), _RETRY_S)
            _check("QUEUE_FULL", "waiting", cap.path, cap.max_queue, self._waiting.get(cap.path, 0), wait_s)
        _check("QUEUE_FULL", "waiting", f"tier {tier}", limits.tier_max_queue, self._waiting_tiers.get(tier, 0), wait_s)
        if limits.max_members is not None and identity.node.count("/") == MAX_DEPTH - 1:
            self.members.seen(identity.node, limits.max_members)
        ticket = Ticket(self, identity, request_id, tier, self._clock.now())
        for path in ticket.paths:
            _increment(self._in_flight, path)
            _increment(self._waiting, path)
        _increment(self._tiers, tier)
        _increment(self._waiting_tiers, tier)
        self._tickets[key] = ticket
        self._idle.clear()
        return ticket

    def find(self, node: str, request_id: str) -> Ticket:
        """The node's own request of that id, exactly; REQUEST_NOT_FOUND for anything else, foreign ones included."""
        ticket = self._tickets.get((node, request_id))
        if ticket is None:
            raise FairlaneError("REQUEST_NOT_FOUND", "no request with this request_id, of this node itself, is in flight")
        return ticket

    def tickets(self) -> Iterable[Ticket]:
        """Requests in flight, in order of admission."""
        return tuple(self._tickets.values())

    def age_s(self, ticket: Ticket) -> float:
        return self._clock.now() - ticket.admitted_s

    def in_flight(self) -> int:
        return len(self._tickets)

    def in_flight_by_node(self) -> dict[str, int]:
        return dict(sorted(self._in_flight.items()))

    def in_flight_by_tier(self) -> dict[str, int]:
        return dict(sorted(self._tiers.items()))

    def waiting_by_node(self) -> Mapping[str, int]:
        return dict(self._waiting)

    def waiting_by_tier(self) -> Mapping[str, int]:
        return dict(self._waiting_tiers)

    def cancel_all(self, error: FairlaneError, which: Callable[[Ticket], bool] = lambda ticket: True) -> int:
        """Ends every request in flight that `which` picks with `error`; answers how many."""
        picked = [ticket for ticket in self.tickets() if which(ticket)]
        for ticket in picked:
            ticket.cancel(error)
        return len(picked)

    async def wait_idle(self) -> None:
        """Returns once no request is in flight."""
        await self._idle.wait()

    def _end_waiting(self, ticket: Ticket) -> None:
        for path in ticket.paths:
            _decrement(self._waiting, path)
        _decrement(self._waiting_tiers, ticket.tier)

    def _release(self, ticket: Ticket) -> None:
        del self._tickets[(ticket.node, ticket.request_id)]
        for path in ticket.paths:
            _decrement(self._in_flight, path)
        _decrement(self._tiers, ticket.tier)
        if not self._tickets:
            self._idle.set()


def _check(reason: str, doing: str, who: str, limit: int | None, count: int, wait_s: float) -> None:
    if limit is None or count < limit:
        return
    raise FairlaneError(
        reason,
        f"{who} has {count} requests {doing}, {limit} are allowed",
        metadata={"node": who, "limit": str(limit)},
        retry_after_s=retry_after_s(wait_s),
    )


def _increment(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def _decrement(counts: dict[str, int], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
