"""How requests end other than well: cancelled, out of time, over a cap, unread, with a bug of ours. Each ends exactly once,
the worker is told, and nothing stays behind."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest

from fairlane.gateway.config import GatewayConfig
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2 as wpb

pytestmark = pytest.mark.asyncio

Code = grpc.StatusCode
REQUEST = pb.GenerateRequest(prompt="x", request_id="request-1")


async def started_stream(service: Any, request: pb.GenerateRequest = REQUEST, **options: Any) -> Any:
    """A stream whose request is running at the worker, which says nothing more."""
    service.worker.on_add = service.worker.silent
    call = service.generate(request, **options)
    assert (await call.read()).WhichOneof("event") == "queued"
    assert (await call.read()).WhichOneof("event") == "started"
    return call


async def test_a_cancelled_stream_aborts_at_the_worker_and_frees_its_place(service: Any, until: Any) -> None:
    call = await started_stream(service)
    assert service.gateway.admission.in_flight() == 1
    call.cancel()
    aborted = await asyncio.wait_for(service.worker.aborts.get(), 5)
    assert aborted == service.worker.adds[0].request_id
    await until(lambda: service.gateway.admission.in_flight() == 0)
    assert service.gateway.admission.in_flight_by_node() == {}


async def test_cancelling_while_still_queued_aborts_too(service: Any, until: Any) -> None:
    async def nothing(add: wpb.Add) -> None: ...

    service.worker.on_add = nothing
    call = service.generate(REQUEST)
    add = await asyncio.wait_for(service.worker.added.get(), 5)
    call.cancel()
    assert await asyncio.wait_for(service.worker.aborts.get(), 5) == add.request_id
    await until(lambda: service.gateway.admission.in_flight() == 0)


async def test_a_client_that_vanishes_while_tokens_flow_aborts_too(service: Any, until: Any) -> None:
    async def endless(add: wpb.Add) -> None:
        service.worker.begin(add.request_id)
        for _ in range(150):
            service.worker.send(add.request_id, token_ids=[65])
            await asyncio.sleep(0)

    service.worker.on_add = endless
    call = service.generate(REQUEST)
    await call.read()
    call.cancel()
    assert await asyncio.wait_for(service.worker.aborts.get(), 5) == service.worker.adds[0].request_id
    await until(lambda: service.gateway.admission.in_flight() == 0)


async def test_many_cancelled_streams_leave_nothing(service: Any, until: Any) -> None:
    service.worker.on_add = service.worker.silent
    calls = [service.generate(pb.GenerateRequest(prompt="x")) for _ in range(40)]
    added = {(await asyncio.wait_for(service.worker.added.get(), 5)).request_id for _ in calls}
    for call in calls:
        call.cancel()
    aborted = {await asyncio.wait_for(service.worker.aborts.get(), 5) for _ in calls}
    await until(lambda: service.gateway.admission.in_flight() == 0)
    assert aborted == added


async def test_cancel_rpc_ends_the_stream_as_cancelled(service: Any, refused: Any) -> None:
    call = await started_stream(service)
    await service.stub.Cancel(pb.CancelRequest(request_id="request-1"), metadata=service.auth())
    refusal = await refused(call)
    assert (refusal.code, refusal.reason) == (Code.CANCELLED, "CANCELLED")
    assert await asyncio.wait_for(service.worker.aborts.get(), 5) == service.worker.adds[0].request_id


async def test_cancel_knows_only_the_callers_own_requests_by_their_exact_name(service: Any, refused: Any) -> None:
    call = await started_stream(service)

    def cancel(name: str, key: str) -> Any:
        return service.stub.Cancel(pb.CancelRequest(request_id=name), metadata=service.auth(key))

    keys = service.keys
    answers = {
        (refusal.code, refusal.reason, refusal.message)
        for refusal in [
            await refused(cancel("request-1", keys.docs)),
            await refused(cancel("request-", keys.shop)),
            await refused(cancel("no-such-request", keys.shop)),
            await refused(cancel("", keys.shop)),
        ]
    }
    assert {(code, reason) for code, reason, _ in answers} == {(Code.NOT_FOUND, "REQUEST_NOT_FOUND")}
    assert len(answers) == 1
    assert service.worker.aborts.empty()
    call.cancel()


async def test_a_request_id_is_unique_among_the_tenants_requests_in_flight(service: Any, until: Any, refused: Any) -> None:
    call = await started_stream(service)
    twice = await refused(service.generate(REQUEST))
    assert (twice.code, twice.reason) == (Code.ALREADY_EXISTS, "REQUEST_ID_IN_USE")
    # Another tenant's name space is its own.
    service.worker.on_add = service.worker.answer("ok")
    other = await service.complete(REQUEST, metadata=service.auth(service.keys.docs))
    assert other.text == "ok"
    call.cancel()
    await until(lambda: service.gateway.admission.in_flight() == 0)
    assert (await service.complete(REQUEST)).text == "ok"


async def test_max_in_flight_refuses_with_a_delay_that_stock_clients_obey(service: Any, until: Any, refused: Any) -> None:
    docs = service.auth(service.keys.docs)
    call = await started_stream(service, metadata=docs)
    refusal = await refused(service.generate(pb.GenerateRequest(prompt="x"), metadata=docs))
    assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "MAX_IN_FLIGHT")
    assert dict(refusal.info.metadata) == {"node": "acme/docs", "limit": "1"}
    assert refusal.retry is not None
    assert int(refusal.trailers["grpc-retry-pushback-ms"]) == refusal.retry.retry_delay.ToMilliseconds() > 0
    call.cancel()
    await until(lambda: service.gateway.admission.in_flight() == 0)
    service.worker.on_add = service.worker.answer("ok")
    assert (await service.complete(REQUEST, metadata=docs)).text == "ok"


async def test_refused_requests_do_not_count(service: Any, refused: Any) -> None:
    docs = service.auth(service.keys.docs)
    await refused(service.generate(pb.GenerateRequest(prompt="x" * 600), metadata=docs))
    assert service.gateway.admission.in_flight_by_node() == {}
    assert (await service.complete(REQUEST, metadata=docs)).text == "Hi."


async def test_the_clients_deadline_ends_the_request_everywhere(service: Any, until: Any, refused: Any) -> None:
    call = await started_stream(service, timeout=0.5)
    refusal = await refused(call)
    assert refusal.code == Code.DEADLINE_EXCEEDED
    assert await asyncio.wait_for(service.worker.aborts.get(), 5) == service.worker.adds[0].request_id
    assert service.worker.adds[0].timeout_s < 1
    await until(lambda: service.gateway.admission.in_flight() == 0)


class TestServerSideCap:
    @pytest.fixture
    def gateway_config(self) -> GatewayConfig:
        return GatewayConfig(port=0, coalesce=0.0, default_max_duration=0.3)

    async def test_without_a_deadline_the_servers_cap_applies(self, service: Any, refused: Any) -> None:
        refusal = await refused(await started_stream(service, timeout=None))
        assert (refusal.code, refusal.reason) == (Code.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")
        assert await asyncio.wait_for(service.worker.aborts.get(), 5) == service.worker.adds[0].request_id


class TestUnreadStream:
    @pytest.fixture
    def gateway_config(self) -> GatewayConfig:
        return GatewayConfig(port=0, coalesce=0.0, slow_consumer=0.3)

    async def test_a_reader_that_stops_is_cut_and_its_blocks_freed(self, service: Any, until: Any, refused: Any) -> None:
        service.worker.welcome.max_model_len = service.worker.welcome.num_blocks = 10_000_000
        await service.worker.kill()
        await service.worker.start()
        await until(lambda: service.gateway.worker.facts.max_model_len == 10_000_000 and service.gateway.worker.ready)

        async def flood(add: wpb.Add) -> None:
            service.worker.begin(add.request_id)
            for _ in range(4000):  # 4000 * 4000 tokens of 2 bytes as ids and 1 as text: far beyond the transport's cushion
                service.worker.send(add.request_id, token_ids=[255] * 2000)
                await asyncio.sleep(0)
                if not service.worker.aborts.empty():
                    return

        service.worker.on_add = flood
        request = pb.GenerateRequest(
            prompt="x", tier="batch", response=pb.ResponseOptions(return_token_ids=True), stopping=pb.StoppingParams()
        )
        call = service.generate(request, timeout=60)
        await call.read()
        aborted = await asyncio.wait_for(service.worker.aborts.get(), 30)
        assert aborted == service.worker.adds[0].request_id
        await until(lambda: service.gateway.admission.in_flight() == 0)
        refusal = await refused(call)
        assert (refusal.code, refusal.reason) == (Code.RESOURCE_EXHAUSTED, "SLOW_CONSUMER")


@pytest.mark.parametrize("method", ["generate", "complete"])
async def test_an_unexpected_exception_shows_an_incident_id_and_nothing_else(
    service: Any, refused: Any, monkeypatch: Any, caplog: Any, method: str
) -> None:
    def explode(*args: Any, **kwargs: Any) -> None:
        raise ValueError("secret path /srv/keys")

    monkeypatch.setattr("fairlane.gateway.service.validate", explode)
    with caplog.at_level(logging.ERROR, logger="fairlane.gateway"):
        refusal = await refused(getattr(service, method)(REQUEST))
    incident = refusal.info.metadata["incident"]
    assert (refusal.code, refusal.reason) == (Code.INTERNAL, "INTERNAL")
    assert refusal.message == f"internal error, incident {incident}"
    assert b"secret" not in b"".join(v if isinstance(v, bytes) else v.encode() for v in refusal.trailers.values())
    # Our own log has the whole story under the same id.
    assert incident in caplog.text
    assert "secret path" in caplog.text


async def test_an_exception_in_mid_stream_keeps_what_was_sent_and_aborts(service: Any, refused: Any, monkeypatch: Any) -> None:
    call = await started_stream(service)

    def explode(*args: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("fairlane.gateway.output_text.OutputText.push", explode)
    service.worker.send(service.worker.adds[0].request_id, token_ids=[65])
    refusal = await refused(call)
    assert refusal.reason == "INTERNAL"
    assert "secret" not in refusal.message
    assert await asyncio.wait_for(service.worker.aborts.get(), 5) == service.worker.adds[0].request_id
