"""Queues with ends: `max_queue` counts until the first step, `max_wait` and `order` reach the worker, tier caps hold for all."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
import pytest

from fairlane.gateway.policy.model import TierPolicy
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2 as wpb
from fairlane.scheduler.tenancy import Tier

pytestmark = pytest.mark.asyncio

REQUEST = pb.GenerateRequest(prompt="x")
Code = grpc.StatusCode


async def limited(service: Any, *, tier: dict[str, Any] | None = None, **shop: Any) -> None:
    """Puts acme/shop's limits, and gold's, in force."""
    policy = service.gateway._in_force.policy
    nodes = {**policy.nodes, "acme/shop": dataclasses.replace(policy.nodes["acme/shop"], **shop)}
    tiers = {**policy.tiers, "gold": TierPolicy(Tier("gold", 100), **(tier or {}))}
    await service.gateway.apply_policy(dataclasses.replace(policy, sha256="1" * 64, nodes=nodes, tiers=tiers))


async def queued(service: Any, **options: Any) -> tuple[Any, wpb.Add]:
    """A request that the worker has queued and not started."""

    async def only_queue(add: wpb.Add) -> None:
        service.worker.send(add.request_id, queue_position=0)

    service.worker.on_add = only_queue
    call = service.generate(REQUEST, **options)
    await call.read()
    return call, service.worker.adds[-1]


async def test_a_full_queue_refuses_with_a_delay_until_a_request_starts(service: Any, refused: Any) -> None:
    await limited(service, max_queue=1)
    call, add = await queued(service)
    full = await refused(service.generate(REQUEST))
    service.worker.send(add.request_id, started=wpb.StartedDelta())
    await call.read()
    _, second = await queued(service)
    assert (full.code, full.reason, full.info.metadata["node"]) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", "acme/shop")
    assert (full.retry is not None, "grpc-retry-pushback-ms" in full.trailers) == (True, True)
    assert second.request_id != add.request_id


async def test_a_start_counts_though_the_client_does_not_read(service: Any, until: Any) -> None:
    await limited(service, max_queue=1)
    service.worker.on_add = service.worker.silent
    unread = service.generate(REQUEST)
    await until(lambda: service.gateway.admission.waiting_by_node() == {} and service.gateway.admission.in_flight() == 1)
    second = service.generate(REQUEST)
    await second.read()
    unread.cancel()
    assert service.gateway.admission.in_flight() >= 1


async def test_a_tiers_queue_is_full_for_everybody(service: Any, refused: Any) -> None:
    await limited(service, tier={"max_queue": 1})
    await queued(service)
    saas = [*service.auth(service.keys.saas), ("fairlane-tenant", "saas/paid/alice")]
    full = await refused(service.generate(REQUEST, metadata=saas))
    assert (full.reason, full.info.metadata["node"]) == ("QUEUE_FULL", "tier gold")


async def test_the_longest_wait_and_the_order_reach_the_worker(service: Any) -> None:
    await limited(service, max_wait_s=7.0)
    await service.complete(pb.GenerateRequest(prompt="x", order=-42))
    await service.complete(pb.GenerateRequest(prompt="x", tier="batch"), metadata=service.auth(service.keys.docs))
    first, second = service.worker.adds
    assert 6.0 < first.max_wait_s <= 7.0  # what tokenizing took is part of the wait
    assert (first.order, second.HasField("max_wait_s")) == (-42, False)


async def test_a_request_that_waited_too_long_may_come_back(service: Any, refused: Any) -> None:
    call, add = await queued(service)
    ended = wpb.EndedDelta(reason="failed", error_reason="QUEUE_TIMEOUT", error_message="waited for 10 s")
    service.worker.send(add.request_id, ended=ended)
    refusal = await refused(call)
    assert (refusal.code, refusal.reason, refusal.retry is not None) == (Code.RESOURCE_EXHAUSTED, "QUEUE_TIMEOUT", True)


async def test_a_nodes_own_output_limit_binds(service: Any, refused: Any) -> None:
    await limited(service, max_output_tokens=20)
    await service.complete(REQUEST)
    refusal = await refused(service.generate(pb.GenerateRequest(prompt="x", stopping=pb.StoppingParams(max_tokens=21))))
    assert (service.worker.adds[0].max_tokens, refusal.violations) == (20, {"stopping.max_tokens": "must be in [1, 20]"})


async def test_a_model_the_tenant_may_not_use_is_as_unknown_as_none(service: Any, refused: Any) -> None:
    await limited(service, models=("other",))
    answers = [await refused(service.generate(pb.GenerateRequest(prompt="x", model=name))) for name in ("tiny", "nonsense", "")]
    listed = await service.stub.ListModels(pb.ListModelsRequest(), metadata=service.auth())
    assert {(answer.reason, answer.message) for answer in answers} == {("MODEL_NOT_FOUND", answers[0].message)}
    assert list(listed.models) == []
