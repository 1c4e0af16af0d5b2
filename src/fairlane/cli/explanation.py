"""An Explanation in words, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import typer

_ARRIVED, _WAITING, _RUNNING, _PAUSED = 1, 2, 3, 4  # Explanation.State
_CAP, _RANK, _SLOTS, _BLOCKS, _STEP, _KV_LIMIT, _LOCALITY = 1, 2, 3, 4, 5, 6, 7  # Explanation.Reason; 8 is a ceil's
_SHOWN_EVICTIONS = 5


def show(name: str, answer: Any) -> None:
    """Prints what is known, the state first."""
    typer.echo(f"{name}: {_state(answer)}")
    for line in (*_reasons(answer), *_ceilings(answer), *_more(answer)):
        typer.echo(f"  {line}")


def _state(answer: Any) -> str:
    if answer.state == _ARRIVED:
        return f"has arrived in {answer.tier} and is not at the worker yet"
    if answer.state == _WAITING:
        return f"waits in {answer.tier} for {answer.waited_s:.1f} s, rank {answer.rank}"
    state = "is paused" if answer.state == _PAUSED else "runs"
    return f"{state} in {answer.tier}, {answer.computed_tokens} of {answer.tokens} tokens computed"


def _reasons(answer: Any) -> Iterator[str]:
    for reason in answer.reasons:
        if reason == _CAP:
            yield from (f"cap: {cap.node} runs {cap.running}, its max_running is {cap.limit}" for cap in answer.caps)
        elif reason == _RANK:
            yield f"rank: before it go {_parties(answer.ahead)}"
        elif reason == _SLOTS:
            yield "slots: the engine has none left for another sequence"
        elif reason == _BLOCKS:
            needed, free = answer.blocks_needed, answer.blocks_free
            yield f"blocks: needs {needed}, {free} are free, {answer.blocks_missing} are missing beside those that run"
        elif reason == _KV_LIMIT:
            for one in answer.kv_accounts:
                if one.is_full:
                    left = f"has {one.used} KV blocks, its kv_limit is {one.limit}"
                    yield f"kv_limit: {one.node} {left}; it needs {answer.blocks_needed}, {answer.blocks_missing} are missing"
        elif reason == _LOCALITY:
            yield "locality: others took its turn, whose prompts are cached"
        elif reason == _STEP:
            yield "nothing holds it up: one of the next steps takes it in"


def _ceilings(answer: Any) -> Iterator[str]:
    """Of a stream that pauses, too, which has no reasons."""
    for one in answer.ceilings:
        whose = one.node or f"tier {one.tier}"
        yield f"ceil: {whose} has had its {one.share * 100:.4g}% of the worker's time, goes on in {one.opens_in_s:.1f} s"


def _more(answer: Any) -> Iterator[str]:
    if answer.is_owed:
        yield "a minimum share is owed to it: it goes before all tiers"
    if answer.holders:
        yield f"running: {_parties(answer.holders)}"
    for one in answer.kv_accounts:
        if one.guarantee:
            yield f"KV cache of {one.node}: {one.used} blocks, {one.guarantee} are guaranteed"
    if answer.HasField("estimated_start_s"):
        yield f"may start in {answer.estimated_start_s:.0f} s, as requests started lately"
    if answer.preemptions:
        yield "lost its blocks " + (f"{answer.preemptions} times" if answer.preemptions > 1 else "once")
    for eviction in answer.evictions[-_SHOWN_EVICTIONS:]:
        by = " ".join(part for part in (eviction.by_node, f"in {eviction.by_tier}" if eviction.by_tier else "") if part)
        yield f"{eviction.ago_s:.1f} s ago: {eviction.kind} ({eviction.reason}) for {by or 'others'}"
    if answer.is_partial:
        yield "there are too many requests to look at all: counts are of the oldest"


def _parties(parties: Iterable[Any]) -> str:
    def say(party: Any) -> str:
        may_take = f" (it may take the blocks of {party.evictable})" if party.evictable else ""
        return f"{party.requests} of {party.node or 'others'} in {party.tier}{may_take}"

    return ", ".join(say(party) for party in parties)
