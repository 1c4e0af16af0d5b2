"""Which limits bind a request: owners before tiers before the file, every ancestor's cap, never more than the smallest."""

from __future__ import annotations

import dataclasses
import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.gateway.policy.effective import Cap, Effective
from fairlane.gateway.policy.loader import load_policy_text
from fairlane.gateway.policy.model import MemberTemplate, Node, Policy, Principal

TODAY = datetime.date(2026, 6, 1)
HASH = "hmac-sha256:" + "a" * 64

TEXT = f"""
version: 1
scheduler: {{within_tier: fair}}
defaults: {{max_output_tokens: 9000, max_duration: 1h}}
tiers:
  gold: {{priority: 2, max_output_tokens: 2000, max_wait: 10s, max_queue: 50}}
  batch: {{priority: 1, max_duration: 12h}}
groups: {{g: {{members: [acme]}}}}
models: {{small: {{}}, large: {{}}}}
organisations:
  acme:
    tiers: [batch]
    keys: [{{id: k, hash: "{HASH}", may_act_for: children}}]
    max_in_flight: 100
    max_queue: 40
    max_output_tokens: 5000
    models: [small, large]
    cache_domain: "group:g"
    tenants:
      own: {{tiers: [gold, batch], max_in_flight: 10, max_output_tokens: 6000, models: [small], cache_domain: tenant}}
      heir: {{}}
      crowd:
        cache_domain: member
        max_wait: 20s
        members: {{max_in_flight: 2, max_queue: 1, max_wait: 30s, max_duration: 1m, max_members: 7, weight: 2, max_running: 1}}
  other:
    tenants:
      plain: {{tiers: [batch]}}
      shut: {{tiers: [batch], cache_domain: member}}
"""


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy_text(TEXT.encode(), "p", TODAY)


def limits(found: Effective) -> tuple[int | None, float | None, float | None]:
    return found.max_output_tokens, found.max_duration_s, found.max_wait_s


@pytest.mark.parametrize(
    ("path", "tier", "expected"),
    [
        # output: the file's, no owner or tier says anything; duration: the tier's before the file's
        ("other/plain", "batch", (9000, 12 * 3600.0, None)),
        # output: the smaller of tenant (6000) and organisation (5000), which replaces the tier's 2000
        ("acme/own", "gold", (5000, 3600.0, 10.0)),
        ("acme/own", "batch", (5000, 12 * 3600.0, None)),
        ("acme/heir", "batch", (5000, 12 * 3600.0, None)),
        ("acme", "batch", (5000, 12 * 3600.0, None)),
        # the tenant's 20 s replace the tier's 10 s
        ("acme/crowd", "gold", (5000, 3600.0, 20.0)),
        # the template's 30 s do not lift the tenant's 20 s; its minute replaces the tier's 12 h
        ("acme/crowd/alice", "batch", (5000, 60.0, 20.0)),
    ],
)
def test_limits_of_single_requests(policy: Policy, path: str, tier: str, expected: tuple[object, ...]) -> None:
    assert limits(policy.effective(path, tier)) == expected


@pytest.mark.parametrize(
    ("path", "caps"),
    [
        ("acme", (Cap("acme", 100, 40),)),
        ("acme/own", (Cap("acme/own", 10, None), Cap("acme", 100, 40))),
        ("acme/crowd/alice", (Cap("acme/crowd/alice", 2, 1), Cap("acme/crowd"), Cap("acme", 100, 40))),
        ("other/plain", (Cap("other/plain"), Cap("other"))),
    ],
)
def test_every_ancestors_cap_binds_the_node_itself_first(policy: Policy, path: str, caps: tuple[Cap, ...]) -> None:
    assert policy.effective(path, "batch").caps == caps


@pytest.mark.parametrize(
    ("path", "domain"),
    [
        ("acme", "group:g"),
        ("acme/own", "tenant:acme/own"),
        ("acme/heir", "group:g"),
        ("acme/crowd", "tenant:acme/crowd"),  # the tenant's own requests are no member's
        ("acme/crowd/alice", "member:acme/crowd/alice"),
        ("other/plain", "tenant:other/plain"),
        ("other/shut", "tenant:other/shut"),
    ],
)
def test_cache_domains_are_resolved(policy: Policy, path: str, domain: str) -> None:
    assert policy.effective(path, "batch").cache_domain == domain


@pytest.mark.parametrize(
    ("path", "tiers", "models"),
    [
        ("acme/own", ("gold", "batch"), ("small",)),
        ("acme/heir", ("batch",), ("small", "large")),
        ("acme/crowd/alice", ("batch",), ("small", "large")),
        ("other/plain", ("batch",), None),
    ],
)
def test_tiers_and_models_come_from_the_tenant_or_its_organisation(
    policy: Policy, path: str, tiers: tuple[str, ...], models: tuple[str, ...] | None
) -> None:
    owner = "/".join(path.split("/")[:2])
    found = policy.effective(path, "batch")
    assert (found.path, found.tiers, policy.nodes[owner].models) == (path, tiers, models)


@pytest.mark.parametrize(
    ("path", "tier"),
    [
        ("nobody", "batch"),
        ("acme/nobody", "batch"),
        ("acme/own", "silver"),
        ("acme/own/alice", "batch"),  # it has no members
        ("acme/crowd/", "batch"),
        ("acme/crowd/alice/phone", "batch"),
        ("", "batch"),
        ("acme/crowd/alice", "silver"),
    ],
)
def test_what_the_policy_does_not_have_is_a_key_error(policy: Policy, path: str, tier: str) -> None:
    with pytest.raises(KeyError):
        policy.effective(path, tier)


def test_forty_thousand_members_cost_the_policy_no_memory(policy: Policy) -> None:
    seen = {policy.effective(f"acme/crowd/customer-{number}", "batch").cache_domain for number in range(40_000)}
    assert (len(seen), len(policy._known) <= 2 * len(policy.tiers) * len(policy.nodes)) == (40_000, True)


def test_nodes_are_organisations_and_tenants_with_their_own_values(policy: Policy) -> None:
    assert (policy.nodes["acme/crowd"], policy.nodes["other"]) == (
        Node(
            "acme/crowd",
            ("batch",),
            "member",
            max_wait_s=20.0,
            models=("small", "large"),
            members=MemberTemplate(7, 2.0, 2, 1, 1, 30.0, None, 60.0),
        ),
        Node("other", (), "tenant:other"),
    )


def test_a_delegating_key_makes_demo_keys_of_its_tenants_needless(policy: Policy) -> None:
    assert (policy.principals[HASH], policy.nodes_without_keys()) == (
        Principal("k", "acme", may_act_for_children=True),
        ("other/plain", "other/shut"),
    )


def test_a_policy_with_more_keys_still_answers(policy: Policy) -> None:
    changed = policy.with_principals({HASH[:-1] + "b": Principal("demo", "other/plain")})
    assert changed.effective("acme/own", "gold") == policy.effective("acme/own", "gold")


@given(
    member=st.none() | st.integers(1, 9),
    tenant=st.none() | st.integers(1, 9),
    organisation=st.none() | st.integers(1, 9),
    tier=st.none() | st.integers(1, 9),
    file=st.none() | st.integers(1, 9),
)
def test_the_smallest_of_the_owners_else_the_tiers_else_the_files(
    member: int | None, tenant: int | None, organisation: int | None, tier: int | None, file: int | None
) -> None:
    def key(value: int | None) -> str:
        return "{}" if value is None else f"{{max_output_tokens: {value}}}"

    text = (
        f"version: 1\ndefaults: {key(file)}\ntiers: {{t: {{priority: 1, {key(tier)[1:-1]}}}}}\norganisations:\n"
        f"  o: {{{key(organisation)[1:-1] + ', ' if organisation else ''}tenants: {{x: {{tiers: [t], members: {key(member)}, "
        f"{key(tenant)[1:-1]}}}}}}}\n"
    )
    policy = load_policy_text(text.encode(), "p", TODAY)
    owners = [value for value in (member, tenant, organisation) if value is not None]
    expected = min(owners) if owners else tier if tier is not None else file
    assert policy.effective("o/x/m", "t").max_output_tokens == expected


def test_a_policy_is_compared_by_what_it_says(policy: Policy) -> None:
    again = load_policy_text(TEXT.encode(), "p", TODAY)
    policy.effective("acme/own", "gold")
    assert (again == policy, dataclasses.replace(again, preempt_gap_ms=1.0) == policy) == (True, False)
