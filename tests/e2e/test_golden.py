"""SmolLM2 through the real engine gives, token by token, what transformers gave (tests/goldens), and the same logits.

The smallest distance between the two best logits in the goldens is about a thousand times the rounding error, so a token that
differs is a fault, not a tie.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fairlane import embedded
from fairlane.worker.config import WorkerConfig
from local_engine import run_prompts
from tiny_models import executor_for, relative_error, teacher_forced

GOLDENS: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "goldens" / "smollm2_greedy.json").read_text(encoding="utf-8")
)
CASES: list[dict[str, Any]] = GOLDENS["cases"]


@pytest.fixture(scope="module", autouse=True)
def smollm2() -> Path:
    return embedded.pull("smollm2")


def differences(results: list[list[int]]) -> list[str]:
    """Where a result leaves its golden, with the gap of the two best logits there."""
    found = []
    for case, tokens in zip(CASES, results, strict=True):
        for index, (token, golden) in enumerate(zip(tokens, case["tokens"], strict=True)):
            if token != golden:
                found.append(f"{case['prompt'][-40:]!r} token {index}: {token} is not {golden}, gap {case['gaps'][index]}")
                break
    return found


@pytest.mark.parametrize(
    "config",
    [
        WorkerConfig(max_model_len=1024, max_num_seqs=20),
        WorkerConfig(max_model_len=1024, max_num_seqs=8, max_prefill_chunk=48, max_num_batched_tokens=64, pipeline_depth=1),
        WorkerConfig(max_model_len=1024, max_num_seqs=20, num_blocks=64),  # too few blocks for all: sequences are preempted
    ],
    ids=["at once", "in small chunks, one step ahead", "preempted"],
)
def test_tokens_are_those_of_transformers(config: WorkerConfig) -> None:
    results = run_prompts([case["prompt_token_ids"] for case in CASES], 64, config)
    assert differences(results) == []


def test_logits_are_those_of_transformers(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM

    case = next(case for case in CASES if len(case["prompt_token_ids"]) > 250)
    tokens = case["prompt_token_ids"] + case["tokens"][:10]
    chunks = [100, 57, len(tokens) - 157 - 10, *[1] * 10]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0][torch.tensor(chunks).cumsum(0) - 1]
    executor = executor_for(smollm2, block_size=16, max_model_len=1024)
    assert relative_error(teacher_forced(executor, tokens, chunks), expected) < 1e-4


def test_the_goldens_hold_no_ties() -> None:
    assert min(min(case["gaps"]) for case in CASES) == GOLDENS["smallest_gap"] > 1e-4
