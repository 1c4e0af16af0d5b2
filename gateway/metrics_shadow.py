"""What a policy that is tried would do otherwise, as Prometheus metrics: by kind and tier, which are few. The counts begin again
with each trial, and whenever another policy is put in force beside it."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fairlane.gateway.shadow_link import ShadowLink
from fairlane.protos.fairlane.v1 import shadow_pb2 as pb

_PREFIX = "SHADOW_KIND_"


class ShadowCollector(Collector):
    """Prometheus collector. Counts are shown while a policy is tried."""

    def __init__(self, shadow: ShadowLink) -> None:
        self._shadow = shadow

    def collect(self) -> Iterable[Metric]:
        shadow = self._shadow
        yield GaugeMetricFamily("fairlane_shadow_running", "1 if a policy is tried.", value=float(shadow.running))
        dropped = "1 if a policy was to be tried and failed, until another is or the trial is ended."
        yield GaugeMetricFamily("fairlane_shadow_dropped", dropped, value=float(bool(shadow.dropped)))
        report = shadow.report
        if not shadow.running or report is None:
            return
        yield CounterMetricFamily("fairlane_shadow_steps", "Engine steps that the shadow has seen.", value=report.steps)
        different = "Of those, in which it would have done anything differently."
        yield CounterMetricFamily("fairlane_shadow_different_steps", different, value=report.different_steps)
        spent = "Of the engine's thread, taken by the shadow."
        yield CounterMetricFamily("fairlane_shadow_seconds", spent, value=report.spent_s)
        text = "What the shadow would have done differently, by the tier of whom it is about."
        differences = CounterMetricFamily("fairlane_shadow_differences", text, labels=("kind", "tier"))
        for total in report.totals:
            differences.add_metric((_label(total.kind), total.tier), total.count)
        yield differences


def _label(kind: pb.ShadowKind) -> str:
    """A closed set, whatever the worker says."""
    return pb.ShadowKind.Name(kind).removeprefix(_PREFIX).lower() if kind in pb.ShadowKind.values() else "unknown"
