"""What is happening, in one sentence, and what came out of it, in a few: written from the board's and the results' figures."""

from __future__ import annotations

from collections.abc import Sequence

from fairlane.demo.board import Board, Lane, PhaseResult

_JUST_NOW_S = 1.5
_LONG_S = 1.5


def sentence(board: Board, now_s: float) -> str:
    """The most telling thing right now."""
    top, *others = board.lanes
    bottom = others[-1]
    if all(not lane.asks for lane in board.lanes):
        return "waiting for the first request"
    if board.tiers == "fair":
        return _shares(board, now_s)
    if board.tiers == "fcfs":
        return _first_come(top, bottom, now_s)
    return _ranked(top, others, now_s)


def _first_come(top: Lane, bottom: Lane, now_s: float) -> str:
    waited_s = top.longest_wait_s(now_s)
    if top.waiting and waited_s > _LONG_S:
        return f"{top.load.tier} has waited for {waited_s:.0f} s, because {bottom.load.tier} came first, and keeps coming"
    return f"everybody queues in order of arrival; {bottom.load.tier} keeps the queue long"


def _ranked(top: Lane, others: Sequence[Lane], now_s: float) -> str:
    hit = [lane for lane in others if lane.last_preempted_s is not None and now_s - lane.last_preempted_s < _JUST_NOW_S]
    if hit and top.running:
        names = " and ".join(lane.load.tier for lane in hit)
        return f"{top.load.tier} took KV blocks from {names}: those streams stop, wait, and go on with the very next token"
    if top.running:
        return f"{top.load.tier} runs at once; the others get what it leaves"
    if top.waiting:
        return f"{top.load.tier} has just come and goes first"
    starved = others[-1]
    waited_s = starved.longest_wait_s(now_s)
    if starved.waiting and not starved.running:
        return f"{starved.load.tier} has to wait (the oldest for {waited_s:.0f} s): there is more important work"
    return f"no {top.load.tier} work just now: the others use the whole machine"


def _shares(board: Board, now_s: float) -> str:
    rates = [lane.rate(now_s) for lane in board.lanes]
    total = sum(rates) or 1.0
    shares = ", ".join(f"{lane.load.tier} {rate / total:.0%}" for lane, rate in zip(board.lanes, rates, strict=True))
    return f"everybody moves, the more weight, the more. Of the tokens just now: {shares}"


def conclusions(results: Sequence[PhaseResult]) -> list[str]:
    """What the phases show, a line each, the first one being what the others are compared with."""
    if not results:
        return []
    first, *later = results
    width = max(len(result.policy) for result in results)
    said = [_waits(first), *(_compared(result, first) for result in later)]
    return [f"{result.policy.upper():<{width}} {text}" for result, text in zip(results, said, strict=True)]


def _waits(result: PhaseResult) -> str:
    waits = [(tier.tier, tier.ttft_s(0.5)) for tier in result.tiers]
    return "a first token takes " + ", ".join(f"{name} {wait}" for name, wait in waits if wait is not None) + " (median)"


def _compared(result: PhaseResult, first: PhaseResult) -> str:
    top, bottom = result.tiers[0].tier, result.tiers[-1].tier
    parts = [_sooner(result, first, top), *(_within(result, tier.tier) for tier in result.tiers[1:-1]), _still(result, bottom)]
    return "; ".join(part for part in parts if part)


def _sooner(result: PhaseResult, first: PhaseResult, tier: str) -> str:
    before, after = first.tier(tier).ttft_s(0.5), result.tier(tier).ttft_s(0.5)
    if before is None or after is None:
        return ""
    ratio = before.seconds / after.seconds if after.seconds and not after.at_least else 0.0
    times = f" ({ratio:.0f} times sooner)" if ratio >= 1.5 else ""
    return f"{tier} after {after} instead of {before}{times}"


def _within(result: PhaseResult, tier: str) -> str:
    wait = result.tier(tier).ttft_s(0.95)
    if wait is None:
        return ""
    return f"{tier} p95 over {wait.seconds:.1f} s" if wait.at_least else f"{tier} mostly within {wait} (p95)"


def _still(result: PhaseResult, tier: str) -> str:
    silent = sum(rate == 0 for rate in result.tier(tier).rates)
    return f"{tier} stood still for {silent} of {result.seconds:.0f} s" if silent else f"{tier} never stood still"
