"""Who may call: one answer to every failed authentication, keys of this machine only, and no way to name another tenant."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from fairlane.gateway.keys import new_key
from fairlane.protos.fairlane.v1 import admin_pb2
from fairlane.protos.fairlane.v1 import inference_pb2 as pb

pytestmark = pytest.mark.asyncio

REQUEST = pb.GenerateRequest(prompt="x")


def bad_credentials(service: Any) -> dict[str, list[tuple[str, str]]]:
    good = f"Bearer {service.keys.shop}"
    return {
        "none": [],
        "empty": [("authorization", "")],
        "no scheme": [("authorization", service.keys.shop)],
        "other scheme": [("authorization", f"Basic {service.keys.shop}")],
        "no key": [("authorization", "Bearer ")],
        "malformed": [("authorization", "Bearer nonsense")],
        "unknown": [("authorization", f"Bearer {new_key()}")],
        "doubled": [("authorization", good), ("authorization", good)],
        "10 kB": [("authorization", "Bearer " + "k" * 10_000)],
        "expired": [("authorization", f"Bearer {service.keys.expired}")],
        "padded": [("authorization", good + " ")],
        "admin key": [("authorization", f"Bearer {service.keys.admin}")],
    }


async def test_every_bad_credential_gets_the_same_answer(service: Any, refused: Any) -> None:
    answers = set()
    for metadata in bad_credentials(service).values():
        refusal = await refused(service.generate(REQUEST, metadata=metadata))
        answers.add((refusal.code, refusal.reason, refusal.message))
    assert len(answers) == 1
    assert answers.pop()[:2] == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    assert service.worker.adds == []


async def test_every_public_method_wants_a_key_even_for_malformed_bytes(service: Any, refused: Any) -> None:
    reasons = []
    for method in ("Generate", "Complete", "Cancel", "CountTokens", "ListModels"):
        refusal = await refused(service.channel.unary_unary(f"/fairlane.v1.Inference/{method}")(b"\xff"))
        reasons.append(refusal.reason)
    assert reasons == ["UNAUTHENTICATED"] * 5


async def test_admin_methods_take_the_admin_key_only(service: Any, refused: Any) -> None:
    reasons = []
    for method in ("GetStatus", "GetPolicy", "CheckPolicy", "Drain"):
        call = service.admin_channel.unary_unary(f"/fairlane.v1.Admin/{method}")
        reasons.append((await refused(call(b"", metadata=service.auth()))).reason)
    status = await service.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=service.auth(service.keys.admin))
    assert reasons == ["UNAUTHENTICATED"] * 4
    assert not status.draining


async def test_admin_is_not_served_on_the_public_port(service: Any, refused: Any) -> None:
    call = service.channel.unary_unary("/fairlane.v1.Admin/GetStatus")(b"", metadata=service.auth(service.keys.admin))
    refusal = await refused(call)
    assert refusal.code == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("header", ["fairlane-tenant", "x-tenant-id", "x-fairlane-tenant"])
async def test_naming_another_tenant_is_refused_not_ignored(service: Any, refused: Any, header: str) -> None:
    refusal = await refused(service.generate(REQUEST, metadata=[*service.auth(), (header, "acme/docs")]))
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.PERMISSION_DENIED, "TENANT_MISMATCH")


async def test_the_tenant_is_the_keys_whatever_the_client_says(service: Any) -> None:
    await service.complete(REQUEST, metadata=service.auth(service.keys.docs))
    assert [(add.tenant, add.tier) for add in service.worker.adds] == [("acme/docs", "batch")]
