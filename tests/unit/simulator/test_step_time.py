"""The step model against arithmetic on paper, and its file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.step_time import StepModel

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
    assert MODEL.seconds(*asked) == pytest.approx(expected)


def test_a_model_comes_back_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "model.json"
    file.write_text(json.dumps(asdict(MODEL)))
    assert StepModel.load(file) == MODEL


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"fixed": 1}', "unknown key 'fixed'"),
        ('{"token_s": "fast"}', "token_s: 'fast': a number of seconds is needed"),
        ('{"token_s": -1}', "token_s: -1: a number of seconds, at least 0, is needed"),
        ('{"token_s": NaN}', "token_s: nan"),
        ("[1]", "a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "model.json"
    file.write_text(text)
    with pytest.raises(SimulationInputError) as error:
        StepModel.load(file)
    message = str(error.value)
    assert (message.startswith(f"{file}: "), complaint in message, "\n" in message) == (True, True, False)
