"""How kernels are timed: as replays of CUDA graphs, each call on other inputs than the one before, the L2 cache holding none of
them. What is timed, and against what it is judged, is decided elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Call = Callable[[], object]

FLUSH_BYTES = 256 << 20
MAX_CALLS = 512  # in one graph


@dataclass(frozen=True)
class Timing:
    """Of one call, in microseconds: percentiles of samples, each the mean of one replay's calls."""

    p10_us: float
    p50_us: float
    p90_us: float


class Timer(Protocol):
    def time(self, calls: Sequence[Call], *, bytes_per_call: float = 0.0, warm: bool = False) -> Timing:
        """Times calls that do the same work on inputs of their own; each has run once before the first measurement.

        bytes_per_call: of the inputs that a call shares with no other. warm: the inputs may be in the L2 cache.
        """
        ...

    def time_eager(self, call: Call) -> Timing:
        """Times a call that is too long, or that no graph can hold."""
        ...


def percentiles(samples: Sequence[float]) -> Timing:
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timing(ordered[round(0.1 * last)], statistics.median(ordered), ordered[round(0.9 * last)])


class GraphTimer:
    """Times on the CUDA device. A graph holds one call per input set, or several rounds of them where the sets together are so
    large that the first has left the cache when the next round begins. Before each replay the cache is filled with other data
    (read, not written: dirty lines would have to leave it at the kernel's expense)."""

    def __init__(self, device: torch.device, *, samples: int = 40, replay_us: float = 1000.0) -> None:
        self._samples, self._replay_us = samples, replay_us
        self._l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._other = torch.empty(FLUSH_BYTES // 4, device=device).normal_()
        self._sink = torch.empty((), device=device)

    def time(self, calls: Sequence[Call], *, bytes_per_call: float = 0.0, warm: bool = False) -> Timing:
        for call in calls:
            call()
        torch.cuda.synchronize()
        graph = _capture(calls, 1)
        rounds = 1
        if warm or bytes_per_call * len(calls) > 3 * self._l2_bytes:
            once_us = self._replays(graph, 3, warm)[-1]
            rounds = max(1, min(MAX_CALLS // len(calls), round(self._replay_us / once_us)))
        if rounds > 1:
            graph = _capture(calls, rounds)
        samples = self._replays(graph, self._samples + 3, warm)[3:]
        return percentiles([us / (rounds * len(calls)) for us in samples])

    def time_eager(self, call: Call) -> Timing:
        call()
        marks = []
        for _ in range(max(5, self._samples // 4)):
            marks.append(_marks())
            marks[-1][0].record()
            call()
            marks[-1][1].record()
        return percentiles(_elapsed_us(marks))

    def _replays(self, graph: torch.cuda.CUDAGraph, count: int, warm: bool) -> list[float]:
        """Microseconds of each replay. All are queued at once, so that the device waits for the host in the first alone."""
        marks = []
        for _ in range(count):
            if not warm:
                torch.sum(self._other, dim=0, out=self._sink)
            marks.append(_marks())
            marks[-1][0].record()
            graph.replay()
            marks[-1][1].record()
        return _elapsed_us(marks)


class WallTimer:
    """Runs each call once, by the host's clock: to try a benchmark where there is no GPU. Its figures mean nothing."""

    def time(self, calls: Sequence[Call], *, bytes_per_call: float = 0.0, warm: bool = False) -> Timing:
        return percentiles([self._once_us(call) for call in calls])

    def time_eager(self, call: Call) -> Timing:
        return percentiles([self._once_us(call)])

    @staticmethod
    def _once_us(call: Call) -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6


def _capture(calls: Sequence[Call], rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def _marks() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return first, last


def _elapsed_us(marks: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1000.0 for begin, end in marks]
