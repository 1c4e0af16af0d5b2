"""θ: how far ahead of a waiting node a running one may be before FAIR takes its blocks. It is given in milliseconds of worker
time, because that is what an operator can reason about, and kept in cost units, which is what counters are in."""

from __future__ import annotations

_SMOOTHING = 0.05


class PreemptGap:
    """Converts with the cost rate of recent steps. Never less than two steps' cost: with less, two nodes that differ by the
    granularity of a step would evict each other for ever."""

    def __init__(self, gap_ms: float | None) -> None:
        self._gap_ms = gap_ms
        self._cost_per_ms = 0.0
        self._largest_step = 0.0

    @property
    def is_set(self) -> bool:
        """Whether there is a θ at all."""
        return self._gap_ms is not None

    @property
    def cost_per_ms(self) -> float:
        """Cost units in a millisecond of worker time, of recent steps; 0 while nothing was measured."""
        return self._cost_per_ms

    def observe(self, cost: int, elapsed_s: float) -> None:
        """One step's cost and time."""
        self._largest_step = max(float(cost), self._largest_step * (1 - _SMOOTHING))
        if elapsed_s > 0:
            rate = cost / (elapsed_s * 1000)
            self._cost_per_ms += (_SMOOTHING if self._cost_per_ms else 1.0) * (rate - self._cost_per_ms)

    def is_exceeded(self, lead: float) -> bool:
        """Whether a lead of so many cost units (over weight) is more than θ; never, while nothing was measured."""
        if self._gap_ms is None or not self._cost_per_ms:
            return False
        return lead > max(self._gap_ms * self._cost_per_ms, 2 * self._largest_step)

    def take_over(self, previous: PreemptGap) -> None:
        """Starts with what another gap measured."""
        self._cost_per_ms, self._largest_step = previous._cost_per_ms, previous._largest_step
