"""Two streams on paper: what a device may do with launches and copies whose order only events fix. Operations are queued, and run
in an order that a seed chooses among all that the queues and the waits allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random

from torch import Tensor


def _done(operation: Callable[[], object]) -> Callable[[], bool]:
    def run() -> bool:
        operation()
        return True

    return run


class Mark:
    """An event: a number grows with each recording; a wait is for the one that was recorded last when it was asked for."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0


class TwoStreams:
    """Stands in for worker.side_stream.SideStream. `compute` queues what the current stream would be given."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._eager = self._random.choice(["compute", "side", None])  # who goes first whenever it can
        self._queues: dict[str, deque[Callable[[], bool]]] = {"compute": deque(), "side": deque()}

    def compute(self, operation: Callable[[], object]) -> None:
        self._queues["compute"].append(_done(operation))

    def mark(self) -> Mark:
        return Mark()

    def copy(self, runs: list[tuple[Tensor, Tensor]]) -> None:
        for destination, source in runs:
            assert destination.shape == source.shape and destination.is_contiguous() and source.is_contiguous()
            self._queues["side"].append(_done(partial(destination.copy_, source)))

    def record(self, mark: Mark) -> None:
        self._record("side", mark)

    def record_compute(self, mark: Mark) -> None:
        self._record("compute", mark)

    def wait(self, mark: Mark) -> None:
        self._wait("side", mark)

    def hold_compute(self, mark: Mark) -> None:
        self._wait("compute", mark)

    def synchronize(self) -> None:
        """Runs everything that was queued."""
        while any(self._queues.values()):
            names = [name for name, queue in self._queues.items() if queue]
            self._random.shuffle(names)
            names.sort(key=lambda name: name != self._eager)
            if not any(self._advance(name) for name in names):
                raise AssertionError("the streams wait for each other")

    def _advance(self, name: str) -> bool:
        queue = self._queues[name]
        if not queue[0]():
            return False
        queue.popleft()
        return True

    def _record(self, name: str, mark: Mark) -> None:
        mark.recorded += 1
        number = mark.recorded

        def reach() -> bool:
            mark.reached = max(mark.reached, number)
            return True

        self._queues[name].append(reach)

    def _wait(self, name: str, mark: Mark) -> None:
        number = mark.recorded
        self._queues[name].append(lambda: mark.reached >= number)
