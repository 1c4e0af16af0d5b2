"""Which share of the work each tier or node got while it was backlogged, over the last ten seconds: what `min` is measured
against. Time in which it had nothing to do earns it no claim."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping


class ShareWindow:
    """A sliding window of cost, in buckets: for each account, what it got and what everybody got while it was backlogged.

    The window's edge is bucket_s coarse: a share is over window_s to window_s + bucket_s.
    """

    def __init__(self, window_s: float = 10.0, bucket_s: float = 0.25) -> None:
        self._window_s = window_s
        self._bucket_s = bucket_s
        # (start, account -> [served, total])
        self._buckets: deque[tuple[float, dict[str, list[int]]]] = deque()
        self._sums: dict[str, list[int]] = {}
        self._backlogged: frozenset[str] = frozenset()

    def advance(self, now_s: float) -> None:
        """Opens the bucket that now_s falls into and forgets those that left the window."""
        if not self._buckets or now_s >= self._buckets[-1][0] + self._bucket_s:
            self._buckets.append((now_s, {}))
        while self._buckets[0][0] < now_s - self._window_s - self._bucket_s:
            for account, (served, total) in self._buckets.popleft()[1].items():
                sums = self._sums[account]
                sums[0] -= served
                sums[1] -= total

    def set_backlogged(self, accounts: Iterable[str]) -> None:
        """Whose accounts the following charges count in."""
        self._backlogged = frozenset(accounts)

    @property
    def is_counting(self) -> bool:
        """Whether anybody is backlogged: else nothing that is added counts."""
        return bool(self._backlogged)

    def add(self, served: Collection[str], cost: int) -> None:
        """Work for the accounts in `served`, into the open bucket.
        LookupError if somebody is backlogged before the first advance()."""
        self.add_costs(dict.fromkeys(served, cost), cost)

    def add_costs(self, served: Mapping[str, int], total: int) -> None:
        """As add(): work that cost `total`, served[account] of it for each account."""
        if not self._backlogged:
            return
        if not self._buckets:
            raise LookupError("advance() opens the first bucket")
        bucket = self._buckets[-1][1]
        for account in self._backlogged:
            for entry in (bucket.setdefault(account, [0, 0]), self._sums.setdefault(account, [0, 0])):
                entry[0] += served.get(account, 0)
                entry[1] += total

    def is_below(self, account: str, share: float) -> bool:
        """Whether the account got less than `share` of all the work done while it was backlogged."""
        served, total = self._sums.get(account, (0, 0))
        return served < share * total
