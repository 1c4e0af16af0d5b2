"""The step model against arithmetic on paper, and the file of a worker's shape that it lies in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.shape import WorkerShape, shape_named
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.step_work import work_of

MODEL = StepModel(fixed_s=1.0, sequence_s=0.1, weights_s=10.0, token_s=0.5, context_s=0.001, attention_s=0.01, swap_block_s=2.0)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((1, 100, [], 0), 1 + 0.1 + 10 + 0.1),  # the weights are the floor
        ((30, 0, [], 0), 1 + 3 + 15),  # 30 tokens take longer than the weights
        ((2, 500, [(100, 40)], 0), 1 + 0.3 + 21 + 0.5 + 0.01 * 40 * 120),
        ((1, 0, [], 3), 1 + 0.1 + 10),  # copies overlap with the step
        ((1, 0, [], 9), 18.0),  # and the step lasts as long as they do
    ],
)  # fmt: skip
def test_a_step_takes_the_sum_of_six_terms(asked: tuple[int, int, list[tuple[int, int]], int], expected: float) -> None:
    assert MODEL.seconds(work_of(*asked)) == pytest.approx(expected)


@pytest.mark.parametrize(("blend", "expected"), [(0.0, 15.0), (0.5, (10**2 + 15**2) ** 0.5), (1.0, 25.0)])
def test_weights_and_arithmetic_count_between_the_larger_and_their_sum(blend: float, expected: float) -> None:
    model = replace(MODEL, blend=blend)
    assert (model.linear_s(30), model.linear_s(0)) == (pytest.approx(expected), 10.0)


def test_a_shape_comes_back_from_its_file(tmp_path: Path) -> None:
    shape = WorkerShape(MODEL, 99, 8, 7, 6, 5, 400, 300, 2000, 2, 0.25)
    file = tmp_path / "shape.json"
    file.write_text(json.dumps(shape.document({"model": "tiny"})))
    assert (WorkerShape.load(file), shape_named(str(file))) == (shape, shape)


def test_what_a_file_leaves_out_keeps_its_default(tmp_path: Path) -> None:
    file = tmp_path / "shape.json"
    file.write_text('{"step": {"token_s": 1e-5}, "num_blocks": 5}')
    assert WorkerShape.load(file) == WorkerShape(StepModel(token_s=1e-5), num_blocks=5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"step": {"fixed": 1}}', "unknown key 'fixed'"),
        ('{"step": {"token_s": "fast"}}', "token_s: 'fast': a number of seconds is needed"),
        ('{"step": {"token_s": -1}}', "token_s: -1: a number of seconds, at least 0, is needed"),
        ('{"step": {"token_s": NaN}}', "token_s: nan"),
        ('{"step": {"fixed_s": 0, "weights_s": 0}}', "a step must take some time"),
        ('{"step": 3}', "an object with fixed_s"),
        ('{"step": {"blend": 1.5}}', "blend: 1.5: from 0 to 1 is allowed"),
        ('{"step": {"blend": "half"}}', "blend: 'half': a number is needed"),
        ('{"token_s": 1}', "unknown key 'token_s': one of step"),
        ('{"num_blocks": 0}', "num_blocks: 0: a whole number, from 1 to 20000000, is needed"),
        ('{"num_blocks": 1.5}', "num_blocks: 1.5: a whole number"),
        ('{"depth": 3}', "depth: 3: a whole number, from 0 to 2, is needed"),
        ('{"network_s": -1}', "network_s: -1: a number of seconds, from 0 to 3600, is needed"),
        ('{"num_blocks": 1000000000000}', "num_blocks: 1000000000000: a whole number, from 1 to"),
        ('{"num_host_blocks": 1000000000000}', "num_host_blocks: 1000000000000: a whole number"),
        ('{"block_size": 1000000000000}', "block_size: 1000000000000: a whole number"),
        ("[" * 100_000, "is not JSON"),
        ('{"prefix_caching": 1}', "prefix_caching: 1: true or false is needed"),
        ('{"max_num_seqs": 9, "max_num_batched_tokens": 8}', "max_num_batched_tokens (8) must be at least max_num_seqs (9)"),
        ("[1]", "an object with step"),
        ("{", "is not JSON"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "shape.json"
    file.write_text(text)
    with pytest.raises(SimulationInputError) as error:
        WorkerShape.load(file)
    message = str(error.value)
    assert (message.startswith(f"{file}: "), complaint in message, "\n" in message) == (True, True, False), message


def test_a_shape_that_is_neither_known_nor_a_file_is_said_to_be() -> None:
    with pytest.raises(SimulationInputError, match=r"^tpu: there is no such file.*h100-8b, h200-8b, is needed"):
        shape_named("tpu")
