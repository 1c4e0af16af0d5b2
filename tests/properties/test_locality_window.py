"""The locality window changes the order where something is cached, and nothing else: what it may do to shares is F1 and F2
(test_fair_gap.py)."""

from __future__ import annotations

from typing import Any

from hypothesis import given

from fairlane.scheduler.tenancy import TiersPolicy
from histories import History, histories, run

FAIR_BANDS = (TiersPolicy.FAIR, TiersPolicy.VIP)


def launched(history: History, *, choosing: bool = True, **options: Any) -> list[dict[str, Any]]:
    """Every step as it is sent to the runner. choosing: whether turns may be taken at all."""
    driver = history.start(**options)
    if not choosing:
        driver.scheduler.locality.choose = lambda head, policy: head  # type: ignore[method-assign]
    seen: list[dict[str, Any]] = []
    launch = driver.engine._executor.launch
    driver.engine._executor.launch = lambda output: (seen.append(output.to_plain()), launch(output))[1]  # type: ignore[method-assign]
    run(driver)
    return seen


@given(history=histories(policies=FAIR_BANDS))
def test_a_window_of_0_is_the_fair_order(history: History) -> None:
    assert launched(history, window_ms=0.0) == launched(history, choosing=False, window_ms=50.0)


@given(history=histories(policies=FAIR_BANDS))
def test_where_nothing_is_cached_a_window_changes_nothing(history: History) -> None:
    assert launched(history, window_ms=50.0, prefix_caching=False) == launched(history, prefix_caching=False)


@given(history=histories(policies=FAIR_BANDS))
def test_whoever_is_passed_gets_the_tokens_it_would_have_got(history: History) -> None:
    tokens = []
    for window_ms in (0.0, 50.0):
        driver = history.start(window_ms=window_ms, check=True)
        run(driver)
        cancelled = {history.asked[number - 1].request_id for number in history.cancels if number <= len(history.asked)}
        tokens.append({number: one.token_ids for number, one in driver.transcripts.items() if number not in cancelled})
    assert tokens[0] == tokens[1]
