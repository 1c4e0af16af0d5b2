"""Steps on a GPU, one or two launched ahead of the results. It decides what is replayed from a graph (steps that only decode) and
what is launched op by op, and brings sampled tokens to the host without stopping the device; the next step reads them where
they were sampled.

    launch(n)    diffs -> inputs -> layers -> sample -> store | copy of ids to pinned memory, event      returns at once
    result(n)    waits for the event
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fairlane.kernels.reference_step import DecodeInputs
from fairlane.kernels.sample import SampleMode, SampleWorkspace, mode_for, sample
from fairlane.kernels.step_prep import store_sampled
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.worker.attention_triton import TritonAttention, TritonMetadata
from fairlane.worker.cascade import Cascade
from fairlane.worker.cuda_batch import CudaBatch
from fairlane.worker.cuda_graphs import DecodeGraphs, GraphCapture, bucket_sizes, split_results
from fairlane.worker.cuda_mixed import MixedGraphs
from fairlane.worker.host_cache import HostCache, move_blocks
from fairlane.worker.input_batch import StepInputs, StepLayout
from fairlane.worker.kv_cache import KVCache
from fairlane.worker.model_runner import NOT_FINITE
from fairlane.worker.models.llama import LlamaModel
from fairlane.worker.sampler import adjust_logits, changes_logits
from fairlane.worker.tracing import span


@dataclass(frozen=True, slots=True)
class CudaStep:
    """A launched step. ids [S], ok [S]: pinned, valid once `done` has happened; entries [S]: whose they are, decode_slots counted
    on after the step's entries."""

    step_id: int
    num_entries: int
    num_decodes: int
    entries: np.ndarray
    ids: Tensor
    ok: Tensor
    begun: torch.cuda.Event
    done: torch.cuda.Event


class CudaRunner:
    """Runs steps in order on the current stream. step_events: where a benchmark wants to find (begun, done) of every step."""

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        host: HostCache,
        batch: CudaBatch,
        attention: TritonAttention,
        max_num_seqs: int,
        cascade: Cascade | None = None,
    ) -> None:
        """cascade: finds the decodes that share leading blocks; None: nobody looks."""
        self._cascade = cascade
        self._model = model
        self.cache = cache
        self.host = host
        self._batch = batch
        self._attention = attention
        self._max_num_seqs = max_num_seqs
        self._workspace = SampleWorkspace.allocate(max_num_seqs, model.config.vocab_size, cache.pool.device)
        self._greedy = batch.sampling_tensors(np.zeros(0, np.int64), np.zeros(0, np.int64), max_num_seqs)
        self._greedy_slots: list[int] | None = None
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.step_events: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None

    @torch.inference_mode()
    def capture_graphs(self, max_mixed_tokens: int) -> None:
        """While no step is launched. max_mixed_tokens: up to this many, steps with prompt chunks are replayed, too."""
        batch, most, capture = self._batch, self._max_num_seqs, GraphCapture()
        limit = self._attention.whole_limit
        find = self._cascade
        if not self._attention.batch_invariant:  # there, decodes are chunks of one token
            self._graphs = DecodeGraphs(batch, self._forward_decodes, self._sample_greedy, most, limit, capture, find)
        self._mixed = MixedGraphs(batch, self._attention, self._forward_hidden, max_mixed_tokens, most, capture, find)

    @torch.inference_mode()
    def compile_samplers(self) -> None:
        """Runs the head over every number of rows, some of which have kernels of their own, and each kind of draw once: a
        compiler that starts with the first request to want one stops everybody for seconds."""
        device, dtype = self.cache.pool.device, self.cache.pool.dtype
        for rows in reversed(bucket_sizes(self._max_num_seqs)):  # the others' logits fit into what the largest took
            self._model.logits(torch.zeros(rows, self._model.config.hidden_size, dtype=dtype, device=device))
        ids, ok = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int8, device=device)
        tensors = self._batch.sampling_tensors(np.zeros(0, np.int64), np.zeros(0, np.int64), 1)
        for kind in {dtype, torch.float32}:  # as the layers give them, and adjusted
            logits = torch.zeros(1, self._model.config.vocab_size, dtype=kind, device=device)
            for mode in SampleMode:
                sample(logits, tensors, workspace=self._workspace, out_ids=ids, out_ok=ok, mode=mode)

    @torch.inference_mode()
    def compile_block_moves(self) -> None:
        """Moves block 1 about, while it is nobody's."""
        self.cache.copy([(1, 1)])
        if self.host.num_blocks:
            self.host.swap_out([(1, 0)])
            self.host.swap_in([(0, 1)])

    @torch.inference_mode()
    def launch(self, output: ScheduleOutput) -> CudaStep:
        """Starts a step. Raises ValueError if it does not fit the runner's state; its diffs are applied all the same."""
        begun, done = self._event_pair()
        begun.record()
        self._batch.apply(output)
        move_blocks(output, self.cache, self.host)
        if self._graphs is not None and not output.scheduled and self._all_greedy(output.decode_slots):
            entries, ids, ok = self._replay(self._graphs, output.decode_slots)
        else:
            entries, ids, ok = self._run_eager(output)
        done.record()
        if self.step_events is not None:
            self.step_events.append((begun, done))
        return CudaStep(output.step_id, len(output.scheduled), len(output.decode_slots), entries, ids, ok, begun, done)

    def result(self, step: CudaStep) -> StepResult:
        """Waits for a launched step. Raises what CUDA reports."""
        step.done.synchronize()
        result = StepResult(step.step_id, [[] for _ in range(step.num_entries)], [0] * step.num_decodes)
        tokens, ok = step.ids.numpy()[: len(step.entries)].tolist(), step.ok.numpy()[: len(step.entries)]
        if not step.num_entries and ok.all():
            result.decode_tokens = tokens
        else:
            for entry, token, finite in zip(step.entries.tolist(), tokens, ok.tolist(), strict=True):
                if not finite:
                    result.errors[entry] = NOT_FINITE
                elif entry < step.num_entries:
                    result.tokens[entry] = [token]
                else:
                    result.decode_tokens[entry - step.num_entries] = token
        result.elapsed_s = step.begun.elapsed_time(step.done) / 1000
        if self.step_events is None:
            self._events.append((step.begun, step.done))
        return result

    @torch.inference_mode()
    def forward_logits(self, output: ScheduleOutput) -> Tensor:
        """Runs a step but samples nothing: [S, V] of the sampling entries' last tokens (tests, scoring)."""
        self._batch.apply(output)
        move_blocks(output, self.cache, self.host)
        return self._forward(self._batch.prepare(output.scheduled, output.decode_slots))

    # -- decode steps ----------------------------------------------------------------------------------------------------

    def _all_greedy(self, slots: list[int]) -> bool:
        """Whether there are any, and none draws. Remembered for as long as the list is the same object: whoever is in it then
        is the same, too."""
        if self._greedy_slots is not slots:
            if not slots:
                return False
            sampling = self._batch.sampling
            if any(sampling[slot].temperature > 0 or changes_logits(sampling[slot]) for slot in slots):
                return False
            self._greedy_slots = slots
        return True

    def _replay(self, graphs: DecodeGraphs, slots: list[int]) -> tuple[np.ndarray, Tensor, Tensor]:
        array, graph = graphs.prepare(slots)
        self._batch.check_decodes(array)
        graphs.replay(graph, array)
        self._batch.advance(array)
        return (np.arange(len(slots)), *split_results(_to_host(graphs.results)))

    def _forward_decodes(self, inputs: DecodeInputs, max_seq_len: int | None = None, cascade: bool = False) -> Tensor:
        """Hidden states [B, H]."""
        metadata = self._attention.plan_decode(inputs, max_seq_len, cascade)
        return self._model.forward(inputs.input_ids, self._attention, metadata)

    def _sample_greedy(self, hidden: Tensor, slots: Tensor, ids: Tensor, ok: Tensor) -> None:
        rows, logits = len(slots), self._model.logits(hidden)
        greedy = type(self._greedy)(*(getattr(self._greedy, name)[:rows] for name in type(self._greedy).__slots__))
        sample(logits, greedy, workspace=self._workspace, out_ids=ids, out_ok=ok, mode=SampleMode.GREEDY)
        self._store(slots, ids)

    # -- other steps -----------------------------------------------------------------------------------------------------

    def _run_eager(self, output: ScheduleOutput) -> tuple[np.ndarray, Tensor, Tensor]:
        nothing = np.zeros(0, np.int64), torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int8)
        if not output.scheduled and not output.decode_slots:
            return nothing
        layout = self._batch.layout(output.scheduled, output.decode_slots)
        graph = self._mixed.find(layout) if self._mixed is not None else None
        with span("forward"):
            if graph is None or self._mixed is None:
                grouped = self._cascade is not None and self._cascade.show(layout.slots[: layout.num_decodes])
                hidden = self._hidden(self._batch.inputs_of(layout), grouped)
            else:
                hidden = self._mixed.run(graph, layout).index_select(0, self._batch.upload(layout.sample_rows))
        if not len(layout.sample_entries):
            return nothing
        with span("sample"):
            ids, ok = self._sample(self._model.logits(hidden), layout)
            return layout.sample_entries, _to_host(ids), _to_host(ok)

    def _forward_hidden(self, input_ids: Tensor, metadata: TritonMetadata) -> Tensor:
        return self._model.forward(input_ids, self._attention, metadata)

    def _forward(self, inputs: StepInputs) -> Tensor:
        return self._model.logits(self._hidden(inputs))

    def _hidden(self, inputs: StepInputs, cascade: bool = False) -> Tensor:
        """Of the rows that are sampled."""
        metadata = self._attention.plan(inputs, self._model.windows, cascade)
        return self._model.forward(inputs.input_ids, self._attention, metadata, inputs.sample_rows)

    def _sample(self, logits: Tensor, inputs: StepLayout | StepInputs) -> tuple[Tensor, Tensor]:
        slots, rows = inputs.sample_slots, len(inputs.sample_slots)
        params = [self._batch.sampling[slot] for slot in slots.tolist()]
        if any(changes_logits(one) for one in params):
            logits = logits.to(torch.float32)
            adjust_logits(logits, params, slots, inputs.sample_positions, self._batch)
        tensors = self._batch.sampling_tensors(slots, inputs.sample_positions, rows)
        ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        ok = torch.empty(rows, dtype=torch.int8, device=logits.device)
        mode = mode_for((one.temperature, one.top_k, one.top_p, one.min_p) for one in params)
        sample(logits, tensors, workspace=self._workspace, out_ids=ids, out_ok=ok, mode=mode)
        self._store(self._batch.upload(slots.astype(np.int32)), ids)
        self._batch.advance(slots)
        return ids, ok

    def _store(self, slots: Tensor, ids: Tensor) -> None:
        state = self._batch.state
        store_sampled(slots, ids, self._batch.token_ids, state.num_tokens, state.last_token)

    def _event_pair(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        if self._events:
            return self._events.popleft()
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        return begun, done


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, on its way when this returns."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
