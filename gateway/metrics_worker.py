"""How the worker and its KV cache are doing, read from its latest heartbeat when the metrics are asked for. While no worker is
ready only that fact is told: absent figures are better than old ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from fairlane.gateway.metrics_tenants import OTHER, tenant_of
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.worker_client import WorkerClient
from fairlane.gateway.worker_facts import WorkerFacts
from fairlane.protos.fairlane.v1 import worker_pb2
from fairlane.scheduler.cache_domain import unframed

_MEMBER_DEPTH = 2

Counts = Iterable[worker_pb2.CountSpec]


class WorkerCollector(Collector):
    """Prometheus collector. max_domains: cache domains with a series of their own, the largest; the rest are `other`."""

    def __init__(self, worker: WorkerClient, policy: Callable[[], tuple[Policy, int]], max_domains: int) -> None:
        self._worker = worker
        self._policy = policy
        self._max_domains = max_domains

    def collect(self) -> Iterable[Metric]:
        worker = self._worker
        yield GaugeMetricFamily("fairlane_worker_ready", "1 if a worker can take requests.", value=float(worker.ready))
        yield CounterMetricFamily("fairlane_worker_restarts", "New worker epochs seen.", value=worker.counters.restarts)
        yield CounterMetricFamily("fairlane_worker_lost", "Sessions with a worker that were lost.", value=worker.counters.lost)
        yield from self._of_policy()
        facts, pong = worker.facts, worker.pong
        if worker.ready and facts is not None:
            yield from self._of_engine(facts, pong)
            yield from self._of_blocks(facts, pong)
            yield from self._of_ceilings(pong)

    def _of_policy(self) -> Iterator[Metric]:
        policy, generation = self._policy()
        yield GaugeMetricFamily("fairlane_policy_generation", "Generation of the policy in force.", value=generation)
        facts = {"tiers": policy.tiers_policy.value, "sha256": policy.sha256[:12]}
        yield InfoMetricFamily("fairlane_policy", "The policy in force.", value=facts)

    @staticmethod
    def _of_engine(facts: WorkerFacts, pong: worker_pb2.Pong) -> Iterator[Metric]:
        yield GaugeMetricFamily("fairlane_worker_epoch", "Times the worker process has been started.", value=facts.epoch)
        fault = "1 if FCFS runs at the worker because the policy in force misbehaved."
        yield GaugeMetricFamily("fairlane_worker_policy_replaced", fault, value=float(bool(pong.policy_fault)))
        yield CounterMetricFamily("fairlane_worker_steps", "Engine steps since the worker's start.", value=pong.step_id)
        yield CounterMetricFamily("fairlane_worker_preemptions", "Evictions since the worker's start.", value=pong.preemptions)
        evictions = CounterMetricFamily("fairlane_worker_evictions", "Evictions by reason.", labels=("reason",))
        for entry in pong.evictions_by_reason:
            evictions.add_metric((entry.name,), entry.count)
        yield evictions
        swaps = CounterMetricFamily("fairlane_worker_swaps", "Sequences moved to host memory and back.", labels=("direction",))
        swaps.add_metric(("out",), pong.swaps_out)
        swaps.add_metric(("in",), pong.swaps_in)
        yield swaps
        running = "How long the current engine step has been running; 0 when idle."
        yield GaugeMetricFamily("fairlane_worker_step_running_seconds", running, value=pong.step_running_s)
        text = "Requests of all gateways in the engine."
        yield _by_tier("fairlane_worker_requests_running", text, pong.running_by_tier)
        yield _by_tier("fairlane_worker_requests_waiting", text, pong.waiting_by_tier)

    def _of_blocks(self, facts: WorkerFacts, pong: worker_pb2.Pong) -> Iterator[Metric]:
        ratio = "Used KV blocks / usable KV blocks."
        yield GaugeMetricFamily("fairlane_block_utilization_ratio", ratio, value=pong.block_utilization_ratio)
        rate = "Allocated but unused slots / allocated slots."
        yield GaugeMetricFamily("fairlane_fragmentation_rate", rate, value=pong.fragmentation_rate)
        blocks = GaugeMetricFamily("fairlane_kv_blocks", "KV blocks by what they hold.", labels=("state",))
        blocks.add_metric(("used",), pong.blocks_used)
        blocks.add_metric(("cached",), pong.blocks_cached)
        blocks.add_metric(("free",), max(0, facts.num_blocks - pong.blocks_used - pong.blocks_cached))
        yield blocks
        host = GaugeMetricFamily("fairlane_host_kv_blocks", "KV blocks of host memory, for swapped requests.", labels=("state",))
        host.add_metric(("used",), pong.host_blocks_used)
        host.add_metric(("free",), max(0, facts.num_host_blocks - pong.host_blocks_used))
        yield host
        domains = GaugeMetricFamily("fairlane_kv_blocks_by_domain", "Used KV blocks by cache domain.", labels=("domain",))
        for domain, count in largest(pong.blocks_by_domain, pong.blocks_used, self._max_domains).items():
            domains.add_metric((domain,), count)
        yield domains
        quotas = GaugeMetricFamily("fairlane_kv_quota_blocks", "KV blocks of nodes with a quota.", labels=("node", "kind"))
        for account in pong.kv_accounts[: self._max_domains]:
            if account.node.count("/") < _MEMBER_DEPTH:  # members must not make series
                quotas.add_metric((account.node, "used"), account.used)
                quotas.add_metric((account.node, "guarantee"), account.guarantee)
                if account.HasField("limit"):
                    quotas.add_metric((account.node, "limit"), account.limit)
        yield quotas

    def _of_ceilings(self, pong: worker_pb2.Pong) -> Iterator[Metric]:
        labels = ("tier", "node")
        used = CounterMetricFamily("fairlane_ceil_seconds", "Worker time taken by tiers and nodes with a ceil.", labels=labels)
        share = GaugeMetricFamily("fairlane_ceil_ratio", "Their ceil, of the worker's time.", labels=labels)
        binds = GaugeMetricFamily("fairlane_ceil_binds", "1 while a ceil keeps requests from running.", labels=labels)
        for ceil in pong.ceilings[: self._max_domains]:
            for family, value in ((used, ceil.used_s), (share, ceil.share), (binds, float(ceil.binds))):
                family.add_metric((ceil.tier, ceil.node), value)
        yield from (used, share, binds)


def largest(counts: Counts, used: int, most: int) -> dict[str, int]:
    """The `most` largest domains, partitions and members folded into their tenant's, and `other` for what is left of `used`."""
    folded: dict[str, int] = {}
    for entry in counts:
        domain = domain_label(entry.name)
        folded[domain] = folded.get(domain, 0) + entry.count
    named = dict(sorted(folded.items(), key=lambda item: (-item[1], item[0]))[:most])
    rest = used - sum(named.values())
    return {**named, OTHER: rest} if rest > 0 else named


def domain_label(framed: str) -> str:
    """Without the client's partition, which must not make series; a member's domain counts for its tenant."""
    domain = unframed(framed)
    kind, colon, path = domain.partition(":")
    return f"{kind}:{tenant_of(path)}" if colon else domain


def _by_tier(name: str, text: str, counts: Counts) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, text, labels=("tier",))
    for entry in counts:
        gauge.add_metric((entry.name,), entry.count)
    return gauge
