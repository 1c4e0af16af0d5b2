"""The linear layers of a decode batch, run by Triton's interpreter, against the product in float64; whatever lies beside inputs
and results in memory is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels import thin_linear as module
from fairlane.kernels.add_rmsnorm import add_rmsnorm, join_add_rmsnorm
from fairlane.kernels.reference import silu_mul
from fairlane.kernels.thin_linear import (
    CANDIDATES,
    ThinConfig,
    config_for,
    gated_linear,
    num_splits,
    split_linear,
    takes,
    thin_linear,
)

COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: too much for huge ones
NAN = float("nan")
SMALL = ThinConfig(block_n=16, block_k=32, num_warps=1, num_stages=2)
EPS = 1e-5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def amid_nan(values: Tensor, margin: int = 24) -> tuple[Tensor, Tensor]:
    """A view of these values in memory that is NaN before, after and between their rows, and that memory."""
    memory = torch.full([values.shape[0] + 2, values.shape[1] + 2 * margin], NAN, dtype=values.dtype)
    view = memory[1:-1, margin:-margin]
    view.copy_(values)
    return view, memory


def exact(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().t()


def exact_gated(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = exact(x, weight).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 128, 131])
@pytest.mark.parametrize("outputs, in_features", [(1, 8), (37, 64), (16, 136)])
@pytest.mark.parametrize("biased", [False, True])
def test_agrees_with_the_product_and_touches_nothing_else(rows: int, outputs: int, in_features: int, biased: bool) -> None:
    x, _ = amid_nan(random(rows, in_features))
    weight, _ = amid_nan(random(outputs, in_features, seed=1))
    bias = amid_nan(random(1, outputs, seed=2))[0][0] if biased else None
    out, memory = amid_nan(torch.full((rows, outputs), NAN))
    before = x.clone(), weight.clone()
    got = thin_linear(x, weight, bias, out=out, config=SMALL)
    expected = exact(x, weight) + (0 if bias is None else bias.double())
    right = torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-4)
    assert right and got is out and torch.equal(x, before[0]) and torch.equal(weight, before[1])
    out.fill_(NAN)
    assert bool(memory.isnan().all())


@pytest.mark.parametrize("rows, both, in_features", [(1, 2, 8), (5, 74, 64), (33, 64, 136), (140, 34, 64)])
def test_the_gated_form_agrees_and_touches_nothing_else(rows: int, both: int, in_features: int) -> None:
    # 37 outputs a half: the third tile of the first half reaches into the second one, which must not show.
    x, _ = amid_nan(random(rows, in_features))
    weight, _ = amid_nan(random(both, in_features, seed=1) / 8)
    out, memory = amid_nan(torch.full((rows, both // 2), NAN))
    got = gated_linear(x, weight, out=out, config=SMALL)
    assert torch.allclose(got.double(), exact_gated(x, weight), rtol=1e-5, atol=1e-4) and got is out
    out.fill_(NAN)
    assert bool(memory.isnan().all())


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_the_parts_sum_to_the_product_and_touch_nothing_else(splits: int) -> None:
    # 3 and 8 stretches of 264 leave stretches that are short or empty.
    rows = 5 if splits > 1 else 133
    x, weight = amid_nan(random(rows, 264))[0], amid_nan(random(37, 264, seed=1))[0]
    memory = torch.full((splits + 2, rows, 37), NAN)
    got = split_linear(x, weight, parts=memory[1:-1], config=SMALL)
    assert torch.allclose(got.double().sum(0), exact(x, weight), rtol=1e-5, atol=1e-4)
    memory[1:-1] = NAN
    assert bool(memory.isnan().all())


def test_joining_parts_is_adding_their_sum() -> None:
    parts, weight = random(3, 5, 200, seed=1), random(200, seed=2)
    residual, memory = amid_nan(random(5, 200))
    expected_residual = residual.clone()
    expected = add_rmsnorm(parts[0] + parts[1] + parts[2], expected_residual, weight, EPS)
    normed = join_add_rmsnorm(parts, residual, weight, EPS)
    same = torch.equal(normed, expected), torch.equal(residual, expected_residual)
    residual.fill_(NAN)
    assert same == (True, True) and bool(memory.isnan().all())


def test_half_precision_parts_are_rounded_once_summed() -> None:
    # Each part alone rounds to 1; together they are 1 + 2^-10, the next float16.
    parts = torch.zeros(2, 1, 128)
    parts[0], parts[1] = 1 + 2**-12, 2**-10 - 2**-12
    residual = torch.zeros(1, 128, dtype=torch.float16)
    join_add_rmsnorm(parts, residual, torch.ones(128, dtype=torch.float16), EPS)
    assert torch.equal(residual, torch.full((1, 128), 1 + 2**-10, dtype=torch.float16))


def test_half_precision_is_summed_wide_and_rounded_once() -> None:
    # Partial sums of 64s drown the rest in float16, in any order; what they cancel to is 1 + 2^-11, half an ulp, as is the bias.
    x = torch.full((3, 128), 8.0, dtype=torch.float16)
    weight = torch.full((9, 128), 8.0, dtype=torch.float16)
    weight[:, 1::2] = -8
    x[:, 126], weight[:, 126] = 1, 1
    x[:, 127], weight[:, 127] = 2**-5, 2**-6
    bias = torch.full((9,), 2**-11, dtype=torch.float16)
    assert torch.equal(thin_linear(x, weight, bias, config=SMALL), torch.full((3, 9), 1 + 2**-10, dtype=torch.float16))


def test_the_gated_form_rounds_where_product_and_activation_do() -> None:
    x, weight = random(7, 328, dtype=torch.float16), random(96, 328, seed=1, dtype=torch.float16) / 8
    apart = silu_mul(thin_linear(x, weight, config=SMALL))
    assert torch.equal(gated_linear(x, weight, config=SMALL), apart)


@pytest.mark.parametrize("product", [thin_linear, split_linear, gated_linear])
def test_a_row_that_is_not_finite_harms_no_other(product: object) -> None:
    x, weight = random(20, 64), random(40, 64, seed=1)
    clean = product(x, weight, config=SMALL)  # type: ignore[operator]
    x[7, 3], x[9, 5] = NAN, float("inf")
    others = [row for row in range(20) if row not in (7, 9)]
    found = product(x, weight, config=SMALL)  # type: ignore[operator]
    assert torch.equal(found[..., others, :], clean[..., others, :]) and bool(found[..., 7, :].isnan().any())


@pytest.mark.parametrize("product", [thin_linear, split_linear, gated_linear])
def test_a_row_has_the_same_bits_in_any_company_and_at_any_place(product: object) -> None:
    # Of whole numbers, whose sums have no order: numpy's product, which the interpreter takes, is cut by the batch.
    x, weight = random(33, 200).mul(8).round(), random(40, 200, seed=1).round()
    together = product(x, weight, config=SMALL)  # type: ignore[operator]
    alone = torch.cat([product(x[i : i + 1], weight, config=SMALL) for i in range(33)], dim=-2)  # type: ignore[operator]
    backwards = product(x.flip(0), weight, config=SMALL).flip(-2)  # type: ignore[operator]
    assert torch.equal(together, alone) and torch.equal(together, backwards)


@pytest.mark.parametrize("config", [one for one in CANDIDATES if one.num_stages == 4])
def test_every_candidate_computes_the_same(config: ThinConfig) -> None:
    x, weight = random(3, 264), random(66, 264, seed=1) / 8
    found = [
        torch.allclose(thin_linear(x, weight, config=config).double(), exact(x, weight), rtol=1e-4, atol=1e-4),
        torch.allclose(split_linear(x, weight, config=config).double().sum(0), exact(x, weight), rtol=1e-4, atol=1e-4),
        torch.allclose(gated_linear(x, weight, config=config).double(), exact_gated(x, weight), rtol=1e-4, atol=1e-4),
    ]
    assert found == [True] * 3


def test_rows_further_apart_than_an_int32_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    # The last row of out starts 2^31 values after the first. Wrapped, that is 2^31 before it, where the marks are.
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    storage = torch.empty(2**32 + 64, dtype=torch.float16)  # committed page by page, as it is touched
    storage[:64] = NAN
    out = storage.as_strided((3, 16), (2**30, 1), 2**31)
    x, weight = random(3, 64, seed=1, dtype=torch.float16), random(16, 64, dtype=torch.float16)
    thin_linear(x, weight, out=out, config=SMALL)
    gated = storage.as_strided((3, 8), (2**30, 1), 2**31 + 32)
    gated_linear(x, weight, out=gated, config=SMALL)
    right = torch.allclose(out.double(), exact(x, weight), rtol=2**-9, atol=1e-2)
    right &= torch.allclose(gated.double(), exact_gated(x, weight), rtol=1e-2, atol=0.1)
    assert right and bool(storage[:64].isnan().all())


def test_no_rows_are_no_launch() -> None:
    x, weight = torch.empty(0, 32), torch.ones(6, 32)
    shapes = thin_linear(x, weight).shape, split_linear(x, weight).shape, gated_linear(x, weight).shape
    assert shapes == ((0, 6), (1, 0, 6), (0, 3))


def test_a_single_rows_stride_says_nothing() -> None:
    x, weight = random(24), random(5, 24, seed=1)
    odd = x.as_strided((1, 24), (3, 1))
    assert torch.allclose(thin_linear(odd, weight, config=SMALL)[0].double(), exact(x[None], weight)[0], atol=1e-4)


def test_the_cuts_follow_from_the_weight_and_leave_no_short_stretch() -> None:
    shapes = {(4096, 4096): 2, (4096, 14336): 2, (1024, 2048): 4, (1024, 3072): 4, (6400, 4096): 1, (64, 512): 1, (64, 10**5): 8}
    assert {shape: num_splits(*shape) for shape in shapes} == shapes


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("outputs", [1024, 4096, 6144, 12288, 28672, 128256])
@pytest.mark.parametrize("in_features", [1024, 2048, 4096, 14336])
def test_the_chosen_tiles_fit_into_shared_memory(gated: bool, outputs: int, in_features: int) -> None:
    splits = 1 if gated else num_splits(outputs, in_features)
    sizes = []
    for rows in (1, 16, 17, 64, 65, 128):
        config = config_for(rows, outputs, in_features, splits=splits, gated=gated)
        sizes.append((config.shared_bytes(rows, gated=gated) <= 220_000, config.num_stages >= 2))
    assert sizes == [(True, True)] * 6


def test_a_measured_choice_replaces_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.MEASURED, (False, 4096, 1024, 32), SMALL)
    assert config_for(17, 4096, 1024) == SMALL and config_for(16, 4096, 1024) != SMALL


@pytest.mark.parametrize("values", [(48, 64, 4, 3), (8, 64, 4, 3), (64, 8, 4, 3), (64, 64, 3, 3), (64, 64, 4, 0)])
def test_a_configuration_that_no_kernel_takes_is_refused(values: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        ThinConfig(*values)


@pytest.mark.parametrize(
    "weight, taken",
    [
        (torch.ones(8, 64).half(), True),
        (torch.ones(8, 64).bfloat16(), True),
        (torch.ones(8, 64), False),
        (torch.ones(8, 60).half(), False),
        (torch.ones(8, 72).half()[:, 4:68], False),
        (torch.ones(64, 8).half().t(), False),
    ],
)
def test_which_weights_are_taken(weight: Tensor, taken: bool) -> None:
    assert takes(weight) == taken


@pytest.mark.parametrize("product", [thin_linear, split_linear, gated_linear])
@pytest.mark.parametrize(
    "x, weight",
    [
        (torch.ones(2, 24), torch.ones(4, 16)),
        (torch.ones(16), torch.ones(4, 16)),
        (torch.ones(2, 16), torch.ones(0, 16)),
        (torch.ones(2, 0), torch.ones(4, 0)),
        (torch.ones(2, 18)[:, :16], torch.ones(4, 16)),
        (torch.ones(16, 2).t(), torch.ones(4, 16)),
        (torch.ones(2, 17)[:, 1:], torch.ones(4, 16)),
        (torch.ones(2, 16), torch.ones(4, 18)[:, :16]),
        (torch.ones(2, 16), torch.ones(16, 4).t()),
        (torch.ones(2, 16), torch.ones(4, 16).half()),
        (torch.ones(2, 16).int(), torch.ones(4, 16).int()),
    ],
)
def test_what_does_not_fit_is_refused(product: object, x: Tensor, weight: Tensor) -> None:
    with pytest.raises(ValueError, match="must be"):
        product(x, weight)  # type: ignore[operator]


@pytest.mark.parametrize("out", [torch.ones(2, 5), torch.ones(2, 4).half(), torch.ones(4, 2).t()])
def test_the_result_must_fit(out: Tensor) -> None:
    with pytest.raises(ValueError, match="out must be"):
        thin_linear(torch.ones(2, 16), torch.ones(4, 16), out=out)


@pytest.mark.parametrize("parts", [torch.ones(2, 4), torch.ones(1, 2, 5), torch.ones(1, 2, 4).half(), torch.ones(2, 4, 2).mT])
def test_the_parts_must_fit(parts: Tensor) -> None:
    with pytest.raises(ValueError, match="parts must be"):
        split_linear(torch.ones(2, 16), torch.ones(4, 16), parts=parts)


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="two halves"):
        gated_linear(torch.ones(2, 16), torch.ones(5, 16))


@pytest.mark.parametrize("parts", [torch.ones(2, 3, 5), torch.ones(3, 4), torch.ones(2, 3, 4).half(), torch.ones(2, 4, 3).mT])
def test_parts_that_do_not_fit_the_residual_are_refused(parts: Tensor) -> None:
    with pytest.raises(ValueError, match="parts"):
        join_add_rmsnorm(parts, torch.ones(3, 4), torch.ones(4), EPS)
