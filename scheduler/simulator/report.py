"""What a run comes to: figures for everything, for each tier and for each node. Every figure has one name, which
assertions, JSON and tables share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from fairlane.scheduler.cache_domain import unframed
from fairlane.scheduler.simulator.fairness import Window, entitled, jain, relative_weights, service_differences
from fairlane.scheduler.simulator.outcome import Outcome
from fairlane.scheduler.simulator.simulation import SimResult

WINDOW_S = 60.0


class Metric(Enum):
    """Of everything, a tier or a node, unless it says otherwise."""

    REQUESTS = "requests"
    FINISHED = "finished"
    TTFT_P50_MS = "ttft_p50_ms"
    TTFT_P99_MS = "ttft_p99_ms"
    TPOT_P50_MS = "tpot_p50_ms"
    TPOT_P99_MS = "tpot_p99_ms"
    QUEUE_P50_MS = "queue_p50_ms"
    QUEUE_P99_MS = "queue_p99_ms"
    TOKENS_PER_S = "tokens_per_s"
    SHARE = "share"
    WORKER_TIME = "worker_time"
    ENTITLED_SHARE = "entitled_share"  # of nodes
    PREEMPTIONS = "preemptions"
    RECOMPUTED_TOKENS = "recomputed_tokens"
    KV_USED_MEAN = "kv_used_mean"  # of everything and of nodes, part of the pool
    KV_USED_MAX = "kv_used_max"
    JAIN = "jain"  # of everything, as are those below
    SERVICE_DIFFERENCE_MAX = "service_difference_max"
    SERVICE_DIFFERENCE_AVG = "service_difference_avg"
    RECOMPUTE_TAX = "recompute_tax"
    BUSY = "busy"


Figures = dict[Metric, float]


@dataclass(frozen=True, slots=True)
class Report:
    """digest: of the event log. A figure that cannot be told (no request got that far) is not there."""

    overall: Figures
    tiers: Mapping[str, Figures]
    nodes: Mapping[str, Figures]
    digest: str
    num_steps: int
    duration_s: float


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed. ValueError without values."""
    if not values:
        raise ValueError("a percentile of nothing")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def report(result: SimResult, weights: Mapping[str, float]) -> Report:
    """weights: of the nodes, by path, as the policy has them."""
    by_tier: dict[str, list[Outcome]] = {}
    by_node: dict[str, list[Outcome]] = {}
    for outcome in result.outcomes:
        if outcome.planned.asked.arrival_s < result.duration_s:
            by_tier.setdefault(outcome.planned.account.tier, []).append(outcome)
            by_node.setdefault(outcome.planned.account.node, []).append(outcome)
    total = sum(counts.service for counts in result.counts.values())
    parts = relative_weights(list(by_node), weights)
    demand = {node: float(sum(map(_demand, outcomes))) for node, outcomes in by_node.items()}
    due = entitled(demand, parts, total)
    tiers = {tier: _figures(result, outcomes, "tier", tier, total) for tier, outcomes in by_tier.items()}
    nodes = {node: _figures(result, outcomes, "node", node, total) for node, outcomes in by_node.items()}
    kv = _kv_by_node(result)
    for node, figures in nodes.items():
        figures[Metric.KV_USED_MEAN], figures[Metric.KV_USED_MAX] = kv.get(node, (0.0, 0.0))
        figures[Metric.ENTITLED_SHARE] = due[node] / total if total else 0.0
    overall = _figures(result, [o for outcomes in by_tier.values() for o in outcomes], None, "", total)
    served = service_by_node(result)
    overall[Metric.JAIN] = jain([served.get(node, 0.0) / due[node] for node in by_node if due[node]])
    _add_windows(overall, result, parts)
    computed = sum(counts.prompt + counts.output + counts.recomputed for counts in result.counts.values())
    overall[Metric.RECOMPUTE_TAX] = overall[Metric.RECOMPUTED_TOKENS] / computed if computed else 0.0
    pool = result.num_blocks * result.num_workers
    used = [sample.blocks_used / pool for sample in result.samples] or [0.0]
    overall[Metric.KV_USED_MEAN], overall[Metric.KV_USED_MAX] = sum(used) / len(used), max(used)
    overall[Metric.BUSY] = min(1.0, result.busy_s / (result.duration_s * result.num_workers))
    return Report(overall, tiers, nodes, result.digest, result.num_steps, result.duration_s)


def _kv_by_node(result: SimResult) -> dict[str, tuple[float, float]]:
    """Mean and most of the pool that each node's own cache domain had. What a group shares counts for none of its nodes."""
    pool, found = result.num_blocks * result.num_workers, dict[str, tuple[float, float]]()
    for domain in {domain for sample in result.samples for domain in sample.blocks_by_domain}:
        kind, _, node = unframed(domain).partition(":")
        if kind in ("tenant", "member"):
            used = [sample.blocks_by_domain.get(domain, 0) / pool for sample in result.samples]
            found[node] = sum(used) / len(used), max(used)
    return found


def service_by_node(result: SimResult) -> dict[str, float]:
    """Over the whole run."""
    served: dict[str, float] = {}
    for account, counts in result.counts.items():
        served[account.node] = served.get(account.node, 0.0) + counts.service
    return served


def _demand(outcome: Outcome) -> int:
    """Service that it asked for."""
    asked = outcome.planned.asked
    return asked.prompt_tokens + 2 * asked.output_tokens


def waits(outcomes: Sequence[Outcome], end_s: float) -> list[float]:
    """Seconds to the first token; of those that have none yet, how long they have waited so far, which is a lower bound.
    Cancelled and refused ones without a token do not count."""
    found = []
    for outcome in outcomes:
        if outcome.ttft_s is not None:
            found.append(outcome.ttft_s)
        elif outcome.ended is None:
            found.append(end_s - outcome.planned.asked.arrival_s)
    return found


def _figures(result: SimResult, outcomes: Sequence[Outcome], level: str | None, name: str, total: float) -> Figures:
    figures: Figures = {
        Metric.REQUESTS: len(outcomes),
        Metric.FINISHED: sum(outcome.finished for outcome in outcomes),
    }
    queued = [_queued_s(outcome, result.duration_s) for outcome in outcomes]
    spread = {
        (Metric.TTFT_P50_MS, Metric.TTFT_P99_MS): waits(outcomes, result.duration_s),
        (Metric.TPOT_P50_MS, Metric.TPOT_P99_MS): [outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None],
        (Metric.QUEUE_P50_MS, Metric.QUEUE_P99_MS): queued,
    }
    for (median, tail), values in spread.items():
        if values:
            figures[median], figures[tail] = 1000 * percentile(values, 0.5), 1000 * percentile(values, 0.99)
    counts = [found for account, found in result.counts.items() if level is None or getattr(account, level) == name]
    figures[Metric.TOKENS_PER_S] = sum(found.output for found in counts) / result.duration_s
    figures[Metric.SHARE] = sum(found.service for found in counts) / total if total else 0.0
    figures[Metric.WORKER_TIME] = sum(found.seconds for found in counts) / (result.duration_s * result.num_workers)
    figures[Metric.PREEMPTIONS] = sum(outcome.preemptions for outcome in outcomes)
    figures[Metric.RECOMPUTED_TOKENS] = sum(found.recomputed for found in counts)
    return figures


def _queued_s(outcome: Outcome, end_s: float) -> float:
    if outcome.queue_s is not None:
        return outcome.queue_s
    return (end_s if outcome.ended_s is None else outcome.ended_s) - outcome.planned.asked.arrival_s


def windows(result: SimResult, window_s: float) -> list[Window]:
    """Whole windows of the run, by the samples next to their borders; none if there are too few samples."""
    found: list[Window] = []
    border_s, before = window_s, dict[str, float]()
    for sample in result.samples:
        if sample.time_s + 1e-9 < border_s:
            continue
        now: dict[str, float] = {}
        for account, service in sample.service.items():
            now[account.node] = now.get(account.node, 0.0) + service
        got = {node: service - before.get(node, 0.0) for node, service in now.items()}
        asked: dict[str, float] = {}
        for outcome in result.outcomes:
            if border_s - window_s <= outcome.planned.asked.arrival_s < border_s:
                node = outcome.planned.account.node
                asked[node] = asked.get(node, 0.0) + _demand(outcome)
        found.append(Window(window_s, got, asked))
        before, border_s = now, border_s + window_s
    return found


def _add_windows(overall: Figures, result: SimResult, parts: Mapping[str, float]) -> None:
    """Windows of a minute, or a quarter of a shorter run. Weights are taken relative to the mean, so that equal ones count 1."""
    window_s = min(WINDOW_S, result.duration_s / 4)
    relative = {node: part * len(parts) for node, part in parts.items()}
    differences = service_differences(windows(result, window_s), relative)
    if differences:
        overall[Metric.SERVICE_DIFFERENCE_MAX] = max(differences)
        overall[Metric.SERVICE_DIFFERENCE_AVG] = sum(differences) / len(differences)
