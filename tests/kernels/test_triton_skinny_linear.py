"""The linear layers of few rows, run by Triton's interpreter, against the product in float64; whatever lies beside inputs and
results in memory is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels import skinny_linear as module
from fairlane.kernels.skinny_linear import CANDIDATES, DOTS, SkinnyConfig, config_for, skinny_linear

COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: too much for huge ones
NAN = float("nan")
VECTOR = SkinnyConfig(dots=False, block_n=4, block_k=64, num_warps=1, num_stages=1)
SMALL_DOTS = SkinnyConfig(dots=True, block_n=16, block_k=64, num_warps=2, num_stages=2)
FORMS = [(VECTOR, 1), (VECTOR, 2), (SMALL_DOTS, 1), (SMALL_DOTS, 2), (SMALL_DOTS, 3), (SMALL_DOTS, 8)]


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


@pytest.mark.parametrize("config, rows", FORMS)
@pytest.mark.parametrize("outputs, in_features", [(1, 8), (37, 64), (16, 136), (35, 200)])
@pytest.mark.parametrize("biased", [False, True])
def test_agrees_with_the_product_and_touches_nothing_else(
    config: SkinnyConfig, rows: int, outputs: int, in_features: int, biased: bool
) -> None:
    x, _ = amid_nan(random(rows, in_features))
    weight, _ = amid_nan(random(outputs, in_features, seed=1))
    bias = amid_nan(random(1, outputs, seed=2))[0][0] if biased else None
    out, memory = amid_nan(torch.full((rows, outputs), NAN))
    before = x.clone(), weight.clone()
    got = skinny_linear(x, weight, bias, out=out, config=config)
    right = torch.allclose(got.double(), exact(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert right and got is out and torch.equal(x, before[0]) and torch.equal(weight, before[1])
    out.fill_(NAN)
    assert bool(memory.isnan().all())


@pytest.mark.parametrize("config", [VECTOR, SMALL_DOTS])
def test_a_row_has_the_same_bits_in_any_company(config: SkinnyConfig) -> None:
    x, weight = random(8, 200), random(20, 200, seed=1)
    most = 8 if config.dots else 2
    alone = torch.cat([skinny_linear(x[i : i + 1], weight, config=config) for i in range(8)])
    together = [torch.equal(skinny_linear(x[:n], weight, config=config), alone[:n]) for n in range(1, most + 1)]
    backwards = skinny_linear(x[:most].flip(0), weight, config=config).flip(0)
    assert together == [True] * most and torch.equal(backwards, alone[:most])


@pytest.mark.parametrize("config, rows", FORMS)
def test_half_precision_is_summed_wide_and_rounded_once(config: SkinnyConfig, rows: int) -> None:
    # Products of 40000 leave float16 in any partial sum; what they cancel to is 1 + 2^-11, half an ulp, as is the bias.
    x = torch.full((rows, 128), 200.0, dtype=torch.float16)
    weight = torch.full((9, 128), 200.0, dtype=torch.float16)
    weight[:, 1::2] = -200
    x[:, 126], weight[:, 126] = 1, 1
    x[:, 127], weight[:, 127] = 2**-5, 2**-6
    bias = torch.full((9,), 2**-11, dtype=torch.float16)
    assert torch.equal(skinny_linear(x, weight, bias, config=config), torch.full((rows, 9), 1 + 2**-10, dtype=torch.float16))


@pytest.mark.parametrize("config, rows", FORMS)
def test_random_half_precision_is_the_rounded_product(config: SkinnyConfig, rows: int) -> None:
    x, weight = random(rows, 328, dtype=torch.float16), random(50, 328, seed=1, dtype=torch.float16)
    got, expected = skinny_linear(x, weight, config=config), exact(x, weight, None).half()
    close = torch.allclose(got.double(), expected.double(), rtol=2**-10, atol=1e-4)
    assert close and float((got == expected).double().mean()) > 0.97


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_computes_the_same(config: SkinnyConfig) -> None:
    x, weight = random(2, 4200), random(33, 4200, seed=1)
    assert torch.allclose(skinny_linear(x, weight, config=config).double(), exact(x, weight, None), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_the_default_configuration_takes_any_number_of_rows(rows: int) -> None:
    x, weight = random(rows, 72), random(6, 72, seed=1)
    assert torch.allclose(skinny_linear(x, weight).double(), exact(x, weight, None), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("config, rows, distance", [(VECTOR, 2, 2**31), (SMALL_DOTS, 3, 2**30)])
def test_rows_further_apart_than_an_int32_reaches(
    config: SkinnyConfig, rows: int, distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last row starts 2^31 values after the first. Wrapped, that is 2^31 before it: memory of ours too, and NaN.
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    storages = [torch.empty(2**32 + 64, dtype=torch.float16) for _ in range(3)]  # committed page by page, as it is touched
    for storage in storages:
        storage[:64] = NAN
    weight = storages[0].as_strided((3, 64), (2**30, 1), 2**31)
    x, out = (storage.as_strided((rows, 64), (distance, 1), 2**31) for storage in storages[1:])
    weight.copy_(random(3, 64, dtype=torch.float16))
    x.copy_(random(rows, 64, seed=1, dtype=torch.float16))
    got = skinny_linear(x, weight, out=out[:, :3], config=config)
    assert torch.allclose(got.double(), exact(x, weight, None), rtol=2**-10, atol=1e-3)


def test_a_single_rows_stride_says_nothing() -> None:
    x, weight = random(24), random(5, 24, seed=1)
    odd = x.as_strided((1, 24), (3, 1))
    assert torch.allclose(skinny_linear(odd, weight, config=VECTOR)[0].double(), exact(x[None], weight, None)[0], atol=1e-4)


def test_no_rows_are_no_launch() -> None:
    assert skinny_linear(torch.empty(0, 32), torch.ones(5, 32)).shape == (0, 5)


def test_the_choice_depends_on_the_rows_by_kernel_only() -> None:
    shapes = [(6144, 4096), (4096, 14336), (1024, 3072), (128, 576)]
    one = [config_for(1, *shape) for shape in shapes]
    more = [{config_for(rows, *shape) for rows in range(2, 9)} for shape in shapes]
    assert not any(config.dots for config in one) and more == [{DOTS}] * 4


@pytest.mark.parametrize("outputs", [1024, 4096, 28672])
@pytest.mark.parametrize("in_features", [896, 1024, 2048, 3072, 4096, 8960, 14336])
def test_the_rule_leaves_enough_programs_and_few_idle_loads(outputs: int, in_features: int) -> None:
    config = config_for(1, outputs, in_features)
    padded = -(-in_features // config.block_k) * config.block_k
    assert outputs // config.block_n >= 256 and padded <= in_features * 4 / 3


def test_a_measured_choice_replaces_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.MEASURED, (4096, 1024, False), VECTOR)
    assert config_for(1, 4096, 1024) == VECTOR and config_for(2, 4096, 1024) == DOTS


@pytest.mark.parametrize(
    "values",
    [
        (False, 3, 64, 4, 1),
        (False, 4, 4, 4, 1),
        (False, 4, 64, 4, 0),
        (True, 8, 512, 4, 3),
        (True, 16, 32, 4, 3),
        (True, 16, 512, 4, 1),
    ],
)
def test_a_configuration_that_no_kernel_takes_is_refused(values: tuple[bool, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be|at least"):
        SkinnyConfig(*values)


@pytest.mark.parametrize(
    "x, weight, bias",
    [
        (torch.ones(9, 16), torch.ones(4, 16), None),
        (torch.ones(2, 24), torch.ones(4, 16), None),
        (torch.ones(16), torch.ones(4, 16), None),
        (torch.ones(2, 16), torch.ones(0, 16), None),
        (torch.ones(2, 0), torch.ones(4, 0), None),
        (torch.ones(2, 12), torch.ones(4, 12), None),
        (torch.ones(2, 20)[:, :16], torch.ones(4, 16), None),
        (torch.ones(16, 2).t(), torch.ones(4, 16), None),
        (torch.ones(2, 16), torch.ones(4, 20)[:, :16], None),
        (torch.ones(2, 16), torch.ones(16, 4).t(), None),
        (torch.ones(2, 16), torch.ones(4, 16).half(), None),
        (torch.ones(2, 16).int(), torch.ones(4, 16).int(), None),
        (torch.ones(2, 16), torch.ones(4, 16), torch.ones(5)),
        (torch.ones(2, 16), torch.ones(4, 16), torch.ones(4).half()),
        (torch.ones(2, 16), torch.ones(4, 16), torch.ones(8)[::2]),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    with pytest.raises(ValueError, match="must be"):
        skinny_linear(x, weight, bias)


@pytest.mark.parametrize("out", [torch.ones(2, 5), torch.ones(2, 4).half(), torch.ones(4, 2).t()])
def test_the_result_must_fit(out: Tensor) -> None:
    with pytest.raises(ValueError, match="out must be"):
        skinny_linear(torch.ones(2, 16), torch.ones(4, 16), out=out)


def test_the_vector_kernel_takes_two_rows_at_most() -> None:
    with pytest.raises(ValueError, match="up to 2 rows"):
        skinny_linear(torch.ones(3, 16), torch.ones(4, 16), config=VECTOR)
