"""What `min` owes each tier and node: its share of all the work that is done while it is backlogged, less what it was given on
that account. Time in which it has nothing to do earns it no claim.

    debt   +=  share x what everybody got     while it is backlogged
           -=  what it got itself

What it gets although nothing is owed to it pays in advance only for a moment: a tier that had an idle worker to itself for a
second would else be owed nothing in the ten seconds of overload that follow. So a debt stays between two bounds, and over *any*
interval the tier gets its share, but for their distance and for the time that its turn takes. It is H-FSC's real-time criterion
with a linear curve (Stoica et al., SIGCOMM 1997), which forgets all such service; remembering a little of it keeps a floor from
becoming a bonus: with none, decodes that run beside others anyway more than double what a `min` of 5 % costs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy

# What is paid in advance counts up to this part of what is due in a window: with `min` exact, the least in any window.
_ADVANCE = 0.04


class ShareDebts:
    """Debts in cost units, by account. `owed`: whom something is owed to, from advance() to advance().

    shares: what each account is to get. window_s: a debt is never more than the share of what was done in so long a time, so that
    one that could not be paid for lack of room does not stop everybody else for as long afterwards.
    """

    def __init__(self, shares: Mapping[str, float], window_s: float = 10.0, bucket_s: float = 0.25) -> None:
        self.owed: frozenset[str] = frozenset()
        self._shares = shares
        self._window_s = window_s
        self._bucket_s = bucket_s
        self._debts: dict[str, float] = {}
        # Since the last advance(): account -> [what it got, what everybody got]
        self._new: dict[str, list[int]] = {}
        # (start, account -> what everybody got while it was backlogged), and their sums
        self._buckets: deque[tuple[float, dict[str, int]]] = deque()
        self._recent: dict[str, int] = {}
        self._backlogged: frozenset[str] = frozenset()

    def advance(self, now_s: float) -> None:
        """A step begins at now_s: settles what the one before was charged."""
        if self._new or self._buckets:
            self._count_recent(now_s)
        for account, (served, total) in self._new.items():
            share = self._shares.get(account, 0.0)
            debt = self._debts.get(account, 0.0) + share * total
            room = max(0.0, debt + _ADVANCE * share * self._recent[account])
            self._debts[account] = debt - (served if account in self.owed else min(served, room))
        self._new.clear()
        for account, debt in self._debts.items():
            self._debts[account] = min(debt, self._shares.get(account, 0.0) * self._recent.get(account, 0))
        self.owed = frozenset(account for account, debt in self._debts.items() if debt > 0)

    def _count_recent(self, now_s: float) -> None:
        if not self._buckets or now_s >= self._buckets[-1][0] + self._bucket_s:
            self._buckets.append((now_s, {}))
        while self._buckets[0][0] < now_s - self._window_s - self._bucket_s:
            for account, total in self._buckets.popleft()[1].items():
                self._recent[account] -= total
        bucket = self._buckets[-1][1]
        for account, (_, total) in self._new.items():
            bucket[account] = bucket.get(account, 0) + total
            self._recent[account] = self._recent.get(account, 0) + total

    def set_backlogged(self, accounts: Iterable[str]) -> None:
        """Whose accounts the following charges count in."""
        self._backlogged = frozenset(accounts)

    @property
    def is_counting(self) -> bool:
        """Whether anybody is backlogged: else nothing that is added counts."""
        return bool(self._backlogged)

    def add(self, served: Collection[str], cost: int) -> None:
        """Work for the accounts in `served`."""
        for account in self._backlogged:
            self._add(account, cost if account in served else 0, cost)

    def add_costs(self, served: Mapping[str, int], total: int) -> None:
        """As add(): work that cost `total`, served[account] of it for each account."""
        for account in self._backlogged:
            self._add(account, served.get(account, 0), total)

    def _add(self, account: str, served: int, total: int) -> None:
        entry = self._new.get(account)
        if entry is None:
            self._new[account] = [served, total]
        else:
            entry[0] += served
            entry[1] += total

    def take_over(self, previous: ShareDebts) -> None:
        """Starts with another's debts, of the accounts that this one has, too; either goes on for itself."""
        kept = self._shares.keys()
        self._debts = {account: debt for account, debt in previous._debts.items() if account in kept}
        self._new, self._buckets = deepcopy(previous._new), deepcopy(previous._buckets)
        self._recent = previous._recent.copy()
        self.owed = previous.owed & kept
        self._backlogged = previous._backlogged & kept
