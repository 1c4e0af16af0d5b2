"""What a GPU worker says when its memory does not suffice, and how a bad row ends alone: the device is faked, the rest real."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import interpreted  # noqa: F401  (first: it makes Triton interpret)
from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.worker import cuda_executor, cuda_memory
from fairlane.worker.attention_triton import TritonAttention
from fairlane.worker.config import WorkerConfig
from fairlane.worker.cuda_batch import CudaBatch
from fairlane.worker.cuda_executor import CudaExecutor
from fairlane.worker.cuda_runner import CudaRunner, CudaStep
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.host_cache import CpuHostCache
from fairlane.worker.kv_cache import KVCache
from fairlane.worker.loading import load_model
from fairlane.worker.model_runner import NOT_FINITE
from tiny_models import GREEDY, save_tiny

GIB = 1 << 30
BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4  # layers, K and V, KV heads, block size, head_dim, float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Qwen3", num_hidden_layers=2, head_dim=16)
    return path


class FakeRunner:
    """Takes no memory but the cache's, of which the device has room for `room` blocks."""

    def __init__(self, num_blocks: int, room: int) -> None:
        if num_blocks > room:
            raise torch.cuda.OutOfMemoryError("tried to allocate")
        self.cache = SimpleNamespace(pool=SimpleNamespace(nbytes=0))

    def compile_samplers(self) -> None:
        pass

    def capture_graphs(self, max_mixed_tokens: int) -> None:
        pass


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GiB, of which weights and context hold 1."""
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * GIB, 4 * GIB))
    monkeypatch.setattr(cuda_executor, "_max_mixed_tokens", lambda *_: 16)  # a CPU's model has let its plain weights go
    for module in (cuda_executor, cuda_memory):
        monkeypatch.setattr(module, "run_largest_step", lambda *_: None)


def refusal(config: WorkerConfig, room: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cuda_executor, "_runner", lambda loaded, config, host, num_blocks: FakeRunner(num_blocks, room))
    with pytest.raises(ModelLoadError) as caught:
        CudaExecutor(config)
    return str(caught.value)


def test_a_cache_that_does_not_fit_is_answered_with_the_tokens_that_do(
    folder: Path, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorkerConfig(model=str(folder), block_size=8, num_blocks=10**7)
    said = refusal(config, 10**6, monkeypatch)
    # Of 0.92 x 4 GiB, 1 is taken and 1 is kept back; a batch's logits and graphs are a few MiB.
    blocks = (0.92 * 4 - 2) * GIB / BLOCK_BYTES
    tokens = int(re.findall(r"about ([\d,]+) tokens of KV cache fit", said)[0].replace(",", ""))
    mib = int(re.findall(r"set kv_cache to at most (\d+)MiB", said)[0])
    assert (tokens, mib) == (pytest.approx(8 * blocks, rel=0.02), pytest.approx(blocks * BLOCK_BYTES / (1 << 20), rel=0.02))


def test_where_no_block_fits_the_settings_that_take_memory_are_named(
    folder: Path, device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = refusal(WorkerConfig(model=str(folder), block_size=8, gpu_memory_utilization=0.3), 10**6, monkeypatch)
    named = ["not one block fits: lower max_num_batched_tokens (512), max_num_seqs (64), max_num_resident (256) or max_model_len"]
    assert [text for text in named if text not in said] == []


def test_weights_that_do_not_fit_are_said_so(folder: Path, device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: WorkerConfig) -> None:
        raise torch.cuda.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(cuda_executor, "load_model", full)
    assert "(3.0 of 4.0 GiB free) does not hold the model's weights" in refusal(WorkerConfig(model=str(folder)), 0, monkeypatch)


# -- one bad row -------------------------------------------------------------------------------------------------------------


class Event:
    """A CUDA event that has happened."""

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return 1.0


def runner_of(folder: Path) -> CudaRunner:
    loaded, cpu = load_model(WorkerConfig(model=str(folder))), torch.device("cpu")
    cache = KVCache(loaded.config, 16, 8, torch.float32, cpu)
    batch = CudaBatch(4, loaded.max_model_len, 8, 16, loaded.config.vocab_size, cpu)
    return CudaRunner(loaded.model, cache, CpuHostCache(cache, 0), batch, TritonAttention(loaded.config, cache, 4, 64), 4)


def step(runner: CudaRunner, output: ScheduleOutput) -> Any:
    with torch.inference_mode():
        runner._batch.apply(output)
        entries, ids, ok = runner._run_eager(output)
    event: Any = Event()
    launched = CudaStep(1, len(output.scheduled), len(output.decode_slots), np.asarray(entries), ids, ok, event, event)
    return runner.result(launched)


@pytest.mark.parametrize("broken", [None, 0, 1, 2])
def test_logits_that_are_not_finite_fail_their_own_sequence_of_a_mixed_step(folder: Path, broken: int | None) -> None:
    runner = runner_of(folder)
    prompts = {slot: [5 + slot, 9, 3 + slot, 8, 7, 6, 5, 4, 3 + slot] for slot in range(3)}
    blocks = {slot: [1 + 2 * slot, 2 + 2 * slot] for slot in range(3)}
    new = [NewSequence(slot, prompts[slot], 9, [blocks[slot]], GREEDY) for slot in range(3)]
    # 1 and 2 have all of their prompt; then 0 computes the end of its own while they decode.
    prepared = [ScheduledSequence(0, 0, 8, False), ScheduledSequence(1, 0, 9, True), ScheduledSequence(2, 0, 9, True)]
    step(runner, ScheduleOutput(1, new=new, scheduled=prepared))
    pool = runner.cache.pool
    pool[15] = 0.0
    if broken is not None:
        with torch.inference_mode():
            pool[blocks[broken][0], :, :, :, 0] = float("nan")
    result = step(runner, ScheduleOutput(2, scheduled=[ScheduledSequence(0, 8, 1, True)], decode_slots=[1, 2]))
    given = [bool(result.tokens[0]), *(index + 1 not in result.errors for index in range(2))]
    expected = {} if broken is None else {broken: NOT_FINITE}
    assert (result.errors, given) == (expected, [slot != broken for slot in range(3)])
