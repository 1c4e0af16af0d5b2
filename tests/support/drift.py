"""What siblings of a fair tree were served, step by step, for the rules on how far they may drift apart (F1, F2, F6); the loads
they are checked on; and how large the terms of their bounds are, in units of what a prompt token costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hypothesis import strategies as st

from books import Books
from engine_world import request
from fairlane.scheduler.cost import Ledger
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import CacheMode, Request, RequestId
from fairlane.scheduler.settlement import RECHECK_STEPS
from fairlane.scheduler.tenancy import NodeShare, Tier, TiersPolicy
from fairlane.scheduler.victims import MAX_EVICTIONS
from histories import TENANTS, History, cancels, machines, requests, shares
from step_watch import Step

ONE_TIER = (Tier("standard", 50),)
UNIT = 10  # of cost, for a prompt token
SIZES = ((60, 40), (60, 6), (16, 10))  # the longest prompt and output of a load


def siblings(tenant: str) -> Iterator[tuple[str, str]]:
    """(parent, child) at each level; a tenant's own requests are a child of it that has no name."""
    parts = [*tenant.split("/"), ""][:3]
    for depth in range(3):
        yield "/".join(parts[:depth]), "/".join(parts[: depth + 1])


class Siblings:
    """Of the last step: `queued`, parents by children that have waiting work after it; `lasting`, children that had some all the
    time since the step before; `service` so far and `counters`, by child, over nothing; `recomputed`, tokens in it."""

    def __init__(self, driver: EngineDriver, history: History) -> None:
        self.driver = driver
        self.queued: dict[str, str] = {}
        self.lasting: set[str] = set()
        self.service: Counter[str] = Counter()
        self.counters: dict[str, float] = {}
        self.recomputed = 0
        self._books = Books(driver)
        self._weights = _weights_of(history)
        self._waited: set[RequestId] = set()
        self._capacity = 0

    def see(self, step: Step) -> None:
        self.queued = {child: parent for one in step.waiting for parent, child in siblings(one.request.tenant)}
        here = (*step.waiting, *step.admitted)
        self.lasting = {child for s in here if s.request_id in self._waited for _, child in siblings(s.request.tenant)}
        self._waited = {s.request_id for s in step.waiting}
        self.service = Counter()
        for (payer, ledger), cost in self._books.charged.items():
            if ledger is Ledger.WORK:
                for _, child in siblings(payer.tenant):
                    self.service[child] += cost / UNIT  # type: ignore[assignment]
        tree = self.driver.scheduler.policy._trees[0]  # type: ignore[attr-defined]
        self.counters = {"/".join(names[1:]): v / UNIT for names, v in tree.counters().items()}
        self.recomputed = sum(
            max(0, min(entry.end, entry.sequence.recompute_until) - entry.start) for entry in step.placed if entry.is_chunk
        )

    def weight(self, child: str) -> float:
        return self._weights.get(child, 1.0)

    def lost_to_growth(self) -> bool:
        """Whether, since the last call, a running sequence took another's blocks because it had to grow."""
        scheduler, before = self.driver.scheduler, self._capacity
        self._capacity = scheduler.num_preemptions - sum(s.num_evictions for s in scheduler.sequences())
        return self._capacity != before

    def is_obstructed(self, step: Step) -> bool:
        """Whether somebody who runs could not be evicted, or the rest would not do for somebody who waits."""
        if has_passed_over(step) or any(s.num_evictions >= MAX_EVICTIONS for s in (*step.running, *step.waiting)):
            return True
        blocks = self.driver.blocks
        largest = max((blocks.blocks_for(s.num_tokens) for s in step.waiting), default=0)
        by_tenant = Counter[str]()
        for one in step.running:
            by_tenant[one.request.tenant] += blocks.freed_by(one.request_id)
        return largest + 1 > blocks.num_free_blocks + min(by_tenant.values(), default=0)


def has_passed_over(step: Step) -> bool:
    """Whether others were let in before a head that did not fit."""
    return any(s.num_skips for s in (*step.running, *step.waiting))


def _weights_of(history: History) -> dict[str, float]:
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
    prompts, outputs = draw(st.sampled_from(SIZES)) if gap else SIZES[0]
    asked = draw(requests(ONE_TIER, tenants=tenants, most=24, prompts=prompts, outputs=outputs, prefixes=window))
    return History(asked, draw(cancels), draw(_options(gap=gap, window=window)))


@st.composite
def _options(draw: st.DrawFn, *, gap: bool, window: bool = False) -> dict[str, object]:
    return draw(machines(least_blocks=26)) | {
        "tiers": ONE_TIER,
        "policy": TiersPolicy.FAIR,
        "nodes": draw(shares(caps=False)),
        "gap_ms": draw(st.sampled_from([1.0, 5.0, 20.0])) if gap else None,
        "prefix_caching": window,
        "window_ms": draw(st.sampled_from([0.5, 2.0, 10.0])) if window else 0.0,
        "predict": not gap and draw(st.booleans()),
    }


def largest_charge(asked: list[Request], max_resident: int) -> float:
    """U of these: every slot taken by the largest, an output token 2."""
    return sum(sorted(len(one.prompt_token_ids) + 2 * one.max_tokens for one in asked)[-max_resident:])


def most_ahead(history: History) -> float:
    """How far one sibling may get ahead of another with a gap, times weight: the gap, the one step or the steps that nobody is
    asked in, and those that an evicted one waits for."""
    options, step = history.options, largest_step(history)
    longest = max(len(one.prompt_token_ids) + one.max_tokens for one in history.asked)
    theta = max(options["gap_ms"] * fastest(history), 2 * step, longest)
    decodes = min(RECHECK_STEPS, max(one.max_tokens for one in history.asked) - 1)
    unasked = 2 * decodes * min(options["max_num_seqs"], options["max_resident"])
    return float(theta + max(step, unasked) + options["depth"] * step)


def largest_step(history: History) -> int:
    """c: all of a step's tokens, those of decodes twice."""
    return int(history.options["budget"] + history.options["max_num_seqs"])


def fastest(history: History) -> float:
    """The most cost in a millisecond: a step takes 5 ms at least."""
    return largest_step(history) / 5


@st.composite
def returns(draw: st.DrawFn, *, gap: bool) -> History:
    """One has work waiting throughout; another comes with a burst long after the start, most times not for the first time."""
    steady, returning = draw(st.sampled_from([("a/x", "a/y"), ("a/x", "b/x"), ("b/y/m", "b/y/n"), ("b/y/m", "a/x")]))
    prompts, outputs = draw(st.sampled_from(SIZES))
    at_s = draw(st.floats(0.05, 0.3))
    crowd = [(steady, draw(st.integers(20, 30)), 0.0), (returning, draw(st.integers(0, 2)), 0.0)]
    crowd += [(draw(st.sampled_from(TENANTS)), draw(st.integers(0, 4)), 0.0), (returning, draw(st.integers(2, 12)), at_s)]
    arrivals = [(tenant, arrival_s) for tenant, count, arrival_s in crowd for _ in range(count)]
    asked = [
        request(
            number,
            ONE_TIER[0].name,
            prompt=draw(st.integers(1, prompts)),
            max_tokens=draw(st.integers(1, outputs)),
            arrival_s=arrival_s,
            tenant=tenant,
            cache_mode=CacheMode.NONE,
        )
        for number, (tenant, arrival_s) in enumerate(arrivals, 1)
    ]
    return History(asked, {}, draw(_options(gap=gap)))
