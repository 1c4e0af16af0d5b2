"""Preemption by swap: an evicted sequence's keys and values wait in host memory, nothing is computed again, and whatever happens
meanwhile (cancels, failed steps, another policy, a full host pool) nobody gets a wrong token and nothing is left behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import TIERS, expected_tokens, request, snapshot, world
from fairlane.scheduler.cost import Ledger
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.engine import Abort
from fairlane.scheduler.events import EndReason, PreemptionKind, PreemptionReason
from fairlane.scheduler.output import ScheduleOutput
from fairlane.scheduler.request import Payer, Request, RequestId, Sequence, SequenceStatus
from fairlane.scheduler.swaps import tokens_to_recompute
from fairlane.scheduler.tenancy import TiersPolicy

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])
BATCH = [request(1, "batch", prompt=60, max_tokens=30), request(2, "batch", prompt=40, max_tokens=30)]
GOLD = request(9, "gold", prompt=100, max_tokens=5)
# Who is owed a minimum holds a lease against being evicted.
WITHOUT_MIN = tuple(replace(tier, min_share=0.0) for tier in TIERS)


def crowded(depth: int = 0, turns: int = 6, **settings: object) -> EngineDriver:
    """Two batch requests decode in 8 blocks; the gold one's 100 tokens need 7 of them."""
    driver = world(depth=depth, num_blocks=8, budget=128, **({"num_host_blocks": 20} | settings))  # type: ignore[arg-type]
    for one in BATCH:
        driver.add(one)
    for _ in range(turns):
        driver.turn()
    driver.add(GOLD)
    return driver


def counts(driver: EngineDriver) -> tuple[int, int, int]:
    """Swapped out, swapped in, tokens computed again."""
    stats = driver.scheduler.stats()
    return stats.swaps_out, stats.swaps_in, stats.recomputed_tokens


def assert_all_got_their_tokens(driver: EngineDriver, *asked: Request) -> None:
    got = [driver.transcripts[one.request_id].token_ids for one in asked]
    assert got == [expected_tokens(one) for one in asked]
    assert (driver.blocks.num_used_blocks, driver.blocks.host.num_used_blocks, driver.scheduler.num_unfinished) == (0, 0, 0)


def swapped(driver: EngineDriver) -> list[Sequence]:
    return [s for s in driver.scheduler._sequences.values() if driver.blocks.host.holds(s.request_id)]


def turn_until_swapped(driver: EngineDriver) -> Sequence:
    """The first sequence whose keys and values are in host memory, and sure to be there."""
    for _ in range(10):
        driver.turn()
        if settled := [sequence for sequence in swapped(driver) if not sequence.steps_in_flight]:
            return settled[0]
    raise AssertionError("nobody was swapped out")


@DEPTHS
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_an_evicted_sequence_goes_on_without_computing_anything_again(depth: int, prefix_caching: bool) -> None:
    driver = crowded(depth, prefix_caching=prefix_caching)
    driver.run_until_idle(500)
    assert_all_got_their_tokens(driver, *BATCH, GOLD)
    assert counts(driver) == (2, 2, 0)
    told = [delta.preempted for one in BATCH for delta in driver.transcripts[one.request_id].deltas if delta.preempted]
    assert told == [(PreemptionKind.SWAPPED, PreemptionReason.HIGHER_RANK)] * 2


@DEPTHS
@pytest.mark.parametrize("policy", list(TiersPolicy))
def test_sequences_that_outgrow_the_cache_are_swapped_under_every_policy(depth: int, policy: TiersPolicy) -> None:
    asked = [request(number, "batch", prompt=20, max_tokens=60) for number in range(1, 7)]
    driver = world(policy=policy, depth=depth, num_blocks=14, num_host_blocks=64, prefix_caching=False)
    for one in asked:
        driver.add(one)
    driver.run_until_idle(2000)
    assert_all_got_their_tokens(driver, *asked)
    out, back, recomputed = counts(driver)
    assert out == back > 0 == recomputed


@DEPTHS
def test_a_prompt_evicted_between_two_chunks_goes_on_where_it_was(depth: int) -> None:
    driver = world(depth=depth, num_blocks=8, budget=32, num_host_blocks=8, prefix_caching=False)
    long = request(1, "batch", prompt=100, max_tokens=4)
    driver.add(long)
    driver.turn()
    driver.turn()
    driver.add(GOLD)
    driver.run_until_idle(200)
    assert_all_got_their_tokens(driver, long, GOLD)
    assert counts(driver) == (1, 1, 0)


@DEPTHS
def test_what_does_not_fit_into_the_host_pool_is_computed_again(depth: int) -> None:
    # 60 and 40 tokens and some output: 5 and 4 blocks at the most. One of the two fits into 5, both do not.
    driver = crowded(depth, num_host_blocks=5, prefix_caching=False)
    driver.run_until_idle(500)
    assert_all_got_their_tokens(driver, *BATCH, GOLD)
    out, back, recomputed = counts(driver)
    assert (out, back, driver.scheduler.num_preemptions) == (1, 1, 2)
    assert recomputed >= 40


@pytest.mark.parametrize(("min_swap_tokens", "expected"), [(1, 2), (50, 1), (200, 0)])
def test_what_is_computed_again_quickly_is_not_swapped(min_swap_tokens: int, expected: int) -> None:
    driver = crowded(min_swap_tokens=min_swap_tokens, prefix_caching=False)
    driver.run_until_idle(500)
    assert (counts(driver)[0], driver.scheduler.num_preemptions) == (expected, 2)


def two_with_one_prompt(driver: EngineDriver) -> tuple[Sequence, Sequence]:
    """Two that run, of which the second found the first's prompt of 70 tokens in the prefix cache."""
    prompt = tuple(range(70))
    driver.add(request(1, prompt=prompt, max_tokens=30, tenant="a/x"))
    for _ in range(3):
        driver.turn()
    driver.add(request(2, prompt=prompt, max_tokens=30, tenant="a/x"))
    driver.turn()
    first, second = driver.scheduler.running.in_order(driver.scheduler.policy.rank)
    driver.scheduler.lane.settle()
    return first, second


def test_leading_blocks_that_others_hold_too_cost_no_recompute() -> None:
    driver = world(num_blocks=40, budget=128, num_host_blocks=8)
    first, second = two_with_one_prompt(driver)
    # Blocks 0 to 3 are both's, 64 tokens of 16 each.
    costs = [tokens_to_recompute(sequence, driver.blocks) for sequence in (first, second)]
    assert costs == [first.num_computed_tokens - 64, second.num_computed_tokens - 64]


def test_what_others_mostly_keep_is_computed_again_rather_than_moved() -> None:
    # 70 tokens of which others hold 64: nine blocks would move for a handful of tokens. Alone, all 70 would be lost.
    driver = world(num_blocks=40, budget=128, num_host_blocks=12, min_swap_tokens=1)
    first, second = two_with_one_prompt(driver)
    swaps = driver.scheduler.swaps
    shared = swaps.is_worth_it(second)
    driver.scheduler.abort(first.request_id)
    assert (shared, swaps.is_worth_it(second)) == (False, True)


@DEPTHS
def test_a_swap_in_the_middle_of_a_recompute_leaves_the_rest_to_whom_it_was_charged(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standard request has the batch one computed again; the gold one only has it swapped, and pays for itself alone."""
    size = {"num_blocks": 8, "budget": 32, "num_host_blocks": 20}
    driver = world(tiers=WITHOUT_MIN, depth=depth, prefix_caching=False, **size)
    driver.turn()
    charged: Counter[str] = Counter()
    policy, swaps = driver.scheduler.policy, driver.scheduler.swaps
    on_charge, is_worth_it = policy.on_charge, swaps.is_worth_it

    def charge(payer: Payer, cost: int, ledger: Ledger = Ledger.WORK) -> None:
        charged[payer.tier] += cost
        on_charge(payer, cost, ledger)

    monkeypatch.setattr(policy, "on_charge", charge)
    monkeypatch.setattr(swaps, "is_worth_it", lambda sequence: bool(sequence.num_preemptions) and is_worth_it(sequence))
    batch, standard = request(1, "batch", prompt=100, max_tokens=9), request(2, "standard", prompt=100, max_tokens=1)
    gold = request(3, "gold", prompt=100, max_tokens=1)
    driver.add(batch)
    for _ in range(6):
        driver.turn()
    driver.add(standard)
    while not driver.transcripts[standard.request_id].ended:
        driver.turn()
    driver.turn()
    driver.turn()
    driver.add(gold)
    driver.run_until_idle(200)
    assert_all_got_their_tokens(driver, batch, standard, gold)
    assert (counts(driver)[:2], charged["gold"], charged["standard"] >= 2000) == ((1, 1), 1000, True)


@DEPTHS
@pytest.mark.parametrize("steps_first", [0, 1])
def test_one_that_ends_while_it_is_swapped_leaves_nothing_in_host_memory(depth: int, steps_first: int) -> None:
    driver = crowded(depth)
    sequence = turn_until_swapped(driver)
    for _ in range(steps_first):
        driver.turn()
    driver.abort(sequence.request_id)
    driver.run_until_idle(500)
    ended = driver.transcripts[sequence.request_id].ended
    assert ended is not None and ended.reason is EndReason.ABORTED
    assert_all_got_their_tokens(driver, GOLD, *(one for one in BATCH if one.request_id != sequence.request_id))


@DEPTHS
def test_a_deadline_passes_while_it_is_swapped(depth: int) -> None:
    driver = world(depth=depth, num_blocks=8, budget=128, num_host_blocks=20)
    doomed = request(1, "batch", prompt=60, max_tokens=30, deadline_s=0.25)
    driver.add(doomed)
    for _ in range(4):
        driver.turn()
    long = replace(GOLD, max_tokens=25)
    driver.add(long)
    assert turn_until_swapped(driver).request_id == doomed.request_id
    driver.clock.advance(1.0)  # type: ignore[attr-defined]
    driver.run_until_idle(500)
    ended = driver.transcripts[doomed.request_id].ended
    assert ended is not None and ended.error_reason == "DEADLINE_EXCEEDED"
    assert_all_got_their_tokens(driver, long)


@DEPTHS
def test_another_policy_takes_over_those_who_are_swapped(depth: int) -> None:
    driver = crowded(depth)
    turn_until_swapped(driver)
    driver.apply(snapshot(TiersPolicy.FCFS, generation=2))
    driver.run_until_idle(500)
    assert_all_got_their_tokens(driver, *BATCH, GOLD)
    assert counts(driver) == (2, 2, 0)


@DEPTHS
def test_one_evicted_between_two_steps_is_swapped_by_a_step_of_its_own(depth: int) -> None:
    """With nobody else to compute anything."""
    driver = world(depth=depth, num_blocks=8, num_host_blocks=8)
    driver.add(BATCH[0])
    for _ in range(5):
        driver.turn()
    (sequence,) = driver.scheduler.running
    assert driver.scheduler.requeue(sequence) is PreemptionKind.SWAPPED
    driver.run_until_idle(200)
    assert_all_got_their_tokens(driver, BATCH[0])
    assert counts(driver) == (1, 1, 0)


def recorded(driver: EngineDriver) -> list[ScheduleOutput]:
    """Every step from now on."""
    executor, seen = driver.engine._executor, []
    launch = executor.launch

    def record(output: ScheduleOutput) -> object:
        seen.append(output)
        return launch(output)

    executor.launch = record  # type: ignore[method-assign]
    return seen


def outputs_until_idle(driver: EngineDriver) -> list[ScheduleOutput]:
    seen = recorded(driver)
    driver.run_until_idle(500)
    return seen


@DEPTHS
@pytest.mark.parametrize("where", ["result", "launch"])
def test_one_whose_swap_was_lost_with_its_step_is_computed_again(depth: int, where: str) -> None:
    """The gold request is in the failed step and ends with it; those it evicted lose nothing but time."""
    (failing,) = {output.step_id for output in outputs_until_idle(crowded(depth)) if output.swap_out}
    fails = frozenset([failing])
    lost = {"fail_steps": fails} if where == "result" else {"fail_launches": fails}
    driver = crowded(depth, **lost)
    driver.run_until_idle(500)
    ended = driver.transcripts[GOLD.request_id].ended
    assert ended is not None and ended.error_reason == "STEP_FAILED"
    finished = [one for one in BATCH if driver.transcripts[one.request_id].ended.reason is EndReason.LENGTH]  # type: ignore[union-attr]
    assert_all_got_their_tokens(driver, *finished)
    assert len(finished) == 2 and counts(driver)[0] == 2 > counts(driver)[1]
    assert driver.scheduler.num_recomputed_tokens > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_what_a_failed_step_was_to_bring_back_is_not_found_in_the_prefix_cache(depth: int) -> None:
    """The step that swaps a request in is still out, and will fail, when the request is evicted again."""

    def evicted_on_its_way_in(**lost: object) -> tuple[EngineDriver, list[ScheduleOutput]]:
        size = {"num_blocks": 8, "budget": 128, "num_host_blocks": 20}
        driver = world(tiers=WITHOUT_MIN, depth=depth, **size, **lost)  # type: ignore[arg-type]
        seen = recorded(driver)
        driver.add(BATCH[0])
        for _ in range(6):
            driver.turn()
        driver.add(GOLD)
        while not seen[-1].swap_in:
            driver.turn()
        driver.add(replace(GOLD, request_id=RequestId(10), prompt_token_ids=GOLD.prompt_token_ids[:50]))
        driver.turn()
        return driver, seen

    _, (*_, bringing, evicting) = evicted_on_its_way_in()
    driver, _ = evicted_on_its_way_in(fail_steps=frozenset([bringing.step_id]))
    again = request(11, "batch", prompt=(*BATCH[0].prompt_token_ids, 5), max_tokens=4)
    driver.add(again)
    driver.run_until_idle(500)
    ended = driver.transcripts[BATCH[0].request_id].ended
    assert evicting.swap_out and ended is not None and ended.error_reason == "STEP_FAILED"
    assert_all_got_their_tokens(driver, again)


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40), st.sampled_from(TIERS)), min_size=2, max_size=12),
    arrivals=st.lists(st.floats(0, 0.3), min_size=12, max_size=12),
    aborts=st.dictionaries(st.integers(1, 12), st.floats(0, 0.8), max_size=4),
    fails=st.frozensets(st.integers(2, 60), max_size=3),
    fail_launches=st.frozensets(st.integers(2, 60), max_size=2),
    depth=st.sampled_from([0, 1, 2]),
    num_blocks=st.integers(13, 24),
    num_host_blocks=st.sampled_from([2, 8, 60]),
    max_resident=st.integers(2, 8),
)
def test_failed_steps_end_who_was_in_them_and_spoil_nobody_else(
    sizes: list[tuple[int, int, object]],
    arrivals: list[float],
    aborts: dict[int, float],
    fails: frozenset[int],
    fail_launches: frozenset[int],
    depth: int,
    num_blocks: int,
    num_host_blocks: int,
    max_resident: int,
) -> None:
    asked = [
        request(number, tier.name, prompt=prompt, max_tokens=output, arrival_s=arrival)  # type: ignore[attr-defined]
        for number, ((prompt, output, tier), arrival) in enumerate(zip(sizes, arrivals, strict=False), 1)
    ]
    driver = world(
        depth=depth,
        num_blocks=num_blocks,
        block_size=8,
        num_host_blocks=num_host_blocks,
        max_resident=max_resident,
        fail_steps=fails,
        fail_launches=fail_launches - fails,
    )
    driver.add_at_arrival(asked)
    for number, time_s in aborts.items():
        if number <= len(asked):
            driver.at(time_s, Abort(asked[number - 1].request_id))
    driver.run_until_idle(20_000)
    for one in asked:
        transcript, whole = driver.transcripts[one.request_id], expected_tokens(one)
        assert transcript.ended is not None
        complete = transcript.ended.reason is EndReason.LENGTH
        assert transcript.token_ids == (whole if complete else whole[: len(transcript.token_ids)])
        assert complete or one.request_id in aborts or fails or fail_launches
    held = driver.blocks.num_used_blocks, driver.blocks.host.num_used_blocks, driver.scheduler.num_unfinished
    assert held == (0, 0, 0)


def test_it_holds_neither_slot_nor_blocks_of_the_device_while_it_is_swapped() -> None:
    driver = crowded()
    sequence = turn_until_swapped(driver)
    assert (sequence.status, sequence.slot, driver.blocks.has(sequence.request_id)) == (SequenceStatus.WAITING, None, False)
    assert driver.scheduler.stats().host_blocks_used == driver.blocks.host.num_used_blocks > 0
