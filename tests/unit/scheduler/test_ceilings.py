"""`ceil`: a tier or node takes its part of the worker's time and no more, even if the rest idles. Everybody else loses nothing by
it, what runs pauses and goes on with its tokens, and an engine with nothing to do until a ceil lets go sleeps till then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from engine_world import TIERS, VOCAB, expected_tokens, request, world
from fairlane.blockmgr.manager import BlockManager
from fairlane.clock import FakeClock
from fairlane.scheduler.ceilings import BURST_S, Bucket, Ceilings, StepParts
from fairlane.scheduler.engine import Add, ApplyPolicy, Command, Engine, Stop
from fairlane.scheduler.events import PreemptionKind, PreemptionReason
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.fake_executor import FakeExecutor, StepTime
from fairlane.scheduler.policies import make_policy
from fairlane.scheduler.policies.guard import GuardedPolicy
from fairlane.scheduler.policies.ordered import OrderedPolicy
from fairlane.scheduler.request import Payer, Request, Sequence
from fairlane.scheduler.scheduler import Scheduler, SchedulerLimits
from fairlane.scheduler.tenancy import NO_POLICY, CostName, KVAmount, NodeShare, PolicySnapshot, Tier, TiersPolicy, WithinTier
from step_times import StepTimes, most_above

STEP = StepTime(fixed_s=0.05, sequence_s=0.0, token_s=0.0, context_s=0.0)
PLAIN = (Tier("gold", 100), Tier("standard", 50), Tier("batch", 10))


def flood(count: int, tenant: str, tier: str = "batch", first: int = 1, **more) -> list[Request]:
    return [request(first + i, tier, tenant=tenant, prompt=20, max_tokens=more.get("max_tokens", 60)) for i in range(count)]


def run_until(driver, end_s: float) -> None:
    while driver.clock.now() < end_s and driver.scheduler.num_unfinished + len(driver._commands):
        driver.turn()
        driver.rest()


def share(times: StepTimes, tenant: str, start_s: float, end_s: float) -> float:
    return sum(s for at, s in times.of_node(tenant) if start_s <= at < end_s) / (end_s - start_s)


# ---- the bucket --------------------------------------------------------------------------------------------------------
def test_a_step_is_paid_for_by_its_time_over_the_ceil_from_when_it_began() -> None:
    ceilings = Ceilings((Tier("batch", 10, ceil=0.25),))
    parts = StepParts()
    parts.add(Payer("batch", "a/x"), 30)
    parts.add(Payer("gold", "a/x"), 10)
    ceilings.take(parts, 1.0, now_s=11.0)  # began at 10: 10 - 0.4 of burst + 0.75 s of it / 25 %
    before = ceilings.advance(12.59), ceilings.shut
    after = ceilings.advance(12.6), ceilings.shut
    assert (before, after, BURST_S) == (((frozenset({"tier batch"}), frozenset()), {"tier batch"}),
                                         ((frozenset(), frozenset({"tier batch"})), frozenset()), 0.4)  # fmt: skip


def test_time_in_which_nothing_is_taken_counts_for_no_more_than_the_burst() -> None:
    idle, busy = Bucket(0.5), Bucket(0.5)
    idle.take(0.1, since_s=1000.0)
    busy.clear_s = 1000.0 - BURST_S
    busy.take(0.1, since_s=1000.0)
    assert idle.clear_s == busy.clear_s == pytest.approx(1000.0 - BURST_S + 0.2)


def test_a_payers_work_counts_for_its_tier_and_every_node_above_it_that_has_a_ceil() -> None:
    nodes = (NodeShare("a", ceil=0.5), NodeShare("a/x"), NodeShare("a/y", ceil=0.1))
    ceilings = Ceilings((Tier("gold", 2), Tier("batch", 1, ceil=0.2)), nodes)
    payers = [Payer("gold", "a/x/m"), Payer("batch", "a/y/m"), Payer("gold", "b")]
    assert [ceilings.gates(payer) for payer in payers] == [("a",), ("tier batch", "a", "a/y"), ()]


# ---- shares ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("policy", TiersPolicy)
@pytest.mark.parametrize("what", ["tier", "tenant", "organisation"])
def test_it_takes_its_ceil_of_the_workers_time_though_the_rest_idles(what: str, policy: TiersPolicy, depth: int) -> None:
    tiers = tuple(replace(tier, ceil=0.3 if what == "tier" and tier.name == "batch" else None) for tier in PLAIN)
    node = {"tier": (), "tenant": (NodeShare("a/x", ceil=0.3),), "organisation": (NodeShare("a", ceil=0.3),)}[what]
    driver = world(tiers=tiers, nodes=node, policy=policy, depth=depth, num_blocks=400, step_time=STEP, max_num_seqs=4)
    times = StepTimes(driver)
    for one in flood(60, "a/x"):
        driver.add(one)
    run_until(driver, 40.0)
    # Over 35 s one step is 0.14 %; a step more may be out, and the burst is 0.3 * 0.4 s.
    assert share(times, "a/x", 5.0, 40.0) == pytest.approx(0.3, abs=0.01)


def test_by_whichever_cost_time_is_split_nobody_is_above_the_ceil_and_the_other_has_the_rest() -> None:
    found = {}
    for cost in CostName:
        driver = world(policy=TiersPolicy.FAIR, nodes=(NodeShare("a", ceil=0.25),), cost=cost, step_time=STEP, num_blocks=900)
        times = StepTimes(driver)
        for one in (*flood(50, "a/x"), *flood(200, "b/x", first=100)):
            driver.add(one)
        run_until(driver, 30.0)
        busy = sum(elapsed_s for start_s, elapsed_s, _ in times.steps if 2.0 <= start_s < 30.0)
        found[cost] = (share(times, "a", 2.0, 30.0) < 0.27, busy > 27.9)
    assert found == dict.fromkeys(CostName, (True, True))  # the worker is never idle: only a/x rests


def test_the_ceil_of_every_node_above_binds() -> None:
    nodes = (NodeShare("a", ceil=0.3), NodeShare("a/x", ceil=0.2), NodeShare("a/y", ceil=0.9))
    driver = world(policy=TiersPolicy.FAIR, nodes=nodes, tiers=PLAIN, step_time=STEP, num_blocks=900)
    times = StepTimes(driver)
    for one in (*flood(60, "a/x"), *flood(60, "a/y", first=100)):
        driver.add(one)
    run_until(driver, 40.0)
    shares = [share(times, node, 5.0, 40.0) for node in ("a", "a/x")]
    assert (shares[0] == pytest.approx(0.3, abs=0.01), shares[1] <= 0.21) == (True, True)


def test_whoever_has_no_ceil_gets_what_others_may_not_take() -> None:
    """As soon as a/x rests, b/x has all the seats: a worker of 4 is never idle, and b/x gets 3/4 of it."""
    driver = world(policy=TiersPolicy.FCFS, nodes=(NodeShare("a/x", ceil=0.25),), tiers=PLAIN, step_time=STEP, num_blocks=400)
    times = StepTimes(driver)
    for one in (*flood(60, "a/x"), *flood(60, "b/x", first=100)):
        driver.add(one)
    run_until(driver, 20.0)
    assert share(times, "a/x", 2.0, 20.0) + share(times, "b/x", 2.0, 20.0) == pytest.approx(1.0, abs=0.01)


def test_a_ceil_that_does_not_bind_changes_nothing() -> None:
    steps = []
    for ceil in (None, 1.0):
        nodes = (NodeShare("a", ceil=ceil), NodeShare("a/x", weight=2.0, ceil=ceil))
        driver = world(policy=TiersPolicy.FAIR, nodes=nodes, tiers=PLAIN, step_time=STEP, num_blocks=60)
        times = StepTimes(driver)
        for one in (*flood(12, "a/x"), *flood(12, "a/y", first=50), *flood(12, "b/x", first=100)):
            driver.add(one)
        run_until(driver, 100.0)
        steps.append(times.steps)
    assert steps[0] == steps[1]


def test_a_min_is_kept_beside_a_ceil_and_under_one() -> None:
    """VIPs want everything; batch is owed 10 %, may take 20 % and decodes in steps of which it gets most."""
    tiers = (Tier("gold", 100), Tier("batch", 10, min_share=0.1, ceil=0.2))
    driver = world(tiers=tiers, step_time=STEP, num_blocks=900, max_num_seqs=4, budget=32)
    times = StepTimes(driver)
    for one in (*flood(30, "b/x", "batch"), *flood(400, "a/x", "gold", first=100)):
        driver.add(one)
    run_until(driver, 60.0)
    assert 0.095 <= share(times, "b/x", 5.0, 55.0) <= 0.21


def test_time_at_its_ceil_earns_a_node_no_claim_on_fair_shares() -> None:
    """Two equal siblings; a/x may take 10 % for 20 s. Then the ceil is lifted, and they are served alike from there on."""
    snapshot = PolicySnapshot(1, "", TiersPolicy.FAIR, PLAIN, nodes=(NodeShare("a/x", ceil=0.1),))
    driver = world(policy=TiersPolicy.FAIR, nodes=snapshot.nodes, tiers=PLAIN, step_time=STEP, num_blocks=900)
    times = StepTimes(driver)
    for one in (*flood(300, "a/x"), *flood(300, "a/y", first=400)):
        driver.add(one)
    driver.apply(replace(snapshot, generation=2, nodes=()), at_s=20.0)
    run_until(driver, 30.0)
    shares = [share(times, node, 21.0, 26.0) for node in ("a/x", "a/y")]
    assert shares[0] == pytest.approx(shares[1], abs=0.1)


# ---- what runs ---------------------------------------------------------------------------------------------------------
def test_streams_pause_with_their_blocks_are_told_why_and_go_on_with_their_tokens() -> None:
    driver = world(nodes=(NodeShare("a/x", ceil=0.1),), tiers=PLAIN, step_time=STEP)
    one = request(1, tenant="a/x", prompt=20, max_tokens=30)
    driver.add(one)
    driver.run_until_idle()
    transcript = driver.transcripts[1]
    told = {delta.preempted for delta in transcript.deltas if delta.preempted}
    resumed = [delta.resumed_after_s for delta in transcript.deltas if delta.resumed_after_s]
    assert told == {(PreemptionKind.PAUSED, PreemptionReason.CEIL)}
    assert (min(resumed) >= 0.25, transcript.token_ids, transcript.ended.preemptions) == (True, expected_tokens(one), 0)


def test_whoever_must_grow_takes_blocks_of_those_that_rest() -> None:
    """b/x came later, so under FCFS it may take nobody's blocks; a/x holds 9 of 12 and rests nine tenths of the time."""
    driver = world(policy=TiersPolicy.FCFS, nodes=(NodeShare("a/x", ceil=0.02),), tiers=PLAIN, step_time=STEP, num_blocks=12)
    driver.add(request(1, tenant="a/x", prompt=130, max_tokens=40))
    driver.turn()
    driver.add(other := request(2, tenant="b/x", prompt=10, max_tokens=100))
    run_until(driver, 7.0)
    assert driver.transcripts[2].token_ids == expected_tokens(other)  # 100 steps of 50 ms


def test_who_can_neither_grow_nor_take_blocks_of_those_that_rest_is_told_that_it_stands_still() -> None:
    """a/x, immune by now, rests with 9 of 11 blocks until its end; b/x needs a third one at its 33rd token."""
    driver = world(policy=TiersPolicy.FCFS, nodes=(NodeShare("a/x", ceil=0.05),), tiers=PLAIN, step_time=STEP, num_blocks=12)
    driver.add(request(1, tenant="a/x", prompt=130, max_tokens=14))
    driver.turn()
    driver.scheduler.sequence(1).num_evictions = 3
    driver.add(other := request(2, tenant="b/x", prompt=10, max_tokens=100))
    turns = 0
    while driver.turn() or driver.scheduler.num_unfinished:
        driver.rest()
        turns += 1
    told = {delta.preempted for delta in driver.transcripts[2].deltas if delta.preempted}
    stood_s = max(delta.resumed_after_s or 0.0 for delta in driver.transcripts[2].deltas)
    assert told == {(PreemptionKind.PAUSED, PreemptionReason.KV_CAPACITY)}
    assert driver.transcripts[2].token_ids == expected_tokens(other)
    assert (stood_s > 5.0, turns < 500) == (True, True)  # it is not asked every millisecond, either


def preemptions(driver, number: int) -> list[tuple[PreemptionKind, PreemptionReason]]:
    told = [delta.preempted for delta in driver.transcripts[number].deltas if delta.preempted]
    return [one for one in told if one[0] is not PreemptionKind.PAUSED]


@pytest.mark.parametrize("policy", TiersPolicy)
def test_whoever_waits_takes_the_place_of_those_that_rest(policy: TiersPolicy) -> None:
    """a/x holds 10 of 12 blocks and the only slot, and rests; b/x, of the same tier, needs 3 and runs at once. a/x gets its own
    tokens all the same."""
    options = {"tiers": PLAIN, "step_time": STEP, "num_blocks": 12, "max_resident": 1, "policy": policy}
    driver = world(nodes=(NodeShare("a/x", ceil=0.02),), **options)
    driver.add(resting := request(1, tenant="a/x", prompt=150, max_tokens=12))
    while not driver.scheduler.ceilings.shut:
        driver.turn()
    driver.add(other := request(2, tenant="b/x", prompt=34, max_tokens=5))
    for _ in range(6):
        driver.turn()
    assert driver.transcripts[2].token_ids == expected_tokens(other)
    assert driver.scheduler.sequence(resting.request_id).evicted_by == Payer("batch", "a/x")  # it pays itself
    driver.run_until_idle()
    assert preemptions(driver, 1) == [(PreemptionKind.RECOMPUTED, PreemptionReason.CEIL)]
    assert driver.transcripts[1].token_ids == expected_tokens(resting)


def test_a_lower_tier_takes_nothing_of_a_higher_one_that_rests() -> None:
    tiers = (Tier("gold", 100, ceil=0.05), Tier("batch", 10))
    driver = world(tiers=tiers, step_time=STEP, num_blocks=12, max_resident=2)
    for number in (1, 2):
        driver.add(request(number, "gold", tenant="a/x", prompt=65, max_tokens=12))
    driver.add(request(3, "batch", tenant="b/x", prompt=34, max_tokens=5, arrival_s=0.1))
    driver.run_until_idle()
    assert preemptions(driver, 1) + preemptions(driver, 2) == []


def test_one_that_rests_is_not_evicted_for_that_more_than_three_times() -> None:
    """Requests of b/x come all the time, each larger than what a/x leaves; a/x still gets to its end."""
    driver = world(policy=TiersPolicy.FCFS, nodes=(NodeShare("a/x", ceil=0.1),), tiers=PLAIN, step_time=STEP, num_blocks=12)
    one = request(1, tenant="a/x", prompt=100, max_tokens=30)
    driver.add_at_arrival([one, *(request(n, tenant="b/x", prompt=100, max_tokens=4, arrival_s=n * 0.4) for n in range(2, 400))])
    while driver.transcripts[1].ended is None:
        driver.turn()
        driver.rest()
        if not driver.scheduler.num_unfinished:
            driver.clock.advance(0.01)
    assert (preemptions(driver, 1), driver.transcripts[1].token_ids) == (
        [(PreemptionKind.RECOMPUTED, PreemptionReason.CEIL)] * 3, expected_tokens(one))  # fmt: skip


def test_a_protected_tier_at_its_ceil_protects_nobody() -> None:
    """Half of a step is for gold while it runs; while it rests, batch reads its prompt in whole steps."""
    tiers = (replace(TIERS[0], ceil=0.02), Tier("batch", 10))
    driver = world(tiers=tiers, step_time=STEP, num_blocks=400, budget=64)
    driver.add(request(1, "gold", prompt=30, max_tokens=100))
    while not driver.scheduler.ceilings.shut:
        driver.turn()
    driver.add(request(2, "batch", prompt=640, max_tokens=2))
    before = driver.scheduler.step_id
    while not driver.transcripts[2].token_ids:
        driver.turn()
    assert driver.scheduler.step_id - before == 10


def test_a_kv_guarantee_is_not_served_while_the_ceil_binds_and_is_then() -> None:
    nodes = (NodeShare("a/x", ceil=0.05, kv_guarantee=KVAmount(share=0.5)), NodeShare("b/x"))
    driver = world(policy=TiersPolicy.FAIR, nodes=nodes, tiers=PLAIN, step_time=STEP, num_blocks=20)
    asked = [*flood(6, "a/x", max_tokens=20), *flood(12, "b/x", first=50)]
    for one in asked:
        driver.add(one)
    times = StepTimes(driver)
    driver.run_until_idle()
    done = all(driver.transcripts[one.request_id].token_ids == expected_tokens(one) for one in asked)
    assert (done, most_above(times.of_node("a/x"), 0.05) <= 0.05 * BURST_S + 0.05 + 1e-9) == (True, True)


# ---- the engine sleeps -------------------------------------------------------------------------------------------------
class SleepyInbox:
    """Sleeps as long as it is told to, on the fake clock, and notes it."""

    def __init__(self, clock: FakeClock, commands: list[Command], wake_after_s: float = 1e9) -> None:
        self.timeouts: list[float | None] = []
        self._clock = clock
        self._commands = commands
        self._stops_s = wake_after_s

    def drain(self, timeout_s: float | None) -> Iterable[Command]:
        self.timeouts.append(timeout_s)
        if self._commands:
            commands, self._commands = self._commands, []
            return commands
        if timeout_s is None or self._clock.now() >= self._stops_s:
            return [Stop()]
        self._clock.advance(timeout_s)
        return []

    def put(self, *_) -> None: ...


def engine(commands: list[Command], *, depth: int = 0, stops_s: float = 1e9) -> tuple[Engine, SleepyInbox, Scheduler, FakeClock]:
    clock = FakeClock()
    info = ExecutorInfo("fake", VOCAB, 4096, 16, 101, (2,), 0)
    scheduler = Scheduler(SchedulerLimits(), BlockManager(101, 16), make_policy(NO_POLICY), clock)
    inbox = SleepyInbox(clock, commands, stops_s)
    return Engine(scheduler, FakeExecutor(info, clock, step_time=STEP), clock, inbox, inbox, depth), inbox, scheduler, clock


def snapshot_with(**ceils: float) -> PolicySnapshot:
    nodes = tuple(NodeShare(f"a/{name}", ceil=ceil) for name, ceil in ceils.items())
    return PolicySnapshot(1, "", TiersPolicy.VIP, PLAIN, nodes=nodes)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_engine_whose_work_all_rests_sleeps_until_a_ceil_lets_go(depth: int) -> None:
    one = request(1, tenant="a/x", prompt=20, max_tokens=40)
    found, inbox, scheduler, _ = engine([ApplyPolicy(snapshot_with(x=0.1), lambda _: None), Add(one)], depth=depth)
    found.run()
    slept = [timeout for timeout in inbox.timeouts if timeout]
    # 40 steps of 50 ms at 10 % are 20 s, 18 s of them idle, less the burst of 0.4 s and what the last step need not wait for. It
    # wakes for a step and to say that it pauses: a few turns for each, and none without a reason.
    turns = len(inbox.timeouts)
    assert (sum(slept) == pytest.approx(17.0, abs=0.5), turns <= 5 * scheduler.step_id, scheduler.num_unfinished) == (
        True,
        True,
        0,
    )


def test_what_is_told_of_an_engine_that_sleeps_is_how_it_went_to_sleep() -> None:
    asked = [request(number, tenant="a/x", max_tokens=400) for number in (1, 2)]
    found, _, scheduler, _ = engine([ApplyPolicy(snapshot_with(x=0.01), lambda _: None), *map(Add, asked)], stops_s=3.0)
    found.run()
    assert (found.stats.step_id, found.stats.ceilings[0].binds) == (scheduler.step_id, True)


def test_a_deadline_is_kept_while_everybody_rests() -> None:
    asked = [request(1, tenant="a/x", max_tokens=400), request(2, tenant="a/x", max_tokens=400, deadline_s=3.0)]
    found, _, scheduler, clock = engine([ApplyPolicy(snapshot_with(x=0.01), lambda _: None), *map(Add, asked)], stops_s=3.2)
    found.run()
    assert (scheduler.num_unfinished, clock.now() < 6.0) == (1, True)


def test_a_reload_keeps_what_is_owed_in_worker_time() -> None:
    found, inbox, scheduler, clock = engine(
        [ApplyPolicy(snapshot_with(x=0.1), lambda _: None), Add(request(1, tenant="a/x", max_tokens=300))], stops_s=10.0
    )
    found.run()
    while not scheduler.ceilings.shut:
        found.turn(wait=False)
    owed_s = (scheduler.ceilings.buckets["a/x"].clear_s - clock.now()) * 0.1
    inbox._commands = [ApplyPolicy(replace(snapshot_with(x=0.5), generation=2), lambda _: None)]
    found._obey(inbox._commands.pop())
    assert (scheduler.ceilings.buckets["a/x"].clear_s - clock.now()) * 0.5 == pytest.approx(owed_s)


# ---- policies of others ------------------------------------------------------------------------------------------------
class Latest(OrderedPolicy):
    name = "latest"

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (-float(sequence.arrival_index),)


class Heedless(Latest):
    """Does not care what it is told of ceilings."""

    def shut(self, gate: str) -> None: ...

    def reopen(self, gate: str) -> None: ...


@pytest.mark.parametrize("make", [Latest, Heedless])
def test_it_holds_under_a_policy_of_somebody_elses(make: type[OrderedPolicy]) -> None:
    tiers = (Tier("gold", 100), Tier("batch", 10, ceil=0.4))
    snapshot = PolicySnapshot(1, "", TiersPolicy.VIP, tiers, nodes=(NodeShare("a/x", ceil=0.2),))
    driver = world(tiers=tiers, nodes=snapshot.nodes, step_time=STEP, num_blocks=400, max_num_seqs=4)
    driver.turn()
    policy = GuardedPolicy(make(snapshot), snapshot)
    driver.scheduler.apply_policy(policy, 1, ceilings=Ceilings(tiers, snapshot.nodes))
    times = StepTimes(driver)
    for one in (*flood(30, "a/x", "gold"), *flood(60, "b/x", "batch", first=100)):
        driver.add(one)
    run_until(driver, 40.0)
    shares = (share(times, "a/x", 5.0, 40.0), share(times, "b/x", 5.0, 40.0))
    assert (shares, policy.fault) == (pytest.approx((0.2, 0.4), abs=0.02), "")


def test_who_takes_over_from_a_policy_that_failed_knows_whom_ceilings_keep_back() -> None:
    tiers = (Tier("gold", 100), Tier("batch", 10, ceil=0.1))
    snapshot = PolicySnapshot(1, "", TiersPolicy.VIP, tiers)
    guarded = GuardedPolicy(Latest(snapshot), snapshot)
    waiting = Sequence(request(1, "batch", tenant="a/x"), 0, None)  # type: ignore[arg-type]
    guarded.push(waiting, 0.0)
    guarded.shut("tier batch")
    guarded._replace("as asked")
    shut = guarded.peek()
    guarded.reopen("tier batch")
    assert (guarded.name, shut, guarded.peek()) == ("fcfs", None, waiting)


def test_patience_deadlines_and_locality_bring_nobody_past_a_ceil() -> None:
    tiers = (Tier("gold", 100), Tier("batch", 10, patience_s=0.2, min_share=0.3, ceil=0.3))
    driver = world(tiers=tiers, step_time=STEP, within=WithinTier.FAIR, num_blocks=400, max_num_seqs=4, window_ms=50.0)
    times = StepTimes(driver)
    for one in (*flood(60, "a/x", "batch"), *flood(60, "a/y", "batch", first=100)):
        driver.add(one)
    run_until(driver, 20.0)
    assert most_above(times.of_tier("batch"), 0.3) <= 0.3 * BURST_S + 0.05 + 1e-9
