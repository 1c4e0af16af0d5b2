"""Health and reflection as stock tools use them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fairlane.gateway.config import GatewayConfig

pytestmark = pytest.mark.asyncio

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def watch(service: Any, name: str = "") -> Any:
    return health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest(service=name))


async def test_watchers_see_loss_and_return_of_the_worker_also_after_another_has_left(service: Any) -> None:
    staying, leaving = watch(service), watch(service)
    seen = [(await staying.read()).status]
    await leaving.read()
    leaving.cancel()
    await service.worker.kill()
    seen.append((await staying.read()).status)
    await service.worker.start()
    seen.append((await staying.read()).status)
    service.gateway.drain()
    seen.append((await staying.read()).status)
    assert seen == [SERVING, NOT_SERVING, SERVING, NOT_SERVING]


async def test_a_drain_is_for_good_even_if_the_worker_comes_back(service: Any, until: Any) -> None:
    service.gateway.drain()
    await service.worker.kill()
    await until(lambda: not service.gateway.worker.ready)
    await service.worker.start()
    await service.gateway.wait_ready(10)
    response = await health_pb2_grpc.HealthStub(service.channel).Check(health_pb2.HealthCheckRequest())
    assert response.status == NOT_SERVING


async def test_unknown_services_are_not_found_and_watched_as_unknown(service: Any, refused: Any) -> None:
    check = health_pb2_grpc.HealthStub(service.channel).Check(health_pb2.HealthCheckRequest(service="nope"))
    refusal = await refused(check)
    watched = await watch(service, "nope").read()
    assert refusal.code == grpc.StatusCode.NOT_FOUND
    assert watched.status == UNKNOWN


def reflected(service: Any, *requests: reflection_pb2.ServerReflectionRequest) -> Any:
    return reflection_pb2_grpc.ServerReflectionStub(service.channel).ServerReflectionInfo(iter(requests))


async def test_reflection_lists_the_public_services(service: Any) -> None:
    call = reflected(service, reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {entry.name for entry in (await call.read()).list_services_response.service}
    assert {"fairlane.v1.Inference", "grpc.health.v1.Health"} <= names
    assert "fairlane.v1.Admin" not in names


class TestWithoutReflection:
    @pytest.fixture
    def gateway_config(self) -> GatewayConfig:
        return GatewayConfig(port=0, reflection=False)

    async def test_reflection_can_be_switched_off(self, service: Any, refused: Any) -> None:
        # Nothing is sent: where a refusal overtakes a message (once in some 2,000 calls) the client of grpc.aio says INTERNAL.
        refusal = await refused(reflected(service))
        assert refusal.code == grpc.StatusCode.UNIMPLEMENTED
