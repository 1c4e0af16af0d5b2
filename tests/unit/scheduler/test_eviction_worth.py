"""What an eviction must be worth: tokens of the step beside those that the victim gives back, and, where a lead gives the right
to it, a lead beyond what the recompute will be charged. The oracle is arithmetic."""

from __future__ import annotations

import pytest

from engine_world import request, world
from fairlane.scheduler.tenancy import Tier, TiersPolicy

GOLD, BATCH = Tier("gold", 100), Tier("batch", 10)


@pytest.mark.parametrize(("budget", "evictions"), [(64, 1), (128, 2), (8, 1)])
def test_nobody_is_evicted_for_tokens_that_evictions_alone_give(budget: int, evictions: int) -> None:
    # Eight of eight slots decode. Eight VIPs of 60 tokens come at once: of 64 tokens 56 are left for them, of 128 two get
    # some of 120. A budget that decodes fill leaves a token for whoever ranks first. No more, although every victim gives one.
    driver = world(tiers=(GOLD, BATCH), num_blocks=400, budget=budget, max_num_seqs=8, max_resident=8)
    for number in range(8):
        driver.add(request(number, "batch", prompt=1, max_tokens=200))
    for _ in range(4):
        driver.turn()
    for number in range(8):
        driver.add(request(100 + number, "gold", prompt=60, max_tokens=2, arrival_s=driver.clock.now()))
    driver.turn()
    assert driver.scheduler.num_preemptions == evictions


def test_vips_that_come_at_once_still_all_get_in_one_after_another() -> None:
    driver = world(tiers=(GOLD, BATCH), num_blocks=400, budget=64, max_num_seqs=8, max_resident=8)
    for number in range(8):
        driver.add(request(number, "batch", prompt=7, max_tokens=400))
    for _ in range(16):
        driver.turn()
    for number in range(8):
        driver.add(request(100 + number, "gold", prompt=60, max_tokens=40, arrival_s=driver.clock.now()))
    for _ in range(10):
        driver.turn()
    assert driver.scheduler.running.by_tier == {"gold": 8, "batch": 0}


@pytest.mark.parametrize(("prompt", "evictions"), [(100, 1), (2000, 0)])
def test_a_lead_does_not_evict_what_would_cost_more_than_it(prompt: int, evictions: int) -> None:
    # One slot. While B waits, A's lead grows by 2 a step, to 1400; theta is two steps' cost, 2 x 256 tokens. To compute A again
    # would be charged to B: some 400 to 800 tokens in the first case, in the second more than 2000.
    driver = world(
        policy=TiersPolicy.FAIR, tiers=(BATCH,), num_blocks=400, budget=256, max_num_seqs=2, max_resident=1, gap_ms=1.0
    )
    driver.add(request(1, "batch", prompt=prompt, max_tokens=700, tenant="o/a"))
    for _ in range(10):
        driver.turn()
    driver.add(request(2, "batch", prompt=50, max_tokens=4, tenant="o/b", arrival_s=driver.clock.now()))
    driver.run_until_idle(50_000)
    assert driver.scheduler.num_preemptions == evictions
