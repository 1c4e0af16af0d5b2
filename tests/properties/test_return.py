"""F6: idle time earns no claim. Whoever had nothing waiting and nothing running, and comes back with a burst, gains little over
who had work waiting meanwhile. Checked for every sibling that comes back, at every level of the tree, against the one of those
that queue that is furthest behind then, for as long as both have work waiting:

    without a gap: U / w,  U: the largest charge that can come from what of it runs at one time, w: its weight; where output is
                           predicted, from what runs of anybody, and w is the smaller weight
    with a gap:    half of F2's bound

An interval ends where a precondition does (test_fair_gap.py), and without a gap where a head is passed over, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given

from drift import Siblings, has_passed_over, largest_charge, most_ahead, returns, siblings
from histories import History, run
from step_watch import Step, StepWatch


@dataclass
class Return:
    """Of a child, beside the one that was furthest behind: what both had been served when it came back."""

    beside: str
    own: float
    other: float
    recomputed: int = 0


@dataclass
class ReturnRule:
    """Notes what is gained, in units of what may be. most: that, of a child, times its weight, or the smaller of the two."""

    known: Siblings
    most: Callable[[str], float]
    with_gap: bool
    by_own_weight: bool
    gains: list[float] = field(default_factory=list)
    _since: dict[str, Return] = field(default_factory=dict)
    _at_work: set[str] = field(default_factory=set)

    def __call__(self, step: Step) -> None:
        known = self.known
        queued, counters, service = known.queued, known.counters, known.service
        known.see(step)
        lasting = known.lasting & known.queued.keys()
        self._since = {child: one for child, one in self._since.items() if {child, one.beside} <= lasting}
        for child in known.queued.keys() - self._at_work:
            beside = [other for other in queued if queued[other] == known.queued[child]]
            behind = min(beside, key=lambda other: counters[other], default=None)
            if behind in lasting:
                self._since[child] = Return(behind, service[child], service[behind])
        self._at_work = {child for s in (*step.running, *step.waiting) for _, child in siblings(s.request.tenant)}
        if known.lost_to_growth() or (known.is_obstructed(step) if self.with_gap else has_passed_over(step)):
            self._since.clear()
        for child, one in self._since.items():
            one.recomputed += known.recomputed
            self.gains.append(self._gained(child, one) / self.most(child))

    def _gained(self, child: str, one: Return) -> float:
        own, other = self.known.weight(child), self.known.weight(one.beside)
        gained = (self.known.service[child] - one.own) / own - (self.known.service[one.beside] - one.other) / other
        return gained * (own if self.by_own_weight else min(own, other)) - one.recomputed


def gains(history: History, most: Callable[[str], float]) -> list[float]:
    driver, with_gap = history.start(), history.options["gap_ms"] is not None
    by_own_weight = not with_gap and not history.options["predict"]
    rule = ReturnRule(Siblings(driver, history), most, with_gap, by_own_weight)
    StepWatch(driver, rule)
    run(driver)
    return rule.gains


@given(history=returns(gap=False))
def test_f6_who_comes_back_gains_no_more_than_what_of_it_can_run_at_once(history: History) -> None:
    def most(child: str) -> float:
        own = [one for one in history.asked if child in (name for _, name in siblings(one.tenant))]
        return largest_charge(history.asked if history.options["predict"] else own, history.options["max_resident"])

    found = gains(history, most)
    assert max(found, default=0.0) <= 1.0


@given(history=returns(gap=True))
def test_f6_with_a_gap_who_comes_back_gains_no_more_than_it_and_a_few_steps(history: History) -> None:
    found = gains(history, lambda child: most_ahead(history))
    assert max(found, default=0.0) <= 1.0
