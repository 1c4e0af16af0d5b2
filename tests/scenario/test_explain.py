"""Why a request waits, as the scheduler says it: by hand-made situations whose answer is plain, and against what then happens."""

from __future__ import annotations

from dataclasses import replace

from engine_world import BATCH, GOLD, request, snapshot, world
from fairlane.scheduler.ceilings import Binding
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.engine import Explain
from fairlane.scheduler.explain import MAX_LOOKED_AT, BindingCap, Explanation, Party, Reason, State
from fairlane.scheduler.request import Payer, Request, RequestId
from fairlane.scheduler.stats import AccountStats
from fairlane.scheduler.tenancy import KVAmount, NodeShare, PolicySnapshot, Tier, TiersPolicy, WithinTier

PLAIN = (Tier("gold", 100), Tier("batch", 10))
FILL = {"prompt": 16, "max_tokens": 1000}


def asked(driver: EngineDriver, number: int) -> Explanation | None:
    """The answer, which comes with the next turn, before its step."""
    answers: list[Explanation | None] = []
    driver._commands.append(Explain(RequestId(number), answers.append))
    driver.turn()
    (answer,) = answers
    return answer


def explained(driver: EngineDriver, number: int) -> Explanation:
    answer = asked(driver, number)
    assert answer is not None
    return answer


def running(driver: EngineDriver, *requests: Request) -> EngineDriver:
    for one in requests:
        driver.add(one)
    for _ in range(4):
        driver.turn()
    return driver


def capped(limit: int, path: str = "org/batch") -> PolicySnapshot:
    return replace(snapshot(), nodes=(NodeShare(path, max_running=limit),), generation=2)


def test_a_request_that_is_gone_has_no_explanation() -> None:
    assert asked(world(), 7) is None


def test_a_running_request_waits_for_nothing() -> None:
    found = explained(running(world(), request(1)), 1)
    assert (found.state, found.reasons, found.rank, found.waited_s) == (State.RUNNING, (), 0, 0.0)


def test_a_cap_that_is_reached_is_named_with_its_count() -> None:
    driver = world()
    driver.apply(capped(2))
    running(driver, request(1, **FILL), request(2, **FILL), request(3))
    found = explained(driver, 3)
    assert (found.state, found.reasons, found.caps) == (State.WAITING, (Reason.CAP,), (BindingCap("org/batch", 2, 2),))


def test_a_kv_limit_that_is_reached_is_named_with_what_it_lacks() -> None:
    # 9 blocks at most: the first has 4, the second needs 6; 1 more is kept for growth.
    driver = world(tiers=PLAIN, budget=256, nodes=(NodeShare("org/batch", kv_limit=KVAmount(tokens=9 * 16)),))
    running(driver, request(1, prompt=60), request(2, prompt=90))
    found = explained(driver, 2)
    assert (found.reasons, found.full_account, found.blocks_needed, found.blocks_missing, found.kv_accounts) == (
        (Reason.KV_LIMIT,),
        "org/batch",
        6,
        1,
        (AccountStats("org/batch", 4, 0, 9),),
    )


def test_an_organisations_cap_binds_its_tenants() -> None:
    driver = world()
    driver.apply(capped(1, "org"))
    running(driver, request(1, **FILL), request(2, tenant="org/other"))
    assert explained(driver, 2).caps == (BindingCap("org", 1, 1),)


def test_a_members_cap_comes_from_its_tenants_template() -> None:
    driver = world()
    driver.apply(replace(snapshot(), nodes=(NodeShare("org/t", member_max_running=1),), generation=2))
    running(driver, request(1, tenant="org/t/alice", **FILL), request(2, tenant="org/t/alice"), request(3, tenant="org/t/bob"))
    assert (explained(driver, 2).caps, explained(driver, 3).state) == ((BindingCap("org/t/alice", 1, 1),), State.RUNNING)


def test_no_slot_is_said_to_be_why() -> None:
    driver = running(world(max_resident=2), request(1, **FILL), request(2, **FILL), request(3))
    found = explained(driver, 3)
    assert (found.reasons, found.rank) == ((Reason.SLOTS,), 1)


def test_missing_blocks_are_counted_with_what_is_left_free() -> None:
    # 9 blocks of 16: the first holds 6 (90 tokens and what it has generated), one is kept free.
    driver = running(world(num_blocks=9), request(1, prompt=90, max_tokens=6), request(2, prompt=60))
    found = explained(driver, 2)
    assert (found.reasons, found.blocks_needed, found.blocks_free, found.blocks_missing) == ((Reason.BLOCKS,), 4, 3, 2)


def test_who_goes_before_is_counted_by_payer_and_is_who_then_goes() -> None:
    driver = running(world(max_resident=1, tiers=PLAIN), request(1, "gold", prompt=16, max_tokens=6))
    later = [request(2, "batch"), request(3, "gold", tenant="org/a"), request(4, "batch"), request(5, "gold", tenant="org/b")]
    for one in later:
        driver.add(one)
    found = explained(driver, 4)
    driver.run_until_idle()
    starts = sorted((2, 3, 5), key=lambda number: driver.transcripts[RequestId(number)].first_token_s or 0.0)
    assert (found.rank, set(found.ahead)) == (
        4, {Party(Payer("gold", "org/a"), 1), Party(Payer("gold", "org/b"), 1), Party(Payer("batch", "org/batch"), 1)},
    )  # fmt: skip
    assert starts == [3, 5, 2]


def test_of_ones_own_line_those_with_more_order_go_before() -> None:
    driver = running(world(max_resident=1), request(1, **FILL))
    for one in (request(2), request(3, order=5)):
        driver.add(one)
    assert (explained(driver, 2).rank, explained(driver, 3).rank) == (2, 1)


def test_those_that_a_cap_holds_up_are_in_nobodys_way() -> None:
    driver = world(max_resident=2)
    driver.apply(capped(1, "org/a"))
    running(driver, request(1, tenant="org/a", **FILL), request(2, tenant="org/b", **FILL))
    for one in (request(3, tenant="org/a"), request(4, tenant="org/b")):
        driver.add(one)
    found = explained(driver, 4)
    assert (found.rank, found.ahead) == (1, ())


def test_of_those_that_the_same_cap_holds_up_each_knows_its_place() -> None:
    """3 and 6 wait for a cap of their own, too, and so are in nobody else's way; 6's line stands where 3 stands."""
    driver = world(max_resident=4)
    nodes = (NodeShare("org", max_running=2), NodeShare("org/a", max_running=1))
    driver.apply(PolicySnapshot(2, "", TiersPolicy.VIP, (Tier("batch", 10),), nodes=nodes))
    running(driver, request(1, tenant="org/a", **FILL), request(2, tenant="org/b", **FILL))
    for number, tenant in ((3, "org/a"), (4, "org/b"), (5, "org/b"), (6, "org/a")):
        driver.add(request(number, tenant=tenant))
    assert {number: explained(driver, number).rank for number in range(3, 7)} == {3: 1, 4: 1, 5: 2, 6: 2}


def test_under_a_cap_a_start_is_estimated_by_those_of_its_own_line() -> None:
    driver = world(max_resident=4)
    driver.apply(capped(1))
    running(driver, *(request(number, max_tokens=10) for number in range(1, 13)))
    for _ in range(60):
        driver.turn()
    found = [explained(driver, number) for number in (11, 12)]
    start_s = [one.estimated_start_s or 0.0 for one in found]
    assert 0.0 < start_s[0] < start_s[1]


def test_fair_shares_rank_whoever_has_had_less_first() -> None:
    driver = world(max_resident=1)
    tiers = (replace(BATCH, patience_s=None, min_share=0.0),)
    driver.apply(PolicySnapshot(2, "1" * 64, TiersPolicy.VIP, tiers, WithinTier.FAIR))
    running(driver, request(1, tenant="org/a", prompt=60, max_tokens=30))
    for one in (request(2, tenant="org/a"), request(3, tenant="org/b")):
        driver.add(one)
    for _ in range(3):  # in which org/a is served and org/b is not
        driver.turn()
    assert (explained(driver, 2).rank, explained(driver, 3).rank) == (2, 1)


def test_running_requests_say_whose_blocks_may_be_taken() -> None:
    driver = running(
        world(max_resident=2, tiers=(GOLD, BATCH)), request(1, "batch", **FILL), request(2, "gold", prompt=16, max_tokens=900)
    )
    driver.add(request(3, "batch"))
    found = explained(driver, 3)
    assert set(found.holders) == {Party(Payer("batch", "org/batch"), 1, 0), Party(Payer("gold", "org/gold"), 1, 0)}


def test_an_evicted_request_says_when_how_and_for_whom() -> None:
    driver = running(world(num_blocks=9, tiers=(GOLD, BATCH)), request(1, "batch", prompt=60, max_tokens=40))
    driver.add(request(2, "gold", prompt=100, max_tokens=20))
    for _ in range(3):
        driver.turn()
    found = explained(driver, 1)
    ((ago_s, eviction),) = found.evictions
    assert (found.state, found.preemptions, ago_s >= 0.0) == (State.WAITING, 1, True)
    assert (eviction.kind.value, eviction.reason.value, eviction.by) == ("recomputed", "higher_rank", Payer("gold", "org/gold"))
    assert found.holders == (Party(Payer("gold", "org/gold"), 1, 0),)


def test_a_start_is_estimated_from_how_often_requests_got_in() -> None:
    driver = world(max_resident=1)
    for number in range(1, 30):
        driver.add(request(number, max_tokens=4))
    while len([t for t in driver.transcripts.values() if t.ended]) < 10:
        driver.turn()
    found = explained(driver, 29)
    assert found.estimated_start_s is not None
    start_s = driver.clock.now() + found.estimated_start_s
    driver.run_until_idle()
    actual_s = driver.transcripts[RequestId(29)].first_token_s
    assert actual_s is not None and abs(actual_s - start_s) < 0.25 * actual_s


def test_nothing_is_estimated_from_nothing() -> None:
    driver = running(world(max_resident=1), request(1, **FILL), request(2))
    assert explained(driver, 2).estimated_start_s is None


def test_with_very_many_waiting_only_the_oldest_are_counted_and_it_says_so() -> None:
    driver = world(max_resident=1)
    for number in range(1, MAX_LOOKED_AT + 100):
        driver.add(request(number, prompt=1, max_tokens=2))
    driver.turn()
    found = explained(driver, MAX_LOOKED_AT + 99)
    assert (found.is_partial, found.rank <= MAX_LOOKED_AT) == (True, True)


def test_asking_changes_neither_tokens_nor_order() -> None:
    def run(asking: bool) -> list[tuple[int, float | None, list[int]]]:
        driver = world(num_blocks=12, max_resident=3, depth=1, check=True)
        for number in range(1, 16):
            driver.add(request(number, "gold" if number % 3 == 0 else "batch", prompt=20 + number, max_tokens=12))
        while driver.turn() or driver.scheduler.num_unfinished:
            if asking:
                for number in range(1, 16):
                    driver._commands.append(Explain(RequestId(number), lambda answer: None))
        return [(number, t.first_token_s, t.token_ids) for number, t in driver.transcripts.items()]

    assert run(asking=True) == run(asking=False)


def test_a_ceil_that_binds_is_named_with_when_it_lets_go() -> None:
    driver = world(
        policy=TiersPolicy.FCFS, tiers=(Tier("gold", 100), Tier("batch", 10, ceil=0.5)), nodes=(NodeShare("a", ceil=0.1),)
    )
    driver.add(request(1, "batch", tenant="a/x", **FILL))
    while not driver.scheduler.ceilings.shut:
        driver.turn()
    for one in (request(2, "gold", tenant="a/y"), request(3, "gold", tenant="b/x"), request(4, "gold", tenant="a/z")):
        driver.add(one)
    answers: list[Explanation | None] = []
    driver._commands += [Explain(RequestId(number), answers.append) for number in (1, 2, 3, 4)]
    lets_go_s = driver.scheduler.ceilings.buckets["a"].clear_s
    now_s = driver.clock.now()
    driver.turn()
    paused, waiting, other, last = answers
    assert paused is not None and waiting is not None and other is not None and last is not None
    binding = (Binding("a", 0.1, lets_go_s - now_s),)
    assert (paused.state, paused.reasons, paused.ceilings) == (State.PAUSED, (), binding)
    assert (waiting.state, waiting.reasons, waiting.ceilings) == (State.WAITING, (Reason.CEIL,), binding)
    assert (other.reasons, other.ceilings) == ((Reason.STEP,), ())  # a/y came before it and does not go before it
    assert (last.reasons, [party.payer.tenant for party in last.ahead]) == ((Reason.CEIL, Reason.RANK), ["a/y", "b/x"])


def test_nothing_is_expected_to_start_before_its_ceil_lets_go() -> None:
    """Requests of a/x started every few steps; then its ceil is lowered to a hundredth."""
    driver = world(policy=TiersPolicy.FCFS, max_resident=1, nodes=(NodeShare("a/x", ceil=0.9),))
    for number in range(1, 30):
        driver.add(request(number, "batch", tenant="a/x", prompt=10, max_tokens=3))
    while driver.scheduler.step_id < 60:
        driver.turn()
        driver.rest()
    driver.apply(replace(snapshot(TiersPolicy.FCFS), nodes=(NodeShare("a/x", ceil=0.01),), generation=2))
    driver.turn()
    while not driver.scheduler.ceilings.shut:
        driver.turn()
    found = explained(driver, 29)
    (binding,) = found.ceilings
    assert found.estimated_start_s is not None and found.estimated_start_s >= binding.for_s > 0
