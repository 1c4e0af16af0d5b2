"""/metrics as a scraper sees it: a real gateway, a scripted worker, plain HTTP."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from fairlane.gateway.config import GatewayConfig
from fairlane.gateway.metrics_server import MetricsServer
from fairlane.protos.fairlane.v1 import explain_pb2 as epb
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2 as wpb

GOLD = {"tier": "gold", "tenant": "acme/shop"}


def ask(text: str = "Hello", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=text, sampling=pb.SamplingParams(temperature=0), **fields)


async def get(service: Any, path: str = "/metrics") -> str:
    url = f"http://127.0.0.1:{service.gateway.metrics_port}{path}"
    return await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())


class Scrape:
    """Samples of one scrape by name and labels."""

    def __init__(self, text: str) -> None:
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def get(self, name: str, **labels: str) -> float | None:
        return self.samples.get((f"fairlane_{name}", frozenset(labels.items())))


async def scrape(service: Any) -> Scrape:
    return Scrape(await get(service))


async def test_a_finished_request_is_in_every_series_it_belongs_to(service: Any, rest: Any) -> None:
    await rest(service.generate(ask()))
    seen = await scrape(service)
    names = {
        "request_success_total": {"finished_reason": "stop"},
        "prompt_tokens_total": {},
        "generation_tokens_total": {},
        "time_to_first_token_seconds_count": {},
        "request_queue_time_seconds_count": {},
        "e2e_request_latency_seconds_count": {},
        "request_time_per_output_token_seconds_count": {},
    }
    measured = {name: seen.get(name, **labels, **GOLD) for name, labels in names.items()}
    # "Hello" is 5 bytes; the worker says "Hi." and its end-of-sequence token.
    assert measured == dict.fromkeys(names, 1.0) | {"prompt_tokens_total": 5.0, "generation_tokens_total": 4.0}


async def test_a_stop_string_is_a_stop_though_the_worker_never_ended_it(service: Any, rest: Any) -> None:
    service.worker.on_add = service.worker.answer("one two three")
    await rest(service.generate(ask(stopping=pb.StoppingParams(stop=["two"]))))
    assert (await scrape(service)).get("request_success_total", finished_reason="stop", **GOLD) == 1.0


async def test_refusals_are_counted_by_reason_wherever_they_happen(service: Any, refused: Any) -> None:
    await refused(service.generate(ask(), metadata=[("authorization", "Bearer nonsense")]))
    await refused(service.generate(ask(tier="platinum")))
    await refused(service.generate(ask("x" * 600)))
    seen = await scrape(service)
    counted = [
        seen.get("request_refusals_total", reason="UNAUTHENTICATED", tier="", tenant=""),
        seen.get("request_refusals_total", reason="TIER_UNKNOWN", tier="", tenant="acme/shop"),
        seen.get("request_refusals_total", reason="CONTEXT_LENGTH_EXCEEDED", **GOLD),
    ]
    assert counted == [1.0, 1.0, 1.0]


async def test_waiting_running_and_gone_are_seen_from_outside(service: Any, until: Any) -> None:
    async def nothing(add: wpb.Add) -> None:
        service.worker.send(add.request_id, queue_position=0)

    service.worker.on_add = nothing
    call = service.generate(ask())
    event = await call.read()
    waiting = await scrape(service)
    service.worker.send(service.worker.adds[0].request_id, started=wpb.StartedDelta(queue_s=0.5))
    await call.read()
    running = await scrape(service)
    call.cancel()
    await until(lambda: service.gateway.admission.in_flight() == 0)
    gone = await scrape(service)
    assert event.WhichOneof("event") == "queued"
    assert [s.get("num_requests_waiting", **GOLD) for s in (waiting, running, gone)] == [1.0, 0.0, 0.0]
    assert [s.get("num_requests_running", **GOLD) for s in (waiting, running, gone)] == [None, 1.0, 0.0]
    assert gone.get("request_failures_total", reason="CLIENT_GONE", **GOLD) == 1.0


async def test_the_workers_heartbeat_is_told_and_forgotten_with_the_worker(service: Any, until: Any) -> None:
    service.worker.pong = wpb.Pong(
        step_id=9,
        blocks_used=6,
        blocks_cached=2,
        block_utilization_ratio=0.25,
        fragmentation_rate=0.125,
        preemptions=3,
        swaps_out=5,
        swaps_in=4,
        host_blocks_used=7,
        policy_fault="rank raised KeyError",
        running_by_tier=[wpb.CountSpec(name="gold", count=2)],
        waiting_by_tier=[wpb.CountSpec(name="batch", count=5)],
        blocks_by_domain=[wpb.CountSpec(name="16:tenant:acme/shop0:", count=4)],
        evictions_by_reason=[wpb.CountSpec(name="kv_guarantee", count=2)],
        kv_accounts=[
            epb.KVAccount(node="acme/shop", used=4, guarantee=3),
            epb.KVAccount(node="acme/shop/alice", used=1, limit=5),
            epb.KVAccount(node="group:g", used=2, limit=8),
        ],
        ceilings=[wpb.CeilSpec(tier="batch", share=0.6, used_s=12.5, binds=True)],
    )
    await service.gateway.worker.fresh_pong()
    seen = await scrape(service)
    figures = [
        seen.get("worker_ready"), seen.get("worker_epoch"), seen.get("worker_steps_total"), seen.get("worker_preemptions_total"),
        seen.get("block_utilization_ratio"), seen.get("fragmentation_rate"),
        seen.get("kv_blocks", state="used"), seen.get("kv_blocks", state="cached"), seen.get("kv_blocks", state="free"),
        seen.get("worker_requests_running", tier="gold"), seen.get("worker_requests_waiting", tier="batch"),
        seen.get("kv_blocks_by_domain", domain="tenant:acme/shop"), seen.get("kv_blocks_by_domain", domain="other"),
        seen.get("policy_generation"), seen.get("worker_restarts_total"),
        seen.get("worker_swaps_total", direction="out"), seen.get("worker_swaps_total", direction="in"),
        seen.get("host_kv_blocks", state="used"), seen.get("host_kv_blocks", state="free"),
        seen.get("worker_policy_replaced"), seen.get("worker_evictions_total", reason="kv_guarantee"),
        *(seen.get("kv_quota_blocks", node="acme/shop", kind=kind) for kind in ("used", "guarantee", "limit")),
        *(seen.get("kv_quota_blocks", node="group:g", kind=kind) for kind in ("used", "guarantee", "limit")),
        seen.get("kv_quota_blocks", node="acme/shop/alice", kind="used"),
        *(seen.get(f"ceil_{name}", tier="batch", node="") for name in ("seconds_total", "ratio", "binds")),
    ]  # fmt: skip
    assert figures == [
        1,
        1,
        9,
        3,
        0.25,
        0.125,
        6,
        2,
        16,
        2,
        5,
        4,
        2,
        1,
        0,
        5,
        4,
        7,
        3,
        1,
        2,
        4,
        3,
        None,
        2,
        0,
        8,
        None,
        12.5,
        0.6,
        1,
    ]
    await service.worker.kill()
    await until(lambda: not service.gateway.worker.ready)
    lost = await scrape(service)
    assert [lost.get(n) for n in ("worker_ready", "worker_lost_total", "worker_steps_total")] == [0, 1, None]
    service.worker.welcome.epoch = 2
    await service.worker.start()
    await until(lambda: service.gateway.worker.ready)
    assert (await scrape(service)).get("worker_restarts_total") == 1


async def test_a_scrape_is_answered_while_many_streams_run(service: Any, rest: Any) -> None:
    service.worker.on_add = service.worker.answer("x" * 150)
    calls = [asyncio.ensure_future(rest(service.generate(ask()))) for _ in range(20)]
    seen = [await scrape(service) for _ in range(5)]
    await asyncio.gather(*calls)
    last = await scrape(service)
    assert last.get("generation_tokens_total", **GOLD) == 20 * 151
    assert all(s.get("worker_ready") == 1 for s in seen)


async def test_only_the_metrics_are_there(service: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        await get(service, "/")
    assert (caught.value.code, caught.value.read()) == (404, b"The metrics are at /metrics\n")
    caught.value.close()


async def test_a_silent_connection_holds_up_no_scrape(service: Any) -> None:
    with socket.create_connection(("127.0.0.1", service.gateway.metrics_port)):
        assert (await scrape(service)).get("worker_ready") == 1


async def test_the_port_is_free_again_after_the_stop(service: Any) -> None:
    port = service.gateway.metrics_port
    await service.gateway.drain_and_stop(0)
    server = MetricsServer(service.gateway._metrics.registry)
    assert server.start("127.0.0.1", port) == port
    await server.stop()


async def test_a_taken_port_is_named_and_nothing_is_left_listening() -> None:
    first, second = MetricsServer(_empty()), MetricsServer(_empty())
    port = first.start("127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        second.start("127.0.0.1", port)
    await second.stop()
    await first.stop()


def _empty() -> Any:
    from prometheus_client import CollectorRegistry

    return CollectorRegistry()


class TestSwitchedOff:
    @pytest.fixture
    def gateway_config(self) -> GatewayConfig:
        return GatewayConfig(port=0, coalesce=0.0, metrics=False)

    async def test_nothing_listens_and_requests_are_served(self, service: Any, rest: Any) -> None:
        events = await rest(service.generate(ask()))
        assert (service.gateway.metrics_port, events[-1].WhichOneof("event")) == (0, "finished")
