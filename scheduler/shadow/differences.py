"""What a shadow policy would have done differently, counted: by kind, by whom it is about, and by who else. Bounded memory:
members count for their tenant, and beyond so many pairs only the tiers are told apart."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from fairlane.scheduler.request import Payer

# Pairs that are kept apart, and those of them that a report names.
MAX_PAIRS = 2000
MAX_NAMED = 20


class Kind(Enum):
    """`whom` and `other` as the counts have them."""

    INSTEAD = "instead"  # it would have admitted a request of whom instead of one of other
    SOONER = "sooner"  # it would have admitted one of whom, which the policy in force left waiting
    LATER = "later"  # it would have left one of whom waiting
    EVICTS = "evicts"  # for one of whom it would have taken the blocks of one of other
    SPARES = "spares"  # it would not have taken the blocks of one of whom for one of other
    PAUSES = "pauses"  # decodes of whom that it would have paused, a step each
    RUNS = "runs"  # decodes of whom that it would not have paused, a step each
    CUTS = "cuts"  # prompt tokens of whom above its part of a step


NOBODY = Payer("", "")


@dataclass(frozen=True, slots=True)
class Difference:
    """`whom` and `other` are tiers and tenants; other is NOBODY where there is none; a tenant "" is all that are not named."""

    kind: Kind
    whom: Payer
    other: Payer
    count: int


class Differences:
    """Counts since the shadow began. admissions: made by the policy in force, each compared."""

    def __init__(self) -> None:
        self.admissions = 0
        self.evictions = 0
        self._totals: dict[tuple[Kind, str], int] = {}
        self._pairs: dict[tuple[Kind, Payer, Payer], int] = {}

    def add(self, kind: Kind, whom: Payer, other: Payer = NOBODY, count: int = 1) -> None:
        total = (kind, whom.tier)
        self._totals[total] = self._totals.get(total, 0) + count
        pair = (kind, _tenant(whom), _tenant(other))
        if pair not in self._pairs and len(self._pairs) >= MAX_PAIRS:
            pair = (kind, Payer(whom.tier, ""), Payer(other.tier, ""))  # tiers are few
        self._pairs[pair] = self._pairs.get(pair, 0) + count

    def total(self, kind: Kind) -> int:
        return sum(count for (found, _), count in self._totals.items() if found is kind)

    def totals(self) -> list[tuple[Kind, str, int]]:
        """By kind and the tier of whom it is about."""
        return [(kind, tier, count) for (kind, tier), count in self._totals.items()]

    def named(self) -> list[Difference]:
        """The largest pairs, largest first."""
        largest = sorted(self._pairs.items(), key=lambda item: (-item[1], item[0][0].value, item[0][1:]))[:MAX_NAMED]
        return [Difference(*pair, count) for pair, count in largest]


def _tenant(payer: Payer) -> Payer:
    parts = payer.tenant.split("/", 2)
    return payer if len(parts) < 3 else Payer(payer.tier, f"{parts[0]}/{parts[1]}")
