"""What a piece of work costs, in integer units, so that sums of charges are exact. A cost function prices work when it is placed
in a step (ledger WORK) and the KV cache that is held from step to step (ledger HELD); a policy's counters go by the larger.

    tokens     VTC's linear price (Sheng et al., OSDI 2024), cached prompt tokens at a tenth
    roofline   worker time: each step's, split over its members by what they make the device do
    kv_time    tokens of KV cache held, times how long (as Justitia's, arXiv 2510.17015)
    drf        roofline and kv_time as parts of what the worker has of each (dominant resource fairness)

A decode's price is linear in its context, and so is what is held: the steady-decode lane charges both as rates, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from fairlane.scheduler.tenancy import CostName

PS_PER_S = 10**12
# A balance beyond this (a device that hung) is nobody's to pay.
_LARGEST_BALANCE_PS = PS_PER_S
_SMOOTHING = 0.1
# Steps over which charges catch up with the time that steps took.
_REPAY_STEPS = 32


class Ledger(IntEnum):
    """What a charge is for. Sums are kept apart."""

    WORK = 0
    HELD = 1


class Rate(NamedTuple):
    """A price that is linear in the tokens of a sequence."""

    per_sequence: int
    per_token: int

    def of(self, num_tokens: int) -> int:
        return self.per_sequence + self.per_token * num_tokens


_FREE, _DECODE = Rate(0, 0), Rate(20, 0)


class Cost(Protocol):
    """Prices in integer units. Those of WORK hold from begin_step() to begin_step()."""

    @property
    def name(self) -> CostName: ...

    def begin_step(self, num_running: int) -> None:
        """A step is about to be placed, with so many sequences running."""

    def chunk(self, start: int, num_tokens: int) -> int:
        """Tokens [start, start + num_tokens) of a prompt or recompute. Additive: the prices of a chunk's parts are its own."""

    def cached(self, num_tokens: int) -> int:
        """Tokens taken from the prefix cache."""

    def decode(self) -> Rate:
        """One decode token of a sequence with so many tokens before it."""

    def holding(self, since_s: float, until_s: float) -> int:
        """One token of KV cache held from since_s to until_s (HELD). Additive in time."""

    def observe(self, charged: int, elapsed_s: float) -> None:
        """A step that was charged so much, as WORK, took so long."""


@dataclass(frozen=True, slots=True)
class TokensCost:
    """Prices per token in tenths of one uncached prompt token."""

    name: CostName = CostName.TOKENS
    prefill_price: int = 10
    cached_price: int = 1
    decode_price: Rate = _DECODE

    def begin_step(self, num_running: int) -> None:
        """Prices are constants."""

    def chunk(self, start: int, num_tokens: int) -> int:
        return self.prefill_price * num_tokens

    def cached(self, num_tokens: int) -> int:
        return self.cached_price * num_tokens

    def decode(self) -> Rate:
        return self.decode_price

    def holding(self, since_s: float, until_s: float) -> int:
        return 0

    def observe(self, charged: int, elapsed_s: float) -> None:
        """Prices are constants."""


@dataclass(frozen=True, slots=True)
class StepModel:
    """What work takes, in picoseconds, relative to each other; RooflineCost learns the scale. Defaults: an 8B model in bf16 on
    an H100 (context read at half of the memory's bandwidth, as Vidur's profiles have it).

    token: computing one token. attention: a prompt token's attention to one token before it. sequence: one decode's overhead.
    context: reading one token's KV for a decode. weights: reading the weights once, which a step's decodes share.
    """

    token: int = 25_400_000
    attention: int = 1_000
    sequence: int = 4_000_000
    context: int = 65_000
    weights: int = 7_000_000_000


class RooflineCost:
    """Picoseconds of worker time. Work is charged when it is placed, so that the next choice sees it, by StepModel times a
    scale; the scale follows the measured step times and what is still to be charged of them, so that all charges together are
    all busy time but for a bounded balance.
    """

    name = CostName.ROOFLINE

    def __init__(self, model: StepModel | None = None) -> None:
        self._model = model or StepModel()
        self._ratio: float | None = None
        self._scale = 1.0
        self.balance = 0  # measured and not charged yet; negative: charged too early
        self.begin_step(1)

    def begin_step(self, num_running: int) -> None:
        self._num_running = num_running or 1
        self._step_scale = self._scale  # fixed while the step is placed

    def chunk(self, start: int, num_tokens: int) -> int:
        pairs = num_tokens * start + num_tokens * (num_tokens - 1) // 2
        return num_tokens * self._price(self._model.token) + pairs * self._price(self._model.attention)

    def cached(self, num_tokens: int) -> int:
        return num_tokens * (self._price(self._model.token) // 10)

    def decode(self) -> Rate:
        model = self._model
        share = max(model.weights // self._num_running, model.token)
        return Rate(self._price(model.sequence + share), self._price(model.context))

    def _price(self, picoseconds: int) -> int:
        return int(picoseconds * self._step_scale) or 1

    def holding(self, since_s: float, until_s: float) -> int:
        return 0

    def observe(self, charged: int, elapsed_s: float) -> None:
        busy = round(elapsed_s * PS_PER_S)
        if busy <= 0 or charged <= 0:
            return
        balance = self.balance + busy - charged
        self.balance = max(-_LARGEST_BALANCE_PS, min(_LARGEST_BALANCE_PS, balance))
        measured = self._scale * busy / charged
        self._ratio = measured if self._ratio is None else self._ratio + _SMOOTHING * (measured - self._ratio)
        repay = self.balance / (_REPAY_STEPS * busy)
        self._scale = self._ratio * max(0.5, min(2.0, 1 + repay))


class KVTimeCost:
    """KV cache held. units_per_token_s: 10^6, so a token for a microsecond is 1."""

    name = CostName.KV_TIME

    def __init__(self, units_per_token_s: float = 1e6) -> None:
        self._units = units_per_token_s

    def begin_step(self, num_running: int) -> None:
        """Work is free."""

    def chunk(self, start: int, num_tokens: int) -> int:
        return 0

    def cached(self, num_tokens: int) -> int:
        return 0

    def decode(self) -> Rate:
        return _FREE

    def holding(self, since_s: float, until_s: float) -> int:
        return int(until_s * self._units) - int(since_s * self._units)  # rounding does not add up over many intervals

    def observe(self, charged: int, elapsed_s: float) -> None:
        """Nothing to learn."""


class DRFCost(RooflineCost):
    """RooflineCost's worker time as WORK; as HELD the part of the pool's tokens that is held, as worker time too: the whole
    pool for a second is a second."""

    name = CostName.DRF

    def __init__(self, pool_tokens: int, model: StepModel | None = None) -> None:
        super().__init__(model)
        self._held = KVTimeCost(PS_PER_S / pool_tokens)

    def holding(self, since_s: float, until_s: float) -> int:
        return self._held.holding(since_s, until_s)


def make_cost(name: CostName, pool_tokens: int) -> Cost:
    """pool_tokens: how many tokens the worker's KV cache holds."""
    match name:
        case CostName.TOKENS:
            return TokensCost()
        case CostName.ROOFLINE:
            return RooflineCost()
        case CostName.KV_TIME:
            return KVTimeCost()
        case CostName.DRF:
            return DRFCost(pool_tokens)
