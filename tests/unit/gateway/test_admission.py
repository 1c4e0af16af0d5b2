"""Tickets: caps along the ownership tree, one name space per tenant, nothing left after release, in any order of events."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fairlane.errors import FairlaneError
from fairlane.gateway.admission import Admission, Ticket
from fairlane.gateway.auth import Identity
from fairlane.gateway.policy.model import Node

NODES = {
    "acme": Node("acme", (), "", max_in_flight=3),
    "acme/shop": Node("acme/shop", ("gold",), "", max_in_flight=2),
    "acme/docs": Node("acme/docs", ("gold",), "", max_in_flight=None),
}
SHOP, DOCS = Identity("acme/shop", "k"), Identity("acme/docs", "k")


def reason_of(admission: Admission, identity: Identity, request_id: str) -> str:
    with pytest.raises(FairlaneError) as caught:
        admission.admit(identity, request_id, "gold")
    return caught.value.reason


def test_every_ancestors_cap_binds() -> None:
    admission = Admission(NODES)
    for number in range(3):
        admission.admit(DOCS, f"docs-{number}", "gold")
    # acme/shop itself has room for two, its parent acme for none.
    with pytest.raises(FairlaneError) as caught:
        admission.admit(SHOP, "shop-0", "gold")
    assert (caught.value.reason, caught.value.metadata["node"]) == ("MAX_IN_FLIGHT", "acme")
    assert caught.value.retry_after_s is not None
    assert admission.in_flight_by_node() == {"acme": 3, "acme/docs": 3}


def test_a_name_is_taken_per_tenant_until_released() -> None:
    admission = Admission(NODES)
    ticket = admission.admit(SHOP, "name", "gold")
    assert reason_of(admission, SHOP, "name") == "REQUEST_ID_IN_USE"
    admission.admit(DOCS, "name", "gold")
    ticket.release()
    assert admission.admit(SHOP, "name", "gold").request_id == "name"


def test_releasing_twice_releases_once() -> None:
    admission = Admission(NODES)
    first, second = admission.admit(SHOP, "a", "gold"), admission.admit(SHOP, "b", "gold")
    first.release()
    first.release()
    assert admission.in_flight_by_node() == {"acme": 1, "acme/shop": 1}
    second.release()
    assert (admission.in_flight_by_node(), admission.in_flight_by_tier()) == ({}, {})


def test_a_lowered_cap_refuses_new_requests_and_keeps_admitted_ones() -> None:
    admission = Admission(NODES)
    admission.admit(SHOP, "a", "gold")
    admission.replace({"acme/shop": Node("acme/shop", ("gold",), "", max_in_flight=1)})
    assert reason_of(admission, SHOP, "b") == "MAX_IN_FLIGHT"
    assert admission.in_flight() == 1


def test_a_draining_gateway_admits_nobody() -> None:
    admission = Admission(NODES)
    admission.draining = True
    assert reason_of(admission, SHOP, "a") == "DRAINING"


def test_a_cancellation_before_the_request_runs_is_not_lost() -> None:
    ticket = Admission(NODES).admit(SHOP, "a", "gold")
    ticket.cancel(FairlaneError("CANCELLED", "by its tenant"))
    with pytest.raises(FairlaneError, match="by its tenant"):
        ticket.on_cancel(lambda error: None)


class TicketMachine(RuleBasedStateMachine):
    """Random admits and releases against a plain list of who is in."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(NODES)
        self.tickets: list[Ticket] = []

    @rule(identity=st.sampled_from([SHOP, DOCS]), name=st.sampled_from("abcde"))
    def admit(self, identity: Identity, name: str) -> None:
        inside = [(ticket.node, ticket.request_id) for ticket in self.tickets]
        shop = sum(node == "acme/shop" for node, _ in inside)
        fits = len(inside) < 3 and (identity is DOCS or shop < 2) and (identity.node, name) not in inside
        try:
            self.tickets.append(self.admission.admit(identity, name, "gold"))
        except FairlaneError:
            assert not fits
        else:
            assert fits

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1))).release()

    @invariant()
    def counts_are_those_of_the_tickets(self) -> None:
        expected = Counter(path for ticket in self.tickets for path in ("acme", ticket.node))
        assert self.admission.in_flight_by_node() == dict(expected)
        assert self.admission.in_flight() == len(self.tickets)


TestTickets = TicketMachine.TestCase
TestTickets.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
