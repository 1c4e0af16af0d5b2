"""The fit finds the model that made the steps, and says where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from random import Random

import pytest

from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.fit import LEAST_STEPS, Cell, cells_of, fit
from fairlane.scheduler.simulator.step_time import H100, H200, StepModel
from fairlane.scheduler.step_work import StepWork, work_of

# A CPU has no floor: its tokens take their time from the first on.
CPU = StepModel(fixed_s=0.03, sequence_s=0.002, weights_s=0, token_s=0.0015, context_s=7e-6, attention_s=8e-7)
WORKS = [
    work_of(decodes, decodes * context, chunks)
    for decodes in (0, 1, 4, 16, 64, 256)
    for context in (128, 2048)
    for chunks in ((), ((0, 16),), ((0, 300),), ((0, 2048),), ((4096, 1024),))
    if decodes or chunks
]


def cells(model: StepModel, noise: float = 0.0) -> list[Cell]:
    random = Random(1)
    return [Cell(work, model.seconds(work) * random.uniform(1 - noise, 1 + noise), 3) for work in WORKS]


# Its products change over from reading to computing one after another, as a GPU's do.
SMOOTH = replace(H100, fixed_s=1e-3, weights_s=3.2e-3, token_s=20e-6, blend=0.5)
# Nothing is copied in these steps, so the default is what is found.
MEASURED = replace(H200, swap_block_s=H100.swap_block_s)


@pytest.mark.parametrize("model", [H100, MEASURED, SMOOTH])
def test_the_model_that_made_the_steps_is_found(model: StepModel) -> None:
    found = fit(cells(model))
    # 1 ns a sequence is 0.01 % of these steps.
    close = {name: pytest.approx(value, rel=0.05, abs=1e-9 * (value == 0)) for name, value in asdict(model).items()}
    assert (asdict(found.model), found.mape < 0.002, found.worst < 0.01, found.is_good) == (close, True, True, True)


@pytest.mark.parametrize("model", [H100, SMOOTH, CPU])
def test_noise_changes_little(model: StepModel) -> None:
    found = fit(cells(model, noise=0.1))
    off = [abs(found.model.seconds(work) / model.seconds(work) - 1) for work in WORKS]
    assert (max(off) < 0.1, found.is_good) == (True, True)


@pytest.mark.parametrize("absent", ["sequence_s", "context_s", "attention_s", "fixed_s"])
def test_what_costs_nothing_is_found_to_and_nothing_is_negative(absent: str) -> None:
    found = asdict(fit(cells(replace(H100, **{absent: 0.0}), noise=0.02)).model)
    share = found[absent] * {"sequence_s": 256, "context_s": 256 * 2048, "attention_s": 2048 * 1024, "fixed_s": 1}[absent]
    assert (min(found.values()) >= 0, share < 0.1 * H100.seconds(WORKS[-1])) == (True, True)


def test_a_model_that_does_not_suit_is_not_called_good() -> None:
    odd = [cell._replace(seconds=cell.seconds * (1 + 2 * (number % 2))) for number, cell in enumerate(cells(H100))]
    found = fit(odd)
    assert (found.is_good, found.worst > 0.25, found.mape > 0.1) == (False, True, True)


def test_copies_that_made_a_step_longer_say_how_long_one_takes() -> None:
    copied = [Cell(work_of(1, 128, (), copies), 0.00025 * copies, 3) for copies in (64, 512)]
    hidden = Cell(work_of(1, 128, (), 2), H100.seconds(work_of(1, 128)), 3)
    found = fit([*cells(H100), *copied, hidden])
    assert (found.model.swap_block_s, found.is_good) == (pytest.approx(0.00025, rel=0.01), True)


def test_copies_that_did_not_show_are_not_said_to_take_long() -> None:
    hidden = Cell(work_of(1, 128, (), 512), H100.seconds(work_of(1, 128)), 3)
    found = fit([*cells(H100), hidden])
    assert (found.model.seconds(hidden.work), found.is_good) == (pytest.approx(hidden.seconds, rel=0.02), True)


@pytest.mark.parametrize(
    ("pick", "complaint"),
    [
        (lambda every: every[:5], "5 kinds of steps: at least 12 are needed"),
        (lambda every: [every[0]._replace(seconds=n) for n in range(1, 20)], "prompts of different lengths are needed"),
    ],
)
def test_too_little_is_said_to_be(pick: Callable[[list[Cell]], list[Cell]], complaint: str) -> None:
    with pytest.raises(SimulationInputError, match=complaint):
        fit(pick(cells(H100)))


def test_recorded_steps_that_are_alike_are_one_cell_and_rare_ones_none() -> None:
    alike = [(StepWork(8, 8, 1000 + n, 0), seconds) for n, seconds in enumerate((0.010, 0.011, 0.9))]
    rare = [(StepWork(1, 500, 0, 125_000), 0.2)] * (LEAST_STEPS - 1)
    nothing = [(StepWork(0, 0, 0, 0, 3), 0.1)] * 9
    assert cells_of([*alike, *rare, *nothing]) == [Cell(StepWork(8, 8, 1001, 0, 0), 0.011, 3)]
