"""What bench_replay.py compares: figures of all requests of a policy's runs together, measured and simulated alike, and how far
chance could have moved them.

A quantile is one of the pool of all requests of all runs (loads x repeats), not a mean of the runs' quantiles; tokens a second
are the mean over the runs of a tier's output tokens from its first arrival to its last end. The simulator's pool has as many
replays of the same load for every real run. Requests of one run wait for each other, so chance is asked run by run: the bootstrap
draws as many runs as there are, with replacement, with the replays of theirs, and figures both anew; of 1000 draws the middle
95 % are the interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import NamedTuple

from fairlane.scheduler.simulator.report import percentile

TTFT50, TTFT99, RATE = "TTFT p50", "TTFT p99", "tokens/s"
NAMES = (TTFT50, TTFT99, RATE)
DRAWS = 1000
MIDDLE = 0.95


@dataclass(frozen=True, slots=True)
class Served:
    """One request as its client saw it, in seconds from the start of its load."""

    load: int
    tier: str
    arrival_s: float
    ttft_s: float
    ended_s: float
    tokens: int
    preemptions: int


Run = Sequence[Served]


class Key(NamedTuple):
    tier: str
    figure: str


@dataclass(frozen=True, slots=True)
class Compared:
    """measured, simulated: of all runs. low, high: of the middle of the draws, of simulated / measured - 1. noise: half of that
    of `measured`, as a part of it."""

    measured: float
    simulated: float
    low: float
    high: float
    noise: float

    @property
    def off(self) -> float:
        return self.simulated / self.measured - 1


def figures(runs: Iterable[Run]) -> dict[Key, float]:
    """Of all runs together. Every run has requests of every tier."""
    return _figures([_parts(run) for run in runs])


def compare(measured: Sequence[Run], replays: Sequence[Sequence[Run]], seed: int = 0) -> dict[Key, Compared]:
    """replays[i]: of measured[i]'s load, as many for each. ValueError for other numbers of them."""
    real, made = [_parts(run) for run in measured], [[_parts(run) for run in own] for own in replays]
    pairs = list(zip(real, made, strict=True))
    found, predicted = _both(pairs)
    random = Random(seed)
    draws = [_both(random.choices(pairs, k=len(pairs))) for _ in range(DRAWS)]
    compared = {}
    for key, value in found.items():
        low, high = _middle([other[key] / one[key] - 1 for one, other in draws])
        least, most = _middle([one[key] for one, _ in draws])
        compared[key] = Compared(value, predicted[key], low, high, (most - least) / 2 / value)
    return compared


# Of a run, by tier: times to first token, and output tokens a second.
_Parts = Mapping[str, tuple[list[float], float]]


def _both(pairs: Sequence[tuple[_Parts, Sequence[_Parts]]]) -> tuple[dict[Key, float], dict[Key, float]]:
    return _figures([real for real, _ in pairs]), _figures([one for _, made in pairs for one in made])


def _parts(run: Run) -> _Parts:
    parts: dict[str, tuple[list[float], float]] = {}
    for tier in dict.fromkeys(one.tier for one in run):
        own = [one for one in run if one.tier == tier]
        seconds = max(one.ended_s for one in own) - min(one.arrival_s for one in own)
        parts[tier] = [one.ttft_s for one in own], sum(one.tokens for one in own) / seconds
    return parts


def _figures(runs: Sequence[_Parts]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for tier in runs[0]:
        waits = sorted(wait for run in runs for wait in run[tier][0])
        found[Key(tier, TTFT50)] = percentile(waits, 0.5)
        found[Key(tier, TTFT99)] = percentile(waits, 0.99)
        found[Key(tier, RATE)] = fmean(run[tier][1] for run in runs)
    return found


def _middle(values: Sequence[float]) -> tuple[float, float]:
    return percentile(values, (1 - MIDDLE) / 2), percentile(values, (1 + MIDDLE) / 2)
