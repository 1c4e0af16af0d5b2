"""What a shadow policy would have done differently, counted: by kind, by whom it is about and by who else, and in how many steps.
Bounded memory: members count for their tenant, and beyond so many pairs and parties only the tiers are told apart."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from heapq import nsmallest

from fairlane.scheduler.request import Payer

# Pairs and parties that are kept apart, and those of them that a report names.
MAX_PAIRS = 2000
MAX_NAMED = 20
MAX_PARTIES = 500
MAX_ROWS = 50


class Kind(Enum):
    """`whom` and `other` as the counts have them."""

    INSTEAD = "instead"  # it would have admitted a request of whom instead of one of other
    SOONER = "sooner"  # it would have admitted one of whom, which the policy in force left waiting
    LATER = "later"  # it would have left one of whom waiting
    EVICTS = "evicts"  # for one of whom it would have taken the blocks of one of other
    SPARES = "spares"  # it would not have taken the blocks of one of whom for one of other
    PAUSES = "pauses"  # decodes of whom that it would have paused, a step each
    RUNS = "runs"  # decodes of whom that it would not have paused, a step each
    CUTS = "cuts"  # prompt tokens of whom above its part of a step, or its ceil


NOBODY = Payer("", "")


@dataclass(frozen=True, slots=True)
class Difference:
    """`whom` and `other` are tiers and tenants; other is NOBODY where there is none; a tenant "" is all that are not named."""

    kind: Kind
    whom: Payer
    other: Payer
    count: int


@dataclass(frozen=True, slots=True)
class Row:
    """One tenant's requests of one tier; a tenant "" is all of the tier that have no row. steps: in which they would have fared
    differently. as_whom, as_other: of the differences that name them so, in total."""

    party: Payer
    steps: int
    as_whom: dict[Kind, int]
    as_other: dict[Kind, int]


class _Tally:
    def __init__(self) -> None:
        self.steps = 0
        self.as_whom = Counter[Kind]()
        self.as_other = Counter[Kind]()

    def __iadd__(self, other: _Tally) -> _Tally:
        """Steps in which both fared differently count twice."""
        self.steps += other.steps
        self.as_whom += other.as_whom
        self.as_other += other.as_other
        return self


class Differences:
    """Counts since the shadow began. admissions, evictions: made by the policy in force, each compared. steps: in which anything
    was different."""

    def __init__(self) -> None:
        self.admissions = 0
        self.evictions = 0
        self.steps = 0
        self._totals = Counter[tuple[Kind, str]]()
        self._pairs: dict[tuple[Kind, Payer, Payer], int] = {}
        self._parties: dict[Payer, _Tally] = {}
        self._touched: set[Payer] = set()  # in this step

    def add(self, kind: Kind, whom: Payer, other: Payer = NOBODY, count: int = 1) -> None:
        self._totals[kind, whom.tier] += count
        pair = (kind, _tenant(whom), _tenant(other))
        self._tally(pair[1]).as_whom[kind] += count
        if other != NOBODY:
            self._tally(pair[2]).as_other[kind] += count
        if pair not in self._pairs and len(self._pairs) >= MAX_PAIRS:
            pair = (kind, Payer(whom.tier, ""), Payer(other.tier, ""))  # tiers are few
        self._pairs[pair] = self._pairs.get(pair, 0) + count

    def _tally(self, party: Payer) -> _Tally:
        tally = self._parties.get(party)
        if tally is None:
            if len(self._parties) >= MAX_PARTIES:
                party = Payer(party.tier, "")
            tally = self._parties[party] = self._parties.get(party) or _Tally()
        self._touched.add(party)
        return tally

    def end_step(self) -> None:
        """What was added since the last call was of one step."""
        if self._touched:
            self.steps += 1
            for party in self._touched:
                self._parties[party].steps += 1
            self._touched.clear()

    def total(self, kind: Kind) -> int:
        return sum(count for (found, _), count in self._totals.items() if found is kind)

    def totals(self) -> list[tuple[Kind, str, int]]:
        """By kind and the tier of whom it is about."""
        return [(kind, tier, count) for (kind, tier), count in self._totals.items()]

    def named(self) -> list[Difference]:
        """The largest pairs, largest first."""
        largest = nsmallest(MAX_NAMED, self._pairs.items(), key=lambda item: (-item[1], item[0][0].value, item[0][1:]))
        return [Difference(*pair, count) for pair, count in largest]

    def rows(self) -> list[Row]:
        """Those who would have fared differently most often, most first, and what is left of each tier."""
        named = nsmallest(MAX_ROWS, (item for item in self._parties.items() if item[0].tenant), key=_order)
        rest: dict[str, _Tally] = {}
        shown = {party for party, _ in named}
        for party, tally in self._parties.items():
            if party not in shown:
                rest[party.tier] = rest.get(party.tier, _Tally())
                rest[party.tier] += tally
        others = [(Payer(tier, ""), tally) for tier, tally in sorted(rest.items())]
        return [Row(party, tally.steps, dict(tally.as_whom), dict(tally.as_other)) for party, tally in (*named, *others)]


def _order(item: tuple[Payer, _Tally]) -> tuple[int, Payer]:
    return -item[1].steps, item[0]


def _tenant(payer: Payer) -> Payer:
    parts = payer.tenant.split("/", 2)
    return payer if len(parts) < 3 else Payer(payer.tier, f"{parts[0]}/{parts[1]}")
