"""Steps with prompt chunks as CUDA graphs, one per number of tokens, for steps so short that launching them op by op would take
longer than running them. A step replays the smallest graph that holds it; rows beyond are padding.

    rows of q    decodes | chunks | padding        the decode kernel sees the first S rows, of which those that decode have a
    seq_lens [S] 17 90 5   0 0 0 0 0               length; what it writes to the others the prefill kernel overwrites
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fairlane.kernels.prefill_sched import TileBuffers
from fairlane.worker.attention_triton import TritonAttention, TritonMetadata
from fairlane.worker.cascade import Cascade
from fairlane.worker.cuda_batch import CudaBatch
from fairlane.worker.cuda_graphs import GraphCapture
from fairlane.worker.input_batch import StepLayout

Forward = Callable[[Tensor, TritonMetadata], Tensor]

_TOKENS_PER_CHUNK = 32  # a graph of T tokens holds T / 32 sequences with chunks, and at least _CHUNKS
_CHUNKS = 4


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """16 to 64 by 16, then in steps of an eighth to a quarter of the size; the last is max_tokens."""
    sizes = list(range(16, 65, 16))
    while sizes[-1] < max_tokens:
        step = max(64, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(sizes[-1] // step * step + step)
    return (*(size for size in sizes if size < max_tokens), max_tokens)


@dataclass(frozen=True, slots=True)
class MixedForm:
    """hidden [T, H]: of its last replay."""

    graph: torch.cuda.CUDAGraph
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class MixedGraph:
    """One bucket: its inputs and its forms, cascade being the one for decodes that form prefix groups."""

    inputs: MixedInputs
    plain: MixedForm
    cascade: MixedForm | None


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """At fixed addresses: input_ids, positions, slot_mapping int64 [T]; seq_lens int32 [S]; block_table int32 [S + C, MB]. All
    but the tiles are shared with the other buckets, each of which uses the first rows."""

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    block_table: Tensor
    tiles: TileBuffers
    max_chunks: int

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


class MixedGraphs:
    """All buckets."""

    def __init__(
        self,
        batch: CudaBatch,
        attention: TritonAttention,
        forward: Forward,
        max_tokens: int,
        max_num_seqs: int,
        capture: GraphCapture,
        cascade: Cascade | None = None,
    ) -> None:
        """forward: (input_ids, metadata) -> hidden states of all rows; it is captured. max_tokens: of the largest bucket.
        cascade: finds prefix groups, for which there is a form, too."""
        self._batch = batch
        self._cascade = cascade
        self._attention = attention
        self._forward = forward
        self._max_num_seqs = max_num_seqs
        self._capture = capture
        largest = self._allocate(max_tokens)
        self._graphs = tuple(self._capture_bucket(size, largest) for size in reversed(token_buckets(max_tokens)))[::-1]

    def find(self, layout: StepLayout) -> MixedGraph | None:
        """The bucket for a step; None if none holds it."""
        tokens, decodes = len(layout.positions), self._attention.num_decodes(layout.num_decodes)
        chunks = len(layout.slots) - decodes
        for graph in self._graphs:
            inputs = graph.inputs
            if tokens <= inputs.num_tokens and decodes <= len(inputs.seq_lens) and chunks <= inputs.max_chunks:
                return graph
        return None

    def run(self, graph: MixedGraph, layout: StepLayout) -> Tensor:
        """Hidden states of all the step's rows, [T, H] and more."""
        batch, inputs = self._batch, graph.inputs
        places = _padded(layout.token_places, inputs.num_tokens, 0)
        torch.index_select(batch.token_ids.view(-1), 0, batch.upload(places), out=inputs.input_ids)
        inputs.positions.copy_(batch.upload(_padded(layout.positions, inputs.num_tokens, 0)))
        inputs.slot_mapping.copy_(batch.upload(_padded(layout.slot_mapping, inputs.num_tokens, -1)))
        decodes = self._attention.num_decodes(layout.num_decodes)
        inputs.seq_lens.copy_(batch.upload(_padded(layout.seq_lens[:decodes], len(inputs.seq_lens), 0)))
        longest = -(-int(layout.seq_lens.max(initial=1)) // batch.block_size)
        table = batch.block_table[layout.slots, :longest].astype(np.int32)
        inputs.block_table[: len(table), :longest].copy_(batch.upload(table))
        self._attention.plan_tiles(layout, inputs.tiles, inputs.num_tokens)
        form = graph.plain
        if graph.cascade is not None and self._cascade is not None and self._cascade.show(layout.slots[:decodes]):
            form = graph.cascade
        form.graph.replay()
        return form.hidden

    def _capture_bucket(self, size: int, largest: MixedInputs) -> MixedGraph:
        inputs = self._first_rows(largest, size)

        def form(cascade: bool) -> MixedForm:
            metadata = self._attention.plan_mixed(inputs, cascade)

            def run() -> Tensor:
                self._attention.schedule(metadata)
                return self._forward(inputs.input_ids, metadata)

            return MixedForm(*self._capture.capture(run))

        grouped = self._cascade is not None and self._sequences(size)[0] >= self._cascade.rule.min_members
        return MixedGraph(inputs, form(False), form(True) if grouped else None)

    def _allocate(self, size: int) -> MixedInputs:
        device = self._batch.state.num_tokens.device
        decodes, chunks = self._sequences(size)
        ids, positions, mapping = (torch.full((size,), fill, dtype=torch.int64, device=device) for fill in (0, 0, -1))
        return MixedInputs(
            ids,
            positions,
            mapping,
            torch.zeros(decodes, dtype=torch.int32, device=device),
            torch.zeros(decodes + chunks, self._batch.block_table.shape[1], dtype=torch.int32, device=device),
            self._attention.tile_buffers(size, chunks),
            chunks,
        )

    def _first_rows(self, largest: MixedInputs, size: int) -> MixedInputs:
        decodes, chunks = self._sequences(size)
        return MixedInputs(
            largest.input_ids[:size],
            largest.positions[:size],
            largest.slot_mapping[:size],
            largest.seq_lens[:decodes],
            largest.block_table[: decodes + chunks],
            self._attention.tile_buffers(size, chunks),
            chunks,
        )

    def _sequences(self, size: int) -> tuple[int, int]:
        """Decodes and chunks that a bucket of so many tokens holds."""
        most = min(size, self._max_num_seqs)
        decodes = self._attention.num_decodes(most)
        return decodes, most if not decodes else max(_CHUNKS, size // _TOKENS_PER_CHUNK)


def _padded(values: np.ndarray, size: int, fill: int) -> np.ndarray:
    padded = np.full(size, fill, dtype=values.dtype)
    padded[: len(values)] = values
    return padded
