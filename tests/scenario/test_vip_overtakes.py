"""The promise of the VIP policy, on paper: with KV for about four requests and forty submitted, VIPs overtake and preempt
batch work, and everyone still gets exactly their tokens."""

from __future__ import annotations

import random

import pytest

from engine_world import expected_tokens, mean_ttft_s, request, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import Request
from fairlane.scheduler.tenancy import TiersPolicy

# 48 blocks of 16 tokens; a request holds 96..160 prompt + 64..96 output tokens = 10..16 blocks: about four at once.
NUM_BLOCKS = 48
FCFS_MAKESPAN_S = 5.0


def forty_requests() -> list[Request]:
    """28 batch and 6 standard requests in the first half second, 6 VIPs spread over what FCFS needs for all of it."""
    rng = random.Random(7)
    asked = [
        request(
            number,
            "standard" if number % 6 == 0 else "batch",
            prompt=rng.randrange(96, 161),
            max_tokens=rng.randrange(64, 97),
            arrival_s=rng.random() * 0.5,
        )
        for number in range(1, 35)
    ]
    vips = [
        request(100 + i, "gold", prompt=rng.randrange(96, 161), max_tokens=32, arrival_s=FCFS_MAKESPAN_S * (i + 1) / 7)
        for i in range(6)
    ]
    return asked + vips


def run(policy: TiersPolicy, depth: int) -> tuple[EngineDriver, list[Request]]:
    driver = world(policy=policy, num_blocks=NUM_BLOCKS, budget=256, max_num_seqs=16, depth=depth)
    asked = forty_requests()
    driver.add_at_arrival(asked)
    driver.run_until_idle()
    return driver, asked


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_vips_wait_a_quarter_of_what_they_wait_under_fcfs_and_nobody_loses_a_token(depth: int) -> None:
    fcfs, asked = run(TiersPolicy.FCFS, depth)
    vip, _ = run(TiersPolicy.VIP, depth)

    for driver in (fcfs, vip):
        assert [driver.transcripts[r.request_id].token_ids for r in asked] == [expected_tokens(r) for r in asked]
        assert driver.blocks.num_used_blocks == 0
        driver.scheduler.check_integrity()
    assert vip.scheduler.num_preemptions > 0
    # The VIPs are spread over the time in which FCFS is busy, or they would compare an idle machine with itself.
    makespan_s = max(t.ended_s or 0.0 for t in fcfs.transcripts.values())
    assert max(r.arrival_s for r in asked) < makespan_s
    vips = [r for r in asked if r.tier == "gold"]
    assert mean_ttft_s(vip, vips) <= 0.25 * mean_ttft_s(fcfs, vips)
