"""What callers without a key can do to those who have one: nothing. Health and reflection are open to all, so they are counted
apart, decode with care and leave no traces in the log; bytes of other protocols end their own connection only."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fairlane.gateway import server as gateway_server
from fairlane.gateway.config import GatewayConfig
from fairlane.protos.fairlane.v1 import inference_pb2 as pb

pytestmark = pytest.mark.asyncio

Code = grpc.StatusCode
REQUEST = pb.GenerateRequest(prompt="x")
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def gateway_config() -> GatewayConfig:
    return GatewayConfig(port=0, coalesce=0.0, max_concurrent_rpcs=2)


async def watching(service: Any) -> Any:
    call = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest())
    assert (await call.read()).status == SERVING
    return call


async def reflecting(service: Any) -> Any:
    call = reflection_pb2_grpc.ServerReflectionStub(service.channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    assert (await call.read()).HasField("list_services_response")
    return call


async def test_streams_without_a_key_take_no_slot_of_a_tenant(service: Any) -> None:
    strangers = [await watching(service) for _ in range(8)] + [await reflecting(service) for _ in range(8)]
    half_open = [service.channel.stream_unary("/fairlane.v1.Inference/Complete")() for _ in range(8)]
    response = await service.complete(REQUEST)
    for call in (*strangers, *half_open):
        call.cancel()
    assert response.text == "Hi."


async def test_more_calls_than_slots_are_overloaded_with_a_delay_and_a_freed_slot_serves_again(
    service: Any, refused: Any, until: Any
) -> None:
    service.worker.on_add = service.worker.silent
    calls = [service.generate(REQUEST) for _ in range(2)]
    for call in calls:
        await call.read()
    count = service.stub.CountTokens(pb.CountTokensRequest(prompt="x"), metadata=service.auth())
    refusals = [await refused(service.generate(REQUEST)), await refused(count)]
    calls[0].cancel()
    service.worker.on_add = service.worker.answer("Hi.")
    await until(lambda: service.gateway.admission.in_flight() == 1)
    response = await service.complete(REQUEST)
    calls[1].cancel()
    assert [(r.code, r.reason, r.retry is not None) for r in refusals] == [(Code.UNAVAILABLE, "OVERLOADED", True)] * 2
    assert int(refusals[0].trailers["grpc-retry-pushback-ms"]) > 0
    assert response.text == "Hi."


async def test_a_stranger_learns_nothing_of_the_load(service: Any, refused: Any) -> None:
    service.worker.on_add = service.worker.silent
    calls = [service.generate(REQUEST) for _ in range(2)]
    for call in calls:
        await call.read()
    refusal = await refused(service.generate(REQUEST, metadata=[]))
    for call in calls:
        call.cancel()
    assert refusal.reason == "UNAUTHENTICATED"


class TestBoundsOfTheirOwn:
    @pytest.fixture
    def service_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gateway_server, "MAX_WATCHERS", 3)
        monkeypatch.setattr(gateway_server, "_REFLECTION_RPCS", 2)

    async def test_watchers_and_reflection_are_bounded_apart_and_probes_get_through(
        self, service_bounds: None, service: Any, refused: Any
    ) -> None:
        calls = [await watching(service) for _ in range(3)] + [await reflecting(service) for _ in range(2)]
        stub = health_pb2_grpc.HealthStub(service.channel)
        watch = await refused(stub.Watch(health_pb2.HealthCheckRequest()))
        reflection = reflection_pb2_grpc.ServerReflectionStub(service.channel).ServerReflectionInfo(iter([]))
        reflect = await refused(reflection)
        check = await stub.Check(health_pb2.HealthCheckRequest())
        for call in calls:
            call.cancel()
        assert [(r.code, r.reason, r.retry is not None) for r in (watch, reflect)] == [(Code.UNAVAILABLE, "OVERLOADED", True)] * 2
        assert check.status == SERVING


GARBAGE = [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x0a\x7fabc"]


@pytest.mark.parametrize("body", GARBAGE)
async def test_garbage_without_a_key_is_malformed_and_no_traceback(
    service: Any, refused: Any, caplog: pytest.LogCaptureFixture, body: bytes
) -> None:
    caplog.set_level(logging.INFO)
    health = "/grpc.health.v1.Health"
    reflect = service.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    calls = [
        service.channel.unary_unary(f"{health}/Check")(body),
        service.channel.unary_stream(f"{health}/Watch")(body),
        reflect(iter([body])),
        reflect(iter([reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString(), body])),
    ]
    refusals = [await refused(call) for call in calls]
    assert {(r.code, r.reason) for r in refusals} == {(Code.INVALID_ARGUMENT, "MALFORMED_REQUEST")}
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []


async def test_refusals_of_strangers_do_not_flood_the_log(service: Any, refused: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    check = service.channel.unary_unary("/grpc.health.v1.Health/Check")
    for _ in range(100):
        await refused(check(b"\xff"))
        await refused(service.complete(REQUEST, metadata=[]))
    lines = [record for record in caplog.records if record.name.startswith("fairlane")]
    assert len(lines) < 60


async def test_a_tenants_refusal_is_logged_with_who_which_and_where_but_not_the_key(
    service: Any, refused: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await refused(service.complete(pb.GenerateRequest(prompt="x", tier="nope", request_id="request-7")))
    await refused(service.complete(pb.GenerateRequest(prompt="x", request_id="forged\nline")))
    first, second = (r.getMessage() for r in caplog.records if r.name == "fairlane.gateway.refusals")
    assert first.startswith("/fairlane.v1.Inference/Complete: INVALID_ARGUMENT TIER_UNKNOWN; node acme/shop, key k-shop, ")
    assert "request request-7, peer ipv4:127.0.0.1:" in first
    assert r"request forged\nline, peer" in second
    assert service.keys.shop not in caplog.text


OTHER_PROTOCOLS = {
    "HTTP/1.1": b"POST /fairlane.v1.Inference/Generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx",
    "TLS": bytes.fromhex("16030100a5010000a10303") + b"\x5a" * 154,
    "zeros": b"\0" * 4096,
    "half a preface": b"PRI * HTTP/2.0\r\n",
}


@pytest.mark.parametrize("name", OTHER_PROTOCOLS)
async def test_bytes_of_another_protocol_do_not_disturb_calls_in_progress(service: Any, rest: Any, name: str) -> None:
    service.worker.on_add = service.worker.silent
    call = service.generate(REQUEST)
    await call.read()
    idle = [await asyncio.open_connection("127.0.0.1", service.gateway.port) for _ in range(50)]
    talking = [await asyncio.open_connection("127.0.0.1", service.gateway.port) for _ in range(5)]
    for _, writer in talking:
        writer.write(OTHER_PROTOCOLS[name])
    ended = await _ends(talking) if name != "half a preface" else True
    service.worker.send(service.worker.adds[0].request_id, token_ids=[65], ended=pb_end())
    events = await rest(call)
    service.worker.on_add = service.worker.answer("Hi.")
    response = await service.complete(REQUEST)
    for _, writer in (*idle, *talking):
        writer.close()
    assert ended
    assert (events[-1].WhichOneof("event"), response.text) == ("finished", "Hi.")


async def _ends(connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> bool:
    """Whether the server closes every one."""
    for reader, _ in connections:
        try:
            async with asyncio.timeout(10):
                await reader.read()
        except ConnectionError:
            continue
    return True


def pb_end() -> Any:
    from fairlane.protos.fairlane.v1 import worker_pb2

    return worker_pb2.EndedDelta(reason="length")


class TestPatientClients:
    """A client that pings each second, the fastest that gRPC lets one be: all right under the production rule ten times as fast
    (a ping each 0.5 s is allowed), and abuse under the real one, which the third ping too many ends."""

    PINGING = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]

    @pytest.fixture(params=[True, False], ids=["allowed", "too fast"])
    def fast_enough(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
        if request.param:
            monkeypatch.setattr(gateway_server, "MIN_PING_INTERVAL_MS", 500)
        return bool(request.param)

    @pytest.fixture
    async def patient(self, fast_enough: bool, service: Any) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{service.gateway.port}", options=self.PINGING) as channel:
            yield channel

    async def test_a_client_that_pings_on_a_silent_stream_is_kept_unless_it_overdoes_it(
        self, fast_enough: bool, service: Any, patient: Any
    ) -> None:
        service.worker.on_add = service.worker.silent
        call = patient.unary_stream(
            "/fairlane.v1.Inference/Generate",
            request_serializer=pb.GenerateRequest.SerializeToString,
            response_deserializer=pb.GenerateEvent.FromString,
        )(REQUEST, metadata=service.auth())
        await call.read()
        await call.read()
        outcome = "silent"
        try:
            async with asyncio.timeout(4 if fast_enough else 20):  # the third ping is due after 3 s
                await call.read()
        except TimeoutError:
            pass
        except grpc.aio.AioRpcError as error:
            outcome = error.details() or ""
        assert outcome == "silent" if fast_enough else "ping" in outcome.lower()


async def test_the_published_ping_interval_is_what_the_server_allows() -> None:
    options = dict(gateway_server.server_options(GatewayConfig()))
    assert options["grpc.http2.min_recv_ping_interval_without_data_ms"] == gateway_server.MIN_PING_INTERVAL_MS == 5000
    assert options["grpc.keepalive_permit_without_calls"] == 1
