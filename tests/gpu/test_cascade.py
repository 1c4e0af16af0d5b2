"""Decode steps of sequences that share a cached prompt, against transformers: with groups in graphs of both kinds and op by op,
and as they form and dissolve. Ours may be off from float32 twice as far as transformers in bfloat16 is, and two ulp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from device import cuda
from fairlane.scheduler.output import NewSequence, ScheduledSequence
from fairlane.worker.config import Device, WorkerConfig
from fairlane.worker.cuda_executor import CudaExecutor
from gpu_steps import BLOCK, GREEDY, Run, assert_close

SHARED = 2048  # with six members 10240 tokens are not read again, 40 MB of a layer


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Any]:
    import transformers

    folder: Path = tmp_path_factory.mktemp("shared")
    sizes = {"vocab_size": 4099, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=4096, tie_word_embeddings=False, dtype="bfloat16")
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.05)
    model.save_pretrained(folder)
    kinds = (torch.bfloat16, torch.float32)
    models = tuple(type(model).from_pretrained(folder, dtype=dtype).eval().to(cuda) for dtype in kinds)
    settings = {"num_blocks": 1000, "max_num_seqs": 8, "max_num_resident": 8, "max_num_batched_tokens": 4096}
    executor = CudaExecutor(WorkerConfig(model=str(folder), device=Device.CUDA, **settings))
    return Run(executor), models


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 4099, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Streams:
    """Six sequences that share their prompt's blocks, each with its first token; what they say next is kept, with its logits."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run = run
        self.prompts = [prompt(SHARED, seed) + prompt(slot + 1, seed + 1 + slot) for slot in range(6)]
        self.found: list[list[int]] = []
        self.logits: list[list[Tensor]] = []
        table: list[int] = []
        for slot, tokens in enumerate(self.prompts):
            self.found.append(run.generate(slot, tokens, 1, table=table))
            self.logits.append(list(run.logits))
            table = table or run.table[: SHARED // BLOCK]

    def step(self, slots: list[int], **parts: Any) -> bool:
        """Decodes them; says whether as a group."""
        self.run.logits.clear()
        result = self.run.run(decode_slots=slots, **parts)
        for row, slot in enumerate(slots):
            self.found[slot].append(result.decode_tokens[row])
            self.logits[slot].append(self.run.logits[0][row : row + 1])
        cascade = self.run.executor.runner._cascade
        return cascade is not None and cascade.show(np.array(slots))

    def assert_close(self, models: Any) -> None:
        for tokens, found, logits in zip(self.prompts, self.found, self.logits, strict=True):
            assert_close(models, tokens, found, logits)


def test_groups_that_form_and_dissolve_are_as_near_to_float32_as_transformers_in_bfloat16(world: tuple[Run, Any]) -> None:
    run, models = world
    streams = Streams(run, 10)
    all_six, five, two = [3, 0, 5, 1, 2, 4], [0, 5, 1, 2, 4], [2, 4]
    grouped = [streams.step(slots) for slots in (all_six, all_six, five, two, all_six, all_six)]
    streams.assert_close(models)
    # Five members save 4 * 2048 tokens, just not more than 32 MB.
    assert grouped == [True, True, False, False, True, True]


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_group_beside_a_prompt_chunk_is_as_near(world: tuple[Run, Any], in_graph: bool) -> None:
    run, models = world
    streams = Streams(run, 30)
    runner, slots = run.executor.runner, [5, 4, 3, 2, 1, 0]
    mixed = runner._mixed
    runner._mixed = mixed if in_graph else None
    try:
        table, tokens = [run.free.pop() for _ in range(3)], prompt(40, 3)
        new = [NewSequence(6, tokens, 40, [table], GREEDY)]
        grouped = [
            streams.step(slots, new=new, scheduled=[ScheduledSequence(6, 0, 30, False)]),
            streams.step(slots, scheduled=[ScheduledSequence(6, 30, 10, True)]),
        ]
    finally:
        runner._mixed = mixed
    streams.assert_close(models)
    assert grouped == [True, True]


def test_a_groups_graph_gives_the_same_tokens_in_any_order(world: tuple[Run, Any]) -> None:
    run, _ = world
    said = []
    for slots in ([0, 1, 2, 3, 4, 5], [4, 2, 0, 5, 3, 1]):
        streams = Streams(run, 50)
        for _ in range(6):
            streams.step(slots)
        said.append(streams.found)
    assert said[0] == said[1]
