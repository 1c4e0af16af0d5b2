"""Decode steps as CUDA graphs: one per batch size, captured when the worker starts. A step of n sequences replays the smallest
that holds them; the rows beyond are padding, which reads nothing and writes nothing.

    slots [B] -> step_prep -> layers -> logits [B, V] -> greedy sample -> store_sampled        all of it replayed by one call
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairlane.kernels.reference_step import DecodeInputs
from fairlane.kernels.step_prep import step_prep
from fairlane.worker.cuda_batch import CudaBatch

_SMALL = 8  # larger batches gain nothing from a form for short sequences

Forward = Callable[[DecodeInputs, int | None], Tensor]
Sample = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def bucket_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then steps of 8 up to 128 and of 16 beyond; padding wastes at most an eighth of a batch of more than 8."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, max_num_seqs + 16, 16)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@dataclass(frozen=True, slots=True)
class Capture:
    """One form of a bucket, for sequences of at most max_seq_len tokens (None: of any length)."""

    max_seq_len: int | None
    graph: torch.cuda.CUDAGraph
    sampling: torch.cuda.CUDAGraph
    logits: Tensor


@dataclass(frozen=True, slots=True)
class DecodeGraph:
    """One bucket. slots int32 [B] is its input; ids and ok, and the logits of the form that ran, are overwritten by the next
    replay. forms: those for short sequences first."""

    forms: tuple[Capture, ...]
    slots: Tensor
    ids: Tensor
    ok: Tensor


class DecodeGraphs:
    """All buckets; they share one memory pool, so that it is as large as the largest."""

    def __init__(self, batch: CudaBatch, forward: Forward, sample: Sample, max_num_seqs: int, short_limit: int) -> None:
        """forward: (inputs, max_seq_len) -> logits. sample: (logits, slots, ids, ok), greedy, storing what it draws. Both are
        captured. short_limit: length up to which small batches have a form of their own; 0: none."""
        self._batch = batch
        self._forward = forward
        self._sample = sample
        self._short_limit = short_limit
        self._graphs: dict[int, DecodeGraph] = {}
        self._sizes = bucket_sizes(max_num_seqs)
        self._shown: tuple[list[int], np.ndarray, DecodeGraph] | None = None
        self.pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):  # the largest first: the others fit into what it took
            self._graphs[size] = self._capture(size, self.pool)

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
        graph.slots.copy_(self._batch.upload(padded), non_blocking=True)
        self._shown = (slots, array, graph)
        return array, graph

    def replay(self, graph: DecodeGraph, slots: np.ndarray) -> Tensor:
        """Runs a prepared bucket for these slots; returns its logits."""
        form = graph.forms[-1]
        if len(graph.forms) > 1 and self._batch.num_tokens[slots].max() <= self._short_limit:
            form = graph.forms[0]
        form.graph.replay()
        form.sampling.replay()
        return form.logits

    def _capture(self, size: int, pool: Any) -> DecodeGraph:
        device = self._batch.state.num_tokens.device
        slots = torch.full((size,), -1, dtype=torch.int32, device=device)
        inputs = DecodeInputs.allocate(size, self._batch.block_table.shape[1], device)
        ids = torch.zeros(size, dtype=torch.int64, device=device)
        ok = torch.zeros(size, dtype=torch.int8, device=device)

        limits = (self._short_limit, None) if self._short_limit and size <= _SMALL else (None,)
        forms = tuple(self._capture_form(limit, inputs, slots, ids, ok, pool) for limit in limits)
        return DecodeGraph(forms, slots, ids, ok)

    def _capture_form(
        self, max_seq_len: int | None, inputs: DecodeInputs, slots: Tensor, ids: Tensor, ok: Tensor, pool: Any
    ) -> Capture:
        def run() -> Tensor:
            step_prep(slots, self._batch.state, self._batch.block_size, out=inputs)
            return self._forward(inputs, max_seq_len)

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels compile and libraries set themselves up outside the capture
            self._sample(run(), slots, ids, ok)
        torch.cuda.current_stream().wait_stream(stream)
        graph, sampling = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = run()
        with torch.cuda.graph(sampling, pool=pool):
            self._sample(logits, slots, ids, ok)
        return Capture(max_seq_len, graph, sampling, logits)
