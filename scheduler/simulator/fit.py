"""From measured steps to a StepModel: least squares of relative errors, no coefficient below 0.

The floor of the weights makes the model bend. With the bend at `knee` tokens, weights are token * knee and the term is token *
blended(knee, n): linear for a given knee and blend, of which the best are searched. What is left has five coefficients. Least
squares with none below 0 have some of them at 0 and are ordinary ones in the others: trying all 31 choices finds them exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import fmean, median
from typing import NamedTuple

from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.step_time import StepModel, blended
from fairlane.scheduler.step_work import StepWork

# A fit is good if it is off by no more than this on average over cells, and in the worst of them.
MAPE_LIMIT, WORST_LIMIT = 0.10, 0.25
LEAST_CELLS = 12
# Steps of one cell that differ by less than this factor in each count, and how many it needs to count.
_BIN = math.sqrt(2)
LEAST_STEPS = 3
_KNEES, _CLOSER = 32, 3
_BLENDS = (0.0, 0.25, 0.5, 0.75)  # at 1 the weights would be one with what any step takes
_SINGULAR = 1e-12
# By what factor a step with copies must take longer than without for them to be the reason.
_LONGER = 1.2


class Cell(NamedTuple):
    """Steps that do about the same: their mean work, their median time, how many."""

    work: StepWork
    seconds: float
    steps: int

    @classmethod
    def of(cls, steps: Sequence[tuple[StepWork, float]]) -> Cell:
        """Of steps (work, seconds) that are alike."""
        mean = StepWork(*(fmean(column) for column in zip(*(work for work, _ in steps), strict=True)))
        return cls(mean, median(seconds for _, seconds in steps), len(steps))


@dataclass(frozen=True, slots=True)
class Fit:
    """model, and how it does on the cells that it was made of. errors: (model - measured) / measured, a cell each."""

    model: StepModel
    cells: Sequence[Cell]
    errors: Sequence[float]

    @property
    def mape(self) -> float:
        """Mean of the errors' sizes."""
        return fmean(map(abs, self.errors))

    @property
    def worst(self) -> float:
        return max(map(abs, self.errors))

    @property
    def is_good(self) -> bool:
        return self.mape <= MAPE_LIMIT and self.worst <= WORST_LIMIT


def cells_of(steps: Iterable[tuple[StepWork, float]], least_steps: int = LEAST_STEPS) -> list[Cell]:
    """Recorded steps (work, seconds), those alike together; what hardly ever happened is left out."""
    alike: dict[tuple[int, ...], list[tuple[StepWork, float]]] = {}
    for work, seconds in steps:
        if work.tokens > 0 and seconds > 0:
            key = tuple(round(math.log(1 + count, _BIN)) for count in work)
            alike.setdefault(key, []).append((work, seconds))
    return [Cell.of(entries) for entries in alike.values() if len(entries) >= least_steps]


def fit(cells: Sequence[Cell]) -> Fit:
    """Each cell counts the same, however many steps it had. Raises SimulationInputError where they say too little."""
    computed = [cell for cell in cells if not cell.work.copies]
    if len(computed) < LEAST_CELLS:
        raise SimulationInputError(f"{len(computed)} kinds of steps: at least {LEAST_CELLS} are needed")
    if max(cell.work.tokens for cell in computed) < 2 * min(cell.work.tokens for cell in computed):
        raise SimulationInputError("all steps have about as many tokens: prompts of different lengths are needed")
    model = _with_copies(_best(computed), cells)
    errors = [model.seconds(cell.work) / cell.seconds - 1 for cell in cells]
    return Fit(model, cells, errors)


def _best(cells: Sequence[Cell]) -> StepModel:
    """Of each blend the best knee."""
    return min((_at_blend(cells, blend) for blend in _BLENDS), key=lambda found: found[0])[1]


def _at_blend(cells: Sequence[Cell], blend: float) -> tuple[float, StepModel]:
    """Knees from one token to the largest step's, evenly by factors, and then more closely about the best of them. The best model
    and its squared relative error."""
    low, high = 1.0, max(cell.work.tokens for cell in cells)
    for _ in range(_CLOSER):
        ratio = (high / low) ** (1 / (_KNEES - 1))
        tried = [(*_at_knee(cells, low * ratio**number, blend), low * ratio**number) for number in range(_KNEES)]
        error, model, knee = min(tried, key=lambda found: found[0])
        low, high = max(1.0, knee / ratio), knee * ratio
    return error, model


def _at_knee(cells: Sequence[Cell], knee: float, blend: float) -> tuple[float, StepModel]:
    """The best model whose weights take as long as computing `knee` tokens, and its squared relative error."""
    rows = []
    for work, seconds, _ in cells:
        terms = (1.0, work.sequences, blended(knee, work.tokens, blend), work.context, work.scores)
        rows.append([term / seconds for term in terms])
    error, (fixed, sequence, token, context, attention) = _least_squares(rows)
    return error, StepModel(fixed, sequence, token * knee, token, context, attention, blend=blend)


def _least_squares(rows: Sequence[Sequence[float]]) -> tuple[float, list[float]]:
    """Coefficients, none below 0, for which the rows come closest to 1; and the sum of the squares they miss it by."""
    size = len(rows[0])
    scales = [max(map(abs, column)) or 1.0 for column in zip(*rows, strict=True)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    gram = [[math.fsum(row[i] * row[j] for row in scaled) for j in range(size)] for i in range(size)]
    sums = [math.fsum(row[i] for row in scaled) for i in range(size)]
    best: tuple[float, list[float]] = (math.inf, [])
    for count in range(1, size + 1):
        for chosen in combinations(range(size), count):
            solved = _solve([[gram[i][j] for j in chosen] for i in chosen], [sums[i] for i in chosen])
            if solved is None or min(solved) < 0:
                continue
            missed = len(rows) - math.fsum(value * sums[i] for value, i in zip(solved, chosen, strict=True))
            if missed < best[0]:
                values = dict(zip(chosen, solved, strict=True))
                best = missed, [values.get(i, 0.0) / scales[i] for i in range(size)]
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss with pivots; None where the matrix is singular."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    largest = max(abs(value) for row in matrix for value in row)
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(rows[row][at]))
        if abs(rows[pivot][at]) <= _SINGULAR * largest:
            return None
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            rows[below] = [value - factor * above for value, above in zip(rows[below], rows[at], strict=True)]
    found = [0.0] * size
    for at in reversed(range(size)):
        rest = math.fsum(rows[at][column] * found[column] for column in range(at + 1, size))
        found[at] = (rows[at][size] - rest) / rows[at][at]
    return found


def _with_copies(model: StepModel, cells: Sequence[Cell]) -> StepModel:
    """Copies run beside the step: one that they made longer tells how long a copy takes, another how long at most."""
    rates = [(cell.seconds / cell.work.copies, cell) for cell in cells if cell.work.copies]
    longer = [rate for rate, cell in rates if cell.seconds > _LONGER * model.seconds(cell.work._replace(copies=0))]
    if longer:
        return replace(model, swap_block_s=median(longer))
    return replace(model, swap_block_s=min([model.swap_block_s, *(rate for rate, _ in rates)]))
