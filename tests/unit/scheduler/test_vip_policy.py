"""What keeps lower tiers alive under VIP: patience, minimum share, leases; and what keeps VIPs ahead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_world import GOLD, request, snapshot, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.fake_executor import StepTime
from fairlane.scheduler.output import StepResult
from fairlane.scheduler.policies import VIPPolicy
from fairlane.scheduler.policies.base import BatchView, StepPlan
from fairlane.scheduler.policies.share_debts import ShareDebts
from fairlane.scheduler.tenancy import NodeShare, PolicySnapshot, Shaping, ShapingRule, Tier, TiersPolicy


def first_token_s(driver: EngineDriver, number: int) -> float:
    time_s = driver.transcripts[request(number).request_id].first_token_s
    assert time_s is not None
    return time_s


def flood(driver: EngineDriver, seconds: float, every_s: float = 0.02) -> None:
    """Gold requests that together want more than the worker has, from 0 to `seconds`."""
    count = int(seconds / every_s)
    driver.add_at_arrival(request(1000 + i, "gold", prompt=64, max_tokens=16, arrival_s=i * every_s) for i in range(count))


def test_without_patience_or_minimum_share_batch_waits_for_the_whole_flood() -> None:
    driver = world(tiers=(GOLD, Tier("batch", 10)), num_blocks=16, max_num_seqs=3)
    flood(driver, 3.0)
    driver.add_at_arrival([request(1, "batch", prompt=64, max_tokens=4, arrival_s=0.1)])
    driver.run_until_idle()
    assert first_token_s(driver, 1) > 3.0


def test_patience_lets_a_waiting_request_rank_one_band_higher_with_its_old_arrival() -> None:
    driver = world(tiers=(GOLD, Tier("batch", 10, patience_s=0.5)), num_blocks=16, max_num_seqs=3)
    flood(driver, 3.0)
    driver.add_at_arrival([request(1, "batch", prompt=64, max_tokens=4, arrival_s=0.1)])
    driver.run_until_idle()
    # It becomes a VIP of 0.1 s at 0.6 s, before every VIP that arrived later; one VIP's stay is 17 short steps.
    assert 0.6 <= first_token_s(driver, 1) < 1.2


def test_patience_gives_no_right_to_evict() -> None:
    # The VIP's 32 + 200 tokens grow to 15 of 16 blocks over 200 steps of at least 5 ms; the batch request needs 16.
    driver = world(tiers=(GOLD, Tier("batch", 10, patience_s=0.1)), num_blocks=16, budget=512, max_num_seqs=4)
    vip = request(1, "gold", prompt=32, max_tokens=200)
    driver.add_at_arrival([vip, request(2, "batch", prompt=250, max_tokens=4, arrival_s=0.01)])
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions == 0
    assert first_token_s(driver, 2) >= 1.0


def test_minimum_share_serves_a_backlogged_tier_through_an_endless_flood() -> None:
    tiers = (GOLD, Tier("batch", 10, min_share=0.1))
    driver = world(tiers=tiers, num_blocks=24, max_num_seqs=3, check=False)
    flood(driver, 20.0)
    driver.add_at_arrival(request(i, "batch", prompt=64, max_tokens=16, arrival_s=0.0) for i in range(1, 200))
    served_by_tier = {"gold": 0, "batch": 0}
    charge = driver.scheduler.cost.decode().per_sequence
    while driver.clock.now() < 20.0:
        driver.turn()
    for number, transcript in driver.transcripts.items():
        tier = "gold" if number >= 1000 else "batch"
        started = any(d.started for d in transcript.deltas)
        served_by_tier[tier] += charge * len(transcript.token_ids) + 10 * 64 * started
    share = served_by_tier["batch"] / sum(served_by_tier.values())
    # At least nine tenths of the promise, and no more than a little over it: it is a floor, not a claim to half.
    assert 0.09 <= share <= 0.15


@pytest.mark.parametrize(("rule", "budget"), [(ShapingRule(0.0), 128), (Shaping.STRICT, 3)])
def test_a_vip_that_waits_for_a_lower_requests_place_does_not_stop_that_one(rule: ShapingRule | Shaping, budget: int) -> None:
    """One of the organisation may run. The batch request's prompt is under way when a VIP of it comes, whose tier leaves others
    nothing of a step, or less than a token: it gets one, or both would wait for ever."""
    tiers = (Tier("gold", 100, shaping=rule), Tier("batch", 10))
    driver = world(tiers=tiers, num_blocks=32, budget=budget, max_num_seqs=2, nodes=(NodeShare("o", max_running=1),))
    driver.add(request(1, "batch", prompt=200, max_tokens=4, tenant="o/a"))
    driver.turn()
    driver.add(request(2, "gold", prompt=8, max_tokens=4, tenant="o/b"))
    driver.run_until_idle(2_000)
    assert [len(driver.transcripts[request(number).request_id].token_ids) for number in (1, 2)] == [4, 4]


@pytest.mark.parametrize("is_contested", [False, True])
def test_only_a_right_that_was_used_against_a_higher_tier_gives_a_lease(is_contested: bool) -> None:
    """While a VIP runs, batch work that does not fit beside it comes to be owed its minimum. It is then admitted, alone or before
    another VIP that waits; a VIP that needs its blocks may take them in the first case only."""
    driver = world(tiers=(GOLD, Tier("batch", 10, min_share=0.1)), num_blocks=16, budget=256)
    batch, late = request(2, "batch", prompt=100, max_tokens=60), request(3, "gold", prompt=200, max_tokens=4)
    driver.add(request(1, "gold", prompt=200, max_tokens=8))
    driver.turn()
    driver.add(batch)
    driver.turn()
    if is_contested:
        driver.add(late)
    while batch.request_id not in {sequence.request_id for sequence in driver.scheduler.running}:
        driver.turn()
    for _ in range(5):
        driver.turn()
    if not is_contested:
        driver.add(late)
    driver.run_until_idle()
    ended_s = [driver.transcripts[request(number).request_id].ended_s or 0.0 for number in (2, 3)]
    assert (driver.scheduler.num_preemptions, ended_s[1] < ended_s[0]) == ((0, False) if is_contested else (1, True))


def test_idle_time_earns_no_claim() -> None:
    debts = ShareDebts({"batch": 0.1})
    debts.set_backlogged([])
    debts.add(["gold"], 1_000_000)
    debts.advance(0.0)
    idle = debts.owed
    debts.set_backlogged(["batch"])
    debts.add(["gold"], 95)
    debts.add(["batch"], 5)  # 5 of 100, a tenth is due
    debts.advance(0.1)
    assert (idle, debts.owed) == (frozenset(), {"batch"})


def test_what_is_owed_is_paid_in_full_and_no_more() -> None:
    debts = ShareDebts({"batch": 0.1})
    debts.set_backlogged(["batch"])
    debts.add(["gold"], 1000)
    debts.advance(0.0)  # owed 100
    debts.add(["batch"], 60)
    debts.advance(0.1)  # 106 due, 60 paid
    debts.add(["batch"], 60)
    owed = debts.owed
    debts.advance(0.2)  # 112 due, 120 paid
    assert (owed, debts.owed) == ({"batch"}, frozenset())


def test_work_that_nobody_else_wanted_does_not_pay_for_the_overload_after_it() -> None:
    debts = ShareDebts({"batch": 0.1})
    debts.set_backlogged(["batch"])
    debts.add(["batch"], 10_000)  # alone on the worker: all of it
    debts.advance(1.0)
    debts.add(["gold"], 1000)
    debts.advance(1.1)
    # 100 are due; 4 % of a tenth of 11,000 were paid in advance, not 9,900
    assert debts.owed == {"batch"}


def test_a_debt_that_could_not_be_paid_is_forgotten_after_ten_seconds() -> None:
    debts = ShareDebts({"batch": 0.1})
    debts.set_backlogged(["batch"])
    debts.add(["gold"], 100)
    debts.advance(0.0)
    debts.advance(10.0)
    before = debts.owed
    debts.advance(10.5)
    assert (before, debts.owed) == ({"batch"}, frozenset())


@given(
    steps=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=400),
    share=st.sampled_from([0.05, 0.1, 0.3]),
)
def test_whoever_is_served_when_owed_gets_its_share_of_every_window(steps: list[tuple[int, int]], share: float) -> None:
    """Each step: what the others take, and what the backlogged account could get beside them. It gets that, or what it is owed
    and no more than a step more; the oracle adds up every window of ten seconds."""
    debts = ShareDebts({"batch": share})
    debts.set_backlogged(["batch"])
    got = []
    for number, (others, beside) in enumerate(steps):
        debts.advance(number * 0.1)
        served = max(beside, 300) if debts.owed else beside  # 300: enough to pay what any step adds
        debts.add(["gold"], others)
        debts.add(["batch"], served)
        got.append((served, others + served))
    short = []
    for first in range(len(got)):
        window = got[first : first + 100]
        mine, all_of_it = sum(s for s, _ in window), sum(t for _, t in window)
        advance = 0.04 * share * sum(t for _, t in got[max(0, first - 102) : first]) + (300 if first else 0)
        # What was paid in advance of the window, and what its last step made due.
        short.append(mine - (share * (all_of_it - window[-1][1]) - advance))
    assert min(short) >= -1e-6


def test_a_policy_swap_loses_nobody_and_an_older_generation_is_refused() -> None:
    driver = world(policy=TiersPolicy.FCFS, num_blocks=16, max_num_seqs=2)
    asked = [request(i, "batch" if i % 2 else "gold", prompt=40, max_tokens=8) for i in range(1, 13)]
    for one in asked:
        driver.add(one)
    for _ in range(3):
        driver.turn()
    driver.apply(snapshot(TiersPolicy.VIP, generation=2))
    driver.turn()
    driver.apply(snapshot(TiersPolicy.FCFS, generation=1))
    driver.run_until_idle()
    assert driver.refusals == ["generation 1 is older than 2"]
    assert all(len(driver.transcripts[one.request_id].token_ids) == 8 for one in asked)
    assert driver.scheduler.policy.name == "vip"


def test_a_tier_removed_from_the_policy_lives_on_for_the_work_it_admitted() -> None:
    driver = world(num_blocks=16, max_num_seqs=1)
    for number in (1, 2, 3):
        driver.add(request(number, "batch", prompt=20, max_tokens=8))
    driver.turn()
    driver.apply(snapshot(tiers=(GOLD,), generation=2))
    driver.run_until_idle()
    assert [len(driver.transcripts[request(n).request_id].token_ids) for n in (1, 2, 3)] == [8, 8, 8]
    driver.add(request(4, "bronze"))
    driver.run_until_idle()
    ended = driver.transcripts[request(4).request_id].ended
    assert ended is not None and ended.error_reason == "TIER_UNKNOWN"


@pytest.mark.parametrize(
    ("shaping", "plan"),
    [
        (Shaping.OFF, StepPlan(400)),
        (Shaping.GENTLE, StepPlan(400, 100, 266, True)),
        (Shaping.BALANCED, StepPlan(400, 100, 200, True)),
        (Shaping.STRICT, StepPlan(400, 100, 100, True)),
        (ShapingRule(0.2, False), StepPlan(400, 100, 80, False)),
    ],
)
def test_the_plan_is_what_the_shaping_says(shaping: Shaping | ShapingRule, plan: StepPlan) -> None:
    tiers = (Tier("gold", 100, shaping=shaping), Tier("batch", 10))
    policy = VIPPolicy(PolicySnapshot(1, "0" * 64, TiersPolicy.VIP, tiers))
    alone, beside = BatchView(400, {"batch": 3}, {}), BatchView(400, {"gold": 1, "batch": 3}, {})
    assert (policy.plan(alone), policy.plan(beside)) == (StepPlan(400), plan)


MAX_STEP = Tier("gold", 100, shaping=ShapingRule(max_step_s=0.03))
FIRST_TOKEN = Tier("gold", 100, shaping=Shaping.GENTLE, ttft_target_s=0.09)  # three steps of 30 ms


@pytest.mark.parametrize(
    ("policy", "gold", "bounded"),
    [
        (TiersPolicy.VIP, MAX_STEP, True),
        (TiersPolicy.VIP, FIRST_TOKEN, True),
        (TiersPolicy.VIP, replace(FIRST_TOKEN, shaping=Shaping.OFF), False),
        (TiersPolicy.FAIR, FIRST_TOKEN, True),
        (TiersPolicy.FAIR, MAX_STEP, False),
        (TiersPolicy.FCFS, MAX_STEP, False),
        (TiersPolicy.FCFS, FIRST_TOKEN, False),
    ],
)
def test_a_step_is_no_longer_than_max_step_and_the_first_token_allow_with_no_vip_there(
    policy: TiersPolicy, gold: Tier, bounded: bool
) -> None:
    tiers = (gold, Tier("batch", 10))
    time = StepTime(0.005, 0.0, 1e-4, 0.0)
    driver = world(policy=policy, tiers=tiers, budget=512, num_blocks=2000, step_time=time, max_num_seqs=8)
    lengths, update = [], driver.scheduler.update

    def timed(result: StepResult) -> None:
        lengths.append(result.elapsed_s)
        update(result)

    driver.scheduler.update = timed  # type: ignore[method-assign]
    for number in range(1, 30):
        driver.add(request(number, "batch", prompt=300, max_tokens=5))
    driver.run_until_idle()
    # The first steps teach it.
    assert (max(lengths[5:]) <= 0.0301) == bounded


def test_beside_a_vip_that_streams_lower_prompts_get_what_its_tpot_target_leaves() -> None:
    gold = Tier("gold", 100, shaping=Shaping.BALANCED, tpot_target_s=0.015)
    policy = VIPPolicy(PolicySnapshot(1, "", TiersPolicy.VIP, (gold, Tier("batch", 10))))
    for tokens in (10, 500):
        policy.on_step_time(tokens, tokens, 0.005 + 1e-4 * tokens)
    streaming = policy.plan(BatchView(400, {"gold": 1, "batch": 29}, {"batch": 5})).lower_prefill_cap
    crowded = policy.plan(BatchView(400, {"gold": 1, "batch": 120}, {})).lower_prefill_cap
    reading = policy.plan(BatchView(400, {"gold": 1, "batch": 29}, {"gold": 1})).lower_prefill_cap
    # 15 ms hold 100 tokens, of which 25 streams; at least 16; a VIP that reads its prompt has no stream to protect.
    assert (streaming, crowded, reading) == (pytest.approx(75, abs=1), 16, 200)


@pytest.mark.parametrize(("shaping", "longest"), [(Shaping.GENTLE, 1), (Shaping.BALANCED, 6)])
def test_under_gentle_no_lower_stream_pauses_in_two_steps_that_follow_each_other(shaping: Shaping, longest: int) -> None:
    # One gold prompt in every step, each read in one, so that none is half read when a step is planned.
    tiers = (Tier("gold", 100, shaping=shaping), Tier("batch", 10))
    driver = world(tiers=tiers, budget=64, num_blocks=2000, prefix_caching=False)
    batch = request(99, "batch", prompt=16, max_tokens=40)
    driver.add(batch)
    driver.turn()
    pauses = [0]
    for number in range(6):
        driver.add(request(number, "gold", prompt=20, max_tokens=1))
        had = len(driver.transcripts[batch.request_id].token_ids)
        driver.turn()
        gone_on = len(driver.transcripts[batch.request_id].token_ids) > had
        pauses.append(0 if gone_on else pauses[-1] + 1)
    assert max(pauses) == longest


def test_a_minimum_share_does_not_lift_an_organisations_max_running() -> None:
    nodes = (NodeShare("o", max_running=1), NodeShare("o/t", min_share=0.5))
    driver = world(tiers=(Tier("gold", 100), Tier("batch", 10)), nodes=nodes, step_time=StepTime(fixed_s=0.01))
    for number in range(1, 6):
        driver.add(request(number, "gold", max_tokens=200))
    for number in range(11, 15):
        driver.add(request(number, "batch", max_tokens=200, tenant="o/t"))
    most = 0
    for _ in range(100):
        driver.turn()
        most = max(most, driver.scheduler.census.running_by_node.copy().get("o/t", 0))
    assert most == 1
