"""F1 and F2: how far the services of two backlogged siblings can drift apart, over weight, in any interval in which both stay
backlogged. Checked in every step of every history, for every two siblings at every level of the tree.

    F1  without a gap: 2 U / w,  U: the largest charge that can still come from what runs at one time; predicted output or not
    F2  with a gap:    2 (theta + (1 + depth) c_step + what the decode lane may be charged before it is looked at again) / w
    and with a locality window 2 Q / w more, Q: the window in cost

theta is the gap, or the cost of computing again the largest that may be evicted, if that is more. w is the smaller weight. An
interval ends where a precondition does: a queue is empty, blocks run out and a decode takes another's (capacity), and for F2
where nobody who is ahead may be evicted for the one behind, or not enough. The next begins when their counters are within half
the bound again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from books import Books
from fairlane.scheduler.cost import Ledger
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import RequestId
from fairlane.scheduler.settlement import RECHECK_STEPS
from fairlane.scheduler.tenancy import NodeShare, Tier, TiersPolicy
from fairlane.scheduler.victims import MAX_EVICTIONS
from histories import TENANTS, History, cancels, machines, many, requests, run, shares
from step_watch import Step, StepWatch

ONE_TIER = (Tier("standard", 50),)
UNIT = 10  # of cost, for a prompt token


def siblings(tenant: str) -> Iterator[tuple[str, str]]:
    """(parent, child) at each level; a tenant's own requests are a child of it that has no name."""
    parts = [*tenant.split("/"), ""][:3]
    for depth in range(3):
        yield "/".join(parts[:depth]), "/".join(parts[: depth + 1])


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
    """Notes every span over weight, in units of what a prompt token costs, with the bound that it must keep."""

    driver: EngineDriver
    books: Books
    weights: dict[str, float]
    bound: float
    with_gap: bool
    spans: list[float] = field(default_factory=list)
    _drifts: dict[tuple[str, str], Drift] = field(default_factory=dict)
    _waited: set[RequestId] = field(default_factory=set)
    _capacity: int = 0

    def __call__(self, step: Step) -> None:
        scheduler = self.driver.scheduler
        queued = {child: parent for one in step.waiting for parent, child in siblings(one.request.tenant)}
        known = self._waited
        still = {s.request_id for s in (*step.waiting, *step.admitted)} & known
        lasting = {
            child for s in (*step.waiting, *step.admitted) if s.request_id in still for _, child in siblings(s.request.tenant)
        }
        self._waited = {s.request_id for s in step.waiting}
        capacity = scheduler.num_preemptions - sum(s.num_evictions for s in scheduler.sequences())
        if capacity != self._capacity or (self.with_gap and self._is_obstructed(step)):
            self._capacity = capacity
            self._drifts.clear()
            return
        service: Counter[str] = Counter()
        for (payer, ledger), cost in self.books.charged.items():
            if ledger is Ledger.WORK:
                for _, child in siblings(payer.tenant):
                    service[child] += cost
        recomputed = sum(
            max(0, min(entry.end, entry.sequence.recompute_until) - entry.start) for entry in step.placed if entry.is_chunk
        )
        pairs = {(a, b) for a, b in combinations(sorted(queued), 2) if queued[a] == queued[b] and {a, b} <= lasting}
        self._drifts = {pair: drift for pair, drift in self._drifts.items() if pair in pairs}
        tree = scheduler.policy._trees[0]  # type: ignore[attr-defined]
        counters = {"/".join(names[1:]): v for names, v in tree.counters().items()}
        for a, b in pairs:
            smaller = min(self._weight(a), self._weight(b))
            lead = smaller * (service[a] / self._weight(a) - service[b] / self._weight(b)) / UNIT
            apart = smaller * abs(counters[a] - counters[b]) / UNIT
            if (a, b) not in self._drifts and apart > self.bound / 2:
                continue  # what tore them apart was before: one of those ends of an interval
            self.spans.append(self._drifts.setdefault((a, b), Drift()).see(lead, recomputed) / self.bound)

    def _weight(self, child: str) -> float:
        return self.weights.get(child.rstrip("/"), 1.0) if not child.endswith("/") else 1.0

    def _is_obstructed(self, step: Step) -> bool:
        """Whether somebody who runs could not be evicted, or the rest would not do for somebody who waits."""
        if any(s.num_evictions >= MAX_EVICTIONS or s.num_skips for s in (*step.running, *step.waiting)):
            return True
        blocks = self.driver.blocks
        largest = max((blocks.blocks_for(s.num_tokens) for s in step.waiting), default=0)
        by_tenant = Counter[str]()
        for one in step.running:
            by_tenant[one.request.tenant] += blocks.freed_by(one.request_id)
        return largest + 1 > blocks.num_free_blocks + min(by_tenant.values(), default=0)


def weights_of(history: History) -> dict[str, float]:
    nodes: tuple[NodeShare, ...] = history.options["nodes"]
    found = {node.path: node.weight for node in nodes}
    for tenant in TENANTS:
        above = tenant.rpartition("/")[0]
        found.setdefault(tenant, next((node.member_weight for node in nodes if node.path == above), 1.0))
    return found


@st.composite
def backlogs(draw: st.DrawFn, *, gap: bool, window: bool = False) -> History:
    """Tenants that ask for more than there is, from the start; with a window, some of each share a prefix."""
    tenants = draw(st.sampled_from([TENANTS, ("a/x", "a/y"), ("a/x", "b/x"), ("b/y/m", "b/y/n")]))
    asked = draw(requests(ONE_TIER, tenants=tenants, most=24, prefixes=window))
    options = draw(machines(least_blocks=26)) | {
        "tiers": ONE_TIER,
        "policy": TiersPolicy.FAIR,
        "nodes": draw(shares(caps=False)),
        "gap_ms": draw(st.sampled_from([1.0, 5.0, 20.0])) if gap else None,
        "prefix_caching": window,
        "window_ms": draw(st.sampled_from([0.5, 2.0, 10.0])) if window else 0.0,
        "predict": not gap and draw(st.booleans()),
    }
    return History(asked, draw(cancels), options)


def largest_charge(history: History) -> float:
    """U, in prompt tokens: every seat taken by the largest request, an output token 2."""
    each = [len(one.prompt_token_ids) + 2 * one.max_tokens for one in history.asked]
    return sum(sorted(each)[-history.options["max_resident"] :])


def gap_bound(history: History) -> float:
    options = history.options
    step = options["budget"] + options["max_num_seqs"]  # all of a step's tokens, those of decodes twice
    lane = 2 * RECHECK_STEPS * options["max_num_seqs"]
    largest = max(len(one.prompt_token_ids) + one.max_tokens for one in history.asked)
    theta = max(options["gap_ms"] * fastest(history), 2 * step, largest)
    return float(2 * (theta + (1 + options["depth"]) * step + lane))


def fastest(history: History) -> float:
    """The most cost in a millisecond, in prompt tokens: a step takes 5 ms at least."""
    return float(history.options["budget"] + history.options["max_num_seqs"]) / 5


def spans(history: History, bound: float, *, with_gap: bool) -> list[float]:
    driver = history.start()
    rule = GapRule(driver, Books(driver), weights_of(history), bound, with_gap)
    StepWatch(driver, rule)
    run(driver)
    return rule.spans


@many
@given(history=backlogs(gap=False))
def test_f1_two_backlogged_siblings_never_drift_apart_by_more_than_what_can_run_at_once(history: History) -> None:
    found = spans(history, 2 * largest_charge(history), with_gap=False)
    assert max(found, default=0.0) <= 1.0


@many
@given(history=backlogs(gap=False, window=True))
def test_f1_holds_with_a_locality_window_but_for_twice_the_window(history: History) -> None:
    window = history.options["window_ms"] * fastest(history)
    found = spans(history, 2 * (largest_charge(history) + window), with_gap=False)
    assert max(found, default=0.0) <= 1.0


@many
@given(history=backlogs(gap=True, window=True))
def test_f2_holds_with_a_locality_window_but_for_twice_the_window(history: History) -> None:
    found = spans(history, gap_bound(history) + 2 * history.options["window_ms"] * fastest(history), with_gap=True)
    assert max(found, default=0.0) <= 1.0


@many
@given(history=backlogs(gap=True))
def test_f2_with_a_gap_they_never_drift_apart_by_more_than_it_and_a_few_steps(history: History) -> None:
    found = spans(history, gap_bound(history), with_gap=True)
    assert max(found, default=0.0) <= 1.0
