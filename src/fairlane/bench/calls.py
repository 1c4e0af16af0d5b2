"""Requests that arrive over time from several tenants, for a benchmark."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from fairlane.scheduler.request import Request, RequestId, SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Call:
    """One request: arrival_s after the start of the run, `prompt` random token ids in, exactly `output` tokens out."""

    node: str
    tier: str
    arrival_s: float
    prompt: int
    output: int


def requests(calls: Sequence[Call], vocab_size: int, seed: int) -> list[Request]:
    """A request of each call, numbered from 0, in their order; arrival_s as the call's. No stop tokens: each gives exactly its
    length."""
    rng, ids = random.Random(seed), range(vocab_size)  # noqa: S311 - a load, no secret
    return [
        Request(
            RequestId(number),
            call.node,
            call.tier,
            tuple(rng.choices(ids, k=call.prompt)),
            call.output,
            GREEDY,
            arrival_s=call.arrival_s,
            cache_domain=f"tenant:{call.node}",
        )
        for number, call in enumerate(calls)
    ]
