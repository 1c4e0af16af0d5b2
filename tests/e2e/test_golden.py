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
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import RequestId
from fairlane.worker.config import WorkerConfig
from local_engine import engine, prompt_request, run_prompts
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


PROMPTS = [case["prompt_token_ids"] for case in CASES]
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 2])


def config(depth: int = 0, **settings: Any) -> WorkerConfig:
    """One thread: where other tests keep the other core busy, two that wait for each other take five times as long."""
    return WorkerConfig(max_model_len=1024, max_num_seqs=20, pipeline_depth=depth, threads=1, **settings)


def add_all(driver: EngineDriver, first: int = 0, max_tokens: int = 64) -> list[RequestId]:
    for number, prompt in enumerate(PROMPTS, start=first):
        driver.add(prompt_request(number, prompt, max_tokens))
    return [RequestId(number) for number in range(first, first + len(PROMPTS))]


def tokens(driver: EngineDriver, ids: list[RequestId]) -> list[list[int]]:
    return [driver.transcripts[request_id].token_ids for request_id in ids]


def test_tokens_are_those_of_transformers_alone() -> None:
    with engine(config(prefix_caching=False)) as driver:
        ids = []
        for number, prompt in enumerate(PROMPTS):
            driver.add(prompt_request(number, prompt, 64))
            driver.run_until_idle()
            ids.append(RequestId(number))
        assert differences(tokens(driver, ids)) == []


@DEPTHS
def test_tokens_are_those_of_transformers_in_a_batch_of_20(depth: int) -> None:
    assert differences(run_prompts(PROMPTS, 64, config(depth))) == []


@DEPTHS
def test_tokens_are_those_of_transformers_in_chunks_of_16(depth: int) -> None:
    assert differences(run_prompts(PROMPTS, 64, config(depth, max_prefill_chunk=16))) == []


@DEPTHS
def test_tokens_are_those_of_transformers_with_prefix_hits(depth: int) -> None:
    with engine(config(depth)) as driver:
        add_all(driver, max_tokens=1)
        driver.run_until_idle()
        ids = add_all(driver, first=100)
        driver.run_until_idle()
        cached = [d.started.cached_tokens for i in ids for d in driver.transcripts[i].deltas if d.started]
        # A hit is whole blocks of 16 and leaves at least one token to compute.
        assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
        assert max(cached) >= 256
        assert differences(tokens(driver, ids)) == []


def preempt_each_once(driver: EngineDriver, ids: list[RequestId]) -> None:
    """Runs until all have ended; each is evicted after another number of tokens."""
    due = {request_id: 1 + 3 * index for index, request_id in enumerate(ids)}
    while driver.turn() or driver.scheduler.num_unfinished:
        for sequence in driver.scheduler.running.in_order(driver.scheduler.policy.rank):
            if sequence.num_output_tokens >= due.get(sequence.request_id, 64):
                del due[sequence.request_id]
                driver.scheduler.requeue(sequence)


@DEPTHS
def test_tokens_are_those_of_transformers_when_every_sequence_is_preempted(depth: int) -> None:
    """Each loses its blocks once at a moment of its own, through the path that every eviction takes, and a pool for about
    half of them makes more lose theirs."""
    with engine(config(depth, num_blocks=130, prefix_caching=False)) as driver:
        ids = add_all(driver)
        preempt_each_once(driver, ids)
        ends = [driver.transcripts[request_id].ended for request_id in ids]
        assert all(end is not None and end.preemptions >= 1 and end.recomputed_tokens >= 1 for end in ends)
        assert differences(tokens(driver, ids)) == []


@DEPTHS
def test_tokens_are_those_of_transformers_when_every_sequence_is_swapped(depth: int) -> None:
    """As above, but with host memory for all: nothing is computed again."""
    with engine(config(depth, num_blocks=130, prefix_caching=False, host_kv_cache=1 << 30)) as driver:
        ids = add_all(driver)
        preempt_each_once(driver, ids)
        ends = [driver.transcripts[request_id].ended for request_id in ids]
        assert all(end is not None and end.preemptions >= 1 and end.recomputed_tokens == 0 for end in ends)
        stats = driver.scheduler.stats()
        assert stats.swaps_out == stats.swaps_in == stats.preemptions and stats.host_blocks_used == 0
        assert differences(tokens(driver, ids)) == []


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
