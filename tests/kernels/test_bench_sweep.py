"""A sweep of the linear layers on this CPU, in the interpreter, and what it proposes for the tuning table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import interpreted  # noqa: F401  (before any op: it selects the interpreter)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from bench_kernels import arguments_of, cases_of
from gpu_ceilings import Ceilings
from gpu_timing import Call, Timing
from kernel_case import World
from kernel_runs import Row, Runner, table_entries

from fairlane.kernels.thin_linear import CANDIDATES, ThinConfig, config_for

TINY = World(torch.device("cpu"), torch.float32, tiny=True)
CEILINGS = Ceilings(*(1.0 for _ in fields(Ceilings)))


class Countdown:
    """Each timed thing is a microsecond faster than the one before."""

    def __init__(self) -> None:
        self._left = 1000.0

    def time(self, calls: Sequence[Call], *, bytes_per_call: float = 0.0, warm: bool = False) -> Timing:
        self._left -= 1
        return Timing(self._left, self._left, self._left)

    def time_eager(self, call: Call) -> Timing:
        return self.time([call])


def sweep(pattern: str) -> list[Row]:
    runner = Runner(TINY, Countdown(), CEILINGS, kept=lambda rows: None)
    runner.sweep(cases_of(["linear"], [16], pattern))
    return runner.rows


@pytest.mark.parametrize("case", ["7B gate_up, M=8", "7B down, M=32", "7B qkv, M=64"])
def test_a_sweep_tries_what_the_engine_takes_now_and_then_every_candidate_that_fits(case: str) -> None:
    rows = sweep(case)
    numbers, configs = [row.get("number") for row in rows], [row["config"] for row in rows]
    right = {row["verdict"] for row in rows} == {"-"} and len(set(configs)) == len(configs)
    left_out = [one for one in CANDIDATES if str(one) not in configs]
    fits = [one for one in left_out if one.shared_bytes(5, gated="gate_up" in case) <= 220_000]
    assert right and numbers == list(range(len(rows))) and not fits


def test_the_best_of_a_case_is_proposed_as_the_table_holds_it() -> None:
    rows = sweep("7B gate_up, M=8")
    last = rows[-1]["config"]
    assert table_entries(rows) == [f"(True, 96, 136, 16): {last},  # 7B gate_up, M=8: {1000 - len(rows)}.00 us, was 999.00"]


def test_a_choice_that_stands_is_not_proposed() -> None:
    row = {"kind": "sweep", "verdict": "-", "kernel": "thin_linear", "case": "a", "BS": None, "entry": "(False, 1, 1, 16)"}
    found = [row | {"number": number, "config": "C", "us p50": us} for number, us in ((0, 50.0), (1, 51.0))]
    assert table_entries(found) == []


def test_a_shape_that_two_models_have_is_proposed_once() -> None:
    row = {"kind": "sweep", "verdict": "-", "kernel": "thin_linear", "BS": None, "entry": "(False, 1, 1, 16)", "config": "C"}
    found = [row | {"case": case, "number": number, "us p50": 9.0 - number} for case in ("a", "b") for number in (0, 1)]
    assert table_entries(found) == ["(False, 1, 1, 16): C,  # a: 8.00 us, was 9.00"]


def test_the_7b_shapes_are_all_there_at_all_decode_batches() -> None:
    names = {case.name for case in cases_of(["linear"], [16], "7B")}
    assert names >= {f"7B {layer}, M={rows}" for layer in ("qkv", "o", "gate_up", "down") for rows in (8, 32, 64, 128)}


def test_configurations_are_written_as_they_are_read() -> None:
    config = config_for(64, 12288, 4096)
    assert eval(str(config), {"ThinConfig": ThinConfig}) == config


def test_cases_are_chosen_by_their_names() -> None:
    arguments = arguments_of(["--only", "linear", "--cases", "7B (down|o), M"])
    names = [case.name for case in cases_of(arguments.groups, arguments.block_sizes, arguments.cases)]
    with pytest.raises(SystemExit):
        arguments_of(["--cases", "("])
    assert len(names) == 8 and all(name.startswith(("7B down", "7B o")) for name in names)
