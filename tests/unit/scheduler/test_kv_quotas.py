"""KV quotas in the scheduler, one promise a test, with its arithmetic. Blocks are of 16 tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine_world import BATCH, GOLD, expected_tokens, request, snapshot, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.events import EndReason, PreemptionKind, PreemptionReason
from fairlane.scheduler.request import Request
from fairlane.scheduler.tenancy import GroupShare, KVAmount, NodeShare, PolicySnapshot, Tier

PLAIN = (Tier("gold", 100), Tier("batch", 10))


def tokens(blocks: int) -> KVAmount:
    return KVAmount(tokens=16 * blocks)


def node(path: str, guarantee: int = 0, limit: int = 0) -> NodeShare:
    return NodeShare(path, kv_guarantee=tokens(guarantee) if guarantee else None, kv_limit=tokens(limit) if limit else None)


def started(driver: EngineDriver, *requests: Request, turns: int = 2) -> EngineDriver:
    for one in requests:
        driver.add(one)
    for _ in range(turns):
        driver.turn()
    return driver


def running(driver: EngineDriver) -> set[int]:
    return {sequence.request_id for sequence in driver.scheduler.running}


def preempted(driver: EngineDriver, number: int) -> list[object]:
    return [d.preempted for t in [driver.transcripts[number]] for d in t.deltas if d.preempted]  # type: ignore[index]


def policy(*nodes: NodeShare, generation: int = 2) -> PolicySnapshot:
    return replace(snapshot(tiers=PLAIN, generation=generation), nodes=nodes)


def test_without_quotas_there_is_nothing_to_count_for() -> None:
    driver = started(world(nodes=(NodeShare("org/batch", max_running=3),)), request(1))
    assert (driver.scheduler.census.quotas, driver.blocks.pool.usage.accounts, driver.blocks.pool.shields) == (None, None, None)


def test_a_tenant_at_its_limit_waits_and_nobody_else_does() -> None:
    # 4 of 40 blocks each; the limit of 9 leaves a margin of 1, so two of the hoarder's fit. Its other 28 hold up nobody.
    driver = world(tiers=PLAIN, num_blocks=40, budget=256, nodes=(node("org/batch", limit=9),))
    started(driver, *(request(n, prompt=60, max_tokens=40) for n in range(1, 31)), request(99, prompt=60, tenant="org/other"))
    assert (running(driver), driver.blocks.used_by("tenant:org/batch")) == ({1, 2, 99}, 8)


def test_the_limit_holds_while_its_sequences_grow_and_all_get_their_tokens() -> None:
    driver = world(tiers=PLAIN, num_blocks=60, budget=256, nodes=(node("org/batch", limit=9),))
    asked = [request(n, prompt=60, max_tokens=70) for n in range(1, 6)]  # 9 blocks each in the end
    started(driver, *asked)
    most = 0
    while driver.turn():
        most = max(most, driver.blocks.used_by("tenant:org/batch"))
    assert (most, [driver.transcripts[a.request_id].token_ids for a in asked]) == (9, [expected_tokens(a) for a in asked])


def test_a_higher_tier_takes_the_blocks_of_the_same_tenants_lower_one_at_their_limit() -> None:
    driver = world(tiers=PLAIN, num_blocks=60, budget=256, nodes=(node("o/t", limit=9),))
    started(driver, *(request(n, "batch", prompt=60, tenant="o/t", max_tokens=30) for n in (1, 2)))
    started(driver, request(3, "batch", prompt=60, tenant="o/u", max_tokens=30), request(9, "gold", prompt=60, tenant="o/t"))
    assert (running(driver), preempted(driver, 2)) == ({1, 3, 9}, [(PreemptionKind.RECOMPUTED, PreemptionReason.HIGHER_RANK)])


def test_a_request_that_no_limit_can_hold_is_refused_by_name() -> None:
    driver = started(world(nodes=(node("org", limit=5),)), request(1, prompt=80, max_tokens=2))
    ended = driver.transcripts[1].ended  # type: ignore[index]
    assert ended is not None
    assert (ended.error_reason, ended.error_message) == (
        "KV_CAPACITY_EXCEEDED",
        "needs 6 KV blocks, the kv_limit of org is 5",
    )


def borrowed(**settings: object) -> EngineDriver:
    """40 blocks: gold of org/gold has 36 of them in six requests of 6; nothing is promised to it. org/batch is promised 12."""
    driver = world(tiers=PLAIN, num_blocks=40, budget=512, nodes=(node("org/batch", guarantee=12),), **settings)  # type: ignore[arg-type]
    started(driver, *(request(n, "gold", prompt=90, max_tokens=6) for n in range(1, 7)))
    assert driver.blocks.num_used_blocks == 36
    return driver


def test_a_guarantee_is_taken_back_from_a_higher_tier_in_the_next_step() -> None:
    # 10 blocks are needed and 4 free: one of 6 goes, the last that came.
    driver = started(borrowed(), request(9, "batch", prompt=155, max_tokens=5), turns=2)
    expected = [(PreemptionKind.RECOMPUTED, PreemptionReason.KV_GUARANTEE)]
    assert (running(driver), preempted(driver, 6)) == ({1, 2, 3, 4, 5, 9}, expected)


def test_forty_guarantees_are_given_back_in_two_steps() -> None:
    # 40 blocks, of which 36 are borrowed in eighteen requests of two; forty owners of one block each ask for it.
    driver = world(tiers=PLAIN, num_blocks=40, budget=512, max_num_seqs=64, nodes=tuple(node(f"o{n}/t", 1) for n in range(40)))
    started(driver, *(request(1000 + n, "gold", prompt=26, tenant="h/oard", max_tokens=7) for n in range(18)))
    started(driver, *(request(n + 1, "batch", prompt=10, tenant=f"o{n}/t", max_tokens=4) for n in range(40)), turns=2)
    assert running(driver) == {*range(1, 41)}


def test_guarantees_do_not_wait_for_seats_and_tokens_of_the_steps() -> None:
    # Eight seats and 16 tokens a step; twenty owners of 2 blocks each want back what four requests of 8 blocks have borrowed.
    nodes = tuple(node(f"o{n}/t", 2) for n in range(20))
    driver = world(tiers=PLAIN, num_blocks=40, budget=16, nodes=nodes)
    started(driver, *(request(1000 + n, "gold", prompt=120, tenant="h/oard", max_tokens=400) for n in range(4)), turns=25)
    borrowed = driver.blocks.num_used_blocks
    started(driver, *(request(n + 1, "batch", prompt=26, tenant=f"o{n}/t", max_tokens=4) for n in range(20)), turns=2)
    owners = running(driver) & {*range(1, 21)}
    assert (borrowed, len(owners) + driver.blocks.num_free_blocks // 2) == (34, 20)  # whoever does not run finds its blocks free


def test_a_request_within_the_guarantee_does_not_wait_for_a_larger_one_before_it() -> None:
    # 40 blocks, 36 of them borrowed; 20 are promised. The first asks for 21, the three behind it for 4 each.
    driver = world(tiers=PLAIN, num_blocks=40, budget=512, nodes=(node("o/t", 20),))
    started(driver, *(request(1000 + n, "gold", prompt=120, tenant="h/oard", max_tokens=8) for n in range(4)))
    started(driver, request(1, prompt=330, tenant="o/t"), *(request(n, prompt=60, tenant="o/t") for n in (2, 3, 4)))
    assert running(driver) >= {2, 3, 4}


def test_a_request_within_the_guarantee_does_not_wait_for_one_that_its_own_limit_keeps_out() -> None:
    # o/t may have 9 blocks of the 20 that o is promised, and has 4: the next asks for 6, the one behind it for 4.
    driver = world(tiers=PLAIN, num_blocks=40, budget=512, nodes=(node("o", 20), node("o/t", limit=9)))
    started(driver, request(1, prompt=50, tenant="o/t", max_tokens=14))
    started(driver, *(request(1000 + n, "gold", prompt=120, tenant="h/oard", max_tokens=8) for n in range(4)))
    started(driver, request(2, prompt=90, tenant="o/t"), request(3, prompt=60, tenant="o/t", max_tokens=4), turns=3)
    assert running(driver) >= {1, 3}


def test_one_that_was_left_to_its_turn_is_not_forgotten_when_another_of_the_node_asks_for_more_than_is_left() -> None:
    # o is promised 8 of 20 blocks, o/t 2 of those. Gold has 13 and takes all tokens. Of those who ask for 3, 4 and 8, the first
    # finds its blocks, the second gets in, and the third is not covered. Then the first does not find a block to spare.
    driver = world(tiers=PLAIN, num_blocks=20, budget=16, nodes=(node("o", 8), node("o/t", 2)))
    started(driver, request(1, "gold", prompt=205, tenant="h/oard", max_tokens=60), turns=2)
    asked = [request(n, prompt=size, tenant="o/t", max_tokens=9) for n, size in ((2, 40), (3, 50), (4, 120))]
    first = running(started(driver, *asked, turns=1))
    driver.turn()
    assert (first, running(driver)) == ({1, 3}, {1, 2, 3})


def test_nobody_is_overtaken_by_guarantee_more_than_sixteen_times() -> None:
    driver = world(tiers=PLAIN, num_blocks=40, budget=512, nodes=(node("o/t", 20),))
    started(driver, *(request(1000 + n, "gold", prompt=120, tenant="h/oard", max_tokens=300) for n in range(4)))
    started(
        driver, request(1, prompt=330, tenant="o/t"), *(request(n, prompt=20, tenant="o/t", max_tokens=4) for n in range(2, 40))
    )
    driver.turn()
    first = driver.scheduler.sequence(request(1).request_id)
    assert first is not None
    for _ in range(60):
        driver.turn()
    assert first.num_skips == 16


def test_it_is_swapped_out_where_there_is_room_in_host_memory() -> None:
    driver = started(borrowed(num_host_blocks=20), request(9, "batch", prompt=155, max_tokens=5), turns=2)
    assert preempted(driver, 6) == [(PreemptionKind.SWAPPED, PreemptionReason.KV_GUARANTEE)]


def test_the_borrower_pays_for_its_recompute_itself() -> None:
    driver = started(borrowed(), request(9, "batch", prompt=155, max_tokens=5), turns=2)
    victim = driver.scheduler.sequence(6)  # type: ignore[arg-type]
    assert victim is not None
    assert (victim.evicted_by, victim.num_evictions) == (victim.payer, 0)


def test_what_a_guarantee_does_not_cover_waits_for_its_turn() -> None:
    driver = started(borrowed(), request(9, "batch", prompt=195, max_tokens=5), turns=2)  # 13 blocks of 12
    assert (running(driver), driver.scheduler.num_preemptions) == ({1, 2, 3, 4, 5, 6}, 0)


def test_immunity_to_eviction_does_not_keep_what_was_borrowed() -> None:
    driver = borrowed()
    for sequence in driver.scheduler.running:
        sequence.num_evictions = 3
    assert 9 in running(started(driver, request(9, "batch", prompt=155, max_tokens=5), turns=2))


def test_whoever_is_most_above_a_guarantee_gives_back_first() -> None:
    # 30 blocks: x has 12, promised 8: 4 over. y has 16, promised 2: 14 over. z is promised 6 and asks for 6 with 2 free.
    nodes = (node("o/x", guarantee=8), node("o/y", guarantee=2), node("o/z", guarantee=6))
    driver = world(tiers=PLAIN, num_blocks=30, budget=512, nodes=nodes)
    started(driver, *(request(n, "gold", prompt=50, max_tokens=14, tenant="o/y") for n in (1, 2, 3, 4)))
    started(driver, *(request(n, "batch", prompt=50, max_tokens=14, tenant="o/x") for n in (5, 6, 7)))
    started(driver, request(9, "batch", prompt=90, tenant="o/z", max_tokens=6))
    assert running(driver) == {1, 2, 3, 5, 6, 7, 9}


def test_nobody_takes_what_a_guarantee_covers() -> None:
    # batch of o/x has 8 of the 8 it is promised, all blocks but 2; a gold request that needs 4 waits.
    driver = world(tiers=PLAIN, num_blocks=10, budget=512, nodes=(node("o/x", guarantee=8),))
    started(driver, *(request(n, "batch", prompt=50, tenant="o/x", max_tokens=14) for n in (1, 2)))
    started(driver, request(9, "gold", prompt=60, tenant="o/y"))
    assert (running(driver), driver.scheduler.num_preemptions) == ({1, 2}, 0)


def test_a_tenant_within_its_organisations_guarantee_is_covered_by_it() -> None:
    driver = world(tiers=PLAIN, num_blocks=40, budget=512, nodes=(node("org", guarantee=12), node("org/batch")))
    started(driver, *(request(n, "gold", prompt=90, max_tokens=6, tenant="other/gold") for n in range(1, 7)))
    started(driver, request(9, "batch", prompt=155, max_tokens=5), turns=2)
    assert 9 in running(driver)


def test_what_a_guarantee_above_covers_need_leave_no_margin_of_the_limit_below() -> None:
    # x has 4 of its 9 blocks, its next needs 5. With org promised 12 that is covered; promised 8 it is not, and 1 would be left.
    promised = [(node("org", guarantee=blocks), node("org/x", limit=9)) for blocks in (12, 8)]
    asked = [request(n, prompt=size, tenant="org/x", max_tokens=4) for n, size in ((1, 60), (2, 76))]
    found = []
    for nodes in promised:
        driver = started(world(tiers=PLAIN, num_blocks=40, nodes=nodes), asked[0], turns=1)
        driver.scheduler.add(asked[1])
        second = driver.scheduler.sequence(asked[1].request_id)
        assert second is not None
        assert driver.scheduler.census.quotas is not None
        found.append(driver.scheduler.census.quotas.full_for(second, 5))
    assert [None if full is None else full.name for full in found] == [None, "org/x"]


def test_a_groups_blocks_count_for_the_group_and_not_for_the_tenant() -> None:
    nodes = (node("org/batch", limit=3), NodeShare("org/in", shared_domain="group:g", kv_limit=tokens(1)))
    driver = world(tiers=PLAIN, budget=256, nodes=nodes, groups=(GroupShare("g", kv_limit=tokens(9)),))
    asked = [request(n, prompt=60, tenant="org/in", cache_domain="group:g", max_tokens=9) for n in (1, 2, 3)]
    started(driver, *asked)
    assert (running(driver), driver.blocks.used_by("group:g")) == ({1, 2}, 8)


def test_members_have_the_limit_of_their_tenants_template() -> None:
    driver = world(tiers=PLAIN, budget=256, nodes=(NodeShare("o/t", member_kv_limit=tokens(5)),))
    asked = [request(n, prompt=60, tenant=m, cache_domain=f"member:{m}") for n, m in ((1, "o/t/a"), (2, "o/t/a"), (3, "o/t/b"))]
    started(driver, *asked)
    assert running(driver) == {1, 3}


def test_a_lowered_limit_takes_blocks_back_before_the_next_step_and_ends_what_can_never_fit() -> None:
    driver = world(tiers=PLAIN, num_blocks=60, budget=512)
    asked = [request(n, prompt=60, max_tokens=20) for n in (1, 2, 3)]  # 4 blocks each, 5 in the end
    started(driver, *asked, request(4, prompt=90, max_tokens=70))  # 6 blocks, 10 in the end
    driver.apply(policy(node("org/batch", limit=9)))
    driver.turn()
    after = (driver.blocks.used_by("tenant:org/batch"), preempted(driver, 3))
    driver.run_until_idle()
    ended = driver.transcripts[4].ended  # type: ignore[index]
    assert ended is not None
    assert (after, ended.reason, ended.error_reason, [driver.transcripts[a.request_id].token_ids for a in asked]) == (
        (8, [(PreemptionKind.RECOMPUTED, PreemptionReason.KV_LIMIT)]),
        EndReason.FAILED,
        "KV_CAPACITY_EXCEEDED",
        [expected_tokens(a) for a in asked],
    )


@pytest.mark.parametrize(
    ("nodes", "refusal"),
    [
        (
            (node("a", guarantee=40), NodeShare("b", kv_guarantee=KVAmount(share=0.5))),
            "kv_guarantee: 72 blocks are promised in all (a 40, b 32): more than the 64 of this worker's KV cache",
        ),
        (
            (node("a", guarantee=10), node("a/x", guarantee=8), NodeShare("a/y", kv_guarantee=KVAmount(share=0.05))),
            "kv_guarantee: 11 blocks are promised below a (a/x 8, a/y 3): more than the 10 of the kv_guarantee of a",
        ),
        (
            (NodeShare("a", kv_limit=KVAmount(share=0.25)), node("a/x", guarantee=20)),
            "kv_guarantee: 20 blocks are promised to a and below (a/x 20): more than the 16 of the kv_limit of a",
        ),
    ],
)
def test_a_policy_that_promises_more_than_there_is_is_refused_in_a_line(nodes: tuple[NodeShare, ...], refusal: str) -> None:
    driver = world(tiers=(GOLD, BATCH))
    driver.turn()
    driver.apply(replace(snapshot(generation=2), nodes=nodes))
    driver.turn()
    assert (driver.refusals, driver.scheduler.policy_generation) == ([refusal], 1)


def test_statistics_name_the_accounts_and_count_evictions_by_reason() -> None:
    driver = started(borrowed(), request(9, "batch", prompt=155, max_tokens=20), turns=2)
    stats = driver.scheduler.stats()
    (account,) = stats.kv_accounts
    assert (account.name, account.used, account.guarantee, account.limit, stats.evictions_by_reason) == (
        "org/batch",
        10,
        12,
        None,
        {"kv_guarantee": 1},
    )
