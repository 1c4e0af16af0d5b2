"""Tickets: caps along the ownership tree, waiting that ends with the first step, one name space per node, nothing left after
release, in any order of events."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fairlane.clock import FakeClock
from fairlane.errors import FairlaneError
from fairlane.gateway.admission import Admission, Limits, Ticket
from fairlane.gateway.auth import Identity
from fairlane.gateway.policy.effective import Cap

ACME = Cap("acme", max_in_flight=3)
SHOP_CAPS = Limits((Cap("acme/shop", max_in_flight=2), ACME))
DOCS_CAPS = Limits((Cap("acme/docs"), ACME))
FREE = Limits()
SHOP, DOCS = Identity("acme/shop", "k"), Identity("acme/docs", "k")


def refusal(admission: Admission, identity: Identity, request_id: str, limits: Limits) -> FairlaneError:
    with pytest.raises(FairlaneError) as caught:
        admission.admit(identity, request_id, "gold", limits)
    return caught.value


def test_every_ancestors_cap_binds() -> None:
    admission = Admission(FakeClock())
    for number in range(3):
        admission.admit(DOCS, f"docs-{number}", "gold", DOCS_CAPS)
    # acme/shop itself has room for two, its parent acme for none.
    error = refusal(admission, SHOP, "shop-0", SHOP_CAPS)
    assert (error.reason, error.metadata) == ("MAX_IN_FLIGHT", {"node": "acme", "limit": "3"})
    assert error.retry_after_s is not None
    assert admission.in_flight_by_node() == {"acme": 3, "acme/docs": 3}


def test_a_request_waits_until_its_first_step_and_no_longer() -> None:
    admission, limits = Admission(FakeClock()), Limits((Cap("acme/shop", max_queue=1),))
    ticket = admission.admit(SHOP, "a", "gold", limits)
    full = refusal(admission, SHOP, "b", limits)
    ticket.start()
    ticket.start()
    admission.admit(SHOP, "c", "gold", limits)
    assert (full.reason, full.retry_after_s is not None) == ("QUEUE_FULL", True)
    assert (admission.waiting_by_node(), admission.waiting_by_tier()) == ({"acme": 1, "acme/shop": 1}, {"gold": 1})


def test_an_ancestors_queue_and_the_tiers_queue_bind_too() -> None:
    admission = Admission(FakeClock())
    admission.admit(DOCS, "a", "gold", FREE)
    by_ancestor = refusal(admission, SHOP, "b", Limits((Cap("acme/shop"), Cap("acme", max_queue=1))))
    by_tier = refusal(admission, SHOP, "b", Limits(tier_max_queue=1))
    assert [error.metadata["node"] for error in (by_ancestor, by_tier)] == ["acme", "tier gold"]
    assert admission.in_flight() == 1


def test_a_request_that_ends_while_it_waits_waits_no_longer() -> None:
    admission, limits = Admission(FakeClock()), Limits((Cap("acme/shop", max_queue=1),))
    ticket = admission.admit(SHOP, "a", "gold", limits)
    ticket.release()
    ticket.start()  # late news
    admission.admit(SHOP, "b", "gold", limits)
    assert admission.waiting_by_node() == {"acme": 1, "acme/shop": 1}


def test_a_name_is_taken_per_node_until_released() -> None:
    admission = Admission(FakeClock())
    ticket = admission.admit(SHOP, "name", "gold", FREE)
    assert refusal(admission, SHOP, "name", FREE).reason == "REQUEST_ID_IN_USE"
    admission.admit(DOCS, "name", "gold", FREE)
    ticket.release()
    assert admission.admit(SHOP, "name", "gold", FREE).request_id == "name"


def test_releasing_twice_releases_once() -> None:
    admission = Admission(FakeClock())
    first, second = (admission.admit(SHOP, name, "gold", FREE) for name in "ab")
    first.release()
    first.release()
    assert admission.in_flight_by_node() == {"acme": 1, "acme/shop": 1}
    second.release()
    assert (admission.in_flight_by_node(), admission.in_flight_by_tier(), admission.waiting_by_tier()) == ({}, {}, {})


def test_a_lowered_cap_refuses_new_requests_and_keeps_admitted_ones() -> None:
    admission = Admission(FakeClock())
    admission.admit(SHOP, "a", "gold", SHOP_CAPS)
    assert refusal(admission, SHOP, "b", Limits((Cap("acme/shop", max_in_flight=1),))).reason == "MAX_IN_FLIGHT"
    assert admission.in_flight() == 1


def test_a_draining_gateway_admits_nobody() -> None:
    admission = Admission(FakeClock())
    admission.draining = True
    assert refusal(admission, SHOP, "a", FREE).reason == "DRAINING"


def test_a_cancellation_before_the_request_runs_is_not_lost() -> None:
    ticket = Admission(FakeClock()).admit(SHOP, "a", "gold", FREE)
    ticket.cancel(FairlaneError("CANCELLED", "by its tenant"))
    with pytest.raises(FairlaneError, match="by its tenant"):
        ticket.on_cancel(lambda error: None)


def test_only_the_requests_that_are_picked_are_cancelled() -> None:
    admission = Admission(FakeClock())
    heard: list[str] = []
    for identity in (SHOP, DOCS):
        ticket = admission.admit(identity, "a", "gold", FREE)
        ticket.on_cancel(lambda error, node=identity.node: heard.append(node))
    number = admission.cancel_all(FairlaneError("SUSPENDED", "x"), lambda ticket: ticket.node == "acme/docs")
    assert (number, heard) == (1, ["acme/docs"])


class TicketMachine(RuleBasedStateMachine):
    """Random admits, starts and releases against a plain list of who is in."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(FakeClock())
        self.tickets: list[Ticket] = []
        self.waiting: list[Ticket] = []

    @rule(identity=st.sampled_from([SHOP, DOCS]), name=st.sampled_from("abcde"))
    def admit(self, identity: Identity, name: str) -> None:
        inside = [(ticket.node, ticket.request_id) for ticket in self.tickets]
        shop = sum(node == "acme/shop" for node, _ in inside)
        fits = len(inside) < 3 and (identity is DOCS or shop < 2) and (identity.node, name) not in inside
        fits = fits and len(self.waiting) < 2
        caps = (SHOP_CAPS if identity is SHOP else DOCS_CAPS).caps
        try:
            ticket = self.admission.admit(identity, name, "gold", Limits(caps, tier_max_queue=2))
        except FairlaneError:
            assert not fits
        else:
            assert fits
            self.tickets.append(ticket)
            self.waiting.append(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        ticket.start()
        self.waiting = [other for other in self.waiting if other is not ticket]

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ticket = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        ticket.release()
        self.waiting = [other for other in self.waiting if other is not ticket]

    @invariant()
    def counts_are_those_of_the_tickets(self) -> None:
        assert self.admission.in_flight_by_node() == _by_path(self.tickets)
        assert self.admission.waiting_by_node() == _by_path(self.waiting)
        assert self.admission.in_flight() == len(self.tickets)


def _by_path(tickets: list[Ticket]) -> dict[str, int]:
    return dict(Counter(path for ticket in tickets for path in ("acme", ticket.node)))


TestTickets = TicketMachine.TestCase
TestTickets.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_full_queue_sends_away_for_as_long_as_the_worker_thinks_it_takes() -> None:
    admission, limits = Admission(FakeClock()), Limits((Cap("acme/shop", max_queue=1),))
    ticket = admission.admit(SHOP, "a", "gold", limits)
    delays = []
    for told_s in (None, 20.0, 1000.0, 0.01):
        if told_s is not None:
            ticket.waits(told_s)
        delays.append(refusal(admission, SHOP, "b", limits).retry_after_s or 0.0)
    wanted = [(0.5, 1.5), (10.0, 30.0), (30.0, 90.0), (0.5, 1.5)]  # with jitter; a second at least, a minute at most
    assert [low <= delay <= high for delay, (low, high) in zip(delays, wanted, strict=True)] == [True] * 4
