"""F1 and F2: how far the services of two backlogged siblings can drift apart, over weight, in any interval in which both stay
backlogged. Checked in every step of every history, for every two siblings at every level of the tree.

    F1  without a gap: 2 U / w,  U: the largest charge that can still come from what runs at one time; predicted output or not
    F2  with a gap:    2 (theta + max(c, what streams are charged before a waiting head is looked at again) + depth c) / w
    and with a locality window 2 Q / w more, Q: the window in cost

c is the most that one step is charged, theta the gap, or the cost of computing again the largest that may be evicted, if that is
more. w is the smaller weight. An interval ends where a precondition does: a queue is empty, blocks run out and a decode takes
another's (capacity), and for F2 where nobody who is ahead may be evicted for the one behind, or not enough. The next begins when
their counters are within half the bound again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from math import inf

from hypothesis import given

from drift import Siblings, backlogs, fastest, largest_charge, most_ahead
from histories import History, many, run
from step_watch import Step, StepWatch


@dataclass
class Drift:
    """Of two siblings, since both are backlogged: the span of their lead."""

    low: float = inf
    high: float = -inf
    recomputed: int = 0

    def see(self, lead: float, recomputed: int) -> float:
        """What of the span is not owed to recompute, which whoever evicted is charged for while the other is served."""
        self.low, self.high = min(self.low, lead), max(self.high, lead)
        self.recomputed += recomputed
        return self.high - self.low - self.recomputed


@dataclass
class GapRule:
    """Notes every span over weight, in units of the bound that it must keep."""

    siblings: Siblings
    bound: float
    with_gap: bool
    spans: list[float] = field(default_factory=list)
    _drifts: dict[tuple[str, str], Drift] = field(default_factory=dict)

    def __call__(self, step: Step) -> None:
        known = self.siblings
        known.see(step)
        if known.lost_to_growth() or (self.with_gap and known.is_obstructed(step)):
            self._drifts.clear()
            return
        queued, service, counters = known.queued, known.service, known.counters
        pairs = {(a, b) for a, b in combinations(sorted(queued), 2) if queued[a] == queued[b] and {a, b} <= known.lasting}
        self._drifts = {pair: drift for pair, drift in self._drifts.items() if pair in pairs}
        for a, b in pairs:
            smaller = min(known.weight(a), known.weight(b))
            lead = smaller * (service[a] / known.weight(a) - service[b] / known.weight(b))
            if (a, b) not in self._drifts and smaller * abs(counters[a] - counters[b]) > self.bound / 2:
                continue  # what tore them apart was before: one of those ends of an interval
            self.spans.append(self._drifts.setdefault((a, b), Drift()).see(lead, known.recomputed) / self.bound)


def spans(history: History, bound: float, *, with_gap: bool) -> list[float]:
    driver = history.start()
    rule = GapRule(Siblings(driver, history), bound, with_gap)
    StepWatch(driver, rule)
    run(driver)
    return rule.spans


def most_running(history: History) -> float:
    return largest_charge(history.asked, history.options["max_resident"])


def window_of(history: History) -> float:
    return float(history.options["window_ms"]) * fastest(history)


@many
@given(history=backlogs(gap=False))
def test_f1_two_backlogged_siblings_never_drift_apart_by_more_than_what_can_run_at_once(history: History) -> None:
    found = spans(history, 2 * most_running(history), with_gap=False)
    assert max(found, default=0.0) <= 1.0


@given(history=backlogs(gap=False, window=True))
def test_f1_holds_with_a_locality_window_but_for_twice_the_window(history: History) -> None:
    found = spans(history, 2 * (most_running(history) + window_of(history)), with_gap=False)
    assert max(found, default=0.0) <= 1.0


@given(history=backlogs(gap=True, window=True))
def test_f2_holds_with_a_locality_window_but_for_twice_the_window(history: History) -> None:
    found = spans(history, 2 * (most_ahead(history) + window_of(history)), with_gap=True)
    assert max(found, default=0.0) <= 1.0


@many
@given(history=backlogs(gap=True))
def test_f2_with_a_gap_they_never_drift_apart_by_more_than_it_and_a_few_steps(history: History) -> None:
    found = spans(history, 2 * most_ahead(history), with_gap=True)
    assert max(found, default=0.0) <= 1.0
