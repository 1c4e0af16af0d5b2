"""batch_invariant on the device: the logits of a sequence have the same bits alone and in company, however its prompt is cut into
chunks, found in the prefix cache or computed again, by graphs or op by op; and as near to float32's as they should be."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.request import SamplingParams
from fairlane.worker.config import Device, LoadFormat, WorkerConfig
from fairlane.worker.cuda_executor import CudaExecutor
from gpu_models import SHAPES, WINDOWED, prompt, save_model
from gpu_steps import GREEDY, Run, assert_close
from launches import compilations


@pytest.fixture(scope="module", params=[*SHAPES, *WINDOWED])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Any]:
    folder = tmp_path_factory.mktemp(f"invariant-{request.param}")
    models = save_model(folder, request.param)
    config = WorkerConfig(
        model=str(folder), device=Device.CUDA, num_blocks=1600, max_num_seqs=8, max_num_resident=8, max_num_batched_tokens=4096,
        batch_invariant=True,
    )  # fmt: skip
    return Run(CudaExecutor(config)), models


def rows(run: Run) -> Tensor:
    return torch.cat(run.logits)


def test_logits_are_as_near_to_float32_as_transformers_in_bfloat16(world: tuple[Run, Any]) -> None:
    run, models = world
    tokens = prompt(600, 1)
    assert_close(models, tokens, run.generate(0, tokens, 20), run.logits)


@pytest.mark.parametrize("length", [1, 77, 600])
def test_chunks_change_no_bit(world: tuple[Run, Any], length: int) -> None:
    run, _ = world
    tokens = prompt(length, length)
    run.generate(0, tokens, 12)
    whole = rows(run)
    same = []
    for chunk in (1, 16, 131, 300):
        if chunk < length and length // chunk < 200:
            run.generate(0, tokens, 12, chunk=chunk)
            same.append(torch.equal(rows(run), whole))
    run.generate(0, tokens, 12)
    assert [*same, torch.equal(rows(run), whole)] == [True] * (len(same) + 1)


def test_a_prefix_hit_and_a_recompute_change_no_bit(world: tuple[Run, Any]) -> None:
    run, _ = world
    tokens = prompt(500, 9)
    found = run.generate(1, tokens, 24)
    first, shared = rows(run), run.table[:20]
    run.generate(2, tokens, 24, table=shared)
    hit = rows(run)
    run.generate(1, tokens + found[:10], 14)
    assert torch.equal(hit, first) and torch.equal(rows(run), first[10:])


def test_company_changes_no_bit(world: tuple[Run, Any]) -> None:
    run, _ = world
    lengths = [37, 600, 1, 250]
    alone = []
    for slot, length in enumerate(lengths):
        run.generate(slot, prompt(length, 100 + slot), 4)
        alone.append(rows(run))
    for slot, length in enumerate(lengths):
        run.generate(slot, prompt(length, 100 + slot), 1)
    run.logits.clear()
    order = [2, 0, 3, 1]
    for _ in range(3):
        run.run(decode_slots=order)
    together = torch.stack(run.logits)  # [steps, rows, V]
    same = [torch.equal(together[:, place], alone[slot][1:]) for place, slot in enumerate(order)]
    assert same == [True] * 4


def test_a_chunk_beside_it_changes_no_bit(world: tuple[Run, Any]) -> None:
    run, _ = world
    first, second = prompt(300, 31), prompt(200, 32)
    run.generate(0, first, 4)
    alone_first = rows(run)
    run.generate(1, second, 1)
    alone_second = rows(run)
    run.generate(0, first, 1)
    table = [run.free.pop() for _ in range(13)]
    new = [NewSequence(1, second, 200, [table], GREEDY)]
    run.logits.clear()
    for number, (start, size) in enumerate([(0, 70), (70, 1), (71, 129)]):
        chunk = ScheduledSequence(1, start, size, start + size == 200)
        run.run(new=new if number == 0 else [], scheduled=[chunk], decode_slots=[0])
    decoded = torch.cat([step[:1] for step in run.logits])
    assert torch.equal(decoded, alone_first[1:]) and torch.equal(run.logits[2][1:], alone_second)


def test_a_graph_changes_no_bit(world: tuple[Run, Any]) -> None:
    run, _ = world
    tokens = prompt(411, 8)
    run.generate(0, tokens, 12, chunk=96)
    by_graph = rows(run)
    runner = run.executor.runner
    mixed, runner._mixed = runner._mixed, None
    try:
        run.generate(0, tokens, 12, chunk=96)
    finally:
        runner._mixed = mixed
    assert torch.equal(rows(run), by_graph)


def test_draws_are_the_same_too(world: tuple[Run, Any]) -> None:
    run, _ = world
    sampling = asdict(SamplingParams(temperature=0.8, top_p=0.9, seed=77))
    draws = []
    for company in ([], [1]):
        tokens = prompt(60, 3)
        table = [run.free.pop() for _ in range(5)]
        run.generate(1, prompt(20, 4), 1)
        new = [NewSequence(0, tokens, 60, [table], sampling)]
        drawn = run.run(new=new, scheduled=[ScheduledSequence(0, 0, 60, True)]).tokens[0]
        for _ in range(6):
            drawn = drawn + run.run(decode_slots=[0, *company]).decode_tokens[:1]
        draws.append(drawn)
    assert draws[0] == draws[1]


def test_steps_of_any_number_of_sequences_compile_nothing_in_front_of_users(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 9001,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
    }  # a head with tiles of its own
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "max_position_embeddings": 512}
    shape = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", **sizes, **heads}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = WorkerConfig(
        model=str(tmp_path), load_format=LoadFormat.DUMMY, device=Device.CUDA, num_blocks=200, max_num_seqs=70,
        max_num_resident=70, batch_invariant=True,
    )  # fmt: skip
    executor = CudaExecutor(config)
    with compilations() as compiled:
        for step, count in enumerate((1, 20, 40, 70), 1):
            new = [NewSequence(slot, [5, 6, 7], 3, [[1 + slot]], GREEDY) for slot in range(count)]
            chunks = [ScheduledSequence(slot, 0, 3, True) for slot in range(count)]
            executor.result(executor.launch(ScheduleOutput(step, new=new, scheduled=chunks)))
    executor.close()
    assert compiled == []
