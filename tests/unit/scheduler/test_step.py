"""What one step contains: budget, seats, chunks, reservations, pauses, victims. Each test shows its arithmetic."""

from __future__ import annotations

import json

import pytest

from engine_world import BATCH, GOLD, expected_tokens, request, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.events import EndReason, PreemptionKind, PreemptionReason
from fairlane.scheduler.fake_executor import StepTime
from fairlane.scheduler.output import ScheduleOutput
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.tenancy import Shaping, Tier, TiersPolicy


def outputs(driver: EngineDriver, turns: int) -> list[ScheduleOutput]:
    """The outputs of the next turns, as the executor saw them."""
    seen: list[ScheduleOutput] = []
    executor = driver.engine._executor
    launch = executor.launch

    def spy(output: ScheduleOutput) -> object:
        seen.append(output)
        return launch(output)

    executor.launch = spy  # type: ignore[method-assign]
    for _ in range(turns):
        driver.turn()
    executor.launch = launch  # type: ignore[method-assign]
    return seen


def tokens_of(output: ScheduleOutput) -> list[int]:
    """Of the lane's decodes, then of the entries."""
    return [1] * len(output.decode_slots) + [entry.num_tokens for entry in output.scheduled]


def test_a_long_prompt_is_chunked_and_leaves_a_token_for_every_decode() -> None:
    driver = world(policy=TiersPolicy.FCFS, budget=32, max_num_seqs=8)
    for number in (1, 2, 3):
        driver.add(request(number, prompt=8, max_tokens=20))
    driver.turn()  # 24 of 32 tokens: three whole prompts
    driver.add(request(4, prompt=100, max_tokens=4))
    first, second = outputs(driver, 2)
    assert tokens_of(first) == [1, 1, 1, 29]  # 32 - 3 decodes
    assert tokens_of(second) == [1, 1, 1, 29]
    assert [entry.sample for entry in first.scheduled] == [False]  # decodes always sample


def test_the_vip_chunk_takes_the_step_but_leaves_a_token_for_every_decode_it_may_not_pause() -> None:
    tiers = (Tier("gold", 100), BATCH)  # no shaping: nothing pauses
    driver = world(tiers=tiers, budget=16, max_num_seqs=8)
    for number in (1, 2, 3):
        driver.add(request(number, "batch", prompt=4, max_tokens=40))
    driver.turn()
    driver.add(request(9, "gold", prompt=64, max_tokens=4))
    (step,) = outputs(driver, 1)
    assert tokens_of(step) == [1, 1, 1, 13]


def test_lower_decodes_pause_only_in_steps_that_hold_a_protected_chunk() -> None:
    driver = world(budget=32, max_num_seqs=8)
    driver.add(request(1, "batch", prompt=4, max_tokens=40))
    driver.turn()
    driver.add(request(9, "gold", prompt=40, max_tokens=4))
    chunk, rest, decodes = outputs(driver, 3)
    assert tokens_of(chunk) == [32]  # the batch decode keeps its KV and skips
    assert tokens_of(rest) == [8]  # 40 - 32; still a protected chunk
    assert tokens_of(decodes) == [1, 1]


def test_balanced_shaping_lets_lower_tiers_prefill_with_half_the_budget_less_what_the_vip_takes() -> None:
    driver = world(budget=64, max_num_seqs=8)
    driver.add(request(1, "gold", prompt=4, max_tokens=40))
    driver.turn()
    driver.add(request(2, "batch", prompt=200, max_tokens=4))
    (beside_a_decode,) = outputs(driver, 1)
    assert tokens_of(beside_a_decode) == [1, 32]  # 0.5 * 64
    driver.add(request(3, "gold", prompt=20, max_tokens=4))
    (beside_a_chunk,) = outputs(driver, 1)
    assert tokens_of(beside_a_chunk) == [1, 20, 12]  # 0.5 * 64 - 20


def test_seats_limit_what_is_placed_not_what_is_resident() -> None:
    driver = world(tiers=(Tier("gold", 100), BATCH), budget=64, max_num_seqs=2)
    for number in (1, 2):
        driver.add(request(number, "batch", prompt=4, max_tokens=40))
    driver.turn()
    driver.add(request(9, "gold", prompt=4, max_tokens=3))
    (step,) = outputs(driver, 1)
    assert tokens_of(step) == [4, 1]  # the VIP takes a seat; one batch sequence keeps its KV and waits a step
    assert driver.scheduler.num_preemptions == 0
    assert len(driver.scheduler.running) == 3


def test_a_waiting_vip_evicts_batch_work_only_if_that_suffices() -> None:
    # 8 blocks of 16. Batch holds 4 + 3; the VIP's 120 tokens need 8, the pool has 8: both must go.
    driver = world(num_blocks=8, budget=128)
    driver.add(request(1, "batch", prompt=60, max_tokens=4))
    driver.add(request(2, "batch", prompt=40, max_tokens=4))
    driver.turn()
    driver.add(request(9, "gold", prompt=120, max_tokens=4))
    driver.turn()
    assert driver.scheduler.num_preemptions == 2
    driver.run_until_idle()
    kinds = [d.preempted for t in driver.transcripts.values() for d in t.deltas if d.preempted]
    assert kinds == [(PreemptionKind.RECOMPUTED, PreemptionReason.HIGHER_RANK)] * 2


def test_nobody_is_evicted_when_the_victims_would_not_suffice() -> None:
    # The VIP needs 8 of 8 blocks; a gold request holds 2 that nobody may take, so evicting batch would be for nothing.
    driver = world(num_blocks=8, budget=128)
    driver.add(request(1, "gold", prompt=20, max_tokens=8))
    driver.add(request(2, "batch", prompt=60, max_tokens=4))
    driver.turn()
    driver.add(request(9, "gold", prompt=120, max_tokens=4))
    driver.turn()
    assert driver.scheduler.num_preemptions == 0


def test_a_growing_sequence_takes_blocks_from_the_lowest_ranked_and_never_from_itself() -> None:
    # 5 blocks: two sequences of 2 (32 tokens) each and a watermark of 1. Both grow to 49 tokens, 4 blocks: the first takes the
    # spare one, then the second's.
    driver = world(policy=TiersPolicy.FCFS, num_blocks=5, budget=128)
    first, second = request(1, prompt=30, max_tokens=20), request(2, prompt=30, max_tokens=20)
    driver.add(first)
    driver.add(second)
    driver.run_until_idle(200)
    assert driver.transcripts[1].token_ids == expected_tokens(first)
    assert driver.transcripts[2].token_ids == expected_tokens(second)
    assert not any(d.preempted for d in driver.transcripts[1].deltas)
    assert [d.preempted for d in driver.transcripts[2].deltas if d.preempted] == [
        (PreemptionKind.RECOMPUTED, PreemptionReason.KV_CAPACITY)
    ]


def test_a_sequence_evicted_three_times_is_immune() -> None:
    driver = world(tiers=(GOLD, Tier("batch", 10)), num_blocks=8, budget=128)
    driver.add(request(1, "batch", prompt=100, max_tokens=20))
    for number in range(10, 16):
        driver.turn()
        driver.turn()
        driver.add(request(number, "gold", prompt=100, max_tokens=2))
        for _ in range(4):
            driver.turn()
    driver.run_until_idle()
    ended = driver.transcripts[1].ended
    assert ended is not None and ended.preemptions == 3


def test_an_aborted_request_frees_its_blocks_at_once_even_with_steps_in_flight() -> None:
    driver = world(depth=2, num_blocks=8, budget=128)
    driver.add(request(1, "batch", prompt=60, max_tokens=40))
    for _ in range(4):
        driver.turn()
    driver.abort(request(1).request_id)
    driver.turn()
    assert driver.blocks.num_used_blocks == 0
    driver.run_until_idle()
    ended = driver.transcripts[1].ended
    assert ended is not None and ended.reason is EndReason.ABORTED


def test_a_request_that_can_never_fit_is_refused_at_once_and_one_that_just_fits_runs() -> None:
    # 8 blocks of 16 hold 128 tokens; the last token's KV is never written, so 129 tokens fit and 130 do not.
    driver = world(num_blocks=8, budget=128)
    driver.add(request(1, prompt=100, max_tokens=29))
    driver.add(request(2, prompt=100, max_tokens=30))
    driver.run_until_idle()
    fits, refused = driver.transcripts[1].ended, driver.transcripts[2].ended
    assert fits is not None and fits.reason is EndReason.LENGTH
    assert refused is not None and refused.error_reason == "KV_CAPACITY_EXCEEDED"


def test_a_deadline_ends_a_waiting_and_a_running_request() -> None:
    driver = world(max_num_seqs=1, budget=64)
    driver.add(request(1, prompt=4, max_tokens=1000, deadline_s=0.1))
    driver.add(request(2, prompt=4, max_tokens=4, deadline_s=0.05))
    driver.run_until_idle()
    for number in (1, 2):
        ended = driver.transcripts[number].ended
        assert ended is not None and ended.error_reason == "DEADLINE_EXCEEDED"
    assert driver.clock.now() < 0.2


def test_stop_tokens_end_the_output_with_the_token_included() -> None:
    asked = request(1, prompt=4, max_tokens=50)
    stop = expected_tokens(asked)[5]
    stopping = request(1, prompt=4, max_tokens=50, stop=[stop])
    for depth in (0, 1, 2):
        driver = world(depth=depth)
        driver.add(stopping)
        driver.run_until_idle()
        ended = driver.transcripts[1].ended
        assert driver.transcripts[1].token_ids == expected_tokens(asked)[:6]
        assert ended is not None and (ended.reason, ended.stop_token_id) == (EndReason.STOP, stop)


def test_a_failed_step_ends_its_own_sequences_only() -> None:
    driver = world(fail_steps=frozenset({2}))
    first, second = request(1, prompt=4, max_tokens=10), request(2, prompt=4, max_tokens=10)
    driver.add(first)
    driver.turn()
    driver.turn()  # step 2 fails with request 1 in it
    driver.add(second)
    driver.run_until_idle()
    failed = driver.transcripts[1].ended
    assert failed is not None and failed.error_reason == "STEP_FAILED"
    assert driver.transcripts[2].token_ids == expected_tokens(second)


def test_a_second_request_with_the_same_prefix_takes_it_from_the_cache_of_its_own_tenant_only() -> None:
    prompt = tuple(range(100, 164))  # 4 blocks; the last token is always computed, so 3 can be shared
    driver = world(budget=128)
    driver.add(request(1, prompt=prompt, tenant="a/x"))
    driver.run_until_idle()
    driver.add(request(2, prompt=prompt, tenant="a/x"))
    driver.add(request(3, prompt=prompt, tenant="a/y"))
    driver.run_until_idle()
    cached = {n: d.started.cached_tokens for n, t in driver.transcripts.items() for d in t.deltas if d.started}
    assert cached == {1: 0, 2: 48, 3: 0}


def test_limits_that_cannot_serve_a_full_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens"):
        SchedulerLimits(max_num_seqs=64, max_num_batched_tokens=32)


def test_strict_shaping_is_a_quarter() -> None:
    tiers = (Tier("gold", 100, shaping=Shaping.STRICT), BATCH)
    driver = world(tiers=tiers, budget=64)
    driver.add(request(1, "gold", prompt=4, max_tokens=40))
    driver.turn()
    driver.add(request(2, "batch", prompt=200, max_tokens=4))
    (step,) = outputs(driver, 1)
    assert tokens_of(step) == [1, 16]


def test_a_vip_never_evicts_its_own_band() -> None:
    driver = world(tiers=(GOLD, BATCH), num_blocks=8, budget=128)
    driver.add(request(1, "gold", prompt=100, max_tokens=20))
    driver.turn()
    driver.add(request(2, "gold", prompt=100, max_tokens=20))
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions == 0


def test_small_requests_overtake_a_large_one_only_so_often() -> None:
    # 10 blocks; the large request needs all of them. Small ones (2 blocks, two a step at most) arrive without end.
    driver = world(policy=TiersPolicy.FCFS, num_blocks=10, budget=128, max_num_seqs=4)
    small = [request(100 + i, prompt=16, max_tokens=16, arrival_s=i * 0.01) for i in range(400)]
    large = request(1, prompt=150, max_tokens=4, arrival_s=0.1)
    driver.add_at_arrival([*small, large])
    driver.run_until_idle()
    first_token_s = driver.transcripts[large.request_id].first_token_s
    # It is passed over when a seat opens: 16 times, four every 17 steps of about 5 ms, after those that came before it; then
    # the four running drain. The flood behind it lasts 4 s and more.
    assert first_token_s is not None and 0.1 < first_token_s < 0.1 + (16 + 8 + 4) / 4 * 0.1
    overtakers = [s for s in small if s.arrival_s > 0.1 and (driver.transcripts[s.request_id].first_token_s or 9) < first_token_s]
    assert overtakers  # it was passed over for a while: blocks it could not use did not lie idle


def test_a_pause_is_told_once_it_has_lasted_a_quarter_of_a_second_and_again_when_it_ends() -> None:
    # Each step costs 0.1 s; the VIP's 320 tokens at 64 a step keep the batch decode out for five steps.
    tiers = (GOLD, Tier("batch", 10))
    driver = world(tiers=tiers, budget=64, num_blocks=64, step_time=StepTime(fixed_s=0.1))
    driver.add(request(1, "batch", prompt=4, max_tokens=40))
    driver.turn()
    driver.add(request(9, "gold", prompt=320, max_tokens=2))
    driver.run_until_idle()
    told = [(d.preempted, d.resumed_after_s) for d in driver.transcripts[1].deltas if d.preempted or d.resumed_after_s]
    assert told[0] == ((PreemptionKind.PAUSED, PreemptionReason.HIGHER_RANK), None)
    assert told[1][0] is None and told[1][1] == pytest.approx(0.5, abs=0.02)
    assert len(told) == 2


def test_a_short_pause_is_not_told() -> None:
    driver = world(budget=64, step_time=StepTime(fixed_s=0.1))
    driver.add(request(1, "batch", prompt=4, max_tokens=40))
    driver.turn()
    driver.add(request(9, "gold", prompt=100, max_tokens=2))
    driver.run_until_idle()
    assert not any(d.preempted or d.resumed_after_s for d in driver.transcripts[1].deltas)


def test_an_output_survives_the_trip_to_another_rank_as_plain_values() -> None:
    driver = world(budget=128)
    driver.add(request(1, prompt=20, max_tokens=20))
    first, second = outputs(driver, 2)
    first.copies.append((3, 4))
    first.swap_out.append((5, 0))
    second.swap_in.append((0, 7))
    for output in (first, second):
        plain = json.loads(json.dumps(output.to_plain()))
        assert ScheduleOutput.from_plain(plain) == output


def test_who_waits_has_no_copy_of_its_prompt_and_who_runs_adds_to_no_other() -> None:
    driver = world(max_num_seqs=1, max_resident=1)
    shared = tuple(range(40))
    first, second = request(1, prompt=shared), request(2, prompt=shared)
    driver.add(first)
    driver.add(second)
    driver.turn()
    waiting = driver.scheduler.sequence(second.request_id)
    assert waiting is not None
    has_copy = waiting.token_ids is not second.prompt_token_ids
    driver.run_until_idle()
    got = [driver.transcripts[one.request_id].token_ids for one in (first, second)]
    assert (has_copy, shared, got) == (False, tuple(range(40)), [expected_tokens(first), expected_tokens(second)])
