"""A shadow policy on live traffic: it changes nothing whatever it is and whatever it does, a policy compared with itself
differs in nothing, and what another would have done is counted once, about the right tenants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import BATCH, GOLD, STANDARD, TIERS, request, world
from fairlane.scheduler.driver import EngineDriver, Transcript
from fairlane.scheduler.engine import Abort, ShadowPolicy
from fairlane.scheduler.fake_executor import StepTime
from fairlane.scheduler.policies.base import Policy
from fairlane.scheduler.policies.vip import VIPPolicy
from fairlane.scheduler.request import Payer, Request, RequestId, Sequence
from fairlane.scheduler.shadow.attach import start_shadow
from fairlane.scheduler.shadow.differences import (
    MAX_NAMED,
    MAX_PAIRS,
    MAX_PARTIES,
    MAX_ROWS,
    NOBODY,
    Difference,
    Differences,
    Kind,
    Row,
)
from fairlane.scheduler.shadow.shadow import ShadowReport
from fairlane.scheduler.shadow.tee import Tee
from fairlane.scheduler.shadow.twin import Twin
from fairlane.scheduler.tenancy import (
    CostName,
    KVAmount,
    NodeShare,
    PolicySnapshot,
    Shaping,
    TiersPolicy,
    WithinTenant,
    WithinTier,
)

HOOKS = sorted(name for name, value in vars(Policy).items() if callable(value) and not name.startswith("_"))
OWN = {"place", "relegated", "due_s", "latest_start_s", "lease_until_tokens", "chain"}
SHADOW = PolicySnapshot(7, "5" * 64, TiersPolicy.VIP, TIERS)


def report_of(driver: EngineDriver) -> ShadowReport:
    report = driver.scheduler.stats().shadow
    assert report is not None
    return report


def named(driver: EngineDriver) -> dict[tuple[str, str, str], int]:
    """Counts by kind and the tenants."""
    return {(one.kind.value, one.whom.tenant, one.other.tenant): one.count for one in report_of(driver).named}


def outcome(driver: EngineDriver) -> dict[RequestId, Transcript]:
    return driver.transcripts


def shadowed(shadow: PolicySnapshot, **options: Any) -> EngineDriver:
    driver = world(**options)
    driver.turn()
    driver.shadow(shadow)
    driver.turn()
    assert not driver.refusals
    return driver


@st.composite
def policies(draw: st.DrawFn) -> PolicySnapshot:
    tiers = tuple(
        replace(
            tier,
            shaping=draw(st.sampled_from(Shaping)),
            patience_s=draw(st.sampled_from([None, 0.05, 1.0])),
            min_share=draw(st.sampled_from([0.0, 0.2])),
            ttft_target_s=draw(st.sampled_from([None, 0.1])),
            tpot_target_s=draw(st.sampled_from([None, 0.02])),
            ceil=draw(st.sampled_from([None, None, 0.05, 0.3])),
        )
        for tier in (GOLD, STANDARD, BATCH)
    )
    ceil = draw(st.sampled_from([None, None, 0.02, 0.2]))
    nodes = (NodeShare("a/x", weight=2.0, max_running=draw(st.sampled_from([None, 1, 2])), ceil=ceil),)
    return PolicySnapshot(
        7,
        "5" * 64,
        draw(st.sampled_from(TiersPolicy)),
        tiers,
        draw(st.sampled_from(WithinTier)),
        nodes,
        draw(st.sampled_from([None, 20.0])),
        CostName.TOKENS,
        draw(st.sampled_from(WithinTenant)),
        predict_output=draw(st.booleans()),
        locality_window_ms=draw(st.sampled_from([0.0, 50.0])),
    )


def prompt_of(number: int, shared: int, own: int) -> tuple[int, ...]:
    return (*range(7000, 7000 + shared), *((number * 7919 + 31 * i) % 50_000 for i in range(own)))


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    return [
        request(
            number,
            draw(st.sampled_from(TIERS)).name,
            prompt=prompt_of(number, draw(st.sampled_from([0, 0, 8, 24])), draw(st.integers(1, 60))),
            max_tokens=draw(st.integers(1, 40)),
            arrival_s=draw(st.floats(0, 0.5)),
            tenant=draw(st.sampled_from(["a/x", "a/y", "b/z"])),
            order=draw(st.sampled_from([0, 0, 1])),
        )
        for number in range(1, draw(st.integers(2, 20)) + 1)
    ]


WORLDS = st.fixed_dictionaries(
    {
        "depth": st.sampled_from([0, 1, 2]),
        "num_blocks": st.integers(14, 40),
        "block_size": st.just(8),
        "budget": st.integers(4, 96),
        "max_num_seqs": st.integers(1, 4),
        "max_resident": st.integers(2, 8),
        "num_host_blocks": st.sampled_from([0, 20]),
    }
)


def run(
    in_force: PolicySnapshot,
    shadow: PolicySnapshot | None,
    asked: list[Request],
    aborts: dict[int, float],
    options: Any,
    between: tuple[float, ...] = (),
) -> Any:
    """between: when the shadow comes, and goes; empty: it is there from the start."""
    driver = world(**options)
    driver.apply(in_force)
    driver.turn()
    for time_s, snapshot in zip(between, (shadow, None), strict=False):
        driver.at(time_s, Abort(RequestId(99)) if shadow is None else ShadowPolicy(snapshot, driver.refusals.append))
    if shadow is not None and not between:
        driver.shadow(shadow)
        driver.turn()
    assert not driver.refusals
    driver.add_at_arrival(asked)
    for number, at_s in aborts.items():
        driver.at(at_s, Abort(RequestId(number)))
    driver.run_until_idle(20_000)
    return driver


# -- it changes nothing ------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(policies(), policies(), requests(), st.dictionaries(st.integers(1, 20), st.floats(0, 1.0), max_size=4), WORLDS)
def test_live_requests_get_the_same_at_the_same_time_whatever_the_shadow(
    in_force: PolicySnapshot, shadow: PolicySnapshot, asked: list[Request], aborts: dict[int, float], options: dict[str, Any]
) -> None:
    without = run(in_force, None, asked, aborts, options)
    beside = run(in_force, shadow, asked, aborts, options)
    assert report_of(beside).fault == ""
    assert beside.scheduler.shadow is not None
    assert not beside.scheduler.shadow.state._twins  # nothing is kept of what has ended
    assert outcome(beside) == outcome(without)


@settings(max_examples=80, deadline=None)
@given(policies(), policies(), requests(), st.floats(0, 0.6), st.floats(0, 0.6), WORLDS)
def test_one_that_comes_and_goes_in_the_midst_of_traffic_is_not_noticed_either(
    in_force: PolicySnapshot,
    shadow: PolicySnapshot,
    asked: list[Request],
    begins_s: float,
    lasts_s: float,
    options: dict[str, Any],
) -> None:
    between = (begins_s, begins_s + lasts_s)
    without = run(in_force, None, asked, {}, options, between)
    beside = run(in_force, shadow, asked, {}, options, between)
    assert set(beside.refusals) <= {""}
    assert (beside.scheduler.shadow, outcome(beside)) == (None, outcome(without))


@pytest.mark.parametrize("begins_s", [0.05, 0.1, 0.15, 0.2, 0.25])
def test_its_coming_does_not_make_anybody_look_sooner_who_may_be_evicted(begins_s: float) -> None:
    """One slot, two tenants, θ: who may evict whom is looked at only now and then while all just decode."""
    in_force = PolicySnapshot(7, "5" * 64, TiersPolicy.FAIR, (GOLD,), preempt_gap_ms=20.0)
    asked = [request(number, "gold", tenant=tenant, max_tokens=120) for number, tenant in ((1, "a/x"), (2, "b/z"))]
    options = {"max_num_seqs": 4, "max_resident": 1}
    without, beside = (run(in_force, shadow, asked, {}, options, (begins_s,)) for shadow in (None, SHADOW))
    assert without.scheduler.num_preemptions > 0
    assert outcome(beside) == outcome(without)


# Two worlds of little memory, without and with quotas, ceils and evictions by a gap, in which a shadow is asked all but these.
UNASKED = {"close", "hold", "let_go", "may_take", "next_change_s", "peek_below", "position"}
NODES = (NodeShare("a", kv_limit=KVAmount(tokens=160)), NodeShare("a/0", ceil=0.3))
PLAIN = PolicySnapshot(2, "2" * 64, TiersPolicy.FCFS, TIERS)
RICH = replace(PLAIN, tiers_policy=TiersPolicy.VIP, within_tier=WithinTier.FAIR, nodes=NODES, preempt_gap_ms=5.0)


@pytest.mark.parametrize("at_call", [1, 4])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_shadow_that_raises_at_any_hook_is_switched_off_and_nobody_notices(
    hook: str, at_call: int, caplog: pytest.LogCaptureFixture
) -> None:
    raised = [_raises_in_one_world(hook, at_call, in_force, caplog) for in_force in (PLAIN, RICH)]
    assert any(raised) == (hook not in UNASKED) or at_call > 1


def _raises_in_one_world(hook: str, at_call: int, in_force: PolicySnapshot, caplog: pytest.LogCaptureFixture) -> bool:
    """Whether the hook was called as often as that, and so raised."""
    calls = 0
    inner = getattr(VIPPolicy, hook)

    def fails(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += self is shadow_policy()
        if calls >= at_call and self is shadow_policy():
            raise ZeroDivisionError("of the shadow's own")
        return inner(self, *arguments)

    asked = [
        request(n, tier, prompt=prompt_of(n, 32, 5 * n), max_tokens=30, arrival_s=0.02 * n, tenant=f"a/{n % 3}")
        for n, tier in zip(range(1, 13), ["batch", "standard", "gold"] * 4, strict=True)
    ]
    options: dict[str, Any] = {"num_blocks": 16, "max_num_seqs": 4}
    without = run(in_force, None, asked, {}, options)
    driver = world(**options)
    driver.apply(in_force)
    driver.turn()
    driver.shadow(replace(in_force, generation=7, tiers_policy=TiersPolicy.VIP, locality_window_ms=50.0))
    driver.turn()

    def shadow_policy() -> Any:
        return driver.scheduler.shadow and driver.scheduler.shadow.state.policy

    caplog.clear()
    with patch.object(VIPPolicy, hook, fails):
        driver.turn()
        driver.add_at_arrival(asked)
        driver.run_until_idle(20_000)
    fault = report_of(driver).fault
    told = [record for record in caplog.records if "is switched off" in record.message]
    assert fault == ("" if calls < at_call else f"{fault.split(' ')[0]} raised ZeroDivisionError: of the shadow's own")
    assert (outcome(driver), len(told)) == (outcome(without), 1 if fault else 0)
    return bool(fault)


def test_a_shadow_that_writes_on_what_it_is_shown_is_switched_off() -> None:
    def meddles(self: Any, sequence: Any, since_s: float) -> None:
        if isinstance(sequence, Twin):
            sequence.token_ids.append(7)
        inner(self, sequence, since_s)

    inner = VIPPolicy.push
    driver = shadowed(SHADOW, policy=TiersPolicy.FCFS)
    with patch.object(VIPPolicy, "push", meddles):
        driver.add(request(1))
        driver.run_until_idle()
    assert report_of(driver).fault == "push raised AttributeError: 'ReadOnly' object has no attribute 'append'"
    assert driver.transcripts[RequestId(1)].ended is not None


@pytest.mark.parametrize("name", sorted(set(Sequence.__slots__) - OWN))
def test_a_twin_cannot_be_written_where_the_engine_writes(name: str) -> None:
    driver = world()
    driver.turn()
    driver.add(request(1))
    driver.turn()
    sequence = driver.scheduler.sequence(RequestId(1))
    assert sequence is not None
    twin = Twin(sequence)
    before = getattr(sequence, name)
    with pytest.raises(AttributeError):
        setattr(twin, name, object())
    assert getattr(sequence, name) is before


def test_the_shadow_starts_with_the_counters_in_force_and_shares_none() -> None:
    """a/x was served alone before the shadow began, so a/y goes first under both; then only live charges move either."""
    options: dict[str, Any] = {"policy": TiersPolicy.FAIR, "max_num_seqs": 1, "max_resident": 1}
    driver = world(**options)
    driver.turn()
    driver.add(request(1, tenant="a/x", max_tokens=40))
    driver.run_until_idle()
    driver.shadow(replace(SHADOW, tiers_policy=TiersPolicy.FAIR))
    driver.turn()
    for number, tenant in enumerate(["a/x", "a/y", "a/x", "a/y"], 2):
        driver.add(request(number, tenant=tenant))
    driver.run_until_idle()
    assert (report_of(driver).admissions, named(driver)) == (4, {})


# -- compared with itself ----------------------------------------------------------------------------------------------------

AMPLE = st.fixed_dictionaries(
    {
        "depth": st.sampled_from([0, 1, 2]),
        "num_blocks": st.just(400),
        "block_size": st.just(8),
        "budget": st.integers(16, 96),
        "max_num_seqs": st.integers(1, 8),
        "max_resident": st.just(24),
    }
)


@pytest.mark.parametrize("turns", [0, 3])
def test_one_that_predicts_gets_the_guesses_that_the_policy_in_force_does_not_ask_for(turns: int) -> None:
    driver = world(policy=TiersPolicy.FAIR)
    driver.add_at_arrival([request(number, prompt=20, max_tokens=30) for number in (1, 2)])
    for _ in range(turns):
        driver.turn()
    driver.shadow(PolicySnapshot(7, "5" * 64, TiersPolicy.FAIR, TIERS, predict_output=True))
    for _ in range(3):
        driver.turn()
    assert [one.expected_charge > 0 for one in driver.scheduler.running] == [True, True]


@settings(max_examples=80, deadline=None)
@given(
    policies(),
    requests(),
    st.dictionaries(st.integers(1, 20), st.floats(0, 1.0), max_size=4),
    AMPLE,
    st.one_of(st.just(()), st.tuples(st.floats(0, 0.6))),
)
def test_a_policy_beside_itself_differs_in_nothing_where_nobody_is_evicted(
    policy: PolicySnapshot,
    asked: list[Request],
    aborts: dict[int, float],
    options: dict[str, Any],
    begins_s: tuple[float, ...],
) -> None:
    """Where callers do not use `order`, whose exchange of places inside one step the shadow sees a step late. It may begin in the
    midst of traffic where the policy does not go by guesses of its own, which it would make anew then."""
    guesses = policy.within_tenant is WithinTenant.DEADLINE or policy.predict_output
    begins_s = () if guesses else begins_s
    driver = run(policy, policy, [replace(one, order=0) for one in asked], aborts, options, begins_s)
    assert (named(driver), report_of(driver).different_steps) == ({}, 0)


@pytest.mark.parametrize("turns", [4, 5])
def test_gentle_beside_itself_rests_in_the_same_steps_whenever_it_began(turns: int) -> None:
    """Batch 1 decodes while gold 2 reads 400 tokens in seven steps, and pauses in every other one of them."""
    policy = replace(SHADOW, tiers=(replace(GOLD, shaping=Shaping.GENTLE), replace(BATCH, min_share=0.0)))
    driver = world(budget=64)
    driver.apply(policy)
    driver.add(request(1, "batch", max_tokens=60))
    for _ in range(turns):
        driver.turn()
    driver.add(request(2, "gold", prompt=400))
    driver.turn()
    driver.shadow(policy)
    driver.run_until_idle()
    assert named(driver) == {}


def test_fair_beside_itself_knows_who_is_behind_however_late_it_begins() -> None:
    """One slot; a/1 has got much more than a/2 when the shadow begins, so that a/2 goes first for long."""
    policy = PolicySnapshot(2, "2" * 64, TiersPolicy.FAIR, TIERS)
    driver = world(max_num_seqs=1, max_resident=1)
    driver.apply(policy)
    for number in range(1, 25):
        driver.add(request(number, tenant=f"a/{1 + number % 2}"))
    for _ in range(20):
        driver.turn()
    driver.scheduler.policy.on_charge(Payer("batch", "a/1"), 600)
    driver.shadow(policy)
    driver.run_until_idle()
    assert (named(driver), report_of(driver).admissions > 15) == ({}, True)


# -- compared with another ---------------------------------------------------------------------------------------------------


def one_at_a_time(shadow: PolicySnapshot, **options: Any) -> EngineDriver:
    return shadowed(shadow, max_num_seqs=1, max_resident=1, **options)


def test_vip_beside_fcfs_would_have_let_gold_in_before_each_batch_request_ahead_of_it() -> None:
    """One slot, batch requests 1 to 4, then gold 5. FCFS lets 1 to 5 in; VIP would have taken 5 instead of 2, 3 and 4,
    and the slot from whoever had it."""
    driver = one_at_a_time(replace(SHADOW, tiers=(GOLD, replace(BATCH, min_share=0.0))), policy=TiersPolicy.FCFS)
    for number in range(1, 5):
        driver.add(request(number, "batch"))
    driver.turn()
    driver.add(request(5, "gold"))
    driver.run_until_idle()
    report = report_of(driver)
    would = {("instead", "org/gold", "org/batch"): 3, ("evicts", "org/gold", "org/batch"): 1}
    assert (report.admissions, named(driver)) == (5, would)


def test_a_request_that_it_would_evict_for_is_counted_once() -> None:
    """Gold 2 waits for 60 steps behind the one slot that batch 1 has."""
    driver = one_at_a_time(replace(SHADOW, tiers=(GOLD, replace(BATCH, min_share=0.0))), policy=TiersPolicy.FCFS)
    driver.add(request(1, "batch", max_tokens=60))
    driver.turn()
    driver.add(request(2, "gold"))
    driver.run_until_idle()
    assert named(driver) == {("evicts", "org/gold", "org/batch"): 1}


def test_evictions_that_it_would_not_have_made_are_counted() -> None:
    driver = one_at_a_time(replace(SHADOW, tiers_policy=TiersPolicy.FCFS), tiers=(GOLD, replace(BATCH, min_share=0.0)))
    driver.add(request(1, "batch", max_tokens=60))
    for _ in range(4):
        driver.turn()
    driver.add(request(2, "gold"))
    driver.run_until_idle()
    assert (report_of(driver).evictions, named(driver)[("spares", "org/batch", "org/gold")]) == (1, 1)


def test_its_cap_would_have_left_requests_waiting() -> None:
    """Of six that come at once, the shadow's max_running lets two in; the other four are let in beyond it."""
    nodes = (NodeShare("org/batch", max_running=2),)
    driver = shadowed(replace(SHADOW, nodes=nodes), max_num_seqs=8)
    for number in range(1, 7):
        driver.add(request(number, "batch"))
    driver.run_until_idle()
    assert named(driver) == {("later", "org/batch", ""): 4}


def test_the_cap_in_force_holds_up_what_it_would_have_let_in() -> None:
    """2 to 6 wait behind the max_running of 1 for more than LAST_STEPS, each once counted."""
    nodes = (NodeShare("org/batch", max_running=1),)
    driver = shadowed(SHADOW, nodes=nodes, max_num_seqs=8)
    for number in range(1, 7):
        driver.add(request(number, "batch", max_tokens=40))
    driver.run_until_idle()
    assert named(driver) == {("sooner", "org/batch", ""): 5}


def test_shaping_is_compared_in_tokens_and_paused_decodes() -> None:
    """Batch 1 decodes while gold 2 reads 150 tokens in three steps: `strict` would have paused it in each, and cut nothing of
    gold."""
    tiers = (replace(GOLD, shaping=Shaping.OFF), replace(BATCH, min_share=0.0))
    strict = replace(SHADOW, tiers=(replace(GOLD, shaping=Shaping.STRICT), tiers[1]))
    driver = shadowed(strict, tiers=tiers, budget=64)
    driver.add(request(1, "batch", max_tokens=30))
    for _ in range(4):
        driver.turn()
    driver.add(request(2, "gold", prompt=150))
    driver.run_until_idle()
    assert named(driver) == {("pauses", "org/batch", ""): 3}


def test_prompt_tokens_of_lower_tiers_above_its_share_are_cut() -> None:
    """Gold 1 decodes; batch 2 reads 120 tokens in chunks of 63 and 57; a quarter of 64 is 16 a step."""
    tiers = (replace(GOLD, shaping=Shaping.OFF), replace(BATCH, min_share=0.0))
    strict = replace(SHADOW, tiers=(replace(GOLD, shaping=Shaping.STRICT), tiers[1]))
    driver = shadowed(strict, tiers=tiers, budget=64)
    driver.add(request(1, "gold", max_tokens=30))
    for _ in range(4):
        driver.turn()
    driver.add(request(2, "batch", prompt=120))
    driver.run_until_idle()
    assert named(driver) == {("cuts", "org/batch", ""): 63 - 16 + 57 - 16}


# -- its life ----------------------------------------------------------------------------------------------------------------


def test_another_cost_is_refused_and_an_earlier_shadow_stays() -> None:
    driver = shadowed(SHADOW)
    before = driver.scheduler.shadow
    driver.shadow(replace(SHADOW, cost=CostName.ROOFLINE))
    driver.turn()
    assert [refusal.split(":")[:2] for refusal in driver.refusals] == [
        ["cost", " roofline cannot be shadowed while tokens is in force"]
    ]
    assert driver.scheduler.shadow is before


def test_what_the_worker_could_not_put_in_force_is_refused_and_an_earlier_shadow_stays() -> None:
    driver = shadowed(SHADOW)
    before = driver.scheduler.shadow
    driver.shadow(replace(SHADOW, nodes=(NodeShare("org/gold", kv_guarantee=KVAmount(tokens=10**9)),)))
    driver.turn()
    assert ([refusal.split(":")[0] for refusal in driver.refusals], driver.scheduler.shadow) == (["kv_guarantee"], before)


def test_a_new_policy_in_force_begins_the_comparison_anew() -> None:
    driver = shadowed(SHADOW, policy=TiersPolicy.FCFS)
    driver.add(request(1))
    driver.run_until_idle()
    driver.apply(PolicySnapshot(2, "2" * 64, TiersPolicy.FAIR, TIERS))
    driver.turn()
    report = report_of(driver)
    assert (report.sha256, report.admissions, report.fault) == (SHADOW.sha256, 0, "")


def test_a_new_policy_that_it_cannot_be_compared_with_ends_it() -> None:
    driver = shadowed(SHADOW)
    driver.apply(PolicySnapshot(2, "2" * 64, TiersPolicy.VIP, TIERS, cost=CostName.ROOFLINE))
    driver.turn()
    assert report_of(driver).fault.startswith("cost: tokens cannot be shadowed while roofline is in force")


def test_without_one_the_policy_in_force_stands_alone_again() -> None:
    driver = world()
    driver.turn()
    policy = driver.scheduler.policy
    driver.shadow(SHADOW)
    driver.turn()
    with_shadow = driver.scheduler.policy
    driver.shadow(None)
    driver.turn()
    assert (with_shadow is policy, driver.scheduler.policy is policy, driver.scheduler.stats().shadow) == (False, True, None)


def test_requests_of_a_tier_that_it_does_not_have_are_followed_all_the_same() -> None:
    driver = shadowed(replace(SHADOW, tiers=(GOLD,)))
    driver.add(request(1, "batch"))
    driver.run_until_idle()
    assert (report_of(driver).fault, report_of(driver).admissions) == ("", 1)


class Stopwatch:
    """Every look at it takes tick_s."""

    def __init__(self, tick_s: float) -> None:
        self.now_s = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


@pytest.mark.parametrize(
    ("own_s", "others_s", "fault"),
    [
        (0.02, 0.08, ""),
        (0.03, 0.07, "it took 30% of the engine's time, more than 25%"),
    ],
)
def test_one_that_takes_too_much_of_the_engines_time_is_switched_off(own_s: float, others_s: float, fault: str) -> None:
    watch = Stopwatch(own_s)
    driver = world()
    driver.turn()
    start_shadow(driver.scheduler, SHADOW, 0.0, watch)
    shadow = driver.scheduler.shadow
    assert shadow is not None
    for number in range(200):  # as many begin_step() as fill two windows
        shadow.tell(shadow.begin_step, 0.01 * number)
        watch.now_s += others_s - own_s
    assert shadow.fault == fault


def test_one_that_was_switched_off_stands_beside_nobody_and_keeps_its_counts_alone() -> None:
    driver = shadowed(replace(SHADOW, tiers=(GOLD, replace(BATCH, min_share=0.0))), policy=TiersPolicy.FCFS, max_resident=1)
    for number in range(1, 5):
        driver.add(request(number, "batch" if number < 4 else "gold"))
    for _ in range(12):
        driver.turn()
    shadow, before = driver.scheduler.shadow, report_of(driver)
    assert shadow is not None
    shadow.end("it is enough")
    driver.turn()
    after = report_of(driver)
    assert (isinstance(driver.scheduler.policy, Tee), shadow.state._twins, after.fault) == (False, {}, "it is enough")
    assert replace(after, fault="", over_s=0.0) == replace(before, over_s=0.0)


def test_the_same_policy_again_goes_on_counting_and_one_that_failed_begins_anew() -> None:
    driver = shadowed(SHADOW)
    driver.add(request(1))
    driver.run_until_idle()
    shadow = driver.scheduler.shadow
    driver.shadow(SHADOW)
    driver.turn()
    again = driver.scheduler.shadow
    assert shadow is not None
    shadow.end("it is enough")
    driver.shadow(SHADOW)
    driver.turn()
    assert (again is shadow, report_of(driver).fault, report_of(driver).admissions) == (True, "", 0)


def test_a_row_says_in_how_many_steps_a_tenant_would_have_fared_differently() -> None:
    gold, batch = Payer("gold", "a/x"), Payer("batch", "b/z")
    counts = Differences()
    counts.add(Kind.INSTEAD, gold, batch)
    counts.add(Kind.CUTS, batch, count=30)
    counts.end_step()
    counts.add(Kind.SPARES, batch, gold)
    counts.end_step()
    counts.end_step()
    counts.add(Kind.LATER, Payer("batch", "b/z/member"))
    counts.end_step()
    assert (counts.steps, counts.rows()) == (
        3,
        [
            Row(batch, 3, {Kind.CUTS: 30, Kind.SPARES: 1, Kind.LATER: 1}, {Kind.INSTEAD: 1}),
            Row(gold, 2, {Kind.INSTEAD: 1}, {Kind.SPARES: 1}),
        ],
    )


def test_rows_stay_bounded_and_what_has_none_of_its_own_is_in_its_tiers() -> None:
    counts = Differences()
    for number in range(2 * MAX_PARTIES):
        counts.add(Kind.LATER, Payer("gold", f"org{number}/a"), count=1 + (number == 7))
        counts.add(Kind.LATER, Payer("batch", "org/a"))
        counts.end_step()
    rows = counts.rows()
    assert (len(counts._parties) <= MAX_PARTIES + 2, len(rows)) == (True, MAX_ROWS + 1)
    assert sum(row.as_whom[Kind.LATER] for row in rows) == 4 * MAX_PARTIES + 1
    assert (rows[0].party, rows[0].steps, rows[-1].party) == (Payer("batch", "org/a"), 2 * MAX_PARTIES, Payer("gold", ""))


def test_counts_stay_bounded_and_members_count_for_their_tenant() -> None:
    counts = Differences()
    for number in range(3 * MAX_PAIRS):
        counts.add(Kind.SOONER, Payer("gold", f"saas/paid/{number}"))
        counts.add(Kind.LATER, Payer("gold", f"org{number}/a"))
    kept, told = len(counts._pairs), counts.total(Kind.LATER)
    assert (kept <= MAX_PAIRS + 1, len(counts.named()), told) == (True, MAX_NAMED, 3 * MAX_PAIRS)
    assert counts.named()[:2] == [
        Difference(Kind.SOONER, Payer("gold", "saas/paid"), NOBODY, 3 * MAX_PAIRS),
        Difference(Kind.LATER, Payer("gold", ""), NOBODY, 3 * MAX_PAIRS - (MAX_PAIRS - 1)),
    ]


def test_steps_that_a_ceil_of_the_shadow_would_have_taken_from_its_streams_are_counted() -> None:
    """Four streams have the worker to themselves, in steps of 50 ms; the shadow lets them have a fifth of it and a burst."""
    step = StepTime(fixed_s=0.05, sequence_s=0.0, token_s=0.0, context_s=0.0)
    shadow = replace(SHADOW, nodes=(NodeShare("a", ceil=0.2),))
    driver = shadowed(shadow, nodes=(), step_time=step, num_blocks=400)
    for number in range(1, 5):
        driver.add(request(number, tenant="a/x", prompt=8, max_tokens=300))
    for _ in range(201):
        driver.turn()
    assert named(driver) == {("pauses", "a/x", ""): pytest.approx(4 * 0.8 * 200, rel=0.05)}


def test_steps_that_only_a_ceil_in_force_takes_from_its_streams_are_counted() -> None:
    step = StepTime(fixed_s=0.05, sequence_s=0.0, token_s=0.0, context_s=0.0)
    driver = shadowed(SHADOW, nodes=(NodeShare("a", ceil=0.2),), step_time=step, num_blocks=400)
    driver.add(request(1, tenant="a/x", prompt=8, max_tokens=300))
    driver.add(request(2, tenant="b/x", prompt=8, max_tokens=300))
    for _ in range(200):
        driver.turn()
    left_out = 200 - len(driver.transcripts[1].token_ids)
    assert (named(driver), left_out > 100) == ({("runs", "a/x", ""): pytest.approx(left_out, abs=2)}, True)
