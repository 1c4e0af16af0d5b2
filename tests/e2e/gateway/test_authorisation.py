"""Who may call what: every method of both services with every kind of credential. A method without a row fails."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from fairlane.gateway.keys import hash_key, new_key
from fairlane.gateway.overrides import Kind
from fairlane.protos.fairlane.v1 import admin_pb2, inference_pb2
from gateway_world import PEPPER

pytestmark = pytest.mark.asyncio

TENANT, ADMIN = "tenant", "admin"
# method -> whose key opens it. Everybody else gets UNAUTHENTICATED.
INFERENCE = {
    "Generate": TENANT,
    "Complete": TENANT,
    "Cancel": TENANT,
    "Explain": TENANT,
    "CountTokens": TENANT,
    "ListModels": TENANT,
}
ADMINISTRATION = {
    "GetStatus": ADMIN,
    "Drain": ADMIN,
    "GetPolicy": ADMIN,
    "CheckPolicy": ADMIN,
    "PlanPolicy": ADMIN,
    "ApplyPolicy": ADMIN,
    "ListPolicyHistory": ADMIN,
    "RollbackPolicy": ADMIN,
    "ShadowPolicy": ADMIN,
    "GetShadow": ADMIN,
    "StopShadow": ADMIN,
    "ListOverrides": ADMIN,
    "SuspendNode": ADMIN,
    "ResumeNode": ADMIN,
    "PauseTier": ADMIN,
    "ResumeTier": ADMIN,
    "RevokeKey": ADMIN,
    "RestoreKey": ADMIN,
    "ListRequests": ADMIN,
    "ExplainRequest": ADMIN,
    "CancelRequest": ADMIN,
}
ROWS = [("Inference", method, who) for method, who in INFERENCE.items()]
ROWS += [("Admin", method, who) for method, who in ADMINISTRATION.items()]


def credentials(service: Any) -> dict[str, list[tuple[str, str]]]:
    keys = service.keys
    service.gateway._overrides.put(Kind.REVOKE_KEY, hash_key(PEPPER, keys.docs), by="test")
    return {
        "none": [],
        "malformed": [("authorization", "Bearer nonsense")],
        "unknown": service.auth(new_key()),
        "expired": service.auth(keys.expired),
        "revoked": service.auth(keys.docs),
        TENANT: service.auth(keys.shop),
        ADMIN: service.auth(keys.admin),
    }


@pytest.mark.parametrize(("service_name", "method", "opener"), ROWS)
async def test_only_the_right_key_opens_a_method(service: Any, service_name: str, method: str, opener: str) -> None:
    channel = service.channel if service_name == "Inference" else service.admin_channel
    opened, refusals = set(), set()
    for kind, metadata in credentials(service).items():
        # Bytes that are no message: whoever is let in is told so, and nothing happens.
        call = channel.unary_unary(f"/fairlane.v1.{service_name}/{method}")(b"\xff", metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        if caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT:
            opened.add(kind)
        else:
            refusals.add((caught.value.code(), caught.value.details()))
    assert opened == {opener}
    assert {code for code, _ in refusals} == {grpc.StatusCode.UNAUTHENTICATED}
    assert len(refusals) == 1, "the refusals can be told apart"


@pytest.mark.parametrize(
    ("descriptor", "rows"),
    [
        (inference_pb2.DESCRIPTOR.services_by_name["Inference"], INFERENCE),
        (admin_pb2.DESCRIPTOR.services_by_name["Admin"], ADMINISTRATION),
    ],
)
async def test_every_method_has_its_row(descriptor: Any, rows: dict[str, str]) -> None:
    assert {method.name for method in descriptor.methods} == set(rows)


async def test_neither_service_is_served_on_the_others_port(service: Any) -> None:
    codes = set()
    for channel, name, rows in (
        (service.channel, "Admin", ADMINISTRATION),
        (service.admin_channel, "Inference", INFERENCE),
    ):
        for method in rows:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/fairlane.v1.{name}/{method}")(b"", metadata=service.auth(service.keys.admin))
            codes.add(caught.value.code())
    assert codes == {grpc.StatusCode.UNIMPLEMENTED}
