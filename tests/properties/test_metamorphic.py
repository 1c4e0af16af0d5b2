"""What must not matter: the unit that weights are in, what tenants are called, and behind how many names one hides. Each is
checked against the same history told otherwise."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from books import Books
from fairlane.scheduler.cost import Ledger
from fairlane.scheduler.request import Request
from fairlane.scheduler.tenancy import NodeShare, Tier, TiersPolicy
from histories import History, cancels, histories, machines, requests, run
from step_watch import Step, StepWatch

FAIR = (TiersPolicy.FAIR, TiersPolicy.VIP)
Schedule = list[list[tuple[int, int, int]]]


def schedule(history: History) -> Schedule:
    """Step by step, who computed which tokens."""
    driver, steps = history.start(), Schedule()
    StepWatch(driver, lambda step: steps.append(sorted((p.sequence.request_id, p.start, p.num_tokens) for p in step.placed)))
    run(driver)
    return steps


@given(history=histories(policies=FAIR), factor=st.sampled_from([2.0**-6, 0.5, 4.0, 2.0**10]))
def test_scaling_all_weights_leaves_the_schedule_unchanged(history: History, factor: float) -> None:
    """By powers of two, which scale counters without rounding them anew."""
    options = history.options
    nodes = tuple(replace(n, weight=n.weight * factor, member_weight=n.member_weight * factor) for n in options["nodes"])
    tiers = tuple(replace(tier, weight=tier.weight * factor) for tier in options["tiers"])
    scaled = History(history.asked, history.cancels, options | {"nodes": nodes, "tiers": tiers})
    assert schedule(scaled) == schedule(history)


RENAMED = {"a": "z", "b": "c", "x": "y", "y": "x", "m": "o", "n": "m"}


def renamed(path: str) -> str:
    return "/".join(RENAMED[part] for part in path.split("/"))


@given(history=histories())
def test_renaming_tenants_leaves_the_schedule_unchanged(history: History) -> None:
    """So the multiset of what tenants get, too."""
    asked = [replace(one, tenant=renamed(one.tenant), cache_domain=f"tenant:{renamed(one.tenant)}") for one in history.asked]
    nodes = tuple(replace(node, path=renamed(node.path)) for node in history.options["nodes"])
    other = History(asked, history.cancels, history.options | {"nodes": nodes})
    assert schedule(other) == schedule(history)


def shares_while_backlogged(asked: list[Request], history: History) -> tuple[int, int]:
    """What tenants a/x and a/y, with all below them, were charged until one of them has nobody waiting."""
    driver = History(asked, history.cancels, history.options).start()
    books, got = Books(driver), Counter[str]()
    over = False

    def rule(step: Step) -> None:
        nonlocal over
        over = over or len({one.request.tenant[:3] for one in step.waiting}) < 2
        if not over:
            got.clear()
            for (payer, ledger), cost in books.charged.items():
                got[payer.tenant[:3]] += cost * (ledger is Ledger.WORK)

    StepWatch(driver, rule)
    run(driver)
    return got["a/x"], got["a/y"]


@st.composite
def pairs(draw: st.DrawFn) -> History:
    """Two tenants of one organisation, both with a queue, room for all that may run."""
    one_tier = (Tier("standard", 50),)
    asked = [replace(one, arrival_s=0.0) for one in draw(requests(one_tier, tenants=("a/x", "a/y"), most=24, prefixes=False))]
    weights = draw(st.sampled_from([1.0, 2.0, 3.0])), draw(st.sampled_from([1.0, 2.0, 3.0]))
    options = draw(machines(least_blocks=120, most_blocks=120)) | {
        "tiers": one_tier,
        "policy": TiersPolicy.FAIR,
        "nodes": (NodeShare("a/x", weights[0]), NodeShare("a/y", weights[1])),
        "prefix_caching": False,
    }
    return History(asked, draw(cancels), options)


@given(history=pairs(), children=st.integers(2, 5))
def test_splitting_a_tenant_into_children_leaves_its_share_unchanged(history: History, children: int) -> None:
    """But for what can run at one time, by which any two schedules may differ (F1)."""
    split = [
        replace(one, tenant=f"a/x/m{number % children}") if one.tenant == "a/x" else one
        for number, one in enumerate(history.asked)
    ]
    x, y = (Fraction(node.weight) for node in history.options["nodes"])
    at_once = sum(sorted(10 * len(one.prompt_token_ids) + 20 * one.max_tokens for one in history.asked)[-8:])
    off = [abs(got[0] / x - got[1] / y) for got in (shares_while_backlogged(asked, history) for asked in (history.asked, split))]
    assert max(off) <= 2 * Fraction(at_once) / min(x, y)
