"""Stopping without breaking anybody: health first, then refusals, then patience, then the end."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fairlane.clock import MonotonicClock
from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.server import Gateway
from fairlane.protos.fairlane.v1 import admin_pb2
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2 as wpb

pytestmark = pytest.mark.asyncio

Code = grpc.StatusCode
REQUEST = pb.GenerateRequest(prompt="x")


async def running(service: Any) -> Any:
    service.worker.on_add = service.worker.silent
    call = service.generate(REQUEST)
    await call.read()
    await call.read()
    return call


async def test_a_drain_says_not_serving_refuses_new_requests_and_lets_running_ones_finish(
    service: Any, until: Any, rest: Any, refused: Any
) -> None:
    call = await running(service)
    watch = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    stopping = asyncio.create_task(service.gateway.drain_and_stop(10))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await until(lambda: service.gateway.admission.draining)
    refusal = await refused(service.generate(REQUEST))
    service.worker.send(service.worker.adds[0].request_id, token_ids=[65], ended=wpb.EndedDelta(reason="length"))
    events = await rest(call)
    watch.cancel()
    await stopping
    assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "DRAINING")
    assert refusal.retry is not None
    assert events[-1].WhichOneof("event") == "finished"


async def test_what_outlives_the_grace_ends_as_unavailable(service: Any, refused: Any) -> None:
    call = await running(service)
    stopping = asyncio.create_task(service.gateway.drain_and_stop(0.05))
    refusal = await refused(call)
    await stopping
    assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "DRAINING")
    assert service.gateway.admission.in_flight() == 0


async def test_the_drain_rpc_drains_and_the_admin_port_still_answers(service: Any, until: Any, refused: Any) -> None:
    admin = service.auth(service.keys.admin)
    await service.admin.Drain(admin_pb2.DrainRequest(), metadata=admin)
    await until(lambda: service.gateway.admission.draining)
    refusal = await refused(service.generate(REQUEST))
    status = await service.admin.GetStatus(admin_pb2.GetStatusRequest(), metadata=admin)
    assert refusal.reason == "DRAINING"
    assert status.draining


async def test_stopping_twice_is_stopping_once(service: Any) -> None:
    await service.gateway.drain_and_stop(0)
    await service.gateway.drain_and_stop(0)
    assert not service.gateway.worker.ready


async def test_a_port_in_use_is_an_error_and_not_shared(service: Any) -> None:
    second = Gateway(
        GatewayConfig(port=service.gateway.port, admin_port=0),
        service.gateway._in_force.policy,
        b"p" * 32,
        "hmac-sha256:0",
        "unix:/nonexistent",
        None,
        MonotonicClock(),
    )
    with pytest.raises(OSError, match=str(service.gateway.port)):
        await second.start()
    assert (await service.complete(REQUEST)).text == "Hi."
