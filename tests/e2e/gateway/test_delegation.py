"""One key, many customers: a delegated key names whom it acts for, members need no entry, nobody reaches outside the subtree."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from fairlane.protos.fairlane.v1 import inference_pb2 as pb

pytestmark = pytest.mark.asyncio

REQUEST = pb.GenerateRequest(prompt="x")
Code = grpc.StatusCode


def acting(service: Any, key: str, *named: str, header: str = "fairlane-tenant") -> list[tuple[str, str]]:
    return [*service.auth(key), *((header, name) for name in named)]


@pytest.mark.parametrize(
    ("key", "named", "tenant", "tier", "domain"),
    [
        ("saas", "saas/paid/alice", "saas/paid/alice", "gold", "member:saas/paid/alice"),
        ("saas", "saas/paid", "saas/paid", "gold", "tenant:saas/paid"),
        ("saas", "saas/free", "saas/free", "batch", "tenant:saas/free"),
        ("paid", "saas/paid/a:b@c.example", "saas/paid/a:b@c.example", "gold", "member:saas/paid/a:b@c.example"),
        ("paid", "saas/paid", "saas/paid", "gold", "tenant:saas/paid"),
    ],
)
async def test_a_delegated_key_acts_for_what_is_below_its_node(
    service: Any, key: str, named: str, tenant: str, tier: str, domain: str
) -> None:
    await service.complete(REQUEST, metadata=acting(service, getattr(service.keys, key), named))
    add = service.worker.adds[0]
    assert (add.tenant, add.tier, add.cache_domain) == (tenant, tier, f"{len(domain)}:{domain}0:")


@pytest.mark.parametrize("header", ["fairlane-tenant", "x-fairlane-tenant"])
async def test_both_headers_delegate(service: Any, header: str) -> None:
    await service.complete(REQUEST, metadata=acting(service, service.keys.saas, "saas/free", header=header))
    assert service.worker.adds[0].tenant == "saas/free"


OUTSIDE = {
    "a stranger's tenant": ("saas", ["acme/shop"]),
    "a sibling": ("paid", ["saas/free"]),
    "its own organisation": ("paid", ["saas"]),
    "a node whose name begins alike": ("paid", ["saas/paid2"]),
    "a tenant there is not": ("saas", ["saas/none"]),
    "a member of a tenant without members": ("saas", ["saas/free/alice"]),
    "two at once": ("saas", ["saas/paid/a", "saas/paid/b"]),
    "anyone, without delegation": ("shop", ["acme/docs"]),
    "itself, without delegation": ("shop", ["acme/shop"]),
}


@pytest.mark.parametrize("case", OUTSIDE)
async def test_everything_outside_the_subtree_gets_one_refusal(service: Any, refused: Any, case: str) -> None:
    key, named = OUTSIDE[case]
    refusal = await refused(service.generate(REQUEST, metadata=acting(service, getattr(service.keys, key), *named)))
    assert (refusal.code, refusal.reason) == (Code.PERMISSION_DENIED, "TENANT_MISMATCH")
    assert service.worker.adds == []


async def test_a_header_of_other_systems_never_delegates(service: Any, refused: Any) -> None:
    metadata = acting(service, service.keys.saas, "saas/free", header="x-tenant-id")
    assert (await refused(service.generate(REQUEST, metadata=metadata))).reason == "TENANT_MISMATCH"


@pytest.mark.parametrize(
    "name", ["saas/paid/", "/saas", "saas//x", "saas/paid/a/b", "saas/paid/../x", "saas/paid/" + "a" * 129, ""]
)
async def test_a_malformed_name_is_a_violation(service: Any, refused: Any, name: str) -> None:
    refusal = await refused(service.generate(REQUEST, metadata=acting(service, service.keys.saas, name)))
    assert (refusal.code, refusal.reason, list(refusal.violations)) == (
        Code.INVALID_ARGUMENT, "INVALID_REQUEST", ["fairlane-tenant"],
    )  # fmt: skip


async def test_an_organisations_key_must_name_a_tenant_to_generate(service: Any, refused: Any) -> None:
    refusal = await refused(service.generate(REQUEST, metadata=service.auth(service.keys.saas)))
    assert (refusal.reason, "fairlane-tenant" in refusal.message) == ("TIER_NOT_ALLOWED", True)


async def test_a_member_has_its_own_caps_and_request_names(service: Any, refused: Any) -> None:
    service.worker.on_add = service.worker.silent
    alice, bob = (acting(service, service.keys.saas, f"saas/paid/{name}") for name in ("alice", "bob"))
    named = pb.GenerateRequest(prompt="x", request_id="same-name")
    calls = [service.generate(named, metadata=alice), service.generate(REQUEST, metadata=alice)]
    calls.append(service.generate(named, metadata=bob))
    for call in calls:
        await call.read()
    third = await refused(service.generate(REQUEST, metadata=alice))
    foreign = await refused(service.stub.Cancel(pb.CancelRequest(request_id="same-name"), metadata=service.auth()))
    assert (third.reason, third.info.metadata["node"]) == ("MAX_IN_FLIGHT", "saas/paid/alice")
    assert foreign.reason == "REQUEST_NOT_FOUND"
    assert service.gateway.admission.in_flight_by_node() == {
        "saas": 3, "saas/paid": 3, "saas/paid/alice": 2, "saas/paid/bob": 1,
    }  # fmt: skip


async def test_more_members_than_the_template_allows_are_refused(service: Any, refused: Any) -> None:
    for name in ("a", "b", "c"):  # the template's most
        await service.complete(REQUEST, metadata=acting(service, service.keys.saas, f"saas/paid/{name}"))
    fourth = await refused(service.generate(REQUEST, metadata=acting(service, service.keys.saas, "saas/paid/d")))
    again = await service.complete(REQUEST, metadata=acting(service, service.keys.saas, "saas/paid/a"))
    assert (fourth.code, fourth.reason, fourth.retry is not None) == (Code.RESOURCE_EXHAUSTED, "MAX_MEMBERS", True)
    assert again.text == "Hi."
