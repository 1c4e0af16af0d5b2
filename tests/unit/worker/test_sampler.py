"""Bias and penalties before the draw, written out by hand on a vocabulary of six."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fairlane.scheduler.request import SamplingParams
from fairlane.worker.input_batch import InputBatch
from fairlane.worker.sampler import sample_tokens
from tiny_models import new_sequence

LOGITS = [1.0, -1.0, 2.0, 0.5, 0.0, 1.9]


def batch_of(*sequences: tuple[list[int], int, dict[str, Any]]) -> InputBatch:
    """Sequences of (token ids, number of prompt tokens, sampling)."""
    batch = InputBatch(8, 64, 8, 100, 6, torch.device("cpu"))
    for slot, (tokens, num_prompt, sampling) in enumerate(sequences):
        new = new_sequence(slot, tokens, [1], {"temperature": 0.0} | sampling)
        new.num_prompt_tokens = num_prompt
        batch._add(new)
    return batch


def adjusted(tokens: list[int], num_prompt: int, **sampling: Any) -> list[float]:
    logits = torch.tensor([LOGITS])
    sample_tokens(logits, np.array([0]), np.array([len(tokens)]), batch_of((tokens, num_prompt, sampling)))
    return pytest.approx(logits[0].tolist())  # type: ignore[no-any-return]


def test_a_logit_bias_is_added() -> None:
    assert adjusted([0], 1, logit_bias={1: 5.0, 4: -2.5}) == [1.0, 4.0, 2.0, 0.5, -2.5, 1.9]


def test_repetition_shrinks_what_prompt_and_output_hold() -> None:
    # 0 (prompt) 1.0 / 2, 1 (output) -1.0 * 2
    assert adjusted([0, 1, 1], 1, repetition_penalty=2.0) == [0.5, -2.0, 2.0, 0.5, 0.0, 1.9]


def test_presence_and_frequency_count_output_tokens_only() -> None:
    # 1 twice in the output: -0.5 - 2 * 0.25; 2 once: -0.5 - 0.25; the prompt's 0 is free
    assert adjusted([0, 0, 1, 1, 2], 2, presence_penalty=0.5, frequency_penalty=0.25) == [1.0, -2.0, 1.25, 0.5, 0.0, 1.9]


def test_bias_comes_before_repetition() -> None:
    # (1.0 - 3.0) is negative, so the penalty multiplies: -4.0
    assert adjusted([0], 1, logit_bias={0: -3.0}, repetition_penalty=2.0) == [-4.0, -1.0, 2.0, 0.5, 0.0, 1.9]


def test_tokens_beyond_the_position_do_not_count() -> None:
    batch = batch_of(([0, 3, 2], 1, {"presence_penalty": 9.0}))
    logits = torch.tensor([LOGITS])
    sample_tokens(logits, np.array([0]), np.array([2]), batch)
    assert logits[0].tolist() == pytest.approx([1.0, -1.0, 2.0, -8.5, 0.0, 1.9])


def test_each_row_gets_its_own_treatment() -> None:
    batch = batch_of(([2], 0, {"presence_penalty": 5.0}), ([2], 0, {}), ([2], 0, {"logit_bias": {4: 9.0}}))
    sampled = sample_tokens(torch.tensor([LOGITS] * 3), np.arange(3), np.ones(3, dtype=np.int64), batch)
    assert sampled.tokens.tolist() == [5, 2, 4]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_marked_and_the_others_draw(bad: float, temperature: float) -> None:
    batch = batch_of(*[([2], 1, {"temperature": temperature, "top_k": 1})] * 3)
    logits = torch.tensor([LOGITS] * 3)
    logits[1, 3] = bad
    sampled = sample_tokens(logits, np.arange(3), np.ones(3, dtype=np.int64), batch)
    assert (sampled.ok.tolist(), sampled.tokens[[0, 2]].tolist()) == ([True, False, True], [2, 2])


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0, "repetition_penalty": 1e-40},
        {"temperature": 1.0, "repetition_penalty": 1e-40, "top_p": 0.9},
        {"temperature": 1e-39, "top_k": 2},
        {"temperature": 1e-39},
    ],
)
def test_parameters_that_overflow_mark_their_row_and_the_others_draw(sampling: dict[str, Any]) -> None:
    batch = batch_of(([2], 1, {"temperature": 1.0, "top_k": 1}), ([2], 1, sampling), ([2], 1, {}))
    sampled = sample_tokens(torch.tensor([LOGITS] * 3), np.arange(3), np.ones(3, dtype=np.int64), batch)
    assert (sampled.ok.tolist(), sampled.tokens[[0, 2]].tolist()) == ([True, False, True], [2, 2])


def test_large_finite_logits_are_no_error() -> None:
    batch = batch_of(([2], 1, {}))
    logits = torch.tensor([[3e38, 2e38, 3.3e38, 1.0, 0.0, 3e38]])  # their sum is no float32
    sampled = sample_tokens(logits, np.array([0]), np.array([1]), batch)
    assert (sampled.ok.tolist(), sampled.tokens.tolist()) == ([True], [2])


def test_all_64_bits_of_a_seed_count() -> None:
    seeds = [0, 1 << 31, 1 << 32, 1 << 63, 2**64 - 1]
    batch = InputBatch(8, 64, 8, 100, 5000, torch.device("cpu"))
    for slot, seed in enumerate(seeds):
        sampling = {"temperature": 1.0, "seed": seed}
        batch._add(new_sequence(slot, [1], [1], sampling))
    sampled = sample_tokens(torch.zeros(5, 5000), np.arange(5), np.ones(5, dtype=np.int64), batch)
    assert len(set(sampled.tokens.tolist())) == 5


def test_default_sampling_params_leave_the_logits_alone() -> None:
    assert adjusted([0, 1], 1, temperature=SamplingParams().temperature) == LOGITS
