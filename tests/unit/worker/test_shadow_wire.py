"""What a shadow has counted, on its way to the gateway: every kind of difference arrives as its own, seen from both sides."""

from __future__ import annotations

from fairlane.protos.fairlane.v1 import shadow_pb2 as pb
from fairlane.scheduler.request import Payer
from fairlane.scheduler.shadow.differences import Differences, Kind
from fairlane.scheduler.shadow.shadow import ShadowReport
from fairlane.worker.shadow_wire import report_to_wire

ONE, OTHER = Payer("gold", "a/x"), Payer("batch", "b/z")


def wire(counts: Differences) -> pb.ShadowReport:
    report = ShadowReport("ab", "why", 2.0, 0.5, 9, counts.steps, 3, 1, counts.totals(), counts.rows(), counts.named())
    return report_to_wire(report)


def test_every_kind_has_a_field_of_its_own_on_both_sides() -> None:
    counts = Differences()
    for number, kind in enumerate(Kind, 1):
        counts.add(kind, ONE, OTHER, number)
    counts.end_step()
    sent = wire(counts)
    rows = {row.tier: row for row in sent.rows}
    whom = pb.ShadowRow(
        tier="gold",
        node="a/x",
        steps=1,
        instead=1,
        sooner=2,
        later=3,
        evicting=4,
        spared=5,
        paused=6,
        not_paused=7,
        cut_tokens=8,
    )
    other = pb.ShadowRow(tier="batch", node="b/z", steps=1, displaced=1, evicted=4, not_evicting=5)
    assert (rows["gold"], rows["batch"]) == (whom, other)
    assert [(one.kind, one.count) for one in sent.totals] == [(number, number) for number in range(1, 9)]
    assert [(one.kind, one.whom_node, one.other_node) for one in sent.largest[:1]] == [(8, "a/x", "b/z")]


def test_the_report_says_of_what_how_long_and_why_it_ended() -> None:
    sent = wire(Differences())
    assert (sent.sha256, sent.fault, sent.over_s, sent.spent_s, sent.steps, sent.different_steps) == ("ab", "why", 2.0, 0.5, 9, 0)
    assert (sent.admissions, sent.evictions) == (3, 1)
