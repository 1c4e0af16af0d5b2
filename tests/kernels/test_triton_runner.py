"""The GPU runner's steps, in the interpreter: with Triton attention, device-side inputs and the Triton sampler it gives
the tokens that the CPU runner gives. What needs a device (graphs, events) is tested in tests/gpu."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import interpreted  # noqa: F401  (first: it makes Triton interpret)
from fairlane.kernels.reference_step import DecodeInputs
from fairlane.kernels.step_prep import step_prep
from fairlane.scheduler.output import BlockAppend, NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.worker.attention_triton import TritonAttention
from fairlane.worker.config import WorkerConfig
from fairlane.worker.cuda_batch import CudaBatch
from fairlane.worker.cuda_runner import CudaRunner
from fairlane.worker.kv_cache import KVCache
from fairlane.worker.loading import load_model
from tiny_models import GREEDY, executor_for, save_tiny

PROMPTS = {0: list(range(3, 24)), 1: [9, 8, 7, 6, 5], 2: list(range(40, 49))}
BLOCKS = {0: [3, 9, 5], 1: [7], 2: [11, 2]}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Qwen3", num_hidden_layers=2, head_dim=16)
    return path


def runner_of(folder: Path) -> CudaRunner:
    loaded = load_model(WorkerConfig(model=str(folder)))
    cache = KVCache(loaded.config, 16, 8, torch.float32, CPU)
    cache.pool[1:] = float("nan")
    batch = CudaBatch(4, loaded.max_model_len, 8, 16, loaded.config.vocab_size, CPU)
    return CudaRunner(loaded.model, cache, batch, TritonAttention(loaded.config, cache, 4, 64), 4)


def new(slot: int) -> NewSequence:
    return NewSequence(slot, PROMPTS[slot], len(PROMPTS[slot]), [BLOCKS[slot]], GREEDY)


def steps() -> list[ScheduleOutput]:
    """A prompt, a chunk beside a decode beside a whole prompt, then decodes as entries and as a column; a block is appended."""
    return [
        ScheduleOutput(1, new=[new(1)], scheduled=[ScheduledSequence(1, 0, 5, True)]),
        ScheduleOutput(
            2,
            new=[new(0), new(2)],
            scheduled=[ScheduledSequence(0, 0, 17, False), ScheduledSequence(1, 5, 1, True), ScheduledSequence(2, 0, 9, True)],
        ),
        ScheduleOutput(3, scheduled=[ScheduledSequence(0, 17, 4, True)], decode_slots=[2, 1]),
        ScheduleOutput(4, appends=[BlockAppend(1, [[14]])], decode_slots=[0, 2, 1]),
    ]


def test_logits_of_mixed_steps_are_the_cpu_runners(folder: Path) -> None:
    ours, reference = runner_of(folder), executor_for(folder, num_blocks=16).runner
    for output in steps():
        wanted = reference.execute(output)
        inputs_ready = ours._batch.prepare
        with torch.inference_mode():
            ours._batch.apply(output)
            inputs = inputs_ready(output.scheduled, output.decode_slots)
            logits = ours._forward(inputs)
            ids, ok = ours._sample(logits, inputs)
        tokens = [t for row in wanted.tokens for t in row] + wanted.decode_tokens
        order = np.argsort(inputs.sample_entries)
        assert bool(ok.all()) and ids[torch.from_numpy(order)].tolist() == tokens


def test_a_decode_step_made_on_the_device_continues_where_entries_left_off(folder: Path) -> None:
    ours, reference = runner_of(folder), executor_for(folder, num_blocks=16).runner
    *before, last = steps()
    for output in before:
        reference.execute(output)
        ours._batch.apply(output)
        ours._run_eager(output)
    wanted = reference.execute(last).decode_tokens
    with torch.inference_mode():
        ours._batch.apply(last)
        slots = torch.tensor([*last.decode_slots, -1], dtype=torch.int32)
        inputs = DecodeInputs.allocate(4, ours._batch.block_table.shape[1], CPU)
        step_prep(slots, ours._batch.state, 8, out=inputs)
        ids, ok = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int8)
        ours._sample_greedy(ours._forward_decodes(inputs), slots, ids, ok)
    assert ids[:3].tolist() == wanted
    assert ours._batch.state.num_tokens[:3].tolist() == [len(PROMPTS[s]) + n for s, n in ((0, 2), (1, 4), (2, 3))]
    assert ours._batch.state.last_token[[0, 2, 1]].tolist() == wanted
