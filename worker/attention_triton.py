"""Attention on a GPU: Triton kernels that write and read the paged cache. Sequences with one query token go to the decode kernel,
which cuts them by their own length, the others to the prefill kernel; a step that has both runs both. Decodes that share leading
blocks may have these computed once per group (cascade); who does is cascade.py's to find.

    rows of q     decode: one each   | prefill: chunk after chunk
    sequences     0 .. num_decodes-1 | the rest                     (InputBatch puts one-token rows first)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fairlane.kernels.decode_sched import DecodeWorkspace, max_items_for
from fairlane.kernels.decode_tuning import tuning_for as decode_tuning
from fairlane.kernels.new_tokens import NewTokens
from fairlane.kernels.paged_decode import paged_decode
from fairlane.kernels.paged_prefill import paged_prefill
from fairlane.kernels.prefill_sched import PrefillPlan, TileBuffers, plan_prefill
from fairlane.kernels.prefill_tuning import invariant
from fairlane.kernels.prefill_tuning import tuning_for as prefill_tuning
from fairlane.kernels.prefix_groups import PrefixGroups
from fairlane.kernels.prefix_tuning import tuning_for as prefix_tuning
from fairlane.kernels.reference_step import DecodeInputs
from fairlane.kernels.rope_decode import rope_decode
from fairlane.kernels.rope_norm_write import rope_norm_write
from fairlane.worker.attention import AttentionLayer
from fairlane.worker.input_batch import StepInputs, StepLayout
from fairlane.worker.kv_cache import KVCache
from fairlane.worker.models.config import ModelConfig
from fairlane.worker.upload import to_device

if TYPE_CHECKING:
    from fairlane.worker.cuda_mixed import MixedInputs


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """One step, all on the device. block_table int32 [B, MB] of all its sequences, seq_lens int32 of the decodes. cascade: the
    decodes' prefix groups are those in prefix_groups."""

    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    seq_lens: Tensor
    num_decodes: int
    prefill: PrefillPlan | None
    cascade: bool = False


class TritonAttention:
    """An AttentionBackend. Its workspace is shared by all layers and steps: they must run on one stream."""

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        max_num_seqs: int,
        max_model_len: int,
        *,
        cascade: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        """cascade: makes room for prefix groups. batch_invariant: the prefill kernel computes every row, so that a token has the
        same bits whether it comes in a chunk or alone."""
        self._cache = cache
        self._config = config
        dtype, device = cache.pool.dtype, cache.pool.device
        group = config.num_heads // config.num_kv_heads
        self._windows = frozenset(config.windows)
        tuning = decode_tuning(config.head_dim, group, dtype, cache.block_size)
        items = max(max_items_for(max_num_seqs, max_model_len, tuning, window) for window in self._windows)
        self._prefill_tuning = prefill_tuning(config.head_dim, group, dtype)
        self.batch_invariant = batch_invariant
        if batch_invariant:
            self._prefill_tuning = invariant(self._prefill_tuning)
        self._workspace = DecodeWorkspace(
            max_num_seqs,
            items,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            device,
            dtype,
            block_size=cache.block_size,
            windows=self._windows,
            tuning=tuning,
            prefix=prefix_tuning(config.head_dim, dtype) if cascade else None,
        )

    @property
    def prefix_groups(self) -> PrefixGroups | None:
        """Where the groups go that a step with `cascade` has."""
        return self._workspace.groups

    def plan(self, inputs: StepInputs, windows: frozenset[int | None], cascade: bool = False) -> TritonMetadata:
        """Any step, its decodes first."""
        device = self._cache.pool.device
        counts = np.diff(inputs.query_start_loc)
        num_decodes = self.num_decodes(int((counts == 1).sum()))
        table = to_device(inputs.block_table.to(torch.int32), device)
        seq_lens = to_device(torch.from_numpy(inputs.seq_lens[:num_decodes]).to(torch.int32), device)
        chunks = np.arange(num_decodes, len(counts))
        prefill = self._plan_tiles(inputs.query_start_loc, inputs.seq_lens, chunks, None, None) if len(chunks) else None
        metadata = TritonMetadata(inputs.positions, inputs.slot_mapping, table, seq_lens, num_decodes, prefill, cascade)
        self.schedule(metadata)
        return metadata

    def num_decodes(self, one_token_rows: int) -> int:
        """How many of a step's sequences with one token the decode kernel computes: all of them or none."""
        return 0 if self.batch_invariant else one_token_rows

    @property
    def whole_limit(self) -> int:
        """Tokens up to which a sequence's attention is never cut: a step of such sequences takes fewer kernels."""
        return self._workspace.tuning.chunks.whole

    def plan_decode(self, inputs: DecodeInputs, max_seq_len: int | None = None, cascade: bool = False) -> TritonMetadata:
        """A step of decodes whose inputs are made on the device; may be captured in a graph, then max_seq_len must hold for
        every replay."""
        rows = len(inputs.seq_lens)
        metadata = TritonMetadata(inputs.positions, inputs.slot_mapping, inputs.block_table, inputs.seq_lens, rows, None, cascade)
        self.schedule(metadata, max_seq_len)
        return metadata

    def plan_mixed(self, inputs: MixedInputs, cascade: bool = False) -> TritonMetadata:
        """A step of fixed addresses, to be captured: schedule() belongs into the graph, plan_tiles() before each replay."""
        plan = self._plan_tiles(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), inputs.tiles, None)
        rows = len(inputs.seq_lens)
        return TritonMetadata(inputs.positions, inputs.slot_mapping, inputs.block_table, inputs.seq_lens, rows, plan, cascade)

    def tile_buffers(self, max_tokens: int, max_chunks: int) -> TileBuffers:
        group = self._config.num_heads // self._config.num_kv_heads
        return TileBuffers(max_tokens, max_chunks, group, self._prefill_tuning, self._cache.pool.device)

    def plan_tiles(self, layout: StepLayout, tiles: TileBuffers, num_rows: int) -> None:
        """Puts the step's tiles into the buffers, and rows up to num_rows to 0."""
        chunks = np.arange(self.num_decodes(layout.num_decodes), len(layout.slots))
        self._plan_tiles(layout.query_start_loc, layout.seq_lens, chunks, tiles, num_rows)

    def _plan_tiles(
        self, starts: np.ndarray, lens: np.ndarray, chunks: np.ndarray, tiles: TileBuffers | None, rows: int | None
    ) -> PrefillPlan:
        config = self._config
        return plan_prefill(
            starts,
            lens,
            config.num_heads,
            config.num_kv_heads,
            tuning=self._prefill_tuning,
            device=self._cache.pool.device,
            sequences=chunks,
            padded_rows=rows,
            buffers=tiles,
        )

    def schedule(self, metadata: TritonMetadata, max_seq_len: int | None = None) -> None:
        """Cuts the decodes into items, once a step."""
        if metadata.num_decodes:
            for window in self._windows:
                self._workspace.schedule(metadata.seq_lens, window, max_seq_len=max_seq_len, cascade=metadata.cascade)

    def forward(self, layer: AttentionLayer, qkv: Tensor, metadata: TritonMetadata) -> Tensor:
        kv = self._cache.layers[layer.index]
        if metadata.prefill is None:
            return self._decode(layer, qkv, kv, metadata)
        q = rope_norm_write(
            qkv,
            metadata.positions,
            metadata.slot_mapping,
            layer.cos,
            layer.sin,
            kv,
            num_heads=layer.num_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=layer.norm_eps,
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        decodes = metadata.num_decodes
        if decodes:
            paged_decode(
                q[:decodes],
                kv,
                metadata.block_table[:decodes],
                metadata.seq_lens,
                scale=layer.scale,
                workspace=self._workspace,
                out=out[:decodes],
                window=layer.window,
                softcap=layer.softcap,
            )
        paged_prefill(
            q,
            kv,
            metadata.block_table,
            metadata.prefill,
            scale=layer.scale,
            window=layer.window,
            softcap=layer.softcap,
            out=out,
        )
        return out.view(out.shape[0], -1)

    def _decode(self, layer: AttentionLayer, qkv: Tensor, kv: Tensor, metadata: TritonMetadata) -> Tensor:
        """A layer of a step of decodes alone."""
        out = torch.empty(len(qkv), layer.num_heads, self._config.head_dim, dtype=qkv.dtype, device=qkv.device)
        where = metadata.positions, metadata.slot_mapping, layer.cos, layer.sin
        rope_decode(
            NewTokens(qkv, *where, layer.q_norm, layer.k_norm, layer.norm_eps),
            kv,
            metadata.block_table,
            metadata.seq_lens,
            num_heads=layer.num_heads,
            scale=layer.scale,
            workspace=self._workspace,
            out=out,
            window=layer.window,
            softcap=layer.softcap,
        )
        return out.view(len(out), -1)
