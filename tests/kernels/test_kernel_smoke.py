"""The cases that `make sanitize-gpu` runs under compute-sanitizer, in the interpreter: they are right and leave no kernel out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from kernel_smoke import Smoke, WrongError

SMOKE = Smoke(torch.device("cpu"), torch.float32, head_dim=16, longest=500)
KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.mark.parametrize("name", SMOKE.cases)
def test_a_case_is_right(name: str) -> None:
    SMOKE.cases[name]()


def test_a_wrong_result_is_noticed() -> None:
    with pytest.raises(WrongError, match="off by 1, "):
        SMOKE.same(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0]))


def test_every_kernel_that_can_be_launched_is_in_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are named _..._kernel; which of them run is seen at their launches."""
    from triton.runtime.interpreter import GridExecutor

    ran: set[str] = set()
    call = GridExecutor.__call__

    def noting(self: GridExecutor, *arguments: object, **named: object) -> object:
        ran.add(self.fn.__name__)
        return call(self, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", noting)
    for case in SMOKE.cases.values():
        case()
    written = {
        name for path in KERNELS.glob("*.py") for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    assert written - ran == set()
