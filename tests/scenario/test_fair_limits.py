"""Where the bounds on fair shares end (docs/scheduling.md, "not enforced"): loads that break a precondition, and what comes of
it. Whoever makes one of these better corrects that page."""

from __future__ import annotations

from collections import Counter

from engine_world import request, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.settlement import RECHECK_STEPS
from fairlane.scheduler.tenancy import Tier, TiersPolicy

SEATS, BUDGET = 60, 64


def fair(**options: object) -> EngineDriver:
    defaults = {"policy": TiersPolicy.FAIR, "tiers": (Tier("t", 0),), "prefix_caching": False, "check": False}
    return world(**(defaults | options))  # type: ignore[arg-type]


class Asking:
    """Numbers requests, and counts what each tenant has waiting and was charged, in prompt tokens."""

    def __init__(self, driver: EngineDriver) -> None:
        self.driver = driver
        self._number = 0

    def ask(self, tenant: str, count: int, *, prompt: int, max_tokens: int) -> None:
        for _ in range(count):
            self._number += 1
            self.driver.add(request(self._number, "t", prompt=prompt, max_tokens=max_tokens, tenant=tenant))

    def waiting(self, tenant: str) -> int:
        return self.driver.scheduler.census.waiting_by_node.copy().get(tenant, 0)

    def charged(self) -> Counter[str]:
        counters = self.driver.scheduler.policy._trees[0].counters()  # type: ignore[attr-defined]
        return Counter({"/".join(names[1:3]): int(v) // 10 for names, v in counters.items() if len(names) == 3})


def test_f1_needs_heads_that_fit_or_eight_of_them_where_kv_is_short() -> None:
    """b has large requests waiting at all times; small ones of a overtake its heads sixteen times, and then the next ones. Nobody
    is evicted."""

    def charged(queued: int) -> Counter[str]:
        asking = Asking(fair(num_blocks=36, max_num_seqs=32, max_resident=32, budget=256))
        for number in range(3000):
            asking.ask("o/a", 1, prompt=4, max_tokens=1 + number * 37 % 12)
        asking.ask("o/b", queued, prompt=200, max_tokens=8)
        for _ in range(800):
            asking.driver.turn()
            assert asking.waiting("o/b") > 0
            asking.ask("o/b", queued - asking.waiting("o/b"), prompt=200, max_tokens=8)
        return asking.charged()

    two, eight = charged(2), charged(8)
    bound = 2 * 32 * (200 + 2 * 8)  # 2 U
    assert eight["o/a"] - eight["o/b"] < bound < two["o/a"] - two["o/b"]
    assert two["o/a"] > 1.5 * two["o/b"]


def test_f2_needs_tokens_beside_the_streams_of_who_is_ahead() -> None:
    """50 long streams of a leave 14 tokens of a step to b, and nothing is short that b could evict for."""
    asking = Asking(fair(num_blocks=10_000, max_num_seqs=SEATS, max_resident=256, budget=BUDGET, gap_ms=1.0))
    asking.ask("o/a", 50, prompt=8, max_tokens=600)
    for _ in range(60):
        asking.driver.turn()
    asking.ask("o/a", 10, prompt=8, max_tokens=600)
    asking.ask("o/b", 100, prompt=600, max_tokens=10)
    before = asking.charged()
    for _ in range(200):
        asking.driver.turn()
    after = asking.charged()
    lead = (after["o/a"] - before["o/a"]) - (after["o/b"] - max(before["o/a"], before["o/b"]))  # b was lifted to a
    step = BUDGET + SEATS
    assert lead > 2 * (2 * step + step + RECHECK_STEPS * 2 * SEATS)


def test_f2_needs_the_steps_in_which_no_waiting_head_is_looked_at() -> None:
    """b comes when six streams of a have every slot, and is level with a. Its head is looked at, and again sixteen steps later:
    a gets further ahead than a bound of theta and a step allows, for the whole drift."""
    seats, budget, output = 6, 20, 30
    asking = Asking(fair(num_blocks=30, block_size=8, max_num_seqs=seats, max_resident=seats, budget=budget, gap_ms=1.0))
    asking.ask("o/a", 20, prompt=1, max_tokens=output)
    for _ in range(3):
        asking.driver.turn()
    before = asking.charged()["o/a"]
    asking.ask("o/b", 20, prompt=1, max_tokens=output)
    leads = []
    for _ in range(60):
        asking.driver.turn()
        charged = asking.charged()
        leads.append(charged["o/a"] - max(before, charged["o/b"]))  # b was lifted to a
    step = budget + seats
    theta = max(2 * step, 1 + output)  # a millisecond is less, and so is the recompute of the largest
    assert asking.waiting("o/a") and asking.waiting("o/b")
    assert 2 * (theta + step) < max(leads) <= theta + RECHECK_STEPS * 2 * seats
