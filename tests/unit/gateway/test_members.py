"""Members without an entry: known while they call, forgotten when idle, never more than the template says, in bounded memory."""

from __future__ import annotations

import tracemalloc

import pytest

from fairlane.clock import FakeClock
from fairlane.errors import FairlaneError
from fairlane.gateway.admission import Admission, Limits
from fairlane.gateway.auth import Identity, PolicyAuthenticator
from fairlane.gateway.keys import hash_key, new_key
from fairlane.gateway.members import IDLE_S, Members
from fairlane.gateway.overrides import Overrides
from fairlane.gateway.policy.model import MemberTemplate, Node, Policy, Principal, TierPolicy
from fairlane.scheduler.tenancy import Tier, TiersPolicy


def test_a_new_member_above_the_most_is_refused_and_a_known_one_never() -> None:
    members = Members(FakeClock(), {})
    members.seen("saas/paid/a", 1)
    with pytest.raises(FairlaneError) as caught:
        members.seen("saas/paid/b", 1)
    members.seen("saas/paid/a", 1)
    members.seen("saas/free/b", 1)  # another tenant's count is its own
    assert (caught.value.reason, caught.value.metadata) == ("MAX_MEMBERS", {"node": "saas/paid", "limit": "1"})


def test_an_idle_member_is_forgotten_after_an_hour_and_makes_room() -> None:
    clock = FakeClock()
    members = Members(clock, {})
    members.seen("saas/paid/a", 1)
    clock.advance(IDLE_S)
    members.seen("saas/paid/b", 1)
    assert members.count("saas/paid") == 1


def test_a_member_with_a_request_in_flight_is_not_forgotten() -> None:
    clock, in_flight = FakeClock(), {"saas/paid/a": 1}
    members = Members(clock, in_flight)
    members.seen("saas/paid/a", 1)
    clock.advance(10 * IDLE_S)
    with pytest.raises(FairlaneError):
        members.seen("saas/paid/b", 1)
    assert members.count("saas/paid") == 1


def test_calling_again_counts_as_fresh() -> None:
    clock = FakeClock()
    members = Members(clock, {})
    for path in ("saas/paid/a", "saas/paid/b"):
        members.seen(path, 2)
    clock.advance(IDLE_S / 2)
    members.seen("saas/paid/a", 2)
    clock.advance(IDLE_S / 2)  # b has been idle for an hour, a for half of one
    members.seen("saas/paid/c", 2)
    with pytest.raises(FairlaneError):
        members.seen("saas/paid/d", 2)
    assert members.count("saas/paid") == 2


def test_the_members_of_a_tenant_that_is_gone_are_forgotten() -> None:
    members = Members(FakeClock(), {})
    members.seen("saas/paid/a", 1)
    members.keep_only({"saas/free": None})
    assert members.count("saas/paid") == 0


def test_forty_thousand_members_of_one_tenant_live_in_bounded_memory() -> None:
    # 20,000 may be known at once. Two batches an hour apart come and go; what stays is the second, and nothing else.
    clock = FakeClock()
    admission = Admission(clock)
    limits = Limits(max_members=20_000)
    tracemalloc.start()
    try:
        for batch in range(2):
            for number in range(20_000):
                identity = Identity(f"saas/paid/customer-{batch}-{number:05d}", "k")
                admission.admit(identity, "request", "gold", limits).release()
            clock.advance(IDLE_S)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert admission.members.count("saas/paid") == 20_000
    assert admission.in_flight_by_node() == {}
    assert used < 6 << 20, f"{used / 2**20:.1f} MiB"


def test_members_leave_nothing_behind_in_the_policy_and_the_authenticator() -> None:
    key, pepper = new_key(), b"p" * 32
    nodes = {
        "saas": Node("saas", (), "tenant:saas"),
        "saas/paid": Node("saas/paid", ("gold",), "member", members=MemberTemplate(20_000)),
    }
    principals = {hash_key(pepper, key): Principal("k", "saas", may_act_for_children=True)}
    policy = Policy("", "", "", TiersPolicy.VIP, {"gold": TierPolicy(Tier("gold", 1))}, nodes, principals, {})
    authenticator = PolicyAuthenticator(policy, 1, pepper, Overrides())

    def call(number: int) -> str:
        named = ("fairlane-tenant", f"saas/paid/customer-{number}")
        identity = authenticator.authenticate([("authorization", f"Bearer {key}"), named], "")
        return policy.effective(identity.node, "gold").cache_domain

    call(0)
    tracemalloc.start()
    try:
        domains = len({call(number) for number in range(1000)})
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert domains == 1000
    assert used < 100_000, f"{used} bytes"
