"""What is charged, under every cost function: the same one by one and in the lane, every step's charges what the step cost, and
what the words promise (worker time, cache held). Oracles: the engine without a lane, busy time, and sums done by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from books import Books
from engine_world import request, world
from fairlane.scheduler.cost import PS_PER_S, Cost, Ledger, RooflineCost, StepModel, TokensCost
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.engine import Abort
from fairlane.scheduler.fake_executor import StepTime
from fairlane.scheduler.lane import DecodeLane
from fairlane.scheduler.request import Payer, Request
from fairlane.scheduler.settlement import Settlement
from fairlane.scheduler.tenancy import CostName, Tier, TiersPolicy, WithinTier

# Of the shape of StepTime(0, 2e-6, 25e-6, 2e-6).
MODEL = StepModel(token=25_000_000, attention=0, sequence=2_000_000, context=2_000_000, weights=0)
TIERS = (Tier("gold", 100), Tier("batch", 10))


@contextmanager
def every_step_looks() -> Iterator[None]:
    with patch.object(DecodeLane, "may_join", return_value=False), patch.object(Settlement, "holds", return_value=False):
        yield


@st.composite
def loads(draw: st.DrawFn) -> list[Request]:
    return [
        request(
            number,
            draw(st.sampled_from(TIERS)).name,
            prompt=draw(st.integers(1, 60)),
            max_tokens=draw(st.integers(1, 60)),
            arrival_s=draw(st.floats(0, 0.4)),
            tenant=draw(st.sampled_from(["a/x", "b/y"])),
        )
        for number in range(1, draw(st.integers(2, 12)) + 1)
    ]


@settings(max_examples=80, deadline=None)
@given(
    asked=loads(),
    aborts=st.dictionaries(st.integers(1, 12), st.floats(0, 0.6), max_size=3),
    cost=st.sampled_from(CostName),
    depth=st.sampled_from([0, 1, 2]),
    num_blocks=st.integers(16, 60),
    max_num_seqs=st.integers(1, 6),
    num_host_blocks=st.sampled_from([0, 20]),
)
def test_charges_are_the_same_one_by_one_and_as_rates_and_add_up_to_what_steps_cost(
    asked: list[Request],
    aborts: dict[int, float],
    cost: CostName,
    depth: int,
    num_blocks: int,
    max_num_seqs: int,
    num_host_blocks: int,
) -> None:
    def run() -> tuple[Counter[tuple[Payer, Ledger]], int, int]:
        options = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "num_host_blocks": num_host_blocks}
        driver = world(tiers=TIERS, depth=depth, block_size=8, prefix_caching=False, cost=cost, **options)
        books = Books(driver)
        with books.watch:
            driver.add_at_arrival(asked)
            for number, time_s in aborts.items():
                if number <= len(asked):
                    driver.at(time_s, Abort(asked[number - 1].request_id))
            driver.run_until_idle(20_000)
        return books.charged, books.sum(Ledger.WORK), books.step_costs

    in_lane, work, steps = run()
    assert work == steps
    with every_step_looks():
        one_by_one, _, _ = run()
    assert +in_lane == +one_by_one


def test_the_tokens_cost_is_vtcs() -> None:
    driver = world(tiers=TIERS, cost=CostName.TOKENS)
    books = Books(driver)
    driver.add(request(1, "gold", prompt=100, max_tokens=30, tenant="a/x"))
    driver.run_until_idle()
    assert books.charged == {(Payer("gold", "a/x"), Ledger.WORK): 100 * 10 + 29 * 20}  # the prompt's last chunk gives the first


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("cost", [CostName.ROOFLINE, CostName.DRF])
def test_all_worker_time_charged_is_all_busy_time(cost: CostName, depth: int) -> None:
    """On a worker whose work has another shape than the model's, and ten times its speed."""
    driver = world(tiers=TIERS, cost=cost, depth=depth, num_blocks=600, check=False, step_time=StepTime(5e-4, 1e-6, 2e-6, 8e-9))
    books, busy_s = Books(driver), 0.0
    update = driver.scheduler.update

    def timed(result):  # type: ignore[no-untyped-def]
        nonlocal busy_s
        busy_s += result.elapsed_s
        update(result)

    driver.scheduler.update = timed  # type: ignore[method-assign]
    for number in range(1, 200):
        driver.add(request(number, "gold", prompt=10 * (number % 20) + 1, max_tokens=1 + 7 * number % 90))
    driver.run_until_idle()
    assert books.sum(Ledger.WORK) == pytest.approx(busy_s * PS_PER_S, rel=0.01)


def test_the_kv_time_of_a_sequence_is_the_tokens_it_held_times_how_long() -> None:
    step_s = 0.25
    driver = world(tiers=TIERS, cost=CostName.KV_TIME, step_time=StepTime(step_s, 0.0, 0.0, 0.0), budget=64)
    books = Books(driver)
    driver.add(request(1, "gold", prompt=100, max_tokens=5, tenant="a/x"))
    driver.run_until_idle()
    # Two steps with room for its whole prompt, then four decodes, in which it has computed 101 to 104.
    held = 2 * 100 + 101 + 102 + 103 + 104
    assert +books.charged == {(Payer("gold", "a/x"), Ledger.HELD): round(held * step_s * 1e6)}


def turn_while_both_wait(driver: EngineDriver) -> None:
    turns = 0
    driver.turn()
    while len(driver.scheduler.census.waiting_by_node.copy()) == 2:
        driver.turn()
        turns += 1
    assert turns > 100


def worker_time(cost: Cost) -> dict[str, float]:
    """Seconds of modelled worker time that a tenant of long contexts and one of short ones got, both backlogged."""
    time = StepTime(0.0, 2e-6, 25e-6, 2e-6)
    driver = world(
        policy=TiersPolicy.FAIR, tiers=TIERS, within=WithinTier.FAIR, cost=cost.name, num_blocks=2000, budget=256, max_num_seqs=8,
        step_time=time, check=False, prefix_caching=False,
    )  # fmt: skip
    driver.turn()
    driver.scheduler.cost = cost
    shapes = {"a/long": (1500, 60), "b/short": (20, 60)}
    for k, (tenant, (prompt, output)) in enumerate(shapes.items()):
        for i in range(400):
            driver.add(request(1000 * k + i + 1, "batch", prompt=prompt, max_tokens=output, tenant=tenant))
    got: Counter[str] = Counter()
    launch = driver.engine._executor.launch
    owner: dict[int, str] = {}

    def watch(output):  # type: ignore[no-untyped-def]
        owner.update({new.slot: "a/long" if new.num_prompt_tokens > 100 else "b/short" for new in output.new})
        handle = launch(output)
        slots = driver.engine._executor._slots
        for entry in output.scheduled:
            got[owner[entry.slot]] += time.of([entry])
        for slot in output.decode_slots:
            got[owner[slot]] += time.sequence_s + time.token_s + time.context_s * len(slots[slot].tokens)
        return handle

    driver.engine._executor.launch = watch  # type: ignore[method-assign]
    turn_while_both_wait(driver)
    return dict(got)


def test_by_tokens_long_contexts_take_more_of_the_worker_than_their_share_and_by_roofline_they_do_not() -> None:
    by_tokens, by_roofline = worker_time(TokensCost()), worker_time(RooflineCost(MODEL))
    shares = [got["a/long"] / sum(got.values()) for got in (by_tokens, by_roofline)]
    assert shares[0] > 0.6 and shares[1] <= 0.525, shares


def test_drf_charges_each_for_what_it_uses_most_of() -> None:
    """One tenant's requests hold much cache and compute little, the other's the reverse: each gets more of what it wants than of
    the other, and their larger parts are alike."""
    driver = world(
        policy=TiersPolicy.FAIR, tiers=TIERS, within=WithinTier.FAIR, cost=CostName.DRF, num_blocks=400, budget=512,
        max_num_seqs=16, check=False, prefix_caching=False, step_time=StepTime(1e-4, 1e-5, 5e-6, 0.0),
    )  # fmt: skip
    books = Books(driver)
    for i in range(1, 400):
        driver.add(request(i, "batch", prompt=500, max_tokens=200, tenant="a/holds"))
        driver.add(request(1000 + i, "batch", prompt=400, max_tokens=1, tenant="b/computes"))
    turn_while_both_wait(driver)
    work, held = ([books.charged[Payer("batch", tenant), ledger] for tenant in ("a/holds", "b/computes")] for ledger in Ledger)
    assert held[0] > work[0] and work[1] > held[1]
    assert held[0] == pytest.approx(work[1], rel=0.1)


def test_another_cost_starts_counters_afresh_and_loses_nobody() -> None:
    driver = world(policy=TiersPolicy.FAIR, tiers=TIERS, within=WithinTier.FAIR, max_num_seqs=2)
    for number in range(1, 9):
        driver.add(request(number, "batch", prompt=30, max_tokens=20, tenant=f"t/{number % 3}"))
    for _ in range(10):
        driver.turn()
    snapshot = driver.engine._snapshot
    assert snapshot is not None
    driver.apply(replace(snapshot, generation=2, sha256="1" * 64, cost=CostName.DRF))
    driver.run_until_idle()
    lengths = {len(transcript.token_ids) for transcript in driver.transcripts.values()}
    assert (driver.scheduler.cost.name, lengths, driver.refusals) == (CostName.DRF, {20}, [])


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("cost", list(CostName))
@pytest.mark.parametrize("fails", [2, 9], ids=["in its prompt", "in the lane"])
def test_work_that_is_lost_by_our_fault_is_refunded_whole_and_nobody_elses(cost: CostName, depth: int, fails: int) -> None:
    driver = world(tiers=TIERS, cost=cost, depth=depth, fail_steps=frozenset([fails]))
    books = Books(driver)
    for number, tenant in ((1, "a/x"), (2, "b/y")):
        driver.add(request(number, "gold", prompt=50, max_tokens=30, tenant=tenant))
    driver.run_until_idle()
    lost = +books.charged, -books.charged
    driver.add(request(3, "gold", prompt=50, max_tokens=30, tenant="b/y"))
    driver.run_until_idle()
    reasons = {number: transcript.ended and transcript.ended.error_reason for number, transcript in driver.transcripts.items()}
    assert (lost, reasons) == ((Counter(), Counter()), {1: "STEP_FAILED", 2: "STEP_FAILED", 3: ""})
    assert {payer.tenant for payer, _ in +books.charged} == {"b/y"}


def test_whoever_was_refunded_goes_first_again() -> None:
    driver = world(
        policy=TiersPolicy.FAIR, tiers=TIERS, within=WithinTier.FAIR, max_num_seqs=1, max_resident=1, fail_steps=frozenset([4])
    )
    requests = [
        request(n, "gold", prompt=40, max_tokens=9, tenant=t) for n, t in ((1, "a/x"), (2, "b/y"), (3, "a/x"), (4, "b/y"))
    ]
    for one in requests:
        driver.add(one)
    driver.run_until_idle()
    starts = {n: t.first_token_s for n, t in driver.transcripts.items()}
    order = sorted(starts, key=lambda number: starts[number] or 0.0)
    # 1 fails in step 4, with nothing on a's account: a ties with b, and came first.
    assert order == [1, 3, 2, 4]
