"""What the decode lane and the settlement must not change: who gets in when, and what is on whose account. `check=False` where
it matters, because a check writes back what the lane owes its members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from engine_world import GOLD, expected_tokens, request, world
from fairlane.blockmgr.hashing import HashChain
from fairlane.scheduler.cost import Ledger, Rate
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.lane import DecodeLane
from fairlane.scheduler.policies import BandPolicy, make_policy
from fairlane.scheduler.policies.share_debts import ShareDebts
from fairlane.scheduler.request import Payer, RequestId, Sequence
from fairlane.scheduler.settlement import RECHECK_STEPS, Settlement
from fairlane.scheduler.tenancy import PolicySnapshot, Tier, TiersPolicy, WithinTier


@contextmanager
def every_step_looks() -> Iterator[None]:
    with patch.object(DecodeLane, "may_join", return_value=False), patch.object(Settlement, "holds", return_value=False):
        yield


def starts(driver: EngineDriver) -> dict[int, float | None]:
    return {number: transcript.first_token_s for number, transcript in driver.transcripts.items()}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("outputs", [(20, 200, 30), (2, 200, 30)], ids=["in the lane", "before it joins"])
def test_a_seat_is_given_on_while_the_last_token_of_who_had_it_is_still_out(depth: int, outputs: tuple[int, ...]) -> None:
    def run() -> dict[int, float | None]:
        driver = world(policy=TiersPolicy.FCFS, depth=depth, max_num_seqs=2, block_size=64)
        for number, max_tokens in enumerate(outputs, 1):
            driver.add(request(number, prompt=8, max_tokens=max_tokens))
        driver.run_until_idle()
        return starts(driver)

    with_lane = run()
    with every_step_looks():
        without = run()
    assert with_lane == without


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_head_that_fits_with_a_prefix_gets_in_as_soon_as_the_prefix_is_known(depth: int) -> None:
    def run() -> dict[int, float | None]:
        driver = world(policy=TiersPolicy.FCFS, depth=depth, num_blocks=20, budget=512)
        prefix = tuple(range(160))
        driver.add(request(1, prompt=(*prefix, 7), max_tokens=60, tenant="a/x"))
        driver.add(request(2, prompt=(*prefix, 8, 9), max_tokens=4, tenant="a/x"))
        driver.run_until_idle()
        return starts(driver)

    with_lane = run()
    with every_step_looks():
        without = run()
    assert with_lane == without


@pytest.mark.parametrize("depth", [0, 1])
def test_a_lease_ends_at_its_token_for_a_member_of_the_lane(depth: int) -> None:
    def run() -> float | None:
        tiers = (Tier("gold", 100), Tier("batch", 10))
        driver = world(tiers=tiers, depth=depth, max_resident=1, max_num_seqs=1, num_blocks=200, check=False)
        driver.add(request(1, "batch", prompt=8, max_tokens=200))
        driver.turn()
        driver.turn()
        next(iter(driver.scheduler.running)).lease_until_tokens = 60
        for _ in range(20):
            driver.turn()
        driver.add(request(2, "gold", prompt=8, max_tokens=4))
        driver.run_until_idle()
        return driver.transcripts[RequestId(2)].first_token_s

    with_lane = run()
    with every_step_looks():
        without = run()
    assert with_lane == without


def test_columns_that_nobody_asked_for_meanwhile_end_up_in_the_right_sequences() -> None:
    driver = world(depth=2, check=False, num_blocks=200)
    asked = [request(number, "gold", prompt=8 + number, max_tokens=60) for number in (1, 2, 3)]
    for one in asked:
        driver.add(one)
    for _ in range(40):
        driver.turn()
    driver.abort(RequestId(2))
    driver.run_until_idle()
    driver.scheduler.check_integrity()
    found = [driver.transcripts[one.request_id].token_ids for one in asked]
    assert [found[0], found[2]] == [expected_tokens(asked[0]), expected_tokens(asked[2])]
    assert found[1] == expected_tokens(asked[1])[: len(found[1])] != []


# -- minimum shares ----------------------------------------------------------------------------------------------------------


def counted(driver: EngineDriver, account: str) -> tuple[float, int]:
    """What is owed to it, and all the work that counted for it."""
    driver.scheduler.policy.begin_step(driver.clock.now())
    debts: ShareDebts = driver.scheduler.policy._min._debts  # type: ignore[attr-defined]
    found = debts._accounts[account]
    return found.debt, found.recent


def test_who_comes_while_every_slot_is_taken_counts_as_waiting_from_the_next_step_on() -> None:
    driver = world(tiers=(Tier("gold", 100), Tier("batch", 10, min_share=0.2)), max_resident=2, max_num_seqs=2, check=False)
    for number in (1, 2):
        driver.add(request(number, "gold", prompt=8, max_tokens=200))
    for _ in range(6):
        driver.turn()
    driver.add(request(3, "batch", prompt=8, max_tokens=4))
    for _ in range(10):
        driver.turn()
    waiting = counted(driver, "tier batch")
    driver.abort(RequestId(3))
    for _ in range(10):
        driver.turn()
    assert (waiting, counted(driver, "tier batch")) == ((0.2 * 400, 10 * 2 * 20), (0.2 * 400, 10 * 2 * 20))


def test_the_lanes_decodes_count_against_who_prefills_beside_them() -> None:
    def run() -> tuple[float, int]:
        driver = world(
            tiers=(Tier("gold", 100), Tier("batch", 10, min_share=0.5)), max_prefill_chunk=4, num_blocks=200, check=False
        )
        for number in (1, 2, 3):
            driver.add(request(number, "gold", prompt=2, max_tokens=200))
        for _ in range(4):
            driver.turn()
        driver.add(request(4, "batch", prompt=80, max_tokens=4))
        for _ in range(10):
            driver.turn()
        return counted(driver, "tier batch")

    with_lane = run()
    with every_step_looks():
        without = run()
    assert with_lane == without


def test_a_vip_evicts_who_was_owed_a_minimum_soon_after_it_is_owed_no_more() -> None:
    driver = world(tiers=(Tier("gold", 100), Tier("batch", 10, min_share=0.2)), max_resident=2, max_num_seqs=2, check=False)
    for number in (1, 2):
        driver.add(request(number, "batch", prompt=8, max_tokens=300))
    for _ in range(6):
        driver.turn()
    with patch.object(ShareDebts, "advance", lambda self, now_s: setattr(self, "owed", frozenset({"tier batch"}))):
        driver.add(request(3, "gold", prompt=8, max_tokens=4))
        for _ in range(3):
            driver.turn()
    waited = driver.transcripts[RequestId(3)].first_token_s is None
    for _ in range(RECHECK_STEPS + 1):
        driver.turn()
    assert waited and driver.transcripts[RequestId(3)].first_token_s is not None


# -- fair shares -------------------------------------------------------------------------------------------------------------


def fair_policy() -> BandPolicy:
    return make_policy(PolicySnapshot(1, "0" * 64, TiersPolicy.FAIR, (Tier("batch", 10),), WithinTier.FAIR, ()))


def waiting_of(number: int, tenant: str) -> Sequence:
    return Sequence(request(number, "batch", tenant=tenant), number, HashChain("x", 16))


def test_a_newcomer_starts_beside_who_still_decodes_not_beside_who_left_long_ago() -> None:
    policy = fair_policy()
    stays, leaves = waiting_of(1, "o/stays"), waiting_of(2, "o/leaves")
    for sequence in (stays, leaves):
        policy.push(sequence, 0.0)
        policy.on_admit(sequence)
        policy.pop(sequence)
        policy.on_decoding(sequence.payer, 1, 0)
    for _ in range(10):
        policy.on_steady_step(Rate(20, 0), Ledger.WORK)
    policy.on_decoding(leaves.payer, -1, 0)
    policy.on_release(leaves)
    for _ in range(1000):
        policy.on_steady_step(Rate(20, 0), Ledger.WORK)
    policy.push(waiting_of(3, "o/new"), 0.0)
    counters = policy._trees[0].counters()
    assert counters["batch", "o", "new"] == counters["batch", "o", "stays"] == 1010 * 20


def test_a_newcomer_does_not_go_before_who_used_the_idle_worker() -> None:
    """One streams all the time, another had the rest to itself in short requests, and neither ever had to wait."""
    policy = fair_policy()
    streams, uses = waiting_of(1, "o/streams"), waiting_of(2, "o/uses")
    for sequence in (uses, streams):
        policy.push(sequence, 0.0)
        policy.on_admit(sequence)
        policy.pop(sequence)
    policy.on_decoding(streams.payer, 1, 0)
    policy.on_charge(uses.payer, 5000)
    policy.on_release(uses)
    policy.on_steady_step(Rate(20, 0), Ledger.WORK)
    newcomer, again = waiting_of(3, "o/new"), waiting_of(4, "o/uses")
    policy.push(newcomer, 0.0)
    policy.push(again, 0.0)
    counters = policy._trees[0].counters()
    assert counters["batch", "o", "new"] == counters["batch", "o", "uses"] == 5000


def test_whoever_goes_as_the_last_of_its_line_keeps_what_it_was_charged() -> None:
    policy = fair_policy()
    for number in (1, 2, 3):
        policy.push(waiting_of(number, "o/many"), 0.0)
    policy.on_charge(Payer("batch", "o/many"), 1000)
    for number in (10, 11):  # one at a time, each costs 5000
        sequence = waiting_of(number, "o/single")
        policy.push(sequence, 0.0)
        policy.on_admit(sequence)
        policy.pop(sequence)
        policy.on_charge(sequence.payer, 5000)
    assert policy._trees[0].counters()["batch", "o", "single"] == 1000 + 2 * 5000


def test_whoever_only_paid_for_a_recompute_is_forgotten() -> None:
    policy = fair_policy()
    policy.push(waiting_of(1, "o/here"), 0.0)
    policy.on_charge(Payer("batch", "o/here"), 1_000_000)
    for number in range(200):
        policy.on_charge(Payer("batch", f"gone/{number}"), 10)
    assert len(policy._trees[0]._leaves) == 1


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_check_sees_a_member_that_the_lane_lost(depth: int) -> None:
    driver = world(tiers=(GOLD,), depth=depth, check=False)
    for number in (1, 2):
        driver.add(request(number, "gold", prompt=8, max_tokens=30))
    for _ in range(6):
        driver.turn()
    driver.scheduler.check_integrity()
    driver.scheduler.lane.members.pop()
    with pytest.raises((RuntimeError, ValueError)):
        driver.scheduler.check_integrity()
