"""The locality window by hand: whose turn is taken, by whom, how often, and what Explain says of it."""

from __future__ import annotations

import pytest

from engine_world import request, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.engine import Explain
from fairlane.scheduler.explain import Explanation, Reason
from fairlane.scheduler.locality import MAX_PASSED
from fairlane.scheduler.request import RequestId
from fairlane.scheduler.tenancy import NodeShare, Tier, TiersPolicy

TIERS = (Tier("batch", 10),)
PREFIX = tuple(range(1000, 1064))  # four blocks of 16


def about(number: int, tenant: str, prefix: tuple[int, ...] = PREFIX, **more: int) -> object:
    """A request with a prefix and 8 tokens of its own."""
    return request(number, prompt=(*prefix, *(number * 31 + k for k in range(8))), max_tokens=2, tenant=tenant, **more)  # type: ignore[arg-type]


def warm(window_ms: float, *, nodes: tuple[NodeShare, ...] = ()) -> EngineDriver:
    """One seat. o/a's prefix is in the cache, o/b has got nothing yet, so that it is next."""
    driver = world(
        policy=TiersPolicy.FAIR, tiers=TIERS, max_num_seqs=1, max_resident=1, num_blocks=200, budget=256, window_ms=window_ms,
        nodes=nodes,
    )  # fmt: skip
    driver.add(about(1, "o/a"))  # type: ignore[arg-type]
    driver.run_until_idle()
    driver.add(request(2, prompt=16, max_tokens=8, tenant="o/c"))
    driver.turn()  # takes the seat
    return driver


def starts(driver: EngineDriver) -> list[int]:
    """In which order they get in, to the end."""
    admit, order = driver.scheduler.admit, list[int]()
    driver.scheduler.admit = lambda one, cached: (order.append(int(one.request_id)), admit(one, cached))[1]  # type: ignore[func-returns-value, method-assign]
    driver.run_until_idle()
    return order


def explained(driver: EngineDriver, number: int) -> Explanation:
    answers: list[Explanation | None] = []
    driver._commands.append(Explain(RequestId(number), answers.append))
    driver.turn()
    assert answers[0] is not None
    return answers[0]


@pytest.mark.parametrize(("window_ms", "order"), [(0.0, [3, 4]), (1000.0, [4, 3])])
def test_a_cached_prompt_takes_the_turn_of_one_that_is_not(window_ms: float, order: list[int]) -> None:
    """o/a was served and lifted o/b to its own counter or below when it came; both wait, o/b in front."""
    driver = warm(window_ms)
    driver.add(request(3, prompt=72, max_tokens=2, tenant="o/b"))
    driver.add(about(4, "o/a"))  # type: ignore[arg-type]
    assert starts(driver) == order


def test_of_one_tenants_requests_the_cached_one_goes_first_but_never_before_a_higher_order() -> None:
    orders = []
    for order in (0, 1):
        driver = warm(1000.0)
        driver.add(request(3, prompt=72, max_tokens=2, tenant="o/a", order=order))
        driver.add(about(4, "o/a"))  # type: ignore[arg-type]
        orders.append(starts(driver))
    assert orders == [[4, 3], [3, 4]]


def test_who_is_beyond_the_window_waits_for_its_turn() -> None:
    """o/a gets in while it is ahead by no more than the window: of 40 requests as many as that pays for, then it is o/b's."""
    places = []
    for window_ms in (1.0, 20.0, 100_000.0):
        driver = warm(window_ms)
        driver.add(request(3, prompt=72, max_tokens=2, tenant="o/b"))
        for number in range(4, 44):
            driver.add(about(number, "o/a"))  # type: ignore[arg-type]
        places.append(starts(driver).index(3))
    assert places[0] < places[1] < places[2] == MAX_PASSED


def test_whoever_was_passed_is_told_why() -> None:
    driver = warm(1000.0)
    driver.add(request(3, prompt=72, max_tokens=2, tenant="o/b"))
    for number in (4, 5):
        driver.add(about(number, "o/a"))  # type: ignore[arg-type]
    while not driver.transcripts[RequestId(4)].token_ids:
        driver.turn()
    passed, other = explained(driver, 3), explained(driver, 5)
    assert (Reason.LOCALITY in passed.reasons, Reason.LOCALITY in other.reasons) == (True, False)


def test_an_owed_minimum_is_not_passed() -> None:
    driver = warm(100_000.0, nodes=(NodeShare("o/b", min_share=0.5),))
    driver.add(request(3, prompt=72, max_tokens=2, tenant="o/b"))
    for number in range(4, 44):
        driver.add(about(number, "o/a"))  # type: ignore[arg-type]
    assert starts(driver).index(3) < MAX_PASSED
