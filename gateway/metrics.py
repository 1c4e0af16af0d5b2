"""What the gateway measures about requests, by tier and tenant, as Prometheus metrics: one observation follows a request from
its arrival to its only end. How the worker is doing is metrics_worker.py's, who gets series of its own metrics_tenants.py's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fairlane.clock import Clock
from fairlane.errors import FairlaneError
from fairlane.gateway.metrics_tenants import TenantLabels, tenant_of
from fairlane.gateway.request_end import ending, finish_name
from fairlane.protos.fairlane.v1 import inference_pb2, worker_pb2

WHO = ("tier", "tenant")
_WAITS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0)
_REQUESTS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Sink(Protocol):
    """One request's inbox, as the worker client sees it (streams.DeltaInbox)."""

    def offer(self, delta: worker_pb2.Delta) -> str | None: ...

    def fail(self, error: FairlaneError) -> None: ...


class State(Enum):
    """Where a request is. WAITING: for KV blocks, for the first time or again; before the worker has it, it is in neither."""

    ARRIVED = "arrived"
    WAITING = "waiting"
    RUNNING = "running"


class GatewayMetrics:
    """All request metrics and their registry. Methods belong to the event loop's thread; scraping may be in any thread.

    max_tenants: tenants with series of their own at a time.
    """

    def __init__(self, clock: Clock, max_tenants: int) -> None:
        # A second series for every counter and histogram, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.clock = clock
        self.tenants = TenantLabels(max_tenants, clock, self._forget)
        self.in_state: dict[tuple[str, str, State], int] = {}  # (tier, tenant, state)
        registry = self.registry

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"fairlane_{name}_seconds", text, WHO, buckets=buckets, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"fairlane_{name}", text, (*labels, *WHO), registry=registry)

        self.ttft = histogram("time_to_first_token", "From arrival at the gateway to the first token.", _WAITS_S)
        self.queue_time = histogram("request_queue_time", "From the worker's inbox to the first step.", _WAITS_S)
        self.inter_token = histogram("inter_token_latency", "Between two arrivals of tokens, stalls included.", _TOKENS_S)
        self.tpot = histogram("request_time_per_output_token", "Of a finished request: mean after its first token.", _TOKENS_S)
        self.e2e = histogram("e2e_request_latency", "Of a finished request: from arrival to its last token.", _REQUESTS_S)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that began to run.")
        self.cached_tokens = counter("prompt_tokens_cached", "Of those, taken from the prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.recomputed_tokens = counter("recomputed_tokens", "Tokens computed again after evictions, of requests that ended.")
        self.preemptions = counter(
            "num_preemptions", "Times a request was evicted (recomputed, swapped) or paused noticeably.", "kind"
        )
        self.success = counter("request_success", "Requests that finished: stop or length.", "finished_reason")
        self.failures = counter("request_failures", "Requests that ended otherwise after they had been queued.", "reason")
        self.refusals = counter("request_refusals", "Requests that were never queued, by the reason they were told.", "reason")
        self.reload_failures = Counter(
            "fairlane_policy_reload_failures", "Policies that were not put in force, for any error.", registry=registry
        )
        self.trace_dropped = Counter(
            "fairlane_trace_dropped",
            "Requests that the trace recorder left out: disk full or too slow.",
            registry=registry,
        )
        self._by_who = [metric for metric in vars(self).values() if isinstance(metric, Counter | Histogram)]
        self._by_who = [metric for metric in self._by_who if metric not in (self.reload_failures, self.trace_dropped)]
        registry.register(_RequestsInState(self))
        ProcessCollector(registry=registry)

    @contextmanager
    def observe(self, node: str) -> Iterator[RequestObservation]:
        """Around everything that is done for one request of `node`; how it is left says how the request ended."""
        observation = RequestObservation(self, tenant_of(node))
        self.tenants.enter(observation.tenant)
        try:
            with ending(observation.ended):
                yield observation
        finally:
            observation.enter(None)
            self.tenants.leave(observation.tenant)

    def turned_away(self, reason: str) -> None:
        """A call that was refused before anybody knew whose it is, or what it asks."""
        self.refusals.labels(reason, "", "").inc()

    def policy_reload_failed(self) -> None:
        self.reload_failures.inc()

    def who(self, tier: str, tenant: str) -> tuple[str, str]:
        """The label values of a request just now: tenants gain and lose series of their own."""
        return tier, self.tenants.label(tenant)

    def sweep(self) -> None:
        """Drops the series of idle tenants."""
        self.tenants.sweep()

    def _forget(self, tenant: str) -> None:
        for place in [place for place, count in self.in_state.items() if place[1] == tenant and not count]:
            del self.in_state[place]
        for metric in self._by_who:
            metric.remove_by_labels({"tenant": tenant})


class RequestObservation:
    """What is known of one request. It is the request's sink at the worker client: it passes everything on to the inbox."""

    def __init__(self, metrics: GatewayMetrics, tenant: str) -> None:
        self.tenant = tenant
        self._metrics = metrics
        self._arrival_s = metrics.clock.now()
        self._tier = ""
        self._prompt_tokens = 0
        self._inbox: Sink | None = None
        self._queued = False
        self._state: State | None = State.ARRIVED
        self._num_tokens = 0
        self._first_s = self._last_s = self._arrival_s

    def asked(self, tier: str) -> None:
        """The request is valid, and for this tier."""
        self._tier = tier

    def watch(self, inbox: Sink, prompt_tokens: int) -> Sink:
        """The sink to give to the worker client in place of `inbox`; the request waits from now on."""
        self._inbox = inbox
        self._prompt_tokens = prompt_tokens
        self.enter(State.WAITING)
        return self

    def offer(self, delta: worker_pb2.Delta) -> str | None:
        assert self._inbox is not None
        violation = self._inbox.offer(delta)
        if violation is None:
            self._measure(delta)
        return violation

    def fail(self, error: FairlaneError) -> None:
        assert self._inbox is not None
        self._inbox.fail(error)

    def finished(self, reason: inference_pb2.FinishReason) -> None:
        """The client has everything, up to `finished`."""
        metrics, who = self._metrics, self._who()
        metrics.success.labels(finish_name(reason), *who).inc()
        metrics.e2e.labels(*who).observe(metrics.clock.now() - self._arrival_s)
        if self._num_tokens > 1:
            metrics.tpot.labels(*who).observe((self._last_s - self._first_s) / (self._num_tokens - 1))

    def ended(self, reason: str) -> None:
        """The request ended without `finished`."""
        metrics = self._metrics
        (metrics.failures if self._queued else metrics.refusals).labels(reason, *self._who()).inc()

    def enter(self, state: State | None) -> None:
        """The state it is in from now on; None: it is over."""
        counts = self._metrics.in_state
        for key, change in ((self._state, -1), (state, 1)):
            if key in (State.WAITING, State.RUNNING):
                place = (self._tier, self.tenant, key)
                counts[place] = counts.get(place, 0) + change
                if not counts[place] and self._metrics.tenants.label(self.tenant) != self.tenant:
                    del counts[place]  # of a tenant with series of its own a 0 is shown
        self._state = state

    def _who(self) -> tuple[str, str]:
        return self._metrics.who(self._tier, self.tenant)

    def _measure(self, delta: worker_pb2.Delta) -> None:
        if delta.HasField("queue_position"):
            self._queued = True
        if delta.HasField("started"):
            self._started(delta.started)
        if delta.HasField("resumed_after_s"):
            self.enter(State.RUNNING)
        if delta.token_ids:
            self._tokens(len(delta.token_ids))
        if delta.HasField("preempted"):
            self._metrics.preemptions.labels(_kind(delta.preempted.kind), *self._who()).inc()
            if delta.preempted.kind in ("recomputed", "swapped"):
                self.enter(State.WAITING)
        if delta.HasField("ended") and delta.ended.recomputed_tokens:
            self._metrics.recomputed_tokens.labels(*self._who()).inc(delta.ended.recomputed_tokens)

    def _started(self, started: worker_pb2.StartedDelta) -> None:
        metrics, who = self._metrics, self._who()
        self._queued = True
        self.enter(State.RUNNING)
        metrics.queue_time.labels(*who).observe(started.queue_s)
        metrics.prompt_tokens.labels(*who).inc(self._prompt_tokens)
        metrics.cached_tokens.labels(*who).inc(started.cached_tokens)
        metrics.tenants.charge(self.tenant, self._prompt_tokens)

    def _tokens(self, number: int) -> None:
        metrics, who, now_s = self._metrics, self._who(), self._metrics.clock.now()
        if self._num_tokens:
            metrics.inter_token.labels(*who).observe(now_s - self._last_s)
        else:
            self._first_s = now_s
            metrics.ttft.labels(*who).observe(now_s - self._arrival_s)
        self._num_tokens += number
        self._last_s = now_s
        metrics.generation_tokens.labels(*who).inc(number)
        metrics.tenants.charge(self.tenant, number)


class _RequestsInState(Collector):
    """Gauges read from the counts when they are asked for: they cannot drift, and a tenant's fold into `other` by itself."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        counts = self._metrics.in_state.copy()  # atomic; the event loop's thread goes on counting
        for state, text in ((State.RUNNING, "holding KV blocks"), (State.WAITING, "waiting for KV blocks, anew or again")):
            gauge = GaugeMetricFamily(f"fairlane_num_requests_{state.value}", f"Requests of this gateway {text}.", labels=WHO)
            folded: dict[tuple[str, str], int] = {}
            for (tier, tenant, where), count in counts.items():
                if where is state:
                    who = self._metrics.who(tier, tenant)
                    folded[who] = folded.get(who, 0) + count
            for who, count in sorted(folded.items()):
                gauge.add_metric(who, count)
            yield gauge


def _kind(kind: str) -> str:
    """A closed set, whatever the worker says."""
    return kind if kind in ("recomputed", "swapped", "paused") else "unknown"
