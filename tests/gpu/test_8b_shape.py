"""The shape of Llama-3.1-8B with random weights, teacher-forced: as near to transformers in float32 as transformers in bfloat16
is, with graphs, chunked prompts, a prefix hit, recompute and swap. Takes about 70 GiB of the GPU's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from device import cuda
from fairlane.worker.config import Device, LoadFormat, WorkerConfig
from fairlane.worker.cuda_executor import CudaExecutor
from gpu_steps import Run, assert_close

CONFIG = Path(__file__).parents[2] / "configs" / "models" / "llama-3.1-8b.json"

if torch.cuda.get_device_properties(cuda).total_memory < 90 << 30:
    pytest.skip("needs 90 GiB of GPU memory", allow_module_level=True)


@pytest.fixture(scope="module")
def world() -> tuple[Run, tuple[Any, Any]]:
    config = WorkerConfig(
        model=str(CONFIG),
        device=Device.CUDA,
        load_format=LoadFormat.DUMMY,
        num_blocks=600,
        host_kv_cache=1 << 30,
        max_num_seqs=8,
        max_num_resident=8,
        max_num_batched_tokens=4096,
    )
    executor = CudaExecutor(config)
    return Run(executor), (twin(executor, torch.bfloat16), twin(executor, torch.float32))


def twin(executor: CudaExecutor, dtype: torch.dtype) -> Any:
    """transformers' model with the executor's weights."""
    import transformers

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(cuda):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_json_file(CONFIG)).eval()
    finally:
        torch.set_default_dtype(before)
    ours = executor.runner._model.tensors()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(ours[name])
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    return model


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 128_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(("length", "chunk"), [(200, 4096), (1500, 4096), (1500, 400)])
def test_logits_are_as_near_to_float32_as_transformers_in_bfloat16(world: Any, length: int, chunk: int) -> None:
    run, models = world
    tokens = prompt(length, length)
    assert_close(models, tokens, run.generate(0, tokens, 24, chunk=chunk), run.logits)


def test_a_prefix_hit_and_a_recompute_go_on_as_before(world: Any) -> None:
    run, models = world
    tokens = prompt(700, 9)
    first = run.generate(1, tokens, 16)
    shared = run.table[:30]
    assert_close(models, tokens, run.generate(2, tokens, 16, table=shared), run.logits)
    assert_close(models, tokens + first[:8], run.generate(1, tokens + first[:8], 8), run.logits)


def test_a_sequence_that_was_swapped_out_goes_on_with_the_bits_it_would_have_had(world: Any) -> None:
    """More blocks than the staging of one direction holds in a piece: 2 MiB each."""
    run, models = world
    tokens = prompt(1500, 9)
    first = run.generate(1, tokens, 16)
    uninterrupted = [rows.clone() for rows in run.logits]
    assert_close(models, tokens, first, uninterrupted)
    begun = run.generate(1, tokens, 8)
    run.swap_away(1, other=prompt(1504, 10), slot_of_other=2)
    rest = run.swap_back(1, tokens + begun, 8)
    assert begun + rest == first
    assert torch.equal(torch.cat(run.logits), torch.cat(uninterrupted[8:]))
