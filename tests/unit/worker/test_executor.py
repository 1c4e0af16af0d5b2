"""The executor as the engine uses it: steps in order, tokens that the next step takes over, errors that end one step only."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fairlane.scheduler.executor import StepError
from fairlane.scheduler.output import BlockAppend, ScheduledSequence, ScheduleOutput, StepResult
from fairlane.scheduler.request import SamplingParams
from fairlane.worker.executor import LocalExecutor
from tiny_models import GREEDY, executor_for, new_sequence, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path)
    return path


@pytest.fixture(scope="module")
def executor(folder: Path) -> LocalExecutor:
    return executor_for(folder)


def run(executor: LocalExecutor, **parts: Any) -> StepResult:
    return executor.result(executor.launch(ScheduleOutput(0, **parts)))


def entry(slot: int, start: int, count: int = 1, sample: bool = True) -> ScheduledSequence:
    return ScheduledSequence(slot, start, count, sample)


def generate(
    executor: LocalExecutor, prompt: list[int], blocks: list[int], count: int, sampling: dict[str, Any] = GREEDY
) -> list[int]:
    """One sequence alone in slot 0, step by step."""
    length = len(prompt)
    result = run(executor, released_slots=[0], new=[new_sequence(0, prompt, blocks, sampling)], scheduled=[entry(0, 0, length)])
    tokens = result.tokens[0]
    for i in range(count - 1):
        tokens = tokens + run(executor, scheduled=[entry(0, length + i)]).tokens[0]
    return tokens


@torch.inference_mode()
def poison(executor: LocalExecutor, blocks: slice) -> None:
    executor.runner.cache.pool[blocks] = float("nan")


PROMPT = [5, 17, 101, 44, 9, 60, 3, 150, 77, 21, 8]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_steps_launched_ahead_take_over_tokens_the_host_has_not_seen(folder: Path, executor: LocalExecutor, depth: int) -> None:
    expected = generate(executor, PROMPT, [1, 2, 3], 8)
    ahead = executor_for(folder, pipeline_depth=depth)
    outputs = [ScheduleOutput(0, new=[new_sequence(0, PROMPT, [4, 9, 2])], scheduled=[entry(0, 0, len(PROMPT))])]
    outputs += [ScheduleOutput(i + 1, scheduled=[entry(0, len(PROMPT) + i)]) for i in range(7)]
    handles = [ahead.launch(output) for output in outputs]
    tokens = [ahead.result(handle).tokens[0][0] for handle in handles]
    ahead.close()
    assert tokens == expected


def test_chunks_company_and_other_blocks_give_the_same_tokens(executor: LocalExecutor) -> None:
    expected = generate(executor, PROMPT, [1, 2, 3], 3)
    other = [7, 8, 9]
    run(executor, released_slots=[0], new=[new_sequence(0, other, [10, 11]), new_sequence(1, PROMPT, [20, 15])])
    first = run(executor, scheduled=[entry(0, 0, 3), entry(1, 0, 6, sample=False)])
    second = run(executor, scheduled=[entry(1, 6, 5), entry(0, 3)])
    third = run(executor, appends=[BlockAppend(1, [[30]])], scheduled=[entry(0, 4), entry(1, 11)])
    fourth = run(executor, scheduled=[entry(1, 12)])
    run(executor, released_slots=[0, 1])
    assert (first.tokens[1], [second.tokens[0][0], third.tokens[1][0], fourth.tokens[0][0]]) == ([], expected)


def test_a_preempted_sequence_sent_again_goes_on_as_before(executor: LocalExecutor) -> None:
    expected = generate(executor, PROMPT, [1, 2, 3], 6)
    known = PROMPT + expected[:3]
    run(executor, released_slots=[0], new=[new_sequence(3, known, [40, 41])])
    tokens = run(executor, scheduled=[entry(3, 0, len(known))]).tokens[0]
    tokens += run(executor, scheduled=[entry(3, len(known))]).tokens[0]
    run(executor, appends=[BlockAppend(3, [[42]])], released_slots=[])
    tokens += run(executor, scheduled=[entry(3, len(known) + 1)]).tokens[0]
    run(executor, released_slots=[3])
    assert tokens == expected[3:]


def test_copied_blocks_serve_a_second_sequence(executor: LocalExecutor) -> None:
    expected = generate(executor, PROMPT, [1, 2, 3], 2)
    # slot 0 holds PROMPT in blocks 1 and 2; the fork shares block 1 and gets its own copy of the unfinished block 2
    forked = new_sequence(1, PROMPT, [1, 50, 51])
    result = run(executor, new=[forked], copies=[(2, 50)], scheduled=[entry(1, len(PROMPT) - 1)])
    tokens = result.tokens[0] + run(executor, scheduled=[entry(1, len(PROMPT))]).tokens[0]
    run(executor, released_slots=[0, 1])
    assert tokens == expected


def test_a_copy_happens_before_the_step_writes(executor: LocalExecutor) -> None:
    expected = generate(executor, PROMPT, [1, 2, 3], 2)
    # the source of the copy is overwritten in the very step that copies it
    overwriting = new_sequence(2, [9, 9, 9, 9], [2])
    forked = new_sequence(1, PROMPT, [1, 50])
    steps = [entry(2, 0, 4), entry(1, len(PROMPT) - 1)]
    result = run(executor, released_slots=[0], new=[overwriting, forked], copies=[(2, 50)], scheduled=steps)
    run(executor, released_slots=[1, 2])
    assert result.tokens[1] == expected[:1]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"scheduled": [entry(7, 0)]}, "slot 7 holds no sequence"),
        ({"released_slots": [99]}, "slot 99 is outside"),
        ({"new": [new_sequence(0, [500], [1])]}, r"token id is outside \[0, 211\)"),
        ({"new": [new_sequence(0, [5], [64])]}, "block id of slot 0 is outside"),
        ({"new": [new_sequence(0, [5] * 9, [1])], "scheduled": [entry(0, 0, 9)]}, "beyond its sequence's blocks"),
        ({"new": [new_sequence(0, [5], [0])], "scheduled": [entry(0, 0)]}, "null block"),
        ({"new": [new_sequence(0, [5, 6], [1])], "scheduled": [entry(0, 0), entry(0, 1)]}, "scheduled twice"),
        ({"new": [new_sequence(0, [5], [1])], "scheduled": [entry(0, 0, 0)]}, "at least one token"),
        ({"appends": [BlockAppend(6, [[1]])]}, "slot 6 holds no sequence"),
        ({"new": [new_sequence(0, [5], [1])], "appends": [BlockAppend(0, [[1], [2]])]}, "one KV-cache group"),
        ({"copies": [(0, 5)]}, "cannot copy block 0"),
    ],
)
def test_a_step_that_does_not_fit_fails_alone(executor: LocalExecutor, parts: dict[str, Any], message: str) -> None:
    expected = generate(executor, PROMPT, [1, 2, 3], 3)
    run(executor, released_slots=[0])
    handle = executor.launch(ScheduleOutput(1, **parts))
    with pytest.raises(StepError, match=message):
        executor.result(handle)
    assert generate(executor, PROMPT, [1, 2, 3], 3) == expected


def test_a_bad_diff_does_not_keep_the_others_from_being_applied(executor: LocalExecutor) -> None:
    expected = generate(executor, PROMPT, [1, 2, 3], 4)
    run(executor, released_slots=[0], new=[new_sequence(0, [9] * 4, [20]), new_sequence(1, [8] * 4, [21])])
    run(executor, new=[new_sequence(2, PROMPT, [30, 31])], scheduled=[entry(2, 0, len(PROMPT))])
    # released: 0, with a slot that does not exist before it; new: 1 is overwritten by what does not fit, 3 fits;
    # appended: 4 holds nothing, 2 grows
    mixed = ScheduleOutput(
        1,
        released_slots=[99, 0],
        new=[new_sequence(1, [500], [40]), new_sequence(3, PROMPT, [41, 42, 43])],
        appends=[BlockAppend(4, [[44]]), BlockAppend(2, [[32]])],
    )
    with pytest.raises(StepError, match="slot 99 is outside"):
        executor.result(executor.launch(mixed))
    batch = executor.runner._batch
    held = {slot: batch.block_table[slot, :4].tolist() for slot in np.flatnonzero(batch.used).tolist()}
    assert held == {2: [30, 31, 32, 0], 3: [41, 42, 43, 0]} and not batch.block_table[[0, 1, 4]].any()
    both = run(executor, scheduled=[entry(3, 0, len(PROMPT)), entry(2, len(PROMPT))])
    run(executor, released_slots=[2, 3])
    assert both.tokens == [expected[:1], expected[1:2]]


def test_decodes_and_growth_in_columns_are_entries_and_appends(executor: LocalExecutor) -> None:
    expected = generate(executor, PROMPT, [1, 2, 3], 8)
    run(executor, released_slots=[0], new=[new_sequence(0, PROMPT, [30, 31])], scheduled=[entry(0, 0, len(PROMPT))])
    tokens = [run(executor, decode_slots=[0]).decode_tokens[0] for _ in range(16 - len(PROMPT))]
    tokens += run(executor, grown_slots=[0], grown_blocks=[[33]], decode_slots=[0]).decode_tokens
    run(executor, released_slots=[0])
    assert tokens == expected[1 : 1 + len(tokens)]


def test_a_slot_that_cannot_grow_does_not_keep_the_others_from_growing(executor: LocalExecutor) -> None:
    run(executor, new=[new_sequence(0, [9] * 4, [20]), new_sequence(1, [8] * 4, [21])])
    grown = ScheduleOutput(1, grown_slots=[1, 5, 0], grown_blocks=[[22, 23, 24]])
    with pytest.raises(StepError, match="slot 5 holds no sequence"):
        executor.result(executor.launch(grown))
    held = executor.runner._batch.block_table[[0, 1, 5], :3].tolist()
    run(executor, released_slots=[0, 1])
    assert held == [[20, 24, 0], [21, 22, 0], [0, 0, 0]]


def test_a_slot_whose_blocks_did_not_fit_holds_no_sequence(executor: LocalExecutor) -> None:
    run(executor, released_slots=[0], new=[new_sequence(0, PROMPT, [1, 2])], scheduled=[entry(0, 0, len(PROMPT))])
    with pytest.raises(StepError, match="block id of slot 0 is outside"):
        run(executor, appends=[BlockAppend(0, [[64]])])
    with pytest.raises(StepError, match="slot 0 holds no sequence"):
        run(executor, scheduled=[entry(0, len(PROMPT))])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_penalty_that_overflows_ends_its_row_only(executor: LocalExecutor, temperature: float) -> None:
    expected = generate(executor, PROMPT, [1, 2, 3], 1)
    tiny = dataclasses.asdict(SamplingParams(temperature=temperature, repetition_penalty=1e-40))
    new = [new_sequence(0, PROMPT, [4, 5], tiny), new_sequence(1, PROMPT, [6, 7])]
    result = run(executor, released_slots=[0], new=new, scheduled=[entry(i, 0, len(PROMPT)) for i in (0, 1)])
    run(executor, released_slots=[0, 1])
    assert (result.tokens, list(result.errors)) == ([[], expected], [0])


def test_rows_that_are_not_sampled_do_not_change_those_that_are(executor: LocalExecutor) -> None:
    """Beyond the last layer's attention only sampled rows are computed."""
    runner = executor.runner
    runner.execute(ScheduleOutput(0, new=[new_sequence(0, PROMPT, [1, 2]), new_sequence(1, PROMPT[::-1], [3, 4])]))
    inputs = runner._batch.prepare([entry(0, 0, len(PROMPT)), entry(1, 0, len(PROMPT))])
    with torch.inference_mode():
        plan = [runner._attention.plan(inputs, runner._model.windows) for _ in range(2)]
        every = runner._model.forward(inputs.input_ids, runner._attention, plan[0])
        rows = torch.tensor([len(PROMPT) - 1, 2 * len(PROMPT) - 1])
        some = runner._model.forward(inputs.input_ids, runner._attention, plan[1], rows)
    run(executor, released_slots=[0, 1])
    assert torch.equal(some, every[rows])


def test_logits_that_are_not_finite_end_their_row_only(folder: Path) -> None:
    executor = executor_for(folder)
    expected = generate(executor, PROMPT, [1, 2, 3], 2)
    run(executor, released_slots=[0], new=[new_sequence(0, PROMPT, [1, 2, 3]), new_sequence(1, PROMPT, [4, 5, 6])])
    run(executor, scheduled=[entry(0, 0, 10, sample=False), entry(1, 0, 10, sample=False)])
    poison(executor, slice(4, 5))
    result = run(executor, scheduled=[entry(1, 10), entry(0, 10)])
    assert (result.tokens, list(result.errors)) == ([[], expected[:1]], [0])


def test_what_a_failed_sequence_left_in_its_blocks_harms_nobody(folder: Path) -> None:
    executor = executor_for(folder)
    expected = generate(executor, PROMPT, [1, 2, 3], 3)
    poison(executor, slice(1, None))
    assert generate(executor, PROMPT, [3, 1, 2], 3) == expected


def test_a_step_without_sequences_only_updates_the_state(executor: LocalExecutor) -> None:
    assert run(executor, released_slots=[5]).tokens == []


def test_a_closed_executor_says_so(folder: Path) -> None:
    executor = executor_for(folder, pipeline_depth=1)
    executor.close()
    executor.close()
    with pytest.raises(StepError, match="closed"):
        executor.launch(ScheduleOutput(0))


def test_a_seeded_draw_is_the_same_in_any_company(executor: LocalExecutor) -> None:
    sampling = dataclasses.asdict(SamplingParams(temperature=0.9, top_p=0.95, seed=2**64 - 5))
    expected = generate(executor, PROMPT, [1, 2, 3], 6, sampling)
    others = [
        new_sequence(slot, [30 + slot] * 4, [10 * slot], dataclasses.asdict(SamplingParams(seed=slot))) for slot in (2, 3, 4)
    ]
    run(executor, released_slots=[0], new=[*others, new_sequence(5, PROMPT, [51, 52, 53], sampling)])
    tokens = []
    for i in range(6):
        mine = entry(5, 0, len(PROMPT)) if i == 0 else entry(5, len(PROMPT) + i - 1)
        company = [entry(slot, 0, 4) if i == 0 else entry(slot, 3 + i) for slot in (2, 3, 4) if i < 3]
        tokens += run(executor, scheduled=[*company, mine]).tokens[-1]
    run(executor, released_slots=[2, 3, 4, 5])
    assert tokens == expected


def test_facts_are_those_of_the_configuration(folder: Path) -> None:
    info = executor_for(folder, served_name="tiny", max_model_len=100, num_blocks=None, kv_cache=1 << 20).info
    # 3 layers * 2 * 2 KV heads * 8 slots * 16 dims * 4 bytes = 6144 bytes a block; 1 MiB / 6144 = 170.7
    facts = (info.model, info.vocab_size, info.max_model_len, info.block_size, info.num_blocks, info.eos_token_ids)
    assert facts == ("tiny", 211, 100, 8, 170, (2,))


def test_the_last_position_can_be_computed_and_sampled(folder: Path) -> None:
    executor = executor_for(folder, max_model_len=16)
    prompt = list(range(10, 25))
    tokens = generate(executor, prompt, [1, 2, 3], 2)
    assert (len(tokens), all(0 <= token < 211 for token in tokens)) == (2, True)


def test_a_decode_step_has_the_same_bits_alone_and_in_company(folder: Path) -> None:
    executor = executor_for(folder)
    runner = executor.runner
    lengths = [11, 30, 7]
    sequences = [new_sequence(slot, [slot + 5] * n, [8 * slot + 1 + i for i in range(5)]) for slot, n in enumerate(lengths)]
    run(executor, new=sequences, scheduled=[entry(slot, 0, n - 1, sample=False) for slot, n in enumerate(lengths)])
    steps = [entry(slot, n - 1) for slot, n in enumerate(lengths)]
    together = runner.forward_logits(ScheduleOutput(0, scheduled=steps))
    alone = torch.cat([runner.forward_logits(ScheduleOutput(0, scheduled=[step])) for step in steps])
    assert float((together - alone).abs().max()) <= 1e-5 * float(alone.abs().max())
