"""Requests that arrive over time from several tenants, for a benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairlane.bench.loads import Load
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
    prompts = Load(tuple((call.prompt, call.output) for call in calls)).prompts(vocab_size, seed)
    return [
        Request(
            RequestId(number),
            call.node,
            call.tier,
            prompt,
            call.output,
            GREEDY,
            arrival_s=call.arrival_s,
            cache_domain=f"tenant:{call.node}",
        )
        for number, (call, prompt) in enumerate(zip(calls, prompts, strict=True))
    ]
