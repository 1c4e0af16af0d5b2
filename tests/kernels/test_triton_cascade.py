"""The GPU runner's steps with cascading on, in the interpreter: sequences that share a cached beginning give the tokens that the
CPU runner gives, while groups form and dissolve. What needs a device (graphs) is tested in tests/gpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import interpreted  # noqa: F401  (first: it makes Triton interpret)
from engine_world import snapshot
from fairlane.clock import FakeClock
from fairlane.kernels import decode_tuning
from fairlane.kernels.decode_tuning import ChunkRule, DecodeTuning
from fairlane.kernels.reference_step import DecodeInputs
from fairlane.kernels.step_prep import step_prep
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput, StepResult
from fairlane.scheduler.request import RequestId
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.worker.attention_triton import TritonAttention
from fairlane.worker.cascade import Cascade, CascadeRule
from fairlane.worker.config import WorkerConfig
from fairlane.worker.cuda_batch import CudaBatch
from fairlane.worker.cuda_graphs import DecodeGraphs
from fairlane.worker.cuda_mixed import MixedGraphs
from fairlane.worker.cuda_runner import CudaRunner, CudaStep
from fairlane.worker.host_cache import CpuHostCache
from fairlane.worker.kv_cache import KVCache
from fairlane.worker.loading import load_model
from local_engine import prompt_request, run_prompts
from tiny_models import GREEDY, executor_for, save_tiny

CPU = torch.device("cpu")
BS, BLOCKS, SLOTS = 8, 40, 5
PREFIX = [(7 * n) % 200 + 3 for n in range(64)]
PREFIX_BLOCKS = [3, 19, 5, 11, 2, 30, 8, 17]
OWN = {0: [9, 8, 7, 6, 5], 1: [44], 2: list(range(60, 69)), 3: [150, 151]}
RULE = CascadeRule(token_bytes=1, granule=32, min_members=3, min_shared=32, min_saved_bytes=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, "Qwen3", num_hidden_layers=2, head_dim=16)
    return path


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences of 70 tokens are cut."""
    tuning = DecodeTuning(block_n=16, chunks=ChunkRule((32, 64, 64), (72, 100)))
    monkeypatch.setitem(decode_tuning.MEASURED, (16, 2, torch.float32, BS), tuning)


def runner_of(folder: Path) -> CudaRunner:
    loaded = load_model(WorkerConfig(model=str(folder)))
    cache = KVCache(loaded.config, BLOCKS, BS, torch.float32, CPU)
    cache.pool[1:] = float("nan")
    batch = CudaBatch(SLOTS, loaded.max_model_len, BS, BLOCKS, loaded.config.vocab_size, CPU)
    attention = TritonAttention(loaded.config, cache, SLOTS, 128, cascade=True)
    assert attention.prefix_groups is not None
    cascade = Cascade(batch, attention.prefix_groups, RULE)
    return CudaRunner(loaded.model, cache, CpuHostCache(cache, 0), batch, attention, SLOTS, cascade)


def new(slot: int) -> NewSequence:
    """A sequence whose first 64 tokens are in the prefix's blocks; it has room for eight more than its own tokens at least."""
    tokens = PREFIX + OWN[slot]
    own = [20 + 2 * slot, 21 + 2 * slot] if slot != 2 else [32, 33, 34]
    return NewSequence(slot, tokens, len(tokens), [PREFIX_BLOCKS + own], GREEDY)


def tail(slot: int) -> ScheduledSequence:
    """What a prefix hit leaves to compute."""
    return ScheduledSequence(slot, 64, len(OWN[slot]), True)


def steps() -> list[ScheduleOutput]:
    """One sequence computes the prefix, others hit it, join its decodes and leave."""
    return [
        ScheduleOutput(1, new=[new(0)], scheduled=[ScheduledSequence(0, 0, 69, True)]),
        ScheduleOutput(2, new=[new(1), new(2)], scheduled=[tail(2), tail(1)], decode_slots=[0]),
        ScheduleOutput(3, decode_slots=[0, 1, 2]),
        ScheduleOutput(4, new=[new(3)], scheduled=[tail(3)], decode_slots=[1, 2, 0]),
        ScheduleOutput(5, decode_slots=[3, 1, 0, 2]),
        ScheduleOutput(6, released_slots=[2], decode_slots=[3, 0, 1]),
        ScheduleOutput(7, released_slots=[1], decode_slots=[0, 3]),
    ]


def run(runner: CudaRunner, output: ScheduleOutput) -> tuple[list[int], bool]:
    """The step's tokens in the order of its entries, and whether its decodes were grouped."""
    with torch.inference_mode():
        runner._batch.apply(output)
        entries, ids, ok = runner._run_eager(output)
    assert bool(ok.all())
    return ids[torch.from_numpy(np.argsort(entries))].tolist(), runner._attention._workspace.schedule_of(None).cascade


def test_tokens_are_the_cpu_runners_while_groups_form_and_dissolve(folder: Path) -> None:
    ours, reference = runner_of(folder), executor_for(folder, num_blocks=BLOCKS).runner
    wanted, found, grouped = [], [], []
    for output in steps():
        result = reference.execute(output)
        wanted.append([token for row in result.tokens for token in row] + result.decode_tokens)
        tokens, cascaded = run(ours, output)
        found.append(tokens)
        grouped.append(cascaded)
    # In step 2 slot 1's single prompt token is a row like a decode: with slot 0 that makes two, too few.
    assert (found, grouped) == (wanted, [False, False, True, True, True, True, False])


def test_a_decode_step_made_on_the_device_is_grouped_too(folder: Path) -> None:
    ours, reference = runner_of(folder), executor_for(folder, num_blocks=BLOCKS).runner
    *before, last = steps()[:5]
    for output in before:
        reference.execute(output)
        run(ours, output)
    wanted = reference.execute(last).decode_tokens
    with torch.inference_mode():
        ours._batch.apply(last)
        slots = torch.tensor([*last.decode_slots, -1], dtype=torch.int32)
        inputs = DecodeInputs.allocate(5, ours._batch.block_table.shape[1], CPU)
        step_prep(slots, ours._batch.state, BS, out=inputs)
        assert ours._cascade is not None and ours._cascade.show(np.array(last.decode_slots))
        ids, ok = torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int8)
        ours._sample_greedy(ours._forward_decodes(inputs, cascade=True), slots, ids, ok)
    assert (ids[:4].tolist(), ours._attention._workspace.schedule_of(None).cascade) == (wanted, True)


class Recorded:
    """A "graph" that runs its step anew when it is replayed, where the first run left its result."""

    def __init__(self, step: Callable[[], Any], name: str, replays: list[str]) -> None:
        self._step, self._name, self._replays = step, name, replays
        self.result = step()

    def replay(self) -> None:
        self._replays.append(self._name)
        found = self._step()
        if found is not None:
            self.result.copy_(found)


class Recorder:
    """Stands in for GraphCapture, and keeps whether each replayed forward pass was one with groups."""

    def __init__(self, runner: CudaRunner) -> None:
        self._workspace = runner._attention._workspace
        self.replays: list[str] = []

    def capture(self, step: Callable[[], Any]) -> tuple[Recorded, Any]:
        self._workspace.schedule_of(None).cascade = False
        graph = Recorded(step, "", self.replays)
        graph._name = "sample" if graph.result is None else "groups" if self._workspace.schedule_of(None).cascade else "plain"
        return graph, graph.result


def test_graphs_take_the_form_for_groups_when_there_are_some(folder: Path) -> None:
    ours, reference = runner_of(folder), executor_for(folder, num_blocks=BLOCKS).runner
    recorder: Any = Recorder(ours)
    wanted, found = [], []
    with torch.inference_mode():
        parts = ours._batch, ours._forward_decodes, ours._sample_greedy
        graphs = DecodeGraphs(*parts, SLOTS, 0, recorder, ours._cascade)
        ours._mixed = MixedGraphs(ours._batch, ours._attention, ours._forward_hidden, 16, SLOTS, recorder, ours._cascade)
    for output in steps():
        result = reference.execute(output)
        wanted.append([token for row in result.tokens for token in row] + result.decode_tokens)
        if output.scheduled:
            found.append(run(ours, output)[0])
            continue
        with torch.inference_mode():
            ours._batch.apply(output)
            ids = ours._replay(graphs, output.decode_slots)[1]
        found.append(ids[: len(output.decode_slots)].tolist())
    forms = [name for name in recorder.replays if name != "sample"]
    # The first prompt is longer than the largest graph. Two rows, of step 2 and of the last one, are too few for a group.
    assert (found, forms) == (wanted, ["plain", "groups", "groups", "groups", "groups", "plain"])


class Instant:
    """An event that has happened."""

    def synchronize(self) -> None:
        """It has."""

    def elapsed_time(self, _: Instant) -> float:
        return 0.0


class InterpretedExecutor:
    """The Executor port over a CudaRunner whose steps are launched op by op, in the interpreter."""

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner
        self.info = ExecutorInfo("tiny", 211, 128, BS, BLOCKS, ())
        self.grouped: list[bool] = []

    def launch(self, output: ScheduleOutput) -> CudaStep:
        with torch.inference_mode():
            self._runner._batch.apply(output)
            self._runner.cache.copy(output.copies)
            entries, ids, ok = self._runner._run_eager(output)
        self.grouped.append(self._runner._attention._workspace.schedule_of(None).cascade)
        happened: Any = Instant()
        counts = len(output.scheduled), len(output.decode_slots)
        return CudaStep(output.step_id, *counts, entries, ids, ok, happened, happened)

    def result(self, step: CudaStep) -> StepResult:
        return self._runner.result(step)

    def close(self) -> None:
        """Nothing to let go of."""


def test_prefix_hits_of_the_engine_become_groups_and_give_the_cpu_engines_tokens(folder: Path) -> None:
    prompts, lengths = [PREFIX + own for own in OWN.values()], [6, 9, 4, 5]
    executor = InterpretedExecutor(runner_of(folder))
    limits = SchedulerLimits(max_num_seqs=4, max_num_resident=4, max_num_batched_tokens=80, max_model_len=128)
    driver = EngineDriver(executor, FakeClock(), snapshot(), limits, check=True)
    wanted = []
    for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        driver.add(prompt_request(number, prompt, length))
        driver.turn()  # the first computes the prefix before the second asks for it
        driver.turn()
        wanted += run_prompts([prompt], length, WorkerConfig(model=str(folder), num_blocks=BLOCKS, block_size=BS))
    driver.run_until_idle()
    found = [driver.transcripts[RequestId(number)].token_ids for number in range(4)]
    assert (found, {executor.grouped[0], executor.grouped[-1]}, any(executor.grouped)) == (wanted, {False}, True)
