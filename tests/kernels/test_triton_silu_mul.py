"""The gated activation's kernel, run by Triton's interpreter, against the definition in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels.silu_mul import CANDIDATES, DEFAULT, SiluConfig, silu_mul

COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: too much for huge ones
SMALL = SiluConfig(tile=64, num_warps=1)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gated64(gate_up: Tensor) -> Tensor:
    """The definition, rounded to the dtype after the activation and after the product, as the contract has it."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return ((gate / (1 + torch.exp(-gate))).to(gate_up.dtype).double() * up).to(gate_up.dtype)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
def test_gates_each_value_and_touches_nothing_else(width: int) -> None:
    memory = torch.full((5, 2 * width + 16), float("nan"))
    gate_up = memory[1:-1, 8:-8]
    gate_up.copy_(random(3, 2 * width))
    result = torch.full((5, width + 16), float("nan"))
    out = result[1:-1, 8:-8]
    expected, before = gated64(gate_up), gate_up.clone()
    got = silu_mul(gate_up, out=out, config=SMALL)
    close = torch.allclose(got, expected, rtol=1e-6, atol=1e-6)
    assert close and got is out and torch.equal(gate_up, before)
    out.fill_(float("nan"))
    assert bool(result.isnan().all())


def test_half_precision_rounds_after_the_activation_and_after_the_product() -> None:
    # Rounding once instead of twice changes about a fifth of the values by an ulp.
    gate_up = random(3, 1000, dtype=torch.float16)
    assert float((silu_mul(gate_up, config=SMALL) == gated64(gate_up)).double().mean()) > 0.99


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's; exp(200) is meant to be inf
def test_extreme_gates_are_exact() -> None:
    gate = torch.tensor([0.0, -200.0, 200.0, float("nan"), -90.0])
    got = silu_mul(torch.cat([gate, torch.full((5,), 2.0)])[None])[0]
    assert torch.equal(got[:3], torch.tensor([0.0, 0.0, 400.0])) and bool(got[3].isnan()) and abs(float(got[4])) < 1e-36


def test_the_result_may_take_the_gates_place() -> None:
    gate_up = random(3, 400)
    expected = gated64(gate_up)
    silu_mul(gate_up, out=gate_up[:, :200], config=SMALL)
    assert torch.allclose(gate_up[:, :200], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_computes_the_same(config: SiluConfig) -> None:
    gate_up = random(2, 2600)
    assert torch.equal(silu_mul(gate_up, config=config), silu_mul(gate_up, config=DEFAULT))


def test_no_rows_are_no_launch() -> None:
    assert silu_mul(torch.empty(0, 32)).shape == (0, 16)


def test_rows_further_apart_than_an_int32_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Row 2 starts 2^31 values after row 0. Wrapped, that is 2^31 before it: memory of ours too, and NaN there would show.
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    storage = torch.empty(2**32 + 48, dtype=torch.float16)  # committed page by page, as it is touched
    storage[:48] = float("nan")
    far = storage.as_strided((3, 48), (2**30, 1), 2**31)
    far.copy_(random(3, 48, dtype=torch.float16))
    expected = gated64(far)
    got = silu_mul(far)
    silu_mul(far, out=far[:, :24])
    assert float((got == expected).double().mean()) > 0.95 and torch.equal(far[:, :24], got)


@pytest.mark.parametrize("gate_up", [torch.ones(2, 7), torch.ones(8, 2).t(), torch.ones(2, 0)])
def test_gate_and_up_must_be_halves_of_contiguous_rows(gate_up: Tensor) -> None:
    with pytest.raises(ValueError, match="gate_up must be"):
        silu_mul(gate_up)


@pytest.mark.parametrize("out", [torch.ones(2, 5), torch.ones(2, 4).half(), torch.ones(4, 2).t()])
def test_the_result_must_fit(out: Tensor) -> None:
    with pytest.raises(ValueError, match="out must be"):
        silu_mul(torch.ones(2, 8), out=out)
