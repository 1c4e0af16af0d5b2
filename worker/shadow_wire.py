"""What a shadow has counted, as the gateway gets it."""

from __future__ import annotations

from fairlane.protos.fairlane.v1 import shadow_pb2 as pb
from fairlane.scheduler.shadow.differences import Difference, Kind, Row
from fairlane.scheduler.shadow.shadow import ShadowReport

_KINDS = {
    Kind.INSTEAD: pb.SHADOW_KIND_INSTEAD,
    Kind.SOONER: pb.SHADOW_KIND_SOONER,
    Kind.LATER: pb.SHADOW_KIND_LATER,
    Kind.EVICTS: pb.SHADOW_KIND_EVICTS,
    Kind.SPARES: pb.SHADOW_KIND_SPARES,
    Kind.PAUSES: pb.SHADOW_KIND_PAUSES,
    Kind.RUNS: pb.SHADOW_KIND_RUNS,
    Kind.CUTS: pb.SHADOW_KIND_CUTS,
}


def report_to_wire(report: ShadowReport) -> pb.ShadowReport:
    return pb.ShadowReport(
        sha256=report.sha256,
        fault=report.fault,
        over_s=report.over_s,
        spent_s=report.spent_s,
        steps=report.steps,
        different_steps=report.different_steps,
        admissions=report.admissions,
        evictions=report.evictions,
        rows=[_row(row) for row in report.rows],
        largest=[_difference(one) for one in report.named],
        totals=[pb.ShadowTotal(kind=_KINDS[kind], tier=tier, count=count) for kind, tier, count in report.totals],
    )


def _row(row: Row) -> pb.ShadowRow:
    whom, other = row.as_whom, row.as_other
    return pb.ShadowRow(
        tier=row.party.tier,
        node=row.party.tenant,
        steps=row.steps,
        instead=whom.get(Kind.INSTEAD, 0),
        sooner=whom.get(Kind.SOONER, 0),
        displaced=other.get(Kind.INSTEAD, 0),
        later=whom.get(Kind.LATER, 0),
        evicting=whom.get(Kind.EVICTS, 0),
        evicted=other.get(Kind.EVICTS, 0),
        spared=whom.get(Kind.SPARES, 0),
        not_evicting=other.get(Kind.SPARES, 0),
        paused=whom.get(Kind.PAUSES, 0),
        not_paused=whom.get(Kind.RUNS, 0),
        cut_tokens=whom.get(Kind.CUTS, 0),
    )


def _difference(one: Difference) -> pb.ShadowDifference:
    return pb.ShadowDifference(
        kind=_KINDS[one.kind],
        whom_tier=one.whom.tier,
        whom_node=one.whom.tenant,
        other_tier=one.other.tier,
        other_node=one.other.tenant,
        count=one.count,
    )
