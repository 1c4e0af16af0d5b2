"""The RMSNorm kernels, run by Triton's interpreter, against the definition in float64; rounding, aliasing, strides, far rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels.add_rmsnorm import CANDIDATES, NormConfig, add_rmsnorm, default_config, gather_add_rmsnorm, rmsnorm

COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: too much for huge ones
EPS = 1e-5


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def guarded(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows as a view with NaN before, between and after them, and all of that memory."""
    memory = torch.full((rows.shape[0] + 2, rows.shape[1] + 16), float("nan"), dtype=rows.dtype)
    view = memory[1:-1, 8:-8]
    view.copy_(rows)
    return view, memory


def blank(rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return guarded(torch.full((rows, width), float("nan"), dtype=dtype))


def intact(view: Tensor, memory: Tensor) -> bool:
    """Whether everything around the view is NaN still. Empties the view."""
    view.fill_(float("nan"))
    return bool(memory.isnan().all())


def norm64(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    """The definition, rounded to x's dtype where the contract says so: after the division, and after the weight."""
    wide = x.double()
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype).double() * weight.double()).to(x.dtype)


def share_equal(got: Tensor, expected: Tensor) -> float:
    return float((got == expected).double().mean())


@pytest.mark.parametrize("width", [1, 48, 128, 576, 1000])
def test_norms_every_row_in_float32(width: int) -> None:
    x, weight = random(3, width), random(width, seed=1)
    rows, _ = guarded(x)
    out, memory = blank(3, width)
    got = rmsnorm(rows, weight, EPS, out=out)
    close = torch.allclose(got, norm64(x, weight), rtol=2e-6, atol=1e-6)
    assert close and got is out and intact(out, memory)


@pytest.mark.parametrize("width", [96, 576])
def test_half_precision_rounds_before_the_weight_and_after(width: int) -> None:
    # Rounding once instead of twice changes about a fifth of the values by an ulp; float32 statistics change almost none.
    x, weight = random(4, width, dtype=torch.float16), random(width, seed=1, dtype=torch.float16)
    got = rmsnorm(x, weight, EPS)
    assert got.dtype == torch.float16 and share_equal(got, norm64(x, weight)) > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_residual_takes_the_rounded_sum_and_that_is_normed(dtype: torch.dtype) -> None:
    x, before, weight = (random(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(3, 576), (3, 576), (576,)]))
    residual, memory = guarded(before)
    rows, _ = guarded(x)
    out, out_memory = blank(3, 576, dtype)
    got = add_rmsnorm(rows, residual, weight, EPS, out=out)
    total = (x.double() + before.double()).to(dtype)
    expected = norm64(total, weight)
    close = torch.allclose(got, expected, rtol=2e-6, atol=1e-6) if dtype == torch.float32 else share_equal(got, expected) > 0.99
    assert close and torch.equal(residual, total)
    assert intact(residual, memory) and intact(out, out_memory) and torch.equal(rows, x)


def test_the_result_may_take_the_place_of_what_is_added() -> None:
    x, residual, weight = random(3, 48), random(3, 48, seed=1), random(48, seed=2)
    expected = norm64(x + residual, weight)
    got = add_rmsnorm(x, residual, weight, EPS, out=x)
    assert got is x and torch.allclose(x, expected, rtol=2e-6, atol=1e-6)


def test_rmsnorm_may_run_in_place() -> None:
    x, weight = random(3, 48), random(48, seed=2)
    expected = norm64(x, weight)
    rmsnorm(x, weight, EPS, out=x)
    assert torch.allclose(x, expected, rtol=2e-6, atol=1e-6)


def test_leading_dimensions_are_rows() -> None:
    x, weight = random(2, 3, 20), random(20, seed=1)
    assert torch.allclose(rmsnorm(x, weight, EPS), norm64(x, weight), rtol=2e-6, atol=1e-6)


def test_eps_keeps_small_rows_small_and_zeros_zero() -> None:
    x, weight = random(2, 48) * 1e-3, random(48, seed=1)
    x[0] = 0.0
    got = rmsnorm(x, weight, 1e-2)
    assert torch.equal(got[0], torch.zeros(48)) and torch.allclose(got[1], norm64(x, weight, 1e-2)[1], rtol=2e-6)


def test_sums_that_overflow_half_precision_do_not() -> None:
    x, weight = torch.full((1, 64), 300.0, dtype=torch.float16), torch.ones(64, dtype=torch.float16)
    assert torch.equal(rmsnorm(x, weight, EPS), torch.ones(1, 64, dtype=torch.float16))  # 300^2 > 65504


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_gathering_equals_selecting_first(index_dtype: torch.dtype) -> None:
    x, residual, weight = random(6, 576), random(6, 576, seed=1), random(576, seed=2)
    originals = x.clone(), residual.clone()
    rows = torch.tensor([5, 0, 3, 3], dtype=index_dtype)
    out, memory = blank(4, 576)
    residual_out, residual_memory = blank(4, 576)
    got, total = gather_add_rmsnorm(x, residual, rows, weight, EPS, out=out, residual_out=residual_out)
    expected = (x + residual).index_select(0, rows)
    right = torch.equal(total, expected) and torch.allclose(got, norm64(expected, weight), rtol=2e-6, atol=1e-6)
    assert right and torch.equal(x, originals[0]) and torch.equal(residual, originals[1])
    assert got is out and total is residual_out and intact(out, memory) and intact(residual_out, residual_memory)


def test_a_negative_row_is_padding_and_reads_nothing() -> None:
    x, residual, weight = random(3, 48), random(3, 48, seed=1), random(48, seed=2)
    x[0] = residual[2] = float("nan")  # what -3 and -1 would read
    got, total = gather_add_rmsnorm(x, residual, torch.tensor([-1, 1, -3]), weight, EPS)
    zeros = torch.zeros(48)
    assert all(torch.equal(t[i], zeros) for t in (got, total) for i in (0, 2)) and torch.equal(total[1], x[1] + residual[1])


def test_half_precision_gathers_with_the_same_rounding() -> None:
    x, residual, weight = (random(*s, seed=i, dtype=torch.float16) for i, s in enumerate([(4, 576), (4, 576), (576,)]))
    got, total = gather_add_rmsnorm(x, residual, torch.tensor([2, 1]), weight, EPS)
    expected = (x.double() + residual.double())[[2, 1]].half()
    assert torch.equal(total, expected) and share_equal(got, norm64(expected, weight)) > 0.99


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_computes_the_same(config: NormConfig) -> None:
    x, residual, weight = random(2, 576), random(2, 576, seed=1), random(576, seed=2)
    expected = norm64(x + residual, weight)
    assert torch.allclose(add_rmsnorm(x, residual, weight, EPS, config=config), expected, rtol=2e-6, atol=1e-6)


def test_the_shape_of_a_program_grows_with_the_row() -> None:
    assert [default_config(n).num_warps for n in (16, 576, 4096, 5120, 16384)] == [1, 2, 8, 16, 16]


def test_no_rows_are_no_launch() -> None:
    empty = torch.empty(0, 48)
    weight = torch.ones(48)
    got, total = gather_add_rmsnorm(random(2, 48), random(2, 48), torch.empty(0, dtype=torch.int64), weight, EPS)
    assert [rmsnorm(empty, weight, EPS).shape, add_rmsnorm(empty, empty, weight, EPS).shape, got.shape, total.shape] == [
        (0, 48)
    ] * 4


def test_rows_further_apart_than_an_int32_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Row 2 starts 2^31 values after row 0. Wrapped, that is 2^31 before it: memory of ours too, and NaN there would show.
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    stride, width = 2**30, 48
    storage = torch.empty(2**32 + width, dtype=torch.float16)  # committed page by page, as it is touched
    far = storage.as_strided((3, width), (stride, 1), 2**31)
    near, weight = random(3, width, seed=1, dtype=torch.float16), random(width, seed=2, dtype=torch.float16)
    values = random(3, width, dtype=torch.float16)
    storage[:width] = float("nan")
    far.copy_(values)
    plain = rmsnorm(far, weight, EPS)
    gathered, _ = gather_add_rmsnorm(far, near, torch.tensor([2]), weight, EPS)
    add_rmsnorm(near, far, weight, EPS)
    total = (values.double() + near.double()).half()
    assert share_equal(plain, norm64(values, weight)) > 0.98 and torch.equal(far, total)
    assert share_equal(gathered[0], norm64(total, weight)[2]) > 0.95


def bad_calls() -> dict[str, Callable[[], object]]:
    x, weight = torch.ones(2, 8), torch.ones(8)
    rows = torch.tensor([0])
    return {
        "width": lambda: rmsnorm(x, torch.ones(7), EPS),
        "weight dtype": lambda: rmsnorm(x, weight.half(), EPS),
        "columns apart": lambda: rmsnorm(torch.ones(8, 2).t(), weight, EPS),
        "too wide": lambda: rmsnorm(torch.ones(1, 16385), torch.ones(16385), EPS),
        "more dimensions apart": lambda: rmsnorm(torch.ones(3, 2, 8).transpose(0, 1), weight, EPS),
        "out shape": lambda: rmsnorm(x, weight, EPS, out=torch.ones(3, 8)),
        "residual shape": lambda: add_rmsnorm(x, torch.ones(3, 8), weight, EPS),
        "residual dtype": lambda: add_rmsnorm(x, x.half(), weight, EPS),
        "gather out": lambda: gather_add_rmsnorm(x, x.clone(), rows, weight, EPS, out=torch.ones(2, 8)),
        "gather ids": lambda: gather_add_rmsnorm(x, x.clone(), rows.float(), weight, EPS),
    }


@pytest.mark.parametrize("what", sorted(bad_calls()))
def test_what_does_not_fit_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match="must be|is|are"):
        bad_calls()[what]()
