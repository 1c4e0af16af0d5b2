"""Request metrics by hand-written deltas and a fake clock: what one request adds to which series, and that ten thousand
tenants cost no more series than twenty."""

from __future__ import annotations

import asyncio
import random

import pytest
from prometheus_client import generate_latest

from fairlane.clock import FakeClock
from fairlane.errors import FairlaneError
from fairlane.gateway.metrics import GatewayMetrics, RequestObservation
from fairlane.gateway.metrics_tenants import IDLE_S, OTHER, TenantLabels, tenant_of
from fairlane.gateway.metrics_worker import domain_label, largest
from fairlane.protos.fairlane.v1 import inference_pb2
from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.cache_domain import framed

WHO = {"tier": "gold", "tenant": "acme/shop"}


class Inbox:
    def __init__(self, violation: str | None = None) -> None:
        self.violation = violation
        self.deltas: list[pb.Delta] = []
        self.errors: list[FairlaneError] = []

    def offer(self, delta: pb.Delta) -> str | None:
        self.deltas.append(delta)
        return self.violation

    def fail(self, error: FairlaneError) -> None:
        self.errors.append(error)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def metrics(clock: FakeClock) -> GatewayMetrics:
    return GatewayMetrics(clock, max_tenants=20)


def value(metrics: GatewayMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"fairlane_{name}", labels or WHO)


def series(metrics: GatewayMetrics) -> list[str]:
    return [line for line in generate_latest(metrics.registry).decode().splitlines() if not line.startswith("#")]


def waiting(observation: RequestObservation, prompt_tokens: int = 10) -> Inbox:
    inbox = Inbox()
    observation.asked("gold")
    observation.watch(inbox, prompt_tokens)
    observation.offer(pb.Delta(queue_position=0))
    return inbox


def started(cached: int = 0, queue_s: float = 0.0) -> pb.Delta:
    return pb.Delta(started=pb.StartedDelta(cached_tokens=cached, queue_s=queue_s))


def test_a_request_is_measured_from_arrival_to_its_last_token(metrics: GatewayMetrics, clock: FakeClock) -> None:
    # arrival 0; first token at 2; then 1 + 2 tokens at 3 and 5; finished at 6.
    with metrics.observe("acme/shop") as observation:
        waiting(observation)
        clock.advance(1)
        observation.offer(started(cached=4, queue_s=0.75))
        clock.advance(1)
        observation.offer(pb.Delta(token_ids=[1]))
        clock.advance(1)
        observation.offer(pb.Delta(token_ids=[2]))
        clock.advance(2)
        observation.offer(pb.Delta(token_ids=[3, 4], ended=pb.EndedDelta(reason="length", recomputed_tokens=7)))
        clock.advance(1)
        observation.finished(inference_pb2.FINISH_REASON_LENGTH)
    measured = {
        name: value(metrics, name)
        for name in (
            "time_to_first_token_seconds_sum", "request_queue_time_seconds_sum", "inter_token_latency_seconds_sum",
            "inter_token_latency_seconds_count", "request_time_per_output_token_seconds_sum", "e2e_request_latency_seconds_sum",
            "prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total", "recomputed_tokens_total",
        )
    }  # fmt: skip
    assert measured == {
        "time_to_first_token_seconds_sum": 2.0,
        "request_queue_time_seconds_sum": 0.75,
        "inter_token_latency_seconds_sum": 3.0,
        "inter_token_latency_seconds_count": 2.0,
        "request_time_per_output_token_seconds_sum": 1.0,  # (5 - 2) / 3
        "e2e_request_latency_seconds_sum": 6.0,
        "prompt_tokens_total": 10.0,
        "prompt_tokens_cached_total": 4.0,
        "generation_tokens_total": 4.0,
        "recomputed_tokens_total": 7.0,
    }
    assert value(metrics, "request_success_total", finished_reason="length", **WHO) == 1.0


def test_a_request_is_waiting_or_running_and_in_the_end_neither(metrics: GatewayMetrics) -> None:
    seen: list[tuple[float | None, float | None]] = []

    def look() -> None:
        seen.append((value(metrics, "num_requests_waiting"), value(metrics, "num_requests_running")))

    with metrics.observe("acme/shop") as observation:
        look()
        waiting(observation)
        look()
        observation.offer(started())
        look()
        observation.offer(pb.Delta(preempted=pb.PreemptedDelta(kind="paused")))
        look()
        observation.offer(pb.Delta(preempted=pb.PreemptedDelta(kind="recomputed")))
        look()
        observation.offer(pb.Delta(resumed_after_s=1.0))
        look()
        observation.offer(pb.Delta(preempted=pb.PreemptedDelta(kind="swapped")))
        look()
    look()
    assert seen == [(None, None), (1, None), (0, 1), (0, 1), (1, 0), (0, 1), (1, 0), (0, 0)]
    kinds = [value(metrics, "num_preemptions_total", kind=kind, **WHO) for kind in ("recomputed", "swapped", "paused")]
    assert kinds == [1.0, 1.0, 1.0]


def test_an_error_before_the_queue_is_a_refusal_and_after_it_a_failure(metrics: GatewayMetrics) -> None:
    for queued in (False, True):
        with pytest.raises(FairlaneError), metrics.observe("acme/shop") as observation:
            observation.asked("gold")
            if queued:
                waiting(observation)
            raise FairlaneError("DEADLINE_EXCEEDED", "")
    refused = value(metrics, "request_refusals_total", reason="DEADLINE_EXCEEDED", **WHO)
    failed = value(metrics, "request_failures_total", reason="DEADLINE_EXCEEDED", **WHO)
    assert (refused, failed) == (1.0, 1.0)


def test_a_client_that_goes_away_and_a_bug_have_reasons_of_their_own(metrics: GatewayMetrics) -> None:
    for error in (asyncio.CancelledError(), ZeroDivisionError()):
        with pytest.raises(type(error)), metrics.observe("acme/shop") as observation:
            waiting(observation)
            raise error
    ends = {reason: value(metrics, "request_failures_total", reason=reason, **WHO) for reason in ("CLIENT_GONE", "INTERNAL")}
    assert ends == {"CLIENT_GONE": 1.0, "INTERNAL": 1.0}


def test_what_the_inbox_rejects_is_not_measured(metrics: GatewayMetrics) -> None:
    with metrics.observe("acme/shop") as observation:
        observation.asked("gold")
        observation.watch(Inbox("nonsense"), 1)
        answer = observation.offer(pb.Delta(token_ids=[1]))
    assert (answer, value(metrics, "generation_tokens_total")) == ("nonsense", None)


def test_failures_reach_the_inbox(metrics: GatewayMetrics) -> None:
    error = FairlaneError("WORKER_LOST", "")
    with metrics.observe("acme/shop") as observation:
        inbox = waiting(observation)
        observation.fail(error)
    assert inbox.errors == [error]


def test_members_count_for_their_tenant(metrics: GatewayMetrics) -> None:
    for node in ("chatly/paid/alice", "chatly/paid/bob"):
        with metrics.observe(node) as observation:
            waiting(observation)
            observation.offer(started())
    assert value(metrics, "prompt_tokens_total", tier="gold", tenant="chatly/paid") == 20.0


def test_callers_nobody_knows_are_counted_without_a_tenant(metrics: GatewayMetrics) -> None:
    metrics.turned_away("UNAUTHENTICATED")
    assert value(metrics, "request_refusals_total", reason="UNAUTHENTICATED", tier="", tenant="") == 1.0


def run_one(metrics: GatewayMetrics, tenant: str, tokens: int = 1) -> None:
    with metrics.observe(tenant) as observation:
        waiting(observation, prompt_tokens=tokens)
        observation.offer(started())
        for token in range(3):
            observation.offer(pb.Delta(token_ids=[token]))
        observation.offer(pb.Delta(preempted=pb.PreemptedDelta(kind="recomputed")))
        observation.finished(inference_pb2.FINISH_REASON_STOP)


def test_ten_thousand_tenants_cost_as_many_series_as_twenty_and_lose_no_token(clock: FakeClock) -> None:
    few, many = GatewayMetrics(clock, 20), GatewayMetrics(clock, 20)
    for number in range(21):
        run_one(few, f"org/t{number}")
    order = [f"org/t{number}" for number in range(10_000)]
    random.Random(1).shuffle(order)
    for tenant in order:
        run_one(many, tenant)
    tenants = {sample.labels["tenant"] for family in many.generation_tokens.collect() for sample in family.samples}
    total = sum(sample.value for family in many.generation_tokens.collect() for sample in family.samples)
    assert (len(series(many)), len(tenants), OTHER in tenants) == (len(series(few)), 21, True)
    assert total == 30_000


def test_requests_in_flight_of_ten_thousand_tenants_are_two_dozen_series(metrics: GatewayMetrics) -> None:
    open_ = [metrics.observe(f"org/t{number}") for number in range(10_000)]
    for context in open_:
        waiting(context.__enter__())
    gauges = [line for line in series(metrics) if line.startswith("fairlane_num_requests_waiting")]
    assert (len(gauges), value(metrics, "num_requests_waiting", tier="gold", tenant=OTHER)) == (21, 9_980)
    for context in open_:
        context.__exit__(None, None, None)
    left = [line for line in series(metrics) if line.startswith("fairlane_num_requests_waiting")]
    assert (len(left), {line.rsplit(" ", 1)[1] for line in left}, len(metrics.in_state)) == (20, {"0.0"}, 20)


def test_a_tenant_that_becomes_much_busier_takes_the_quietest_ones_place(clock: FakeClock) -> None:
    metrics = GatewayMetrics(clock, max_tenants=2)
    for tenant, tokens in (("org/a", 1000), ("org/b", 100), ("org/c", 150), ("org/c", 150), ("org/c", 1)):
        run_one(metrics, tenant, tokens)
    assert metrics.tenants.named == ("org/a", "org/c")
    assert not any("org/b" in line for line in series(metrics))


def test_two_equals_do_not_take_turns(clock: FakeClock) -> None:
    labels = TenantLabels(1, clock)
    for number in range(100):
        labels.enter(("org/a", "org/b")[number % 2])
    assert labels.named == ("org/a",)


def test_idle_tenants_lose_their_series_but_not_while_a_request_is_in_flight(metrics: GatewayMetrics, clock: FakeClock) -> None:
    run_one(metrics, "org/idle")
    with metrics.observe("org/long") as observation:
        waiting(observation)
        observation.offer(started())
        clock.advance(IDLE_S)
        metrics.sweep()
        named = metrics.tenants.named
    assert (named, any("org/idle" in line for line in series(metrics))) == (("org/long",), False)
    assert {tenant for _, tenant, _ in metrics.in_state} == {"org/long"}


def test_without_names_everybody_is_other(clock: FakeClock) -> None:
    metrics = GatewayMetrics(clock, max_tenants=0)
    run_one(metrics, "org/a")
    assert value(metrics, "generation_tokens_total", tier="gold", tenant=OTHER) == 3.0


def test_memory_of_tenants_gone_quiet_fades(clock: FakeClock) -> None:
    labels = TenantLabels(1, clock)
    for number in range(1000):
        labels.enter(f"org/t{number}")
        labels.leave(f"org/t{number}")
    clock.advance(3600)
    labels.sweep()
    assert len(labels._traffic) == 0


@pytest.mark.parametrize(
    ("node", "tenant"), [("org", "org"), ("org/a", "org/a"), ("org/a/x", "org/a"), ("org/a/x/y", "org/a"), ("", "")]
)
def test_the_tenant_of_a_node(node: str, tenant: str) -> None:
    assert tenant_of(node) == tenant


@pytest.mark.parametrize(
    ("domain", "partition", "label"),
    [
        ("tenant:acme/shop", "", "tenant:acme/shop"),
        ("tenant:acme/shop", "x:y/z", "tenant:acme/shop"),
        ("member:chatly/paid/alice", "", "member:chatly/paid"),
        ("group:docs", "", "group:docs"),
        ("public", "p", "public"),
    ],
)
def test_partitions_and_members_make_no_series(domain: str, partition: str, label: str) -> None:
    assert domain_label(framed(domain, partition)) == label


def test_the_largest_domains_are_named_and_the_rest_adds_up() -> None:
    counts = [
        pb.CountSpec(name=framed(domain, partition), count=count)
        for domain, partition, count in (("tenant:a/x", "1", 5), ("tenant:a/x", "2", 5), ("public", "", 7), ("tenant:b/y", "", 1))
    ]
    assert largest(counts, used=20, most=2) == {"tenant:a/x": 10, "public": 7, OTHER: 3}
