"""How long a request will wait: how many get in before it, times the time from one admission to the next, measured while somebody
waited. Requests of one node and tier get in one after another under every policy, so that is measured for each such line, and
for all together where a line is too new. As QLM's estimate (arXiv 2407.00047), with the rate measured instead of modelled.
Whoever is evicted waits before the others once more, so a line moves by those that get in less those that are put back."""

from __future__ import annotations

from collections.abc import Iterator

from fairlane.scheduler.request import Payer, Sequence

# Admissions that a line must have seen, and over how many the mean goes.
_FEWEST = 4
_MEAN_OF = 32
# The share of them that is taken to last, however many are undone.
_LEAST_KEPT = 0.1
# Lines that are remembered; those in which nobody waits are forgotten first.
_MOST_LINES = 4096


class _Line:
    """mean_s: between the last `count` admissions; undone: how many of the last _MEAN_OF were, where those that it has not seen
    count as kept; since_s: of the last one, or since when somebody waits."""

    __slots__ = ("count", "mean_s", "since_s", "since_step", "undone", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        self.since_s = 0.0
        self.since_step = 0
        self.count = 0
        self.mean_s = 0.0
        self.undone = 0.0

    def enter(self, now_s: float, step_id: int, again: bool) -> None:
        if not self.waiting:
            self.since_s, self.since_step = now_s, step_id
        self.waiting += 1
        self.undone += again

    def admit(self, now_s: float, step_id: int) -> None:
        """Whoever got in at once, with nobody before it, says nothing about how fast a queue moves."""
        self.waiting -= 1
        if step_id == self.since_step:
            return
        self.count = min(self.count + 1, _MEAN_OF)
        self.undone -= self.undone / _MEAN_OF
        self.mean_s += (now_s - self.since_s - self.mean_s) / self.count
        self.since_s = now_s

    def interval_s(self, now_s: float) -> float | None:
        """None: too little was seen. A longer wait for the next one than the mean counts as one more."""
        if self.count < _FEWEST:
            return None
        open_s = now_s - self.since_s if self.waiting else 0.0
        mean_s = max(self.mean_s, self.mean_s + (open_s - self.mean_s) / (self.count + 1))
        return mean_s / max(_LEAST_KEPT, 1 - self.undone / _MEAN_OF)


class WaitEstimate:
    """Told of everybody who comes to wait and who stops waiting; O(1) each, and nothing is done in a step that admits nobody."""

    def __init__(self) -> None:
        self._all = _Line()
        self._lines: dict[Payer, _Line] = {}

    def enter(self, sequence: Sequence, now_s: float, step_id: int, *, again: bool = False) -> None:
        """It waits from now on; step_id: of the last step. again: it ran and was evicted."""
        for line in self._of(sequence.payer):
            line.enter(now_s, step_id, again and line is not self._all)

    def admit(self, sequence: Sequence, now_s: float, step_id: int) -> None:
        """It gets in, with the step after step_id."""
        for line in self._of(sequence.payer):
            line.admit(now_s, step_id)

    def leave(self, sequence: Sequence) -> None:
        """It ends without having got in."""
        for line in self._of(sequence.payer):
            line.waiting -= 1

    def wait_s(self, payer: Payer, ahead: int, ahead_of_all: int | None, now_s: float) -> float | None:
        """Seconds until one gets in that has so many before it in its own line, and among all (None: only its own line says
        something). None where too little was seen."""
        line = self._lines.get(payer)
        own_s = None if line is None else line.interval_s(now_s)
        if own_s is not None:
            return (ahead + 1) * own_s
        all_s = self._all.interval_s(now_s)
        return None if all_s is None or ahead_of_all is None else (ahead_of_all + 1) * all_s

    def num_waiting(self, payer: Payer) -> int:
        line = self._lines.get(payer)
        return 0 if line is None else line.waiting

    def _of(self, payer: Payer) -> Iterator[_Line]:
        line = self._lines.get(payer)
        if line is None:
            if len(self._lines) >= _MOST_LINES:
                self._lines = {key: known for key, known in self._lines.items() if known.waiting}
            line = self._lines[payer] = _Line()
        yield line
        yield self._all
