"""Whose time the worker's was: every step that returned, with when it began and what each payer's sequences took of it. An oracle
of its own: it sees what the runner is told, and prices a prompt's token 1, a decode 2, whoever is charged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import Payer
from step_watch import Step, StepWatch, paths


class Taken(NamedTuple):
    """Of one step."""

    start_s: float
    seconds: float


class StepTimes:
    """steps: when each began, how long it took, and the payers' parts of that, which sum to 1."""

    def __init__(self, driver: EngineDriver) -> None:
        self.steps: list[tuple[float, float, dict[Payer, float]]] = []
        self._driver = driver
        self._parts: dict[int, dict[Payer, float]] = {}
        executor: Any = driver.engine._executor
        self._result = executor.result
        executor.result = self._returned
        StepWatch(driver, self._launched)

    def _launched(self, step: Step) -> None:
        costs = Counter[Payer]()
        for entry in step.placed:
            costs[entry.sequence.payer] += entry.num_tokens if entry.is_chunk else 2
        total = sum(costs.values())
        self._parts[step.output.step_id] = {payer: cost / total for payer, cost in costs.items()}

    def _returned(self, handle: int) -> Any:
        start_s = self._driver.clock.now()
        result = self._result(handle)  # raises for one that failed: nobody's
        self.steps.append((start_s, self._driver.clock.now() - start_s, self._parts[handle]))
        return result

    def of(self, belongs: Callable[[Payer], bool]) -> list[Taken]:
        """What some payers took together, by step; without steps they had no part in."""
        found = [
            (start_s, elapsed_s * sum(part for payer, part in parts.items() if belongs(payer)))
            for start_s, elapsed_s, parts in self.steps
        ]
        return [Taken(start_s, seconds) for start_s, seconds in found if seconds]

    def of_node(self, path: str) -> list[Taken]:
        return self.of(lambda payer: path in paths(payer.tenant))

    def of_tier(self, name: str) -> list[Taken]:
        return self.of(lambda payer: payer.tier == name)


def most_above(taken: list[Taken], share: float) -> float:
    """By how much, in seconds, what was taken in some stretch of time exceeds `share` of it, at most: of all steps that begin in
    it, from the first's beginning to the last's."""
    most, total, best = 0.0, 0.0, float("-inf")
    for start_s, seconds in taken:
        best = max(best, share * start_s - total)
        total += seconds
        most = max(most, total - share * start_s + best)
    return most
