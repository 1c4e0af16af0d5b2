"""Predicted output changes the order and nothing else: a counter is back at what was charged when all has ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import request, snapshot, world
from fairlane.blockmgr.hashing import HashChain
from fairlane.scheduler.cost import Ledger, TokensCost
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.engine import Abort
from fairlane.scheduler.policies import make_policy
from fairlane.scheduler.policies.node import Node, SteadyCost
from fairlane.scheduler.prediction import OutputPredictor
from fairlane.scheduler.request import Payer, Request, RequestId, Sequence
from fairlane.scheduler.tenancy import Tier, TiersPolicy

TIERS = (Tier("batch", 10),)
PREDICTS = make_policy(replace(snapshot(TiersPolicy.FAIR, TIERS), predict_output=True))


def sequence(number: int, tenant: str = "o/a", outputs: int = 0, prompt: int = 100, max_tokens: int = 1000) -> Sequence:
    found = Sequence(request(number, prompt=prompt, max_tokens=max_tokens, tenant=tenant), number, HashChain("x", 16))
    found.token_ids = [*found.token_ids, *[7] * outputs]
    found.started = True
    return found


def test_a_request_is_expected_to_cost_its_prompt_and_what_its_owners_last_ones_generated() -> None:
    outputs, one = OutputPredictor(), sequence(9)
    for number in range(20):
        outputs.ended(sequence(number, outputs=41))
    outputs.expect(one, PREDICTS, TokensCost(), 0)
    assert one.expected_charge == 100 * 10 + 40 * 20  # the first token comes with the prompt


def test_the_newest_requests_count_most_and_strangers_go_by_everybodys() -> None:
    outputs, known, stranger = OutputPredictor(), sequence(8, "o/a"), sequence(9, "o/b")
    for number in range(30):
        outputs.ended(sequence(number, "o/a", outputs=500))
    for number in range(30):
        outputs.ended(sequence(number, "o/a", outputs=11))
    for one in (known, stranger):
        outputs.expect(one, PREDICTS, TokensCost(), 0)
    assert (known.expected_charge, stranger.expected_charge) == (1200, 1200)


def test_no_more_is_expected_than_it_may_generate_nor_what_others_pay() -> None:
    outputs, short, evicted = OutputPredictor(), sequence(8, max_tokens=6), sequence(9, outputs=10)
    outputs.ended(sequence(1, outputs=500))
    evicted.evicted_by, evicted.recompute_until = Payer("gold", "o/b"), 105
    for one in (short, evicted):
        outputs.expect(one, PREDICTS, TokensCost(), 0)
    # 5 of its 110 tokens were never computed before; 490 are still to come, the first with those
    assert (short.expected_charge, evicted.expected_charge) == (1000 + 5 * 20, 5 * 10 + 489 * 20)


def test_who_was_let_in_is_behind_at_once_where_outputs_are_predicted() -> None:
    """Its tenant's last outputs were long: it counts with so many, though little was charged yet."""
    firsts = []
    for predict in (False, True):
        driver = _world(predict, seats=2)
        driver.add(request(1, prompt=32, max_tokens=60, tenant="o/long"))
        driver.add(request(2, prompt=32, max_tokens=60, tenant="o/long"))
        driver.run_until_idle()
        driver.add(request(3, prompt=32, max_tokens=60, tenant="o/long"))
        driver.add(request(4, prompt=128, max_tokens=2, tenant="o/other"))
        driver.turn()
        driver.turn()
        leaf = {name: node.v - node.charged_v for name, node in _tenants(driver).items()}
        firsts.append(leaf["long"] > 50 * 20)
    assert firsts == [False, True]


def test_nothing_is_expected_of_anybody_where_no_policy_asks_for_it() -> None:
    expected = []
    for predict in (False, True):
        driver = _world(predict)
        driver.add(request(1, prompt=32, max_tokens=20, tenant="o/a"))
        driver.run_until_idle()
        driver.add(request(2, prompt=32, max_tokens=20, tenant="o/a"))
        driver.turn()
        one = driver.scheduler.sequence(RequestId(2))
        expected.append(None if one is None else one.expected_charge)
    assert expected == [0, 32 * 10 + 19 * 20]


def test_a_policy_that_predicts_counts_those_too_that_were_let_in_before_it_came() -> None:
    driver = _world(predict=False)
    driver.add(request(1, prompt=32, max_tokens=40, tenant="o/long"))
    driver.run_until_idle()
    driver.add(request(2, prompt=32, max_tokens=40, tenant="o/long"))
    for _ in range(3):
        driver.turn()
    driver.apply(replace(snapshot(TiersPolicy.FAIR, TIERS, 3), predict_output=True))
    driver.turn()
    node = _tenants(driver)["long"]
    assert node.v - node.charged_v > 30 * 20  # of the 40 tokens that the one before it generated


def _world(predict: bool, *, seats: int = 6, num_blocks: int = 60) -> EngineDriver:
    driver = world(policy=TiersPolicy.FAIR, tiers=TIERS, num_blocks=num_blocks, max_num_seqs=seats, max_resident=8)
    driver.apply(replace(snapshot(TiersPolicy.FAIR, TIERS, 2), predict_output=predict))
    driver.turn()
    return driver


def _tenants(driver: EngineDriver) -> dict[str, Node]:
    root = driver.scheduler.policy._trees[0].root  # type: ignore[attr-defined]
    organisations = [org for tier in root.children.values() for org in tier.children.values()]
    return {name: node for org in organisations for name, node in org.children.items()}


@st.composite
def loads(draw: st.DrawFn) -> list[Request]:
    tenants = st.sampled_from(["o/x", "o/y", "p/z"])
    return [
        request(
            number,
            prompt=draw(st.integers(1, 60)),
            max_tokens=draw(st.integers(1, 50)),
            arrival_s=draw(st.floats(0, 0.5)),
            tenant=draw(tenants),
        )
        for number in range(1, draw(st.integers(2, 14)) + 1)
    ]


@settings(max_examples=100, deadline=None)
@given(
    asked=loads(),
    aborts=st.dictionaries(st.integers(1, 14), st.floats(0, 0.6), max_size=3),
    depth=st.sampled_from([0, 1, 2]),
    num_blocks=st.integers(16, 60),
    seats=st.integers(1, 6),
    gap_ms=st.sampled_from([None, 20.0]),
)
def test_what_was_expected_is_gone_when_all_has_ended_and_charges_are_the_sequences_own(
    asked: list[Request], aborts: dict[int, float], depth: int, num_blocks: int, seats: int, gap_ms: float | None
) -> None:
    """With evictions, cancels, requests that outgrow what was expected and some that fall short: counters come back to the
    charges, and the integers behind them to 0."""
    driver = world(
        policy=TiersPolicy.FAIR, tiers=TIERS, depth=depth, num_blocks=num_blocks, max_num_seqs=seats, max_resident=seats
    )
    driver.apply(replace(snapshot(TiersPolicy.FAIR, TIERS, 2), predict_output=True, preempt_gap_ms=gap_ms))
    driver.turn()
    tree = driver.scheduler.policy._trees[0]  # type: ignore[attr-defined]
    nodes: dict[int, Node] = {}
    driver.add_at_arrival(asked)
    for number, when_s in aborts.items():
        if number <= len(asked):
            driver.at(when_s, _abort(asked[number - 1]))
    expected_ok = True
    while driver.turn() or driver.scheduler.num_unfinished or not all(t.ended for t in driver.transcripts.values()):
        nodes |= {node.uid: node for node in _all(tree.root)}
        expected_ok &= all(node.v >= node.charged_v for node in nodes.values())
        if not driver.scheduler.num_unfinished:
            driver.clock.advance(0.01)  # type: ignore[attr-defined]
    left = [(node._expected, node._came, node.v - node.charged_v) for node in nodes.values()]
    assert (expected_ok, set(left), tree._foreseen) == (True, {(0, 0, 0.0)}, {})


def _abort(asked: Request) -> Abort:
    return Abort(asked.request_id)


def _all(root: Node) -> list[Node]:
    found, stack = [], list(root.children.values())
    while stack:
        node = stack.pop()
        found.append(node)
        stack += node.children.values()
    return found


@pytest.mark.parametrize("came", [30, 130])
def test_a_counter_goes_by_what_is_expected_until_that_is_outgrown(came: int) -> None:
    node = Node("n", "n", None, 2.0, 1, SteadyCost())
    node.expect(100, 0)
    node.charge(came, Ledger.WORK, came)
    during = node.v
    node.expect(-100, -came)
    assert (during, node.v) == (max(100, came) / 2, came / 2)
