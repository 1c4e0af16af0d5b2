"""Decode steps as CUDA graphs: one per batch size, captured when the worker starts. A step of n sequences replays the smallest
that holds them; the rows beyond are padding, which reads nothing and writes nothing.

    slots [B] -> step_prep -> layers -> hidden [B, H]         one graph
    hidden -> logits [B, V] -> greedy sample -> store_sampled     another, replayed right after it

Only one graph runs at a time, so all of them share their inputs, each its first rows, and the memory of what they compute on
the way: logits of every batch size, kept, would take gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fairlane.kernels.reference_step import DecodeInputs
from fairlane.kernels.step_prep import step_prep
from fairlane.worker.cascade import Cascade
from fairlane.worker.cuda_batch import CudaBatch
from fairlane.worker.tracing import span

_SMALL = 8  # larger batches gain nothing from a form for short sequences

Forward = Callable[[DecodeInputs, int | None, bool], Tensor]
Sample = Callable[[Tensor, Tensor, Tensor, Tensor], None]
R = TypeVar("R")


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then steps of 8 up to 128, of 16 up to 512 and of an eighth of a power of two beyond; padding wastes at most an
    eighth of a batch of more than 8."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, 513, 16)]
    while sizes[-1] < max_num_seqs:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 4)))
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class GraphCapture:
    """Captures graphs into one memory pool, on one stream: cuBLAS keeps 32 MiB for every stream that it was ever used on."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
        """The graph of run(), and what it returned. That stays; what else it allocated is the next graph's, too."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # kernels compile and libraries set themselves up outside the capture
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()
        return graph, result


@dataclass(frozen=True, slots=True)
class Capture:
    """One form of a bucket. hidden [B, H]: of its last replay."""

    graph: torch.cuda.CUDAGraph
    sampling: torch.cuda.CUDAGraph
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One bucket. slots int32 [B] is its input; ids int64 and ok int8 [B] are overwritten by the next replay of any bucket.
    plain: for any sequences. short: for short ones only. cascade: for those that form prefix groups."""

    plain: Capture
    short: Capture | None
    cascade: Capture | None
    slots: Tensor
    ids: Tensor
    ok: Tensor


def split_results(results: Tensor) -> tuple[Tensor, Tensor]:
    """ids int64 [S] and ok int8 [S] of DecodeGraphs.results, or of a copy of it."""
    ids = results.numel() // 9 * 8
    return results[:ids].view(torch.int64), results[ids:].view(torch.int8)


class DecodeGraphs:
    """All buckets."""

    def __init__(
        self,
        batch: CudaBatch,
        forward: Forward,
        sample: Sample,
        max_num_seqs: int,
        short_limit: int,
        capture: GraphCapture,
        cascade: Cascade | None = None,
    ) -> None:
        """forward: (inputs, max_seq_len, cascade) -> hidden. sample: (hidden, slots, ids, ok), greedy, storing what it draws.
        Both are captured. short_limit: length up to which small batches have a form of their own; 0: none. cascade: finds prefix
        groups, for which there is a form, too."""
        self._batch = batch
        self._cascade = cascade
        self._forward = forward
        self._sample = sample
        self._short_limit = short_limit
        self._capture = capture
        self._graphs: dict[int, DecodeGraph] = {}
        self._sizes = bucket_sizes(max_num_seqs)
        self._shown: tuple[list[int], np.ndarray, DecodeGraph] | None = None
        device = batch.state.num_tokens.device
        self._slots = torch.full((max_num_seqs,), -1, dtype=torch.int32, device=device)
        self._inputs = DecodeInputs.allocate(max_num_seqs, batch.block_table.shape[1], device)
        # ids int64 [S], then ok int8 [S]: one piece of memory, so that they reach the host in one copy.
        self.results = torch.zeros(9 * max_num_seqs, dtype=torch.uint8, device=device)
        self._ids, self._ok = split_results(self.results)
        for size in reversed(self._sizes):  # the largest first: the others fit into what it took
            self._graphs[size] = self._capture_bucket(size)

    def prepare(self, slots: list[int]) -> tuple[np.ndarray, DecodeGraph]:
        """The slots as an array, and the bucket for them, told which they are. The list may be the same object again only if it
        is unchanged. Raises ValueError for more than the largest bucket holds."""
        if self._shown is not None and self._shown[0] is slots:
            return self._shown[1:]
        size = next((size for size in self._sizes if size >= len(slots)), None)
        if size is None:
            raise ValueError(f"{len(slots)} sequences are more than the {self._sizes[-1]} this worker was set up for")
        graph, array = self._graphs[size], np.array(slots, dtype=np.int64)
        padded = np.full(size, -1, dtype=np.int32)
        padded[: len(slots)] = array
        self._shown = None  # all buckets read the same memory
        graph.slots.copy_(self._batch.upload(padded), non_blocking=True)
        self._shown = (slots, array, graph)
        return array, graph

    def replay(self, graph: DecodeGraph, slots: np.ndarray) -> Tensor:
        """Runs a prepared bucket for these slots; returns its hidden states [B, H], valid until the next replay."""
        form = self._form(graph, slots)
        with span("forward"):
            form.graph.replay()
        with span("sample"):
            form.sampling.replay()
        return form.hidden

    def _form(self, graph: DecodeGraph, slots: np.ndarray) -> Capture:
        if graph.short is not None and self._batch.num_tokens[slots].max() <= self._short_limit:
            return graph.short
        if graph.cascade is not None and self._cascade is not None and self._cascade.show(slots):
            return graph.cascade
        return graph.plain

    def _capture_bucket(self, size: int) -> DecodeGraph:
        inputs = DecodeInputs(*(getattr(self._inputs, name)[:size] for name in DecodeInputs.__slots__))
        slots, ids, ok = self._slots[:size], self._ids[:size], self._ok[:size]

        def form(max_seq_len: int | None = None, cascade: bool = False) -> Capture:
            def run() -> Tensor:
                step_prep(slots, self._batch.state, self._batch.block_size, out=inputs)
                return self._forward(inputs, max_seq_len, cascade)

            graph, hidden = self._capture.capture(run)
            sampling, _ = self._capture.capture(lambda: self._sample(hidden, slots, ids, ok))
            return Capture(graph, sampling, hidden)

        short = form(self._short_limit) if self._short_limit and size <= _SMALL else None
        grouped = form(cascade=True) if self._cascade is not None and size >= self._cascade.rule.min_members else None
        return DecodeGraph(form(), short, grouped, slots, ids, ok)
