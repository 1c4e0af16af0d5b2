"""The GPU worker against transformers on identical random weights, teacher-forced on its own tokens: with decode graphs, chunked
prompts, prefix hits, recompute and swap. Both are compared with transformers in float32; ours may be off twice as far as
transformers in bfloat16 is, and two ulp."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.request import Request, RequestId, SamplingParams
from fairlane.worker.config import Device, LoadFormat, WorkerConfig
from fairlane.worker.cuda_executor import CudaExecutor
from fairlane.worker.errors import ModelLoadError
from gpu_models import SHAPES, prompt, save_model
from gpu_steps import GREEDY, Run, assert_close, small_engine, whole, wrong_tokens


@pytest.fixture(scope="module", params=list(SHAPES))
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    models = save_model(folder, request.param)
    config = WorkerConfig(
        model=str(folder),
        device=Device.CUDA,
        num_blocks=1600,
        host_kv_cache=64 << 20,
        max_num_seqs=8,
        max_num_resident=8,
        max_num_batched_tokens=4096,
    )
    return Run(CudaExecutor(config)), models


def test_a_cache_that_does_not_fit_is_refused_with_what_does(tmp_path: Path) -> None:
    sizes = {"vocab_size": 499, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 1}
    shape = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    dummy = {"model": str(tmp_path), "load_format": LoadFormat.DUMMY, "device": Device.CUDA, "max_num_seqs": 4}
    with pytest.raises(ModelLoadError, match=r"about [\d,]+ tokens of KV cache fit: set kv_cache to at most \d+MiB"):
        CudaExecutor(WorkerConfig(**dummy, num_blocks=1 << 30))  # type: ignore[arg-type]  # 4 TiB


@pytest.mark.parametrize(("length", "chunk"), [(1, 4096), (77, 4096), (600, 4096), (600, 131), (333, 16)])
def test_logits_are_as_near_to_float32_as_transformers_in_bfloat16(world: tuple[Run, Any], length: int, chunk: int) -> None:
    run, models = world
    tokens = prompt(length, length)
    found = run.generate(0, tokens, 40, chunk=chunk)
    assert_close(models, tokens, found, run.logits)


def test_steps_launched_op_by_op_are_as_near(world: tuple[Run, Any]) -> None:
    run, models = world
    runner = run.executor.runner
    mixed, runner._mixed = runner._mixed, None
    try:
        for chunk in (4096, 96):
            tokens = prompt(411, 8)
            assert_close(models, tokens, run.generate(0, tokens, 20, chunk=chunk), run.logits)
    finally:
        runner._mixed = mixed


def test_decodes_beside_chunks_are_what_they_are_alone(world: tuple[Run, Any]) -> None:
    run, models = world
    first, second = prompt(300, 31), prompt(200, 32)
    alone = run.generate(0, first, 5)
    assert_close(models, first, alone, run.logits)
    run.generate(0, first, 1)
    table = [run.free.pop() for _ in range(13)]
    new = [NewSequence(1, second, 200, [table], GREEDY)]
    run.logits.clear()
    beside = []
    for number, (start, size) in enumerate([(0, 70), (70, 70), (140, 60)]):
        chunk = ScheduledSequence(1, start, size, start + size == 200)
        beside.append(run.run(new=new if number == 0 else [], scheduled=[chunk], decode_slots=[0]))
    tokens = [result.decode_tokens[0] for result in beside]
    assert_close(models, first + alone[:1], tokens, [rows[:1] for rows in run.logits])
    assert_close(models, second, beside[2].tokens[0], [run.logits[2][1:]])


def test_a_prefix_hit_and_a_recompute_go_on_as_before(world: tuple[Run, Any]) -> None:
    run, models = world
    tokens = prompt(500, 9)
    first = run.generate(1, tokens, 24)
    shared = run.table[:20]
    assert_close(models, tokens, run.generate(2, tokens, 24, table=shared), run.logits)
    assert_close(models, tokens + first[:10], run.generate(1, tokens + first[:10], 14), run.logits)


def test_a_sequence_that_was_swapped_out_goes_on_with_the_bits_it_would_have_had(world: tuple[Run, Any]) -> None:
    run, models = world
    tokens = prompt(500, 9)
    first = run.generate(1, tokens, 24)
    uninterrupted = [rows.clone() for rows in run.logits]
    assert_close(models, tokens, first, uninterrupted)
    begun = run.generate(1, tokens, 10)
    # As in a step that gives its blocks to another at once: that one's prompt is computed in the very step that swaps it out.
    run.swap_away(1, other=prompt(512, 10), slot_of_other=2)
    rest = run.swap_back(1, tokens + begun, 14)
    assert begun + rest == first
    assert torch.equal(torch.cat(run.logits), torch.cat(uninterrupted[10:]))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_engine_short_of_blocks_swaps_and_draws_what_transformers_would(world: tuple[Run, Any], depth: int) -> None:
    run, models = world
    prompts = [prompt(length, 40 + length) for length in (200, 90, 161, 240, 33)]
    driver = small_engine(run, depth, num_blocks=24)
    for number, tokens in enumerate(prompts):
        tier = ("gold", "standard", "batch")[number % 3]
        asked = Request(RequestId(number), "org/app", tier, tuple(tokens), 60, SamplingParams(temperature=0.0))
        driver.add(asked)
    driver.run_until_idle(5000)
    stats = driver.scheduler.stats()
    found = [driver.transcripts[RequestId(number)].token_ids for number in range(len(prompts))]
    run.run(released_slots=list(range(8)))
    assert [len(tokens) for tokens in found] == [60] * len(prompts)
    assert stats.swaps_out == stats.swaps_in == stats.preemptions > 0 == stats.recomputed_tokens
    assert [wrong_tokens(models, *pair) for pair in zip(prompts, found, strict=True)] == [[]] * len(prompts)


def test_a_copy_on_write_is_made_before_the_step_writes(world: tuple[Run, Any]) -> None:
    run, _ = world
    pool = run.executor.runner.cache.pool
    run.generate(6, prompt(40, 6), 1)
    block, copy = run.table[1], run.free.pop()
    expected = pool[block].clone()
    run.run(copies=[(block, copy)], new=[NewSequence(7, prompt(16, 7), 16, [[block]], GREEDY)], scheduled=[whole(7, 16)])
    assert torch.equal(pool[copy], expected) and not torch.equal(pool[block], expected)


def test_a_row_of_a_graph_does_not_depend_on_its_batch_mates(world: tuple[Run, Any]) -> None:
    run, _ = world
    lengths = [37, 600, 1, 250]
    for slot, length in enumerate(lengths):
        run.generate(slot, prompt(length, 100 + slot), 1)
    steps = [run.run(decode_slots=[0, 1, 2, 3]).decode_tokens for _ in range(4)]
    for slot, length in enumerate(lengths):
        run.generate(slot, prompt(length, 100 + slot), 1)
    swapped = [run.run(decode_slots=[2, 0, 3, 1]).decode_tokens for _ in range(4)]
    assert [[row[i] for i in (1, 3, 0, 2)] for row in swapped] == steps


def test_steps_launched_ahead_use_tokens_the_host_has_not_seen(world: tuple[Run, Any]) -> None:
    run, _ = world
    tokens = prompt(70, 5)
    expected = run.generate(3, tokens, 9)
    run.generate(3, tokens, 1)
    slots = [3]
    handles = [run.executor.launch(ScheduleOutput(1000 + n, decode_slots=slots)) for n in range(8)]
    ahead = [run.executor.result(handle).decode_tokens[0] for handle in handles]
    assert ahead == expected[1:]


def test_sampled_rows_are_drawn_by_seed_and_position_whatever_path_they_take(world: tuple[Run, Any]) -> None:
    run, _ = world
    sampling = asdict(SamplingParams(temperature=0.8, top_p=0.9, seed=77))
    draws = []
    for company in ([], [1]):
        tokens = prompt(60, 3)
        table = [run.free.pop() for _ in range(5)]
        run.generate(1, prompt(20, 4), 1)
        new = [NewSequence(0, tokens, 60, [table], sampling)]
        result = run.run(new=new, scheduled=[ScheduledSequence(0, 0, 60, True)])
        drawn = result.tokens[0]
        for _ in range(6):
            drawn = drawn + run.run(decode_slots=[0, *company]).decode_tokens[:1]
        draws.append(drawn)
    assert draws[0] == draws[1]


def test_logits_that_are_not_finite_fail_their_own_sequence(world: tuple[Run, Any]) -> None:
    run, _ = world
    run.generate(4, prompt(20, 1), 1)
    broken = run.table[0]
    run.generate(5, prompt(20, 2), 1)
    with torch.inference_mode():
        run.executor.runner.cache.pool[broken] = float("nan")
        result = run.run(decode_slots=[4, 5])
        run.executor.runner.cache.pool[broken] = 0.0
    assert list(result.errors) == [0]
