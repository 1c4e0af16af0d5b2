"""What every (node, tier) was given: tokens placed in steps, counted when they are placed, as the scheduler charges them. The
simulator's own count, from what the executor is told, so that it can disagree with the scheduler's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Account(NamedTuple):
    """Who a token was computed for."""

    node: str
    tier: str


@dataclass(slots=True)
class Counts:
    """Tokens: of prompts computed for the first time, found in the cache, computed again, and of outputs. seconds: its part of
    the time of steps, by tokens that they compute, whatever for: of a chunk 1 each, a decode 2."""

    prompt: int = 0
    cached: int = 0
    recomputed: int = 0
    output: int = 0
    seconds: float = 0.0

    @property
    def service(self) -> int:
        """VTC's measure: a prompt token 1, an output token 2; what was computed again serves nobody."""
        return self.prompt + 2 * self.output


@dataclass(slots=True)
class Meter:
    """Counts by account, over all workers."""

    counts: dict[Account, Counts] = field(default_factory=dict)

    def of(self, account: Account) -> Counts:
        found = self.counts.get(account)
        if found is None:
            found = self.counts[account] = Counts()
        return found

    def seconds(self) -> dict[Account, float]:
        return {account: counts.seconds for account, counts in self.counts.items()}

    def service(self) -> dict[Account, int]:
        return {account: counts.service for account, counts in self.counts.items()}
