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

# What is paid in advance counts up to this part of what is due in a window: with `min` exact, the least in any window.
_ADVANCE = 0.04


class _Account:
    """debt: in cost units; recent: what everybody got while it was backlogged, in the window; served, total: what it got, and
    what everybody got, since the last advance()."""

    __slots__ = ("debt", "name", "recent", "served", "share", "total")

    def __init__(self, name: str, share: float) -> None:
        self.name = name
        self.share = share
        self.debt = 0.0
        self.recent = self.served = self.total = 0

    def bound(self) -> float:
        """No more is owed than its share of the window; returns that."""
        self.debt = min(self.debt, self.share * self.recent)
        return self.debt


class ShareDebts:
    """Debts in cost units, by account. `owed`: whom something is owed to, from advance() to advance().

    shares: what each account is to get. window_s: a debt is never more than the share of what was done in so long a time, so that
    one that could not be paid for lack of room does not stop everybody else for as long afterwards.
    """

    def __init__(self, shares: Mapping[str, float], window_s: float = 10.0, bucket_s: float = 0.25) -> None:
        self.owed: frozenset[str] = frozenset()
        self._accounts = {name: _Account(name, share) for name, share in shares.items()}
        self._window_s = window_s
        self._bucket_s = bucket_s
        self._counting: set[_Account] = set()  # since the last advance()
        # (start, account -> what everybody got while it was backlogged)
        self._buckets: deque[tuple[float, dict[str, int]]] = deque()
        self._backlogged: list[_Account] = []

    def advance(self, now_s: float) -> None:
        """A step begins at now_s: settles what the one before was charged."""
        if self._counting or self._buckets:
            self._move_window(now_s)
        owed = []
        for account in self._counting:
            debt = account.debt + account.share * account.total
            if account.name in self.owed:
                debt -= account.served
            else:
                debt -= min(account.served, max(0.0, debt + _ADVANCE * account.share * account.recent))
            account.debt = debt
            account.served = account.total = 0
            if account.bound() > 0:
                owed.append(account.name)
        if self.owed:
            owed += self._still_owed()
        self._counting.clear()
        if owed or self.owed:
            self.owed = frozenset(owed)

    def _still_owed(self) -> list[str]:
        """Of those that nothing was counted for, whom the window still owes something."""
        owed = [self._accounts[name] for name in self.owed]
        return [account.name for account in owed if account not in self._counting and account.bound() > 0]

    def _move_window(self, now_s: float) -> None:
        buckets = self._buckets
        if not buckets or now_s >= buckets[-1][0] + self._bucket_s:
            buckets.append((now_s, {}))
        while buckets[0][0] < now_s - self._window_s - self._bucket_s:
            for name, total in buckets.popleft()[1].items():
                self._accounts[name].recent -= total
        bucket = buckets[-1][1]
        for account in self._counting:
            bucket[account.name] = bucket.get(account.name, 0) + account.total
            account.recent += account.total

    def set_backlogged(self, accounts: Iterable[str]) -> None:
        """Whose accounts the following charges count in."""
        self._backlogged = [self._accounts[name] for name in set(accounts)]

    @property
    def is_counting(self) -> bool:
        """Whether anybody is backlogged: else nothing that is added counts."""
        return bool(self._backlogged)

    def add(self, served: Collection[str], cost: int) -> None:
        """Work for the accounts in `served`."""
        for account in self._backlogged:
            if account.name in served:
                account.served += cost
            account.total += cost
        self._counting.update(self._backlogged)

    def add_costs(self, served: Mapping[str, int], total: int) -> None:
        """As add(): work that cost `total`, served[account] of it for each account."""
        for account in self._backlogged:
            account.served += served.get(account.name, 0)
            account.total += total
        self._counting.update(self._backlogged)

    def take_over(self, previous: ShareDebts) -> None:
        """Starts with another's debts, of the accounts that this one has, too; either goes on for itself."""
        kept = self._accounts.keys() & previous._accounts.keys()
        for name in kept:
            mine, its = self._accounts[name], previous._accounts[name]
            mine.debt, mine.recent, mine.served, mine.total = its.debt, its.recent, its.served, its.total
        self._counting = {self._accounts[account.name] for account in previous._counting if account.name in kept}
        self._backlogged = [self._accounts[account.name] for account in previous._backlogged if account.name in kept]
        self._buckets = deque((start, {n: total for n, total in of.items() if n in kept}) for start, of in previous._buckets)
        self.owed = previous.owed & kept
