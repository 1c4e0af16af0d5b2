"""Which worker a request goes to: the one with the fewest requests that have not ended, the first among equals."""

from __future__ import annotations

from heapq import heappop, heappush


class LeastOutstanding:
    """Ends count from their own time on: a worker's turn may tell of one that is still to come."""

    def __init__(self, num_workers: int) -> None:
        self._outstanding = [0] * num_workers
        self._ends: list[tuple[float, int]] = []

    def pick(self, now_s: float) -> int:
        """The worker for a request that arrives now; times never go back."""
        while self._ends and self._ends[0][0] <= now_s:
            self._outstanding[heappop(self._ends)[1]] -= 1
        index = min(range(len(self._outstanding)), key=self._outstanding.__getitem__)
        self._outstanding[index] += 1
        return index

    def ended(self, worker: int, time_s: float) -> None:
        heappush(self._ends, (time_s, worker))
