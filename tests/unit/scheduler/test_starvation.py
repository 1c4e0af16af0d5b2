"""Who waits for whom, and for how long: heads that may not evict do not hold up those that may, a minimum share reaches running
work too, nobody is placed twice, and nothing is kept for those that are gone."""

from __future__ import annotations

import gc
from collections import Counter

import pytest

from engine_world import BATCH, GOLD, STANDARD, expected_tokens, request, snapshot, world
from fairlane.scheduler.fake_executor import StepTime
from fairlane.scheduler.request import RequestId, Sequence, SequenceStatus
from fairlane.scheduler.tenancy import Tier


def ttft(d, r):
    return d.transcripts[r.request_id].first_token_s - r.arrival_s


# ---- waiting closed to a VIP behind heads that may not evict -----------------------------------------------------------
def test_a_vip_is_not_held_up_by_aged_batch_heads_that_do_not_fit() -> None:
    # 4 blocks of 256. Two batch requests of 2 blocks run for 240 steps of 5 ms; one more waits, aged to the VIP's band.
    tiers = (GOLD, Tier("batch", 10, patience_s=0.2))
    d = world(tiers=tiers, num_blocks=4, block_size=256, budget=600, max_num_seqs=8)
    d.add_at_arrival([request(i, "batch", prompt=260, max_tokens=240) for i in (1, 2, 3)])
    vip = request(99, "gold", prompt=260, max_tokens=2, arrival_s=0.5)
    d.add_at_arrival([vip])
    d.run_until_idle(50_000)
    assert ttft(d, vip) < 0.05  # it may evict a running batch request: two steps of 5 ms and 260 tokens


def test_a_vip_is_not_held_up_by_one_min_share_head_that_does_not_fit() -> None:
    tiers = (GOLD, Tier("standard", 50, min_share=0.5), Tier("batch", 10))
    d = world(tiers=tiers, num_blocks=16, budget=64, max_num_seqs=8)
    d.add_at_arrival([request(1, "gold", prompt=16, max_tokens=200), request(2, "batch", prompt=60, max_tokens=100)])
    big = request(3, "standard", prompt=230, max_tokens=4, arrival_s=0.01)  # 15 of 16 blocks: gold's are in the way, it waits
    # 7 blocks. The standard head was passed over too often, so what is free is kept for it: the VIP must bring its own, and
    # batch holds 7 by then.
    vip = request(99, "gold", prompt=90, max_tokens=2, arrival_s=0.2)
    d.add_at_arrival([big, vip])
    d.run_until_idle(50_000)
    assert ttft(d, vip) < 0.1


def test_a_vip_is_not_held_up_by_aged_heads_whose_prefill_share_is_used_up() -> None:
    tiers = (GOLD, Tier("batch", 10, patience_s=0.01))
    d = world(tiers=tiers, num_blocks=2000, budget=64, max_num_seqs=64)
    d.add(request(1, "gold", prompt=4, max_tokens=500))
    d.turn()
    for i in range(100, 160):
        d.add(request(i, "batch", prompt=200, max_tokens=2))
    for _ in range(4):
        d.turn()
    vip = request(99, "gold", prompt=16, max_tokens=2, arrival_s=d.clock.now())
    d.add(vip)
    d.run_until_idle(50_000)
    assert ttft(d, vip) < 0.03  # 32 of 64 tokens are free for it in every step


# ---- minimum share ends at admission ----------------------------------------------------------------------------------
def vip_load(until_s, prompt=64, every=0.05):
    return [request(1000 + i, "gold", prompt=prompt, max_tokens=1, arrival_s=i * every) for i in range(int(until_s / every))]


def test_a_running_prefill_of_a_tier_below_its_min_gets_its_reserved_tokens() -> None:
    d = world(tiers=(GOLD, Tier("standard", 50, min_share=0.2)), num_blocks=500, budget=64, step_time=StepTime(fixed_s=0.1))
    d.add_at_arrival(vip_load(40))
    low = request(1, "standard", prompt=300, max_tokens=1, arrival_s=0.05)
    d.add_at_arrival([low])
    while d.clock.now() < 30:
        d.turn()
    t = d.transcripts[low.request_id]  # 20 % of 300 steps x 64 tokens = 3840 tokens of prefill, it wants 300
    assert t.first_token_s is not None


def test_a_decode_of_a_tier_with_a_min_is_not_paused_for_ever() -> None:
    d = world(tiers=(GOLD, Tier("standard", 50, min_share=0.2)), num_blocks=500, budget=64, step_time=StepTime(fixed_s=0.1))
    low = request(1, "standard", prompt=16, max_tokens=20)
    d.add(low)
    d.turn()
    d.add_at_arrival(vip_load(40))
    while d.clock.now() < 30:
        d.turn()
    assert len(d.transcripts[low.request_id].token_ids) > 1


def test_a_resident_decode_of_a_tier_with_a_min_gets_a_seat() -> None:
    d = world(
        tiers=(Tier("gold", 100), Tier("standard", 50, min_share=0.2)),
        num_blocks=500,
        budget=64,
        max_num_seqs=4,
        step_time=StepTime(fixed_s=0.1),
    )
    low = request(1, "standard", prompt=16, max_tokens=20)
    d.add(low)
    d.turn()
    for i in range(4):
        d.add(request(10 + i, "gold", prompt=8, max_tokens=1000))
    while d.clock.now() < 30:
        d.turn()
    assert len(d.transcripts[low.request_id].token_ids) > 1


# ---- reservations nobody can use --------------------------------------------------------------------------------------
def test_mins_that_sum_to_one_do_not_stop_the_engine() -> None:
    tiers = (Tier("gold", 100), Tier("standard", 50, min_share=0.6), Tier("batch", 10, min_share=0.4))  # policy check: <= 100 %
    d = world(tiers=tiers, num_blocks=64, budget=64)
    d.add(request(1, "gold", prompt=1000, max_tokens=2))  # 63 of 64 blocks
    d.turn()
    d.add(request(2, "standard", prompt=100, max_tokens=2))
    d.add(request(3, "batch", prompt=100, max_tokens=2))
    idle = 0
    while d.scheduler.num_unfinished:
        idle += not d.turn()
    assert idle == 0  # no turn without a step while anybody is unfinished


def test_reserved_tokens_that_nobody_can_use_go_to_whoever_waits() -> None:
    d = world(tiers=(Tier("gold", 100), STANDARD, BATCH), num_blocks=64, budget=64)
    d.add(request(1, "gold", prompt=1000, max_tokens=2))
    d.turn()
    d.add(request(2, "standard", prompt=100, max_tokens=2))  # does not fit, may not evict
    d.add(request(3, "batch", prompt=100, max_tokens=2))
    d.turn()
    before = d.scheduler._sequences[RequestId(1)].num_computed_tokens
    d.turn()
    after = d.scheduler._sequences[RequestId(1)].num_computed_tokens
    assert after - before == 64


# ---- victims that share blocks ----------------------------------------------------------------------------------------
def test_a_vip_evicts_victims_that_share_a_prefix() -> None:
    prefix = tuple(range(96))  # 6 blocks
    d = world(tiers=(Tier("gold", 100), BATCH), num_blocks=10, budget=256)
    d.add(request(1, "batch", prompt=(*prefix, 1), max_tokens=60, tenant="a/x"))
    d.turn()
    d.turn()
    d.add(request(2, "batch", prompt=(*prefix, 2), max_tokens=60, tenant="a/x"))
    d.turn()
    d.turn()
    vip = request(9, "gold", prompt=70, max_tokens=2, arrival_s=d.clock.now())  # 5 blocks; free 2, the pair holds 8
    d.add(vip)
    d.run_until_idle()
    assert ttft(d, vip) < 0.05


# ---- patience -----------------------------------------------------------------------------------------------------------
def waiting_world():
    tiers = (Tier("gold", 100), Tier("batch", 10, patience_s=60.0))
    d = world(tiers=tiers, num_blocks=10, budget=64, check=False)
    d.add(request(1, "gold", prompt=140, max_tokens=20))
    d.turn()
    d.add(request(2, "batch", prompt=100, max_tokens=4))
    d.turn()
    return d, tiers


def test_applying_the_same_policy_again_does_not_restart_patience() -> None:
    d, tiers = waiting_world()
    for _ in range(5):  # a gateway reconnects every 50 s and sends the snapshot in force
        d.clock.advance(50.0)
        d.apply(snapshot(tiers=tiers))
        d.turn()
    assert d.scheduler.policy._stays[RequestId(2)].risen == 1  # waited 250 s, patience 60 s


def test_an_eviction_starts_patience_anew_and_old_promotions_do_not_count() -> None:
    tiers = (Tier("gold", 100), Tier("batch", 10, patience_s=60.0))
    d = world(tiers=tiers, num_blocks=10, budget=64, check=False)
    d.add(request(2, "batch", prompt=100, max_tokens=40))
    d.turn()
    d.turn()
    d.turn()
    d.clock.advance(59.0)
    d.add(request(1, "gold", prompt=140, max_tokens=20))  # evicts it at t = 59
    d.turn()
    d.clock.advance(2.0)
    d.turn()
    assert d.scheduler.policy._stays[RequestId(2)].risen == 0  # has waited 2 s


def test_ended_requests_are_not_kept_for_the_sake_of_their_promotions() -> None:
    d = world(tiers=(Tier("gold", 100), Tier("batch", 10, patience_s=600.0)), check=False)
    for n in range(200):
        d.add(request(n, "batch", prompt=64, max_tokens=1))
    d.run_until_idle()
    d.transcripts.clear()
    gc.collect()
    assert sum(isinstance(o, Sequence) for o in gc.get_objects()) < 100
    assert len(d.scheduler.policy._promotions) < 100


# ---- engine ---------------------------------------------------------------------------------------------------------------
def test_deadlines_of_ended_requests_are_not_kept_for_an_hour() -> None:
    d = world(check=False)
    for n in range(500):
        d.add(request(n, "batch", prompt=4, max_tokens=1, deadline_s=3600.0))
    d.run_until_idle()
    assert len(d.engine._timers) < 100


def test_a_removed_tier_takes_no_new_requests() -> None:
    d = world(check=False)
    d.add(request(1, "batch", prompt=4, max_tokens=50))
    d.turn()
    d.apply(snapshot(tiers=(GOLD, STANDARD), generation=2))
    d.run_until_idle()
    d.add(request(2, "batch", prompt=4, max_tokens=2))
    d.run_until_idle()
    assert d.transcripts[RequestId(2)].ended.error_reason == "TIER_UNKNOWN"


def test_a_request_that_ended_in_the_queue_reports_how_long_it_queued() -> None:
    d, _ = waiting_world()
    d.clock.advance(5.0)
    d.abort(RequestId(2))
    d.turn()
    assert d.transcripts[RequestId(2)].ended.queue_s > 4


def test_recompute_after_an_eviction_is_not_charged_to_the_victims_tier() -> None:
    tiers = (Tier("gold", 100), Tier("batch", 10, min_share=0.0))
    d = world(tiers=tiers, num_blocks=10, budget=256, prefix_caching=False)
    d.turn()
    charged = charges_of(d.scheduler.policy)
    d.add(request(1, "batch", prompt=100, max_tokens=10))
    d.turn()
    d.add(request(2, "gold", prompt=100, max_tokens=2))
    d.run_until_idle()
    # batch: its prompt, 8 decodes, and the one token that it computed in the same chunk as its recompute; gold: its prompt, a
    # decode, and the 100 tokens that it made batch compute again.
    assert charged == {"batch": 100 * 10 + 8 * 20 + 10, "gold": 100 * 10 + 20 + 100 * 10}


def charges_of(policy):
    """What each tier is charged from now on, piece by piece and by rate."""
    charged, decoding = Counter(), Counter()
    on_charge, on_decoding, on_steady_step = policy.on_charge, policy.on_decoding, policy.on_steady_step

    def charge(payer, cost, ledger):
        charged[payer.tier] += cost
        on_charge(payer, cost, ledger)

    def decode(payer, change, tokens):
        decoding[payer.tier] += change
        on_decoding(payer, change, tokens)

    def steady_step(rate, ledger):
        for tier, count in decoding.items():
            charged[tier] += count * rate.per_sequence
        on_steady_step(rate, ledger)

    policy.on_charge, policy.on_decoding, policy.on_steady_step = charge, decode, steady_step
    return charged


def spied(d):
    """The outputs the driver's executor will see."""
    seen, executor = [], d.engine._executor
    launch = executor.launch

    def spy(output):
        seen.append((output, {s.slot for s in d.scheduler.running._ordered}))
        return launch(output)

    executor.launch = spy
    return seen


@pytest.mark.parametrize(("x", "v1", "last"), [(150, 18, 256), (160, 17, 336)])
def test_who_is_evicted_in_a_step_comes_back_in_a_later_one_and_what_is_placed_keeps_its_blocks(
    x: int, v1: int, last: int
) -> None:
    tiers = (Tier("gold", 100), Tier("standard", 50, min_share=0.1))
    d = world(tiers=tiers, num_blocks=33, budget=128, max_num_seqs=4, step_time=StepTime(fixed_s=0.5))
    seen = spied(d)
    asked = [request(1, "standard", prompt=x, max_tokens=40), request(2, "standard", prompt=v1, max_tokens=20)]
    asked.append(request(3, "standard", prompt=140, max_tokens=4))
    for one in asked:
        d.add(one)
    for _ in range(2):
        d.turn()
    for number in range(4):  # four gold decodes take every seat: standard is below its min after a while
        d.add(request(10 + number, "gold", prompt=4, max_tokens=30))
    for _ in range(28):
        d.turn()
    d.add(request(20, "gold", prompt=last, max_tokens=4))
    d.run_until_idle(500)
    for output, live in seen:
        slots = [entry.slot for entry in output.scheduled] + output.decode_slots
        assert len(set(slots)) == len(slots)
        assert set(slots) <= live
    assert [d.transcripts[one.request_id].token_ids for one in asked] == [expected_tokens(one) for one in asked]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_that_could_not_be_started_ends_its_own_sequences_only(depth: int) -> None:
    d = world(depth=depth, fail_launches=frozenset({12}))
    asked = [request(n, "gold", prompt=8, max_tokens=9 + n, arrival_s=0.004 * n) for n in range(1, 12)]
    d.add_at_arrival(asked)
    d.run_until_idle(5000)
    outcomes = [d.transcripts[one.request_id] for one in asked]
    failed = [t for t in outcomes if t.ended.error_reason == "STEP_FAILED"]
    assert 0 < len(failed) < len(asked)
    assert all(t in failed or t.token_ids == expected_tokens(one) for t, one in zip(outcomes, asked, strict=True))
    assert d.blocks.num_used_blocks == 0


def test_a_deadline_of_an_ended_request_does_not_end_a_later_one_of_the_same_id() -> None:
    d = world()
    d.add(request(1, prompt=4, max_tokens=1, deadline_s=0.05))
    d.run_until_idle()
    d.add(request(1, prompt=4, max_tokens=50))
    d.run_until_idle()
    assert d.transcripts[RequestId(1)].ended.error_reason == ""


def test_max_wait_ends_who_was_never_placed_and_nobody_else() -> None:
    d = world(max_num_seqs=1, budget=64)
    d.add(request(1, prompt=4, max_tokens=200, max_wait_s=0.1))
    d.add(request(2, prompt=4, max_tokens=4, max_wait_s=0.1))
    d.run_until_idle()
    assert d.transcripts[RequestId(1)].ended.error_reason == ""
    assert d.transcripts[RequestId(2)].ended.error_reason == "QUEUE_TIMEOUT"


def test_what_a_growing_sequence_frees_goes_to_the_head_it_was_too_late_for_not_to_a_lower_tier() -> None:
    """10 blocks: standard holds 3, batch 6. Neither waiting request fits. When standard needs its fifth block, batch loses all of
    its own: gold, which was passed over before that in the same step, fits now, and goes before the other batch request."""
    d = world(num_blocks=10, budget=256, tiers=(GOLD, Tier("standard", 50), Tier("batch", 10)))
    d.add(request(1, "standard", prompt=47, max_tokens=40))
    d.add(request(2, "batch", prompt=95, max_tokens=40))
    for _ in range(3):
        d.turn()
    victim = d.scheduler.sequence(RequestId(2))
    victim.num_evictions = 3  # immune to eviction for rank
    d.add(request(3, "gold", prompt=60, max_tokens=4))
    d.add(request(4, "batch", prompt=10, max_tokens=4))
    while victim.status is SequenceStatus.RUNNING:
        d.turn()
    assert [n for n in (3, 4) if any(delta.started for delta in d.transcripts[RequestId(n)].deltas)] == [3]


@pytest.mark.parametrize("depth", [0, 1])
def test_two_that_must_grow_do_not_wait_for_each_other_for_ever(depth: int) -> None:
    """9 blocks, 4 each at the start. Whose tier is below its min ranks first and takes the ninth; for another it may not
    take gold's, so gold, which needs one too, takes its."""
    d = world(num_blocks=9, budget=256, tiers=(GOLD, Tier("batch", 10, min_share=0.9)), depth=depth, prefix_caching=False)
    asked = [request(n, tier, prompt=60, max_tokens=40) for n, tier in ((1, "gold"), (2, "batch"), (3, "batch"))]
    for one in asked:
        d.add(one)
    d.run_until_idle(2000)
    assert [d.transcripts[one.request_id].token_ids for one in asked] == [expected_tokens(one) for one in asked]
