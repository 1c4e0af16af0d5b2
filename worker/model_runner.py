"""One step, from the scheduler's ScheduleOutput to sampled tokens: apply the diffs, move blocks, plan attention, run the layers,
sample, remember. Threads, devices and error translation are the executor's business."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fairlane.clock import Clock
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.worker.attention import make_backend
from fairlane.worker.host_cache import HostCache, move_blocks
from fairlane.worker.input_batch import InputBatch, StepInputs
from fairlane.worker.kv_cache import KVCache
from fairlane.worker.models.llama import LlamaModel
from fairlane.worker.sampler import sample_tokens

NOT_FINITE = "the model's logits are not finite"


class ModelRunner:
    """Runs steps in order; `cache` is the KV cache it writes, `host` keeps the blocks of sequences that are swapped out.

    After an exception its state is that of the step's diffs applied, and it can run the next step.
    """

    def __init__(
        self, model: LlamaModel, cache: KVCache, host: HostCache, batch: InputBatch, clock: Clock, backend: str = "torch"
    ) -> None:
        self._model = model
        self.cache = cache
        self.host = host
        self._batch = batch
        self._clock = clock
        self._attention = make_backend(backend, cache)

    @torch.inference_mode()
    def execute(self, output: ScheduleOutput) -> StepResult:
        """Runs a step. Raises ValueError if it does not fit the runner's state."""
        started = self._clock.now()
        self._batch.apply(output)
        move_blocks(output, self.cache, self.host)
        result = StepResult(output.step_id, [[] for _ in output.scheduled], [0] * len(output.decode_slots))
        if output.scheduled or output.decode_slots:
            inputs = self._batch.prepare(output.scheduled, output.decode_slots)
            logits = self._forward(inputs)
            self._sample(logits, inputs, result)
        result.elapsed_s = self._clock.now() - started
        return result

    @torch.inference_mode()
    def forward_logits(self, output: ScheduleOutput) -> torch.Tensor:
        """Runs a step but samples nothing: float32 [S, V] of the sampling entries' last tokens (tests, scoring)."""
        self._batch.apply(output)
        move_blocks(output, self.cache, self.host)
        return self._forward(self._batch.prepare(output.scheduled, output.decode_slots))

    @torch.inference_mode()
    def warm_up(self, batches: Sequence[int] = (1, 16)) -> None:
        """Runs batches of so many rows that see no key and write nothing, so that the first request does not pay for lazy
        initialisation."""
        for rows in batches:
            zeros = torch.zeros(rows, dtype=torch.int64, device=self.cache.pool.device)
            inputs = self._batch.padding(rows, zeros)
            self._forward(inputs)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        metadata = self._attention.plan(inputs, self._model.windows)
        hidden = self._model.forward(inputs.input_ids, self._attention, metadata, inputs.sample_rows)
        return self._model.logits(hidden)

    def _sample(self, logits: torch.Tensor, inputs: StepInputs, result: StepResult) -> None:
        if not len(inputs.sample_entries):
            return
        sampled = sample_tokens(logits, inputs.sample_slots, inputs.sample_positions, self._batch)
        self._batch.store(inputs.sample_slots, inputs.sample_positions, sampled.tokens)
        for entry, token, ok in zip(inputs.sample_entries.tolist(), sampled.tokens.tolist(), sampled.ok.tolist(), strict=True):
            if not ok:
                result.errors[entry] = NOT_FINITE
            elif entry < len(result.tokens):
                result.tokens[entry] = [token]
            else:
                result.decode_tokens[entry - len(result.tokens)] = token
