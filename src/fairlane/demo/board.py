"""What the demo has seen: per tenant, who runs and waits, tokens over time, and every request's time to first token. It only
keeps and counts; sentences and pictures are made of it elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from fairlane.demo.scenario import Load

RATE_WINDOW_S = 3.0


class Stage(Enum):
    """Where a request is, as its own events tell."""

    SENT = "sent"
    WAITING = "waiting"
    RUNNING = "running"
    OVER = "over"


@dataclass(slots=True)
class Ask:
    """One request. Times are seconds since the phase began; first_s is None until the first token."""

    sent_s: float
    stage: Stage = Stage.SENT
    first_s: float | None = None
    tokens: int = 0

    def ttft_s(self, now_s: float) -> float:
        """Its time to first token; while there is none, what it has waited up to now."""
        return (now_s if self.first_s is None else self.first_s) - self.sent_s


@dataclass(slots=True)
class Lane:
    """One tenant in one phase. kv_blocks: as the server told last; None when it did not."""

    load: Load
    asks: list[Ask] = field(default_factory=list)
    tokens: list[tuple[float, int]] = field(default_factory=list)  # (when, how many)
    preemptions: int = 0
    errors: int = 0
    kv_blocks: int | None = None
    last_preempted_s: float | None = None

    def count(self, *stages: Stage) -> int:
        return sum(ask.stage in stages for ask in self.asks)

    @property
    def running(self) -> int:
        return self.count(Stage.RUNNING)

    @property
    def waiting(self) -> int:
        return self.count(Stage.SENT, Stage.WAITING)

    def longest_wait_s(self, now_s: float) -> float:
        """Of those that have no token yet; 0 if there are none."""
        return max((ask.ttft_s(now_s) for ask in self.asks if ask.first_s is None and ask.stage is not Stage.OVER), default=0.0)

    def rate(self, now_s: float, window_s: float = RATE_WINDOW_S) -> float:
        """Tokens a second over the last window."""
        window_s = min(window_s, max(now_s, 0.5))
        number = 0
        for when_s, tokens in reversed(self.tokens):
            if when_s <= now_s - window_s:
                break
            number += tokens
        return number / window_s

    def points(self, now_s: float) -> tuple[Point, ...]:
        """Of all requests but those that failed before their first token."""
        asks = [ask for ask in self.asks if ask.first_s is not None or ask.stage is not Stage.OVER]
        return tuple(Point(ask.sent_s, ask.ttft_s(now_s), ask.first_s is None) for ask in asks)

    def recent_ttfts_s(self, number: int) -> list[float]:
        """Of the latest requests that have a token, in order of sending."""
        got = deque((ask.ttft_s(0) for ask in self.asks if ask.first_s is not None), maxlen=number)
        return list(got)


@dataclass(slots=True)
class Board:
    """One phase. generation, tiers: of the policy in force, as the server tells it. file_is_bad: the policy file was changed into
    something that cannot be used."""

    lanes: tuple[Lane, ...]
    file_is_bad: bool = False
    generation: int = 0
    tiers: str = ""
    blocks: int = 0

    def lane(self, tier: str) -> Lane:
        return next(lane for lane in self.lanes if lane.load.tier == tier)

    def kv_share(self, lane: Lane) -> float | None:
        """Part of all blocks that the tenant's requests hold; None if the server did not say."""
        return None if lane.kv_blocks is None or not self.blocks else lane.kv_blocks / self.blocks


def new_board(loads: Iterable[Load]) -> Board:
    return Board(tuple(Lane(load) for load in loads))


@dataclass(frozen=True, slots=True)
class Point:
    """One request in the picture. censored: it had no token when the phase ended, so it waited at least this long."""

    sent_s: float
    ttft_s: float
    censored: bool


@dataclass(frozen=True, slots=True)
class TierResult:
    """One tier in one phase. rates: tokens a second in each second of it."""

    tier: str
    points: tuple[Point, ...]
    rates: tuple[float, ...]
    tokens: int
    preemptions: int
    errors: int

    def ttft_s(self, quantile: float) -> Wait | None:
        """A quantile over all requests; None without any."""
        return quantile_of(self.points, quantile)


@dataclass(frozen=True, slots=True)
class PhaseResult:
    """A phase that is over. title: of the policy it began with."""

    policy: str
    title: str
    seconds: float
    tiers: tuple[TierResult, ...]

    def tier(self, name: str) -> TierResult:
        return next(result for result in self.tiers if result.tier == name)


def result_of(board: Board, policy: str, title: str, seconds: float) -> PhaseResult:
    return PhaseResult(policy, title, seconds, tuple(_tier_result(lane, seconds) for lane in board.lanes))


def _tier_result(lane: Lane, seconds: float) -> TierResult:
    rates = [0.0] * max(1, round(seconds))
    for when_s, tokens in lane.tokens:
        rates[min(len(rates) - 1, max(0, int(when_s)))] += tokens
    total = sum(tokens for _, tokens in lane.tokens)
    return TierResult(lane.load.tier, lane.points(seconds), tuple(rates), total, lane.preemptions, lane.errors)


@dataclass(frozen=True, slots=True)
class Wait:
    """A quantile of waiting times. at_least: it is longer than this, but the phase ended before anybody knew how long."""

    seconds: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{'> ' if self.at_least else ''}{self.seconds:.{1 if self.seconds >= 10 else 2}f} s"


def quantile_of(points: Sequence[Point], quantile: float) -> Wait | None:
    """The quantile by Kaplan and Meier: who was still waiting at the end counts as waiting longer than that, so neither leaving
    them out nor taking their time so far for the whole can flatter a policy that makes people wait."""
    left, still = len(points), 1.0
    ordered = sorted(points, key=lambda point: (point.ttft_s, point.censored))
    for point in ordered:
        if not point.censored:
            still *= 1 - 1 / left
            if still <= 1 - quantile + 1e-9:
                return Wait(point.ttft_s)
        left -= 1
    return Wait(ordered[-1].ttft_s, at_least=True) if ordered else None
