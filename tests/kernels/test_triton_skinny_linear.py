"""The linear layers of one row, run by Triton's interpreter, against the product in float64; whatever lies beside inputs and
results in memory is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels import skinny_linear as module
from fairlane.kernels.skinny_linear import CANDIDATES, SkinnyConfig, config_for, skinny_linear

COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: too much for huge ones
NAN = float("nan")
SMALL = SkinnyConfig(block_n=4, block_k=64, num_warps=1, num_stages=1)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def amid_nan(values: Tensor, margin: int = 24) -> tuple[Tensor, Tensor]:
    """A view of these values in memory that is NaN before, after and between their rows, and that memory."""
    memory = torch.full([values.shape[0] + 2, values.shape[1] + 2 * margin], NAN, dtype=values.dtype)
    view = memory[1:-1, margin:-margin]
    view.copy_(values)
    return view, memory


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x.double() @ weight.double().t()
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("outputs, in_features", [(1, 8), (37, 64), (16, 136), (35, 200)])
@pytest.mark.parametrize("biased", [False, True])
def test_agrees_with_the_product_and_touches_nothing_else(outputs: int, in_features: int, biased: bool) -> None:
    x, _ = amid_nan(random(1, in_features))
    weight, _ = amid_nan(random(outputs, in_features, seed=1))
    bias = amid_nan(random(1, outputs, seed=2))[0][0] if biased else None
    out, memory = amid_nan(torch.full((1, outputs), NAN))
    before = x.clone(), weight.clone()
    got = skinny_linear(x, weight, bias, out=out, config=SMALL)
    right = torch.allclose(got.double(), exact(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert right and got is out and torch.equal(x, before[0]) and torch.equal(weight, before[1])
    out.fill_(NAN)
    assert bool(memory.isnan().all())


def test_half_precision_is_summed_wide_and_rounded_once() -> None:
    # Products of 40000 leave float16 in any partial sum; what they cancel to is 1 + 2^-11, half an ulp, as is the bias.
    x = torch.full((1, 128), 200.0, dtype=torch.float16)
    weight = torch.full((9, 128), 200.0, dtype=torch.float16)
    weight[:, 1::2] = -200
    x[:, 126], weight[:, 126] = 1, 1
    x[:, 127], weight[:, 127] = 2**-5, 2**-6
    bias = torch.full((9,), 2**-11, dtype=torch.float16)
    assert torch.equal(skinny_linear(x, weight, bias, config=SMALL), torch.full((1, 9), 1 + 2**-10, dtype=torch.float16))


def test_random_half_precision_is_the_rounded_product() -> None:
    x, weight = random(1, 328, dtype=torch.float16), random(50, 328, seed=1, dtype=torch.float16)
    got, expected = skinny_linear(x, weight, config=SMALL), exact(x, weight, None).half()
    close = torch.allclose(got.double(), expected.double(), rtol=2**-10, atol=1e-4)
    assert close and float((got == expected).double().mean()) > 0.97


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_computes_the_same(config: SkinnyConfig) -> None:
    x, weight = random(1, 4200), random(33, 4200, seed=1)
    assert torch.allclose(skinny_linear(x, weight, config=config).double(), exact(x, weight, None), rtol=1e-4, atol=1e-3)


def test_the_default_configuration_fits_any_shape() -> None:
    x, weight = random(1, 72), random(6, 72, seed=1)
    assert torch.allclose(skinny_linear(x, weight).double(), exact(x, weight, None), rtol=1e-5, atol=1e-4)


def test_rows_of_the_weight_further_apart_than_an_int32_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last row starts 2^31 values after the first. Wrapped, that is 2^31 before it: memory of ours too, and NaN.
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    storage = torch.empty(2**32 + 64, dtype=torch.float16)  # committed page by page, as it is touched
    storage[:64] = NAN
    weight = storage.as_strided((3, 64), (2**30, 1), 2**31)
    weight.copy_(random(3, 64, dtype=torch.float16))
    x = random(1, 64, seed=1, dtype=torch.float16)
    got = skinny_linear(x, weight, config=SMALL)
    assert torch.allclose(got.double(), exact(x, weight, None), rtol=2**-10, atol=1e-3)


def test_the_rows_own_stride_says_nothing() -> None:
    x, weight = random(24), random(5, 24, seed=1)
    odd = x.as_strided((1, 24), (3, 1))
    assert torch.allclose(skinny_linear(odd, weight, config=SMALL)[0].double(), exact(x[None], weight, None)[0], atol=1e-4)


@pytest.mark.parametrize("outputs", [1024, 4096, 28672])
@pytest.mark.parametrize("in_features", [896, 1024, 2048, 3072, 4096, 8960, 14336])
def test_the_rule_leaves_enough_programs_and_few_idle_loads(outputs: int, in_features: int) -> None:
    config = config_for(outputs, in_features)
    padded = -(-in_features // config.block_k) * config.block_k
    assert outputs // config.block_n >= 256 and padded <= in_features * 4 / 3


def test_a_measured_choice_replaces_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.MEASURED, (4096, 1024), SMALL)
    assert config_for(4096, 1024) == SMALL and config_for(4096, 1032) != SMALL


@pytest.mark.parametrize("values", [(3, 64, 4, 1), (4, 4, 4, 1), (4, 64, 4, 0), (4, 64, 3, 1)])
def test_a_configuration_that_the_kernel_does_not_take_is_refused(values: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be|at least"):
        SkinnyConfig(*values)


@pytest.mark.parametrize(
    "x, weight, bias",
    [
        (torch.ones(2, 16), torch.ones(4, 16), None),
        (torch.ones(0, 16), torch.ones(4, 16), None),
        (torch.ones(1, 24), torch.ones(4, 16), None),
        (torch.ones(16), torch.ones(4, 16), None),
        (torch.ones(1, 16), torch.ones(0, 16), None),
        (torch.ones(1, 0), torch.ones(4, 0), None),
        (torch.ones(1, 12), torch.ones(4, 12), None),
        (torch.ones(1, 32)[:, ::2], torch.ones(4, 16), None),
        (torch.ones(1, 16), torch.ones(4, 20)[:, :16], None),
        (torch.ones(1, 16), torch.ones(16, 4).t(), None),
        (torch.ones(1, 16), torch.ones(4, 16).half(), None),
        (torch.ones(1, 16).int(), torch.ones(4, 16).int(), None),
        (torch.ones(1, 16), torch.ones(4, 16), torch.ones(5)),
        (torch.ones(1, 16), torch.ones(4, 16), torch.ones(4).half()),
        (torch.ones(1, 16), torch.ones(4, 16), torch.ones(8)[::2]),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        skinny_linear(x, weight, bias)


@pytest.mark.parametrize("out", [torch.ones(1, 5), torch.ones(1, 4).half(), torch.ones(1, 8)[:, ::2]])
def test_the_result_must_fit(out: Tensor) -> None:
    with pytest.raises(ValueError, match="out must be"):
        skinny_linear(torch.ones(1, 16), torch.ones(4, 16), out=out)
