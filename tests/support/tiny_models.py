"""Tiny models with random weights, made by transformers in a folder, and what the worker computes for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairlane.clock import FakeClock
from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.request import SamplingParams
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executor import LocalExecutor

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
GREEDY = dataclasses.asdict(SamplingParams(temperature=0.0))


def save_tiny(folder: Path, kind: str = "Llama", seed: int = 0, max_shard_size: str = "1GB", **changes: Any) -> Any:
    """Saves a `{kind}ForCausalLM` and returns the transformers model. Weights are large enough to matter in every part."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**(SIZES | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def executor_for(folder: Path, **settings: Any) -> LocalExecutor:
    values = {"model": str(folder), "num_blocks": 64, "block_size": 8, "max_num_resident": 8, "threads": 2} | settings
    return LocalExecutor(WorkerConfig(**values), FakeClock())


def new_sequence(slot: int, token_ids: list[int], blocks: list[int], sampling: dict[str, Any] = GREEDY) -> NewSequence:
    return NewSequence(slot, token_ids, len(token_ids), [blocks], sampling)


def teacher_forced(executor: LocalExecutor, token_ids: list[int], chunks: list[int]) -> Tensor:
    """Logits [len(chunks), V] after each chunk of the given tokens, which fill blocks in a shuffled order."""
    info = executor.info
    needed = -(-len(token_ids) // info.block_size)
    order = (torch.randperm(info.num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()[:needed]
    rows, start = [], 0
    for step, count in enumerate(chunks):
        output = ScheduleOutput(step, scheduled=[ScheduledSequence(0, start, count, True)])
        if step == 0:
            output.new = [new_sequence(0, token_ids, order)]
        rows.append(executor.runner.forward_logits(output)[0])
        start += count
    executor.runner.execute(ScheduleOutput(len(chunks), released_slots=[0]))
    return torch.stack(rows)


def relative_error(measured: Tensor, expected: Tensor) -> float:
    """The largest deviation, relative to the largest expected value."""
    return float((measured - expected).abs().max() / expected.abs().max())
