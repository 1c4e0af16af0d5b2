"""The GPU runner's steps, in the interpreter: with Triton attention, device-side inputs and the Triton sampler it gives
the tokens that the CPU runner gives. What needs a device (graphs, events) is tested in tests/gpu."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import interpreted  # noqa: F401  (first: it makes Triton interpret)
from fairlane.kernels.reference_step import DecodeInputs
from fairlane.kernels.step_prep import step_prep
from fairlane.scheduler.executor import StepError
from fairlane.scheduler.output import BlockAppend, NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.request import SamplingParams
from fairlane.worker.attention_triton import TritonAttention
from fairlane.worker.config import WorkerConfig
from fairlane.worker.cuda_batch import CudaBatch
from fairlane.worker.cuda_executor import CudaExecutor, DeviceLostError
from fairlane.worker.cuda_graphs import bucket_sizes
from fairlane.worker.cuda_memory import is_out_of_memory, run_largest_step
from fairlane.worker.cuda_mixed import token_buckets
from fairlane.worker.cuda_runner import CudaRunner
from fairlane.worker.host_cache import CpuHostCache
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


def runner_of(folder: Path, batch_invariant: bool = False) -> CudaRunner:
    loaded = load_model(WorkerConfig(model=str(folder)))
    cache = KVCache(loaded.config, 16, 8, torch.float32, CPU)
    cache.pool[1:] = float("nan")
    batch = CudaBatch(4, loaded.max_model_len, 8, 16, loaded.config.vocab_size, CPU)
    attention = TritonAttention(loaded.config, cache, 4, 64, batch_invariant=batch_invariant)
    return CudaRunner(loaded.model, cache, CpuHostCache(cache, 6), batch, attention, 4)


def new(slot: int, sampling: dict[str, Any] = GREEDY) -> NewSequence:
    return NewSequence(slot, PROMPTS[slot], len(PROMPTS[slot]), [BLOCKS[slot]], sampling)


def on_device(runner: CudaRunner, slots: list[int]) -> DecodeInputs:
    """What a decode step of these slots would compute."""
    inputs = DecodeInputs.allocate(len(slots), runner._batch.block_table.shape[1], CPU)
    step_prep(torch.tensor(slots, dtype=torch.int32), runner._batch.state, 8, out=inputs)
    return inputs


def run_as_entries(runner: CudaRunner, output: ScheduleOutput) -> list[int]:
    """The step's tokens, launched op by op, in the order of its entries."""
    with torch.inference_mode():
        runner._batch.apply(output)
        entries, ids, ok = runner._run_eager(output)
    assert bool(ok.all())
    return ids[torch.from_numpy(np.argsort(entries))].tolist()


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
        ScheduleOutput(4, grown_slots=[1], grown_blocks=[[14]], decode_slots=[0, 2, 1]),
    ]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_of_mixed_steps_are_the_cpu_runners(folder: Path, batch_invariant: bool) -> None:
    ours, reference = runner_of(folder, batch_invariant), executor_for(folder, num_blocks=16).runner
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


def test_a_sequence_sent_in_full_may_decode_at_once(folder: Path) -> None:
    ours = runner_of(folder)
    with torch.inference_mode():
        ours._batch.apply(ScheduleOutput(1, new=[new(0)], decode_slots=[0]))
        inputs = on_device(ours, [0])
    row = (inputs.input_ids.item(), inputs.positions.item(), inputs.slot_mapping.item(), inputs.seq_lens.item())
    assert row == (PROMPTS[0][-1], 20, 5 * 8 + 4, 21)


def test_a_slot_that_changes_hands_within_a_step_shows_its_new_owner_only(folder: Path) -> None:
    ours = runner_of(folder)
    with torch.inference_mode():
        ours._batch.apply(ScheduleOutput(1, new=[new(0), new(1)]))
        again = NewSequence(0, [5, 6], 2, [[4]], GREEDY)
        ours._batch.apply(ScheduleOutput(2, released_slots=[0, 1], new=[again], appends=[BlockAppend(0, [[8]])]))
        inputs = on_device(ours, [0, 1])
    assert (inputs.input_ids.tolist(), inputs.seq_lens.tolist(), inputs.slot_mapping.tolist()) == (
        [6, 0],
        [2, 0],
        [4 * 8 + 1, -1],
    )
    assert ours._batch.state.block_table[0, :2].tolist() == ours._batch.block_table[0, :2].tolist() == [4, 8]


def test_a_slot_sent_twice_in_a_step_shows_the_later_sequence_only(folder: Path) -> None:
    ours = runner_of(folder)
    twice = [NewSequence(3, [5] * 20, 20, [[3, 9, 5]], GREEDY), NewSequence(3, [6, 7], 2, [[4]], GREEDY)]
    with torch.inference_mode():
        ours._batch.apply(ScheduleOutput(1, new=twice))
    state = ours._batch.state
    assert (state.block_table[3, :3].tolist(), state.num_tokens[3].item(), state.last_token[3].item()) == ([4, 0, 0], 2, 7)


def test_a_diff_that_does_not_fit_leaves_no_sequence_on_the_device_and_loses_no_other(folder: Path) -> None:
    ours = runner_of(folder)
    bad = NewSequence(2, [1, 2, 3], 3, [[1], [2]], GREEDY)
    with torch.inference_mode():
        with pytest.raises(ValueError, match="KV-cache group"):
            ours._batch.apply(ScheduleOutput(1, new=[new(0), bad, new(1)]))
        inputs = on_device(ours, [0, 1, 2])
    assert inputs.seq_lens.tolist() == [21, 5, 0]
    with pytest.raises(ValueError, match="holds no sequence"):
        ours._batch.check_decodes(np.array([0, 2]))


PENALISED = dataclasses.asdict(
    SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.75, repetition_penalty=1.3, logit_bias={7: 4.0})
)
DRAWN = dataclasses.asdict(SamplingParams(temperature=0.9, top_p=0.9, frequency_penalty=0.5, seed=2**64 - 3))


def test_penalties_count_tokens_that_only_the_device_knows(folder: Path) -> None:
    ours, reference = runner_of(folder), executor_for(folder, num_blocks=16).runner
    first = ScheduleOutput(
        1,
        new=[new(0, PENALISED), new(1, DRAWN)],
        scheduled=[ScheduledSequence(0, 0, 21, True), ScheduledSequence(1, 0, 5, True)],
    )
    later = [ScheduleOutput(2 + n, decode_slots=[0, 1]) for n in range(3)]
    wanted, found = [], []
    for output in [first, *later]:
        result = reference.execute(output)
        wanted += [token for row in result.tokens for token in row] + result.decode_tokens
        found += run_as_entries(ours, output)
    assert found == wanted


def test_steps_are_greedy_by_what_their_slots_hold_now(folder: Path) -> None:
    ours = runner_of(folder)
    both, one = [0, 1], [1]
    with torch.inference_mode():
        ours._batch.apply(ScheduleOutput(1, new=[new(0, DRAWN), new(1)]))
        before = [ours._all_greedy(slots) for slots in (both, one, one, [], both)]
        ours._batch.apply(ScheduleOutput(2, released_slots=[0], new=[new(0)]))
    assert (before, ours._all_greedy(list(both))) == ([False, True, True, False, False], True)


def test_every_kind_of_draw_is_compiled_without_a_sequence(folder: Path) -> None:
    ours = runner_of(folder)
    ours.compile_samplers()
    assert not ours._batch.used.any() and not ours._batch.state.num_tokens.any()


def test_the_head_is_compiled_for_every_number_of_rows_even_without_decode_graphs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, rows = runner_of(folder, batch_invariant=True), []
    logits = ours._model.logits
    monkeypatch.setattr(ours._model, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    ours.compile_samplers()
    assert rows == list(reversed(bucket_sizes(ours._max_num_seqs)))  # the largest first, so that one piece of memory does


@pytest.mark.parametrize("most", [1, 3, 8, 100, 128, 130, 512, 513, 1000, 4096])
def test_buckets_waste_at_most_an_eighth(most: int) -> None:
    sizes = bucket_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most and len(sizes) <= 48 + 8 * (most // 512).bit_length()
    waste = [min(size for size in sizes if size >= count) - count for count in range(1, most + 1)]
    assert all(wasted <= max(7, count / 8) for count, wasted in enumerate(waste, 1))


@pytest.mark.parametrize("most", [4, 16, 100, 1090, 8192])
def test_token_buckets_end_with_the_largest(most: int) -> None:
    sizes = token_buckets(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most and len(sizes) < 40


@pytest.mark.parametrize(
    ("settings", "max_model_len", "expected"),
    [
        ({"max_num_batched_tokens": 40, "max_num_seqs": 2}, 16, [16, 16]),  # not more sequences than a step may have
        ({"max_num_batched_tokens": 40, "max_num_seqs": 4}, 100, [40]),
        ({"max_num_batched_tokens": 200, "max_num_seqs": 1}, 100, [100]),
        ({"max_num_batched_tokens": 200, "max_num_seqs": 1}, 128, [120]),  # as much as 15 blocks of 8 hold
    ],
)
def test_the_largest_step_is_one_the_scheduler_could_ask_for(
    folder: Path, settings: dict[str, int], max_model_len: int, expected: list[int]
) -> None:
    runner, ran = runner_of(folder), []

    def launch(output: ScheduleOutput) -> None:
        runner._batch.apply(output)
        ran.append(runner._batch.layout(output.scheduled, []).seq_lens.tolist())

    runner.launch, runner.result = launch, lambda step: None  # type: ignore[method-assign, assignment, return-value]
    with torch.inference_mode():
        run_largest_step(runner, WorkerConfig(block_size=8, **settings), max_model_len)
    assert (ran, runner._batch.used.any()) == ([expected, []], False)


class Failing:
    """A runner whose steps fail."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def launch(self, output: ScheduleOutput) -> None:
        raise self.error

    def result(self, step: ScheduleOutput) -> None:
        raise self.error


def executor_that_fails(error: Exception) -> Any:
    executor = CudaExecutor.__new__(CudaExecutor)
    executor._closed, executor.runner = False, Failing(error)  # type: ignore[assignment]
    return executor


@pytest.mark.parametrize(
    ("error", "synchronize", "expected"),
    [
        (ValueError("no block"), "fails", StepError),
        (IndexError("slot"), "fails", StepError),
        (torch.cuda.OutOfMemoryError("no room"), "fails", StepError),
        (RuntimeError("too many resources"), "works", StepError),
        (RuntimeError("an illegal memory access"), "fails", DeviceLostError),
    ],
)
def test_a_step_fails_alone_unless_the_device_is_lost(
    error: Exception, synchronize: str, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost if synchronize == "fails" else lambda: None)
    executor = executor_that_fails(error)
    for call in (executor.launch, executor.result):
        with pytest.raises(expected, match="step 7 failed"):
            call(ScheduleOutput(7))
    executor.close()
    executor.close()
    with pytest.raises(StepError, match="closed"):
        executor.launch(ScheduleOutput(8))


def raised_while(first: Exception, second: Exception) -> Exception:
    """The second, as it is when it was raised while the first was handled."""
    second.__context__ = first
    return second


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.cuda.OutOfMemoryError("tried to allocate"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (
            raised_while(
                torch.cuda.OutOfMemoryError("x"), RuntimeError("operation failed due to a previous error during capture")
            ),
            True,
        ),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_lack_of_memory_is_recognised_whoever_reports_it(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
