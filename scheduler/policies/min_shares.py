"""`min`: which tiers and nodes are owed something because, while they had unserved work, they were not given their minimum
share of the worker's cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache

from fairlane.scheduler.cost import Rate
from fairlane.scheduler.policies.caps import prefixes
from fairlane.scheduler.policies.share_debts import ShareDebts
from fairlane.scheduler.request import Payer
from fairlane.scheduler.tenancy import NodeShare, Tier

# Everybody who decodes; no account's name.
_ALL = ""


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One `min`: the account, the share, and where it hangs in a tree: a tier by its name, a node below each tier."""

    account: str
    share: float
    tier: str | None
    names: tuple[str, ...]

    def places(self, tiers: Iterable[str]) -> list[tuple[str, ...]]:
        """Names from a tree's root to it; an organisation's or tenant's requests come in several tiers."""
        return [self.names] if self.tier is not None else [(tier, *self.names) for tier in tiers]


class MinShares:
    """`owed` is fixed from advance() to advance()."""

    def __init__(self, tiers: Collection[Tier], nodes: Collection[NodeShare]) -> None:
        found = [Guarantee(f"tier {t.name}", t.min_share, t.name, (t.name,)) for t in tiers if t.min_share]
        found += [Guarantee(f"node {n.path}", n.min_share, None, tuple(n.path.split("/"))) for n in nodes if n.min_share]
        self.guarantees = tuple(found)
        self.owed: tuple[Guarantee, ...] = ()
        self._owed_accounts: frozenset[str] = frozenset()
        self._unserved: set[str] = set()
        self._debts = ShareDebts({g.account: g.share for g in found})
        self._guaranteed = frozenset(g.account for g in found)
        self._decoding = Counter[str]()
        self._tokens = Counter[str]()

    def advance(self, now_s: float) -> None:
        """Before each step."""
        if self.guarantees:
            self._debts.advance(now_s)
            if self._debts.owed != self._owed_accounts:
                self._owed_accounts = self._debts.owed
                self.owed = tuple(g for g in self.guarantees if g.account in self._owed_accounts)

    @property
    def has_unserved(self) -> bool:
        """Whether the last step left out somebody that running sequences of a guarantee may be among."""
        return bool(self._unserved)

    def set_backlogged(self, waiting: Iterable[Guarantee]) -> None:
        """Who has work to do: those named, and those whose running sequences the last step left out."""
        self._debts.set_backlogged(self._unserved.union(g.account for g in waiting))
        self._unserved.clear()

    def unserved(self, payer: Payer) -> None:
        if self.guarantees:
            self._unserved |= self._guaranteed & _accounts(payer)

    def is_owed(self, payer: Payer) -> bool:
        return bool(self.owed) and not self._owed_accounts.isdisjoint(_accounts(payer))

    def charge(self, payer: Payer, cost: int) -> None:
        if self.guarantees:
            self._debts.add(_accounts(payer), cost)

    def decode(self, payer: Payer, change: int, tokens: int) -> None:
        """So many more of the payer's sequences, with so many tokens more, are charged by steady_step()."""
        if self.guarantees:
            for account in [_ALL, *(self._guaranteed & _accounts(payer))]:
                self._decoding[account] += change
                self._tokens[account] += tokens

    def steady_step(self, rate: Rate) -> None:
        """Every decoding sequence is charged by its tokens."""
        if self._debts.is_counting:
            each, per_token, tokens = rate.per_sequence, rate.per_token, self._tokens
            costs = {account: each * count + per_token * tokens[account] for account, count in self._decoding.items()}
            self._debts.add_costs(costs, costs.get(_ALL, 0))

    def take_over(self, previous: MinShares) -> None:
        """Goes on from what another has counted; either goes on for itself."""
        self._debts.take_over(previous._debts)


@lru_cache(maxsize=16_384)
def _accounts(payer: Payer) -> frozenset[str]:
    return frozenset([f"tier {payer.tier}", *(f"node {path}" for path in prefixes(payer.tenant))])
