"""Which share of the work each tier got while it was backlogged, over the last ten seconds: what a tier's `min` is measured
against. Time in which a tier had nothing to do earns it no claim."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class ShareWindow:
    """A sliding window of cost, in buckets: for each tier, what it got and what everybody got while it was backlogged.

    The window's edge is bucket_s coarse: a share is over window_s to window_s + bucket_s.
    """

    def __init__(self, window_s: float = 10.0, bucket_s: float = 0.25) -> None:
        self._window_s = window_s
        self._bucket_s = bucket_s
        # (start, tier -> [served, total])
        self._buckets: deque[tuple[float, dict[str, list[int]]]] = deque()
        self._sums: dict[str, list[int]] = {}
        self._backlogged: frozenset[str] = frozenset()

    def advance(self, now_s: float) -> None:
        """Opens the bucket that now_s falls into and forgets those that left the window."""
        if not self._buckets or now_s >= self._buckets[-1][0] + self._bucket_s:
            self._buckets.append((now_s, {}))
        while self._buckets[0][0] < now_s - self._window_s - self._bucket_s:
            for tier, (served, total) in self._buckets.popleft()[1].items():
                sums = self._sums[tier]
                sums[0] -= served
                sums[1] -= total

    def set_backlogged(self, tiers: Iterable[str]) -> None:
        """Whose accounts the following charges count in."""
        self._backlogged = frozenset(tiers)

    def add(self, tier: str, cost: int) -> None:
        """Adds work to the open bucket. LookupError before the first advance()."""
        if not self._buckets:
            raise LookupError("advance() opens the first bucket")
        bucket = self._buckets[-1][1]
        for account in self._backlogged:
            served = cost if account == tier else 0
            for entry in (bucket.setdefault(account, [0, 0]), self._sums.setdefault(account, [0, 0])):
                entry[0] += served
                entry[1] += cost

    def is_below(self, tier: str, share: float) -> bool:
        """Whether the tier got less than `share` of all the work done while it was backlogged."""
        served, total = self._sums.get(tier, (0, 0))
        return served < share * total
