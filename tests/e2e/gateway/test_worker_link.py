"""The link to the worker: readiness and health, loss and reconnection, a worker that hangs, lies or comes back from the past,
and a new policy."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.worker_client import PolicyRefused
from fairlane.protos.fairlane.v1 import admin_pb2
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2 as wpb

pytestmark = pytest.mark.asyncio

Code = grpc.StatusCode
REQUEST = pb.GenerateRequest(prompt="x")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def gateway_config() -> GatewayConfig:
    return GatewayConfig(port=0, coalesce=0.0, worker_timeout=0.5, ping_interval=0.05)


async def health(service: Any, name: str = "") -> Any:
    stub = health_pb2_grpc.HealthStub(service.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def running(service: Any) -> Any:
    service.worker.on_add = service.worker.silent
    call = service.generate(REQUEST)
    await call.read()
    await call.read()
    return call


async def test_health_is_not_serving_until_the_worker_has_applied_the_policy(worker: Any, unready: Any, until: Any) -> None:
    # Refused at first: connected is not ready.
    await unready.gateway.wait_ready(10)
    await until(lambda: unready.gateway.worker.ready)
    assert worker.policies[0].generation == 1
    assert [tier.name for tier in worker.policies[0].tiers] == ["gold", "batch"]
    for name in ("", "fairlane.v1.Inference"):
        assert await health(unready, name) == SERVING


class TestWorkerThatRefusesThePolicy:
    @pytest.fixture
    def worker(self, worker: Any) -> Any:
        worker.on_policy = lambda snapshot: "unknown shaping"
        return worker

    async def test_it_never_becomes_ready(self, unready: Any, until: Any, refused: Any) -> None:
        await until(lambda: unready.gateway.worker.counters.lost > 0)
        assert await health(unready) == NOT_SERVING
        refusal = await refused(unready.generate(REQUEST))
        assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "NO_READY_WORKER")
        assert refusal.retry is not None


async def test_a_worker_killed_in_mid_stream_ends_its_streams_as_unavailable(service: Any, until: Any, refused: Any) -> None:
    calls = [await running(service) for _ in range(3)]
    await service.worker.kill()
    refusals = [await asyncio.wait_for(refused(call), 2) for call in calls]
    assert {(r.code, r.reason) for r in refusals} == {(Code.UNAVAILABLE, "WORKER_LOST")}
    assert all(r.retry is not None for r in refusals)
    await until(lambda: service.gateway.admission.in_flight() == 0)
    assert await health(service) == NOT_SERVING


async def test_tokens_sent_before_the_loss_are_kept(service: Any) -> None:
    call = await running(service)
    service.worker.send(service.worker.adds[0].request_id, token_ids=[65])
    first = await call.read()
    await service.worker.kill()
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    assert first.tokens.text == "A"


async def test_after_a_restart_of_the_worker_service_goes_on(service: Any, until: Any) -> None:
    await service.worker.kill()
    await until(lambda: not service.gateway.worker.ready)
    service.worker.welcome.epoch = 2
    await service.worker.start()
    await service.gateway.wait_ready(10)
    response = await service.complete(REQUEST)
    assert response.text == "Hi."
    assert service.gateway.worker.facts.epoch == 2
    assert len(service.worker.policies) == 2


async def test_a_worker_that_answers_no_ping_is_lost(service: Any, refused: Any) -> None:
    call = await running(service)
    service.worker.pong = None
    refusal = await asyncio.wait_for(refused(call), 5)
    assert refusal.reason == "WORKER_LOST"


async def test_a_worker_stuck_in_one_step_is_lost_though_it_answers_pings(service: Any, refused: Any) -> None:
    call = await running(service)
    service.worker.pong = wpb.Pong(step_id=7, running=1, step_running_s=0.6)
    refusal = await asyncio.wait_for(refused(call), 5)
    assert refusal.reason == "WORKER_LOST"


async def test_a_worker_with_work_but_no_steps_is_lost(service: Any, refused: Any) -> None:
    call = await running(service)
    service.worker.pong = wpb.Pong(step_id=7, waiting=1)
    refusal = await asyncio.wait_for(refused(call), 5)
    assert refusal.reason == "WORKER_LOST"


async def test_an_older_epoch_of_the_same_worker_is_fenced_off(service: Any, until: Any) -> None:
    await service.worker.kill()
    await until(lambda: not service.gateway.worker.ready)
    service.worker.welcome.epoch = 0
    sessions = service.gateway.worker.counters.sessions
    await service.worker.start()
    with pytest.raises(TimeoutError):
        await service.gateway.wait_ready(0.5)
    assert service.gateway.worker.counters.sessions == sessions


async def test_deltas_of_unknown_requests_are_ignored_and_counted(service: Any, rest: Any) -> None:
    call = await running(service)
    known = service.worker.adds[0].request_id
    service.worker.send(known ^ 1, token_ids=[65])
    service.worker.send(known, token_ids=[66], ended=wpb.EndedDelta(reason="length"))
    events = await rest(call)
    assert "".join(event.tokens.text for event in events) == "B"
    assert service.gateway.worker.counters.stale_deltas == 1


async def test_a_column_of_tokens_reaches_each_request_before_the_deltas_of_its_step(service: Any, rest: Any) -> None:
    calls = [await running(service), await running(service)]
    ids = [add.request_id for add in service.worker.adds]
    ends = [wpb.Delta(request_id=one, token_ids=[67], ended=wpb.EndedDelta(reason="length")) for one in ids]
    step = wpb.StepDeltas(step_id=9, deltas=ends, decoded=wpb.DecodedTokens(request_ids=ids, token_ids=[65, 66]))
    service.worker._out.put_nowait(wpb.FromWorker(deltas=step))
    texts = ["".join(event.tokens.text for event in await rest(call)) for call in calls]
    assert texts == ["AC", "BC"]


async def test_a_column_with_a_token_too_few_ends_the_session(service: Any, refused: Any) -> None:
    call = await running(service)
    column = wpb.DecodedTokens(request_ids=[service.worker.adds[0].request_id], token_ids=[])
    service.worker._out.put_nowait(wpb.FromWorker(deltas=wpb.StepDeltas(step_id=9, decoded=column)))
    refusal = await refused(call)
    assert refusal.reason == "WORKER_LOST"


LIES: dict[str, Any] = {
    "token outside the vocabulary": [{"token_ids": [300]}],
    "more tokens than max_tokens": [{"token_ids": [65] * 201}],
    "a second start": [{"started": wpb.StartedDelta()}],
    "a delta after the end": [{"ended": wpb.EndedDelta(reason="length")}, {"token_ids": [65]}],
    "an end of no known kind": [{"ended": wpb.EndedDelta(reason="bored")}],
    "a failure of no known reason": [{"ended": wpb.EndedDelta(reason="failed", error_reason="OOPS", error_message="secret")}],
}


@pytest.mark.parametrize("name", LIES)
async def test_a_delta_that_makes_no_sense_ends_its_stream_only(service: Any, rest: Any, refused: Any, name: str) -> None:
    other = await running(service)
    call = await running(service)
    bystander, victim = (add.request_id for add in service.worker.adds)
    step = wpb.StepDeltas(step_id=99, deltas=[wpb.Delta(request_id=victim, **fields) for fields in LIES[name]])
    service.worker._out.put_nowait(wpb.FromWorker(deltas=step))
    refusal = await refused(call)
    service.worker.send(bystander, token_ids=[65], ended=wpb.EndedDelta(reason="length"))
    events = await rest(other)
    assert (refusal.code, refusal.reason) == (Code.INTERNAL, "WORKER_PROTOCOL")
    assert "secret" not in refusal.message
    assert events[-1].WhichOneof("event") == "finished"


async def test_three_violations_disconnect_the_worker(service: Any, until: Any, refused: Any) -> None:
    reasons = []
    for _ in range(3):
        call = await running(service)
        service.worker.send(service.worker.adds[-1].request_id, token_ids=[300])
        reasons.append((await refused(call)).reason)
    await until(lambda: service.gateway.worker.counters.lost == 1)
    assert reasons == ["WORKER_PROTOCOL"] * 3


async def test_an_engine_failure_keeps_its_reason_and_its_code(service: Any, refused: Any) -> None:
    async def fail(add: wpb.Add) -> None:
        ended = wpb.EndedDelta(reason="failed", error_reason="OVERLOADED", error_message="the engine's queue is full")
        service.worker.send(add.request_id, ended=ended)

    service.worker.on_add = fail
    refusal = await refused(service.generate(REQUEST))
    assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "OVERLOADED")
    assert refusal.retry is not None
    assert "fairlane-request-id" not in refusal.initial


async def test_a_new_policy_reaches_the_worker_before_any_request_uses_it(service: Any) -> None:
    policy = service.gateway._in_force.policy
    gold = dataclasses.replace(policy.tiers["gold"], max_output_tokens=50)
    new = dataclasses.replace(policy, sha256="1" * 64, tiers={**policy.tiers, "gold": gold})
    generation = await service.gateway.apply_policy(new)
    await service.complete(REQUEST)
    assert generation == 2
    assert [snapshot.generation for snapshot in service.worker.policies] == [1, 2]
    assert (service.worker.adds[0].policy_generation, service.worker.adds[0].max_tokens) == (2, 50)


async def test_a_policy_the_worker_refuses_changes_nothing(service: Any) -> None:
    policy = service.gateway._in_force.policy
    service.worker.on_policy = lambda snapshot: "not this one"
    with pytest.raises(PolicyRefused, match="not this one"):
        await service.gateway.apply_policy(dataclasses.replace(policy, principals={}))
    response = await service.complete(REQUEST)
    assert response.text == "Hi."
    assert service.worker.adds[0].policy_generation == 1


async def test_a_worker_that_does_not_answer_a_policy_is_told_the_old_one_again_as_a_newer_generation(
    service: Any, until: Any
) -> None:
    # Nobody knows whether it took generation 2, and it would refuse generation 1 as older.
    policy = service.gateway._in_force.policy
    service.worker.on_policy = lambda snapshot: None if snapshot.generation == 2 else ""
    with pytest.raises(PolicyRefused, match="no answer"):
        await service.gateway.apply_policy(dataclasses.replace(policy, sha256="1" * 64))
    await until(lambda: len(service.worker.policies) == 3)
    await service.complete(REQUEST)
    told = [(snapshot.generation, snapshot.sha256[0]) for snapshot in service.worker.policies]
    assert told == [(1, "0"), (2, "1"), (3, "0")]
    assert service.worker.adds[0].policy_generation == service.gateway.policy_generation == 3


async def test_a_worker_lost_while_it_applies_a_policy_begins_its_next_life_with_the_old_one(service: Any, until: Any) -> None:
    policy = service.gateway._in_force.policy
    service.worker.on_policy = lambda snapshot: None
    applying = asyncio.create_task(service.gateway.apply_policy(dataclasses.replace(policy, sha256="1" * 64)))
    await until(lambda: len(service.worker.policies) == 2)
    await service.worker.kill()
    with pytest.raises(PolicyRefused):
        await applying
    service.worker.on_policy = lambda snapshot: ""
    service.worker.welcome.epoch = 2
    await service.worker.start()
    await service.gateway.wait_ready(10)
    last = service.worker.policies[-1]
    assert (last.generation, last.sha256, (await service.complete(REQUEST)).text) == (3, "0" * 64, "Hi.")


async def test_status_shows_the_worker_and_what_is_in_flight(service: Any, until: Any) -> None:
    service.worker.pong = wpb.Pong(step_id=5, running=1, blocks_used=3, policy_generation=1)
    call = await running(service)
    await until(lambda: service.gateway.worker.pong.step_id == 5)
    status = await service.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=service.auth(service.keys.admin))
    call.cancel()
    assert (status.model, status.in_flight, status.draining) == ("tiny", 1, False)
    assert {node.node: node.in_flight for node in status.nodes} == {"acme": 1, "acme/shop": 1}
    assert {tier.node: tier.in_flight for tier in status.tiers} == {"gold": 1}
    assert (status.worker.ready, status.worker.epoch, status.worker.step_id, status.worker.blocks_used) == (True, 1, 5, 3)


async def test_status_shows_nothing_of_a_worker_that_was_lost(service: Any, until: Any) -> None:
    service.worker.pong = wpb.Pong(step_id=5, running=2, blocks_used=3, policy_generation=1)
    await until(lambda: service.gateway.worker.pong.step_id == 5)
    await service.worker.kill()
    await until(lambda: not service.gateway.worker.ready)
    status = await service.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=service.auth(service.keys.admin))
    assert status.worker == admin_pb2.WorkerStatus(epoch=1)
    assert status.model == "tiny"


async def test_a_hung_worker_is_named_with_its_epoch_for_whoever_can_replace_it(service: Any, until: Any) -> None:
    before = service.gateway.worker.hung
    service.worker.pong = None
    await until(lambda: not service.gateway.worker.ready)
    hung = service.gateway.worker.hung
    assert before is None
    assert (hung[0], hung[1].startswith("silent for")) == (1, True)


async def test_a_worker_that_dies_is_not_called_hung(service: Any, until: Any) -> None:
    await service.worker.kill()
    await until(lambda: not service.gateway.worker.ready)
    assert service.gateway.worker.hung is None


async def test_no_proxy_comes_between_gateway_and_worker(service: Any, monkeypatch: pytest.MonkeyPatch, until: Any) -> None:
    for name in ("http_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    await service.worker.kill()
    await until(lambda: not service.gateway.worker.ready)
    await service.worker.start()
    await service.gateway.wait_ready(10)
    assert service.gateway.worker.counters.sessions == 2


async def test_the_policy_in_force_can_be_read(service: Any) -> None:
    policy = await service.admin.GetPolicy(admin_pb2.GetPolicyRequest(), metadata=service.auth(service.keys.admin))
    assert (policy.text, policy.sha256, policy.generation, policy.path) == ("version: 1\n", "0" * 64, 1, "tenants.yaml")


async def test_a_bad_policy_text_is_found_and_nothing_changes(service: Any) -> None:
    request = admin_pb2.CheckPolicyRequest(text="version: 1\ntiers: 3\n", name="new.yaml")
    response = await service.admin.CheckPolicy(request, metadata=service.auth(service.keys.admin))
    policy = await service.admin.GetPolicy(admin_pb2.GetPolicyRequest(), metadata=service.auth(service.keys.admin))
    assert not response.ok
    assert all(finding.error and finding.message for finding in response.findings)
    assert any(finding.location.startswith("new.yaml:") for finding in response.findings)
    assert policy.generation == 1
