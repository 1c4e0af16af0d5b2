"""The night shift: suspend, pause, revoke, look and cancel on a running gateway, in force with the very next request."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from fairlane.gateway.keys import hash_key
from fairlane.gateway.overrides import Overrides
from fairlane.protos.fairlane.v1 import admin_pb2 as apb
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from gateway_world import PEPPER, FakeWorker, Keys, following, policy_text

pytestmark = pytest.mark.asyncio

REQUEST = pb.GenerateRequest(prompt="x")
Code = grpc.StatusCode


async def admin(service: Any, method: str, request: Any, **metadata: str) -> Any:
    extra = [(name.replace("_", "-"), value) for name, value in metadata.items()]
    return await getattr(service.admin, method)(request, metadata=[*service.auth(service.keys.admin), *extra], timeout=20)


async def running(service: Any, **options: Any) -> Any:
    service.worker.on_add = service.worker.silent
    call = service.generate(REQUEST, **options)
    await call.read()
    await call.read()
    return call


async def test_a_suspended_node_and_all_below_it_are_refused_until_resumed(service: Any, refused: Any) -> None:
    member = [*service.auth(service.keys.saas), ("fairlane-tenant", "saas/paid/alice")]
    await admin(service, "SuspendNode", apb.SuspendNodeRequest(node="saas"))
    below = await refused(service.generate(REQUEST, metadata=member))
    counting = await refused(service.stub.CountTokens(pb.CountTokensRequest(prompt="x"), metadata=member))
    other = await service.complete(REQUEST)
    lifted = await admin(service, "ResumeNode", apb.ResumeNodeRequest(node="saas"))
    again = await service.complete(REQUEST, metadata=member)
    assert {(r.code, r.reason) for r in (below, counting)} == {(Code.PERMISSION_DENIED, "SUSPENDED")}
    assert (lifted.lifted, other.text, again.text) == (True, "Hi.", "Hi.")


async def test_suspending_lets_requests_finish_unless_they_are_aborted(service: Any, refused: Any) -> None:
    shop, docs = await running(service), await running(service, metadata=service.auth(service.keys.docs))
    kept = await admin(service, "SuspendNode", apb.SuspendNodeRequest(node="acme/docs"))
    aborted = await admin(service, "SuspendNode", apb.SuspendNodeRequest(node="acme/shop", abort=True))
    ended = await refused(shop)
    assert (kept.aborted, aborted.aborted, ended.reason) == (0, 1, "SUSPENDED")
    assert service.gateway.admission.in_flight_by_node() == {"acme": 1, "acme/docs": 1}
    docs.cancel()


async def test_a_paused_tier_is_refused_with_a_delay_and_others_go_on(service: Any, refused: Any) -> None:
    await admin(service, "PauseTier", apb.PauseTierRequest(tier="gold", duration=Duration(seconds=30)))
    paused = await refused(service.generate(REQUEST))
    other = await service.complete(pb.GenerateRequest(prompt="x", tier="batch"))
    await admin(service, "ResumeTier", apb.ResumeTierRequest(tier="gold"))
    again = await service.complete(REQUEST)
    assert (paused.code, paused.reason, paused.retry.retry_delay.seconds in range(25, 35)) == (
        Code.UNAVAILABLE, "TIER_PAUSED", True,
    )  # fmt: skip
    assert (other.text, again.text) == ("Hi.", "Hi.")


async def test_a_revoked_key_is_dead_at_once_and_can_be_restored(service: Any, refused: Any) -> None:
    call = await running(service)
    revoked = await admin(service, "RevokeKey", apb.RevokeKeyRequest(key="k-shop", abort=True))
    ended, next_one = await refused(call), await refused(service.generate(REQUEST))
    service.worker.on_add = service.worker.answer("Hi.")
    await admin(service, "RestoreKey", apb.RestoreKeyRequest(key="k-shop"))
    again = await service.complete(REQUEST)
    assert (revoked.aborted, ended.reason, next_one.reason) == (1, "UNAUTHENTICATED", "UNAUTHENTICATED")
    assert again.text == "Hi."


@pytest.mark.parametrize("name", ["k-shop", "hash"])
async def test_a_key_is_named_by_its_id_or_its_hash(service: Any, name: str) -> None:
    digest = hash_key(PEPPER, service.keys.shop)
    await admin(service, "RevokeKey", apb.RevokeKeyRequest(key=digest if name == "hash" else name))
    assert service.gateway._overrides.revoked(digest) is not None


SLIPS: dict[str, tuple[str, Any, Code, str]] = {
    "a node there is not": ("SuspendNode", apb.SuspendNodeRequest(node="acme/shpo"), Code.NOT_FOUND, "NODE_NOT_FOUND"),
    "no node": ("SuspendNode", apb.SuspendNodeRequest(), Code.NOT_FOUND, "NODE_NOT_FOUND"),
    "a member of a tenant without": ("SuspendNode", apb.SuspendNodeRequest(node="acme/shop/x"), Code.NOT_FOUND, "NODE_NOT_FOUND"),
    "a tier there is not": ("PauseTier", apb.PauseTierRequest(tier="glod"), Code.INVALID_ARGUMENT, "TIER_UNKNOWN"),
    "requests of no node": ("ListRequests", apb.ListRequestsRequest(node="acme/shpo"), Code.NOT_FOUND, "NODE_NOT_FOUND"),
    "requests of no tier": (
        "ListRequests", apb.ListRequestsRequest(node="acme", tier="glod"), Code.INVALID_ARGUMENT, "TIER_UNKNOWN",
    ),
    "a key there is not": ("RevokeKey", apb.RevokeKeyRequest(key="k-sohp"), Code.NOT_FOUND, "KEY_NOT_FOUND"),
    "no time at all": (
        "PauseTier", apb.PauseTierRequest(tier="gold", duration=Duration()), Code.INVALID_ARGUMENT, "INVALID_REQUEST",
    ),
    "a negative time": (
        "PauseTier", apb.PauseTierRequest(tier="gold", duration=Duration(seconds=-1)), Code.INVALID_ARGUMENT, "INVALID_REQUEST",
    ),
    "a request there is not": (
        "CancelRequest", apb.CancelRequestRequest(node="acme/shop", request_id="x"), Code.NOT_FOUND, "REQUEST_NOT_FOUND",
    ),
    "a generation there is not": (
        "RollbackPolicy", apb.RollbackPolicyRequest(generation=9), Code.NOT_FOUND, "GENERATION_NOT_FOUND",
    ),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
async def test_a_slip_of_the_finger_is_refused_and_changes_nothing(service: Any, refused: Any, slip: str) -> None:
    method, request, code, reason = SLIPS[slip]
    refusal = await refused(getattr(service.admin, method)(request, metadata=service.auth(service.keys.admin)))
    listed = await admin(service, "ListOverrides", apb.ListOverridesRequest())
    assert (refusal.code, refusal.reason, list(listed.overrides)) == (code, reason, [])


async def test_lifting_what_is_not_there_says_so(service: Any) -> None:
    answers = [
        await admin(service, "ResumeNode", apb.ResumeNodeRequest(node="acme")),
        await admin(service, "ResumeTier", apb.ResumeTierRequest(tier="gold")),
        await admin(service, "RestoreKey", apb.RestoreKeyRequest(key="k-shop")),
    ]
    assert [answer.lifted for answer in answers] == [False] * 3


async def test_requests_can_be_listed_and_one_cancelled(service: Any, refused: Any, until: Any) -> None:
    named = pb.GenerateRequest(prompt="x", request_id="night-shift-1")
    service.worker.on_add = service.worker.silent
    call = service.generate(named)
    await call.read()
    await call.read()
    docs = await running(service, metadata=service.auth(service.keys.docs))
    every = await admin(service, "ListRequests", apb.ListRequestsRequest(node="acme"))
    gold = await admin(service, "ListRequests", apb.ListRequestsRequest(tier="gold"))
    one = await admin(service, "ListRequests", apb.ListRequestsRequest(limit=1))
    await admin(service, "CancelRequest", apb.CancelRequestRequest(node="acme/shop", request_id="night-shift-1"))
    ended = await refused(call)
    docs.cancel()
    listed = gold.requests[0]
    assert ([r.node for r in every.requests], len(one.requests), one.total) == (["acme/shop", "acme/docs"], 1, 2)
    assert (listed.request_id, listed.key_id, listed.started, listed.policy_generation) == ("night-shift-1", "k-shop", True, 1)
    assert (ended.code, ended.reason) == (Code.CANCELLED, "CANCELLED")
    await until(lambda: service.gateway.admission.in_flight() == 0)


async def test_status_lists_overrides_and_the_audit_log_has_who_and_until(service: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fairlane.audit")
    request = apb.SuspendNodeRequest(node="acme/docs", duration=Duration(seconds=60))
    await admin(service, "SuspendNode", request, fairlane_operator="eve")
    status = await admin(service, "GetStatus", apb.GetStatusRequest())
    line = json.loads(caplog.records[-1].message)
    override = status.overrides[0]
    assert (override.name, override.kind, override.until.seconds - override.since.seconds) == ("acme/docs", 1, 60)
    assert (line["action"], line["target"], line["by"].startswith("eve from ipv4:127.0.0.1:"), "until" in line) == (
        "suspend_node", "acme/docs", True, True,
    )  # fmt: skip


async def test_an_operators_name_cannot_forge_the_log(service: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fairlane.audit")
    await admin(service, "PauseTier", apb.PauseTierRequest(tier="gold"), fairlane_operator='x", "action": "none')
    assert json.loads(caplog.records[-1].message)["by"].startswith("admin from ")


async def test_overrides_survive_a_restart_of_the_gateway(
    tmp_path: Path, worker: FakeWorker, model_dir: Path, refused: Any
) -> None:
    keys, path, state = Keys(), tmp_path / "tenants.yaml", tmp_path / "state"
    path.write_text(policy_text(keys))
    async with following(path, worker, keys, model_dir, state) as first:
        answer = await admin(first, "SuspendNode", apb.SuspendNodeRequest(node="acme/shop"))
    async with following(path, worker, keys, model_dir, state) as second:
        refusal = await refused(second.generate(REQUEST))
        generation = second.gateway.policy_generation
    assert (answer.persisted, refusal.reason) == (True, "SUSPENDED")
    assert generation == 2  # the worker lives on, and refuses generations older than its own
    assert len(Overrides(state).active()) == 1
