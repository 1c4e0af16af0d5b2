"""The linear layers of a decode batch on the device: real shapes, the same bits in any company and with any tiles, graph replay,
launches that neither allocate nor compile again, and the layers that take them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from device import cuda
from fairlane.kernels.add_rmsnorm import add_rmsnorm, join_add_rmsnorm
from fairlane.kernels.reference import silu_mul
from fairlane.kernels.thin_linear import CANDIDATES, gated_linear, num_splits, split_linear, thin_linear
from fairlane.worker.linear import Linear
from fairlane.worker.ops import triton_ops
from launches import allocations, captured, compilations, normal

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
SHAPES = [(6144, 4096), (4096, 14336), (1024, 2048), (1024, 3072), (578, 1000)]  # outputs, K
MOST = 300  # more than two tiles of rows
ROWS = (1, 2, 16, 17, 64, 100, 128, 129, 300)
PRODUCTS: list[Callable[[Tensor, Tensor], Tensor]] = [thin_linear, split_linear, gated_linear]


def weights(outputs: int, in_features: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return normal(outputs, in_features, seed=1, dtype=dtype) * in_features**-0.5


def error(got: Tensor, exact: Tensor) -> float:
    """The worst row's ||error|| / ||exact||; NaN where a result is."""
    return float(((got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def gated(product: Tensor) -> Tensor:
    gate, up = product.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("outputs, in_features", SHAPES)
def test_all_forms_agree_with_the_product(outputs: int, in_features: int, dtype: torch.dtype) -> None:
    weight, bias = weights(outputs, in_features, dtype), normal(outputs, seed=2, dtype=dtype)
    errors = []
    for rows in ROWS:
        x = normal(rows, in_features, dtype=dtype)
        exact = x.double() @ weight.double().t()
        out, half = (torch.full((rows, n), torch.nan, dtype=dtype, device=cuda) for n in (outputs, outputs // 2))
        errors.append(error(thin_linear(x, weight, out=out), exact))
        errors.append(error(thin_linear(x, weight, bias), exact + bias.double()))
        errors.append(error(split_linear(x, weight).double().sum(0), exact) * 40)  # not rounded to 16 bits
        errors.append(error(gated_linear(x, weight, out=half), gated(exact)) / 2)  # rounded three times
    assert [found for found in errors if not found < TOLERANCE[dtype]] == []


@pytest.mark.parametrize("outputs, in_features", SHAPES)
def test_a_row_has_the_same_bits_in_a_batch_of_any_size_and_at_any_place(outputs: int, in_features: int) -> None:
    x, weight = normal(MOST, in_features), weights(outputs, in_features)
    found = []
    for product in PRODUCTS:
        together = product(x, weight)
        found += [torch.equal(product(x[:rows], weight), together[..., :rows, :]) for rows in ROWS]
        found.append(torch.equal(product(x.flip(0), weight).flip(-2), together))
    assert found == [True] * len(found)


def test_no_tile_size_changes_a_bit() -> None:
    x, weight = normal(MOST, 4096), weights(4096, 4096)
    found = []
    for index, product in enumerate(PRODUCTS):
        fitting = [one for one in CANDIDATES if one.shared_bytes(128, gated=product is gated_linear) <= 220_000]
        default = product(x, weight)
        for config in fitting[index :: len(PRODUCTS)]:  # a third each: compiling takes its time
            found.append(torch.equal(product(x, weight, config=config), default))  # type: ignore[call-arg]
    assert found == [True] * len(found)


def test_random_shapes_touch_nothing_else() -> None:
    chosen = random.Random(5)
    wrong = []
    for case in range(40):
        rows, outputs, in_features = chosen.randint(1, 300), 2 * chosen.randint(15, 1500), chosen.choice([8, 72, 576, 896, 4096])
        x = torch.full((rows + 2, in_features + 16), torch.nan, dtype=torch.bfloat16, device=cuda)[1:-1, 8:-8]
        weight = torch.full((outputs + 2, in_features + 16), torch.nan, dtype=torch.bfloat16, device=cuda)[1:-1, 8:-8]
        x.copy_(normal(rows, in_features, seed=case))
        weight.copy_(normal(outputs, in_features, seed=case + 99) * in_features**-0.5)
        exact = x.double() @ weight.double().t()
        for product, expected in ((thin_linear, exact), (gated_linear, gated(exact))):
            memory = torch.full((rows + 2, expected.shape[1] + 6), torch.nan, dtype=torch.bfloat16, device=cuda)
            out = memory[1:-1, 3:-3]
            found = error(product(x, weight, out=out), expected)
            out.fill_(torch.nan)
            if not (found < 4 * TOLERANCE[torch.bfloat16] and bool(memory.isnan().all())):
                wrong.append((case, product.__name__, rows, outputs, in_features, found))
    assert wrong == []


def test_the_same_bits_every_time_under_load() -> None:
    x, weight, norm = normal(64, 4096), weights(4096, 4096), normal(4096, seed=3)

    def once() -> tuple[Tensor, Tensor]:
        residual = normal(64, 4096, seed=4)
        return join_add_rmsnorm(split_linear(x, weight), residual, norm, 1e-5), gated_linear(x, weight)

    first = once()
    again = [once() for _ in range(20)]
    assert all(torch.equal(a[0], first[0]) and torch.equal(a[1], first[1]) for a in again)


def test_joining_parts_is_adding_their_sum() -> None:
    parts, norm = split_linear(normal(100, 4096), weights(4096, 4096)), normal(4096, seed=3)
    residual, expected_residual = (normal(100, 4096, seed=4) for _ in range(2))
    expected = add_rmsnorm(parts.sum(0).bfloat16(), expected_residual, norm, 1e-5)
    normed = join_add_rmsnorm(parts, residual, norm, 1e-5)
    assert len(parts) == 2 and torch.equal(normed, expected) and torch.equal(residual, expected_residual)


def test_weights_beyond_an_int32_of_values() -> None:
    weight = torch.empty(131_096, 16_384, dtype=torch.bfloat16, device=cuda)  # 2^31 values end with row 131071
    weight.fill_(torch.nan)
    wanted = torch.tensor([0, 131_071, 131_072, 131_095], device=cuda)
    weight[wanted] = normal(4, 16_384)
    x = normal(3, 16_384, seed=1)
    expected = x.double() @ weight[wanted].double().t()
    assert torch.allclose(thin_linear(x, weight)[:, wanted].double(), expected, rtol=1e-2, atol=1.0)


def test_replay_equals_eager_on_new_data() -> None:
    x, weight = normal(128, 4096), weights(4096, 4096)
    outs = [torch.empty(rows, 4096, dtype=torch.bfloat16, device=cuda) for rows in (1, 30, 128)]

    def step() -> None:
        for out in outs:
            thin_linear(x[: len(out)], weight, out=out)
            out[:, :2048] += gated_linear(x[: len(out)], weight)
            out += split_linear(x[: len(out)], weight).sum(0)

    graph = captured(step)
    x.copy_(normal(128, 4096, seed=7))
    weight.copy_(normal(4096, 4096, seed=8) / 64)
    graph.replay()
    replayed = [out.clone() for out in outs]
    step()
    assert all(torch.equal(a, b) for a, b in zip(replayed, outs, strict=True))


def test_a_warm_launch_allocates_nothing_and_compiles_nothing() -> None:
    x, weight = normal(MOST, 4096), weights(4096, 4096)
    out, parts = torch.empty_like(x), torch.empty(num_splits(4096, 4096) * MOST * 4096, device=cuda)

    def launches(rows: int) -> None:
        thin_linear(x[:rows], weight, out=out[:rows])
        split_linear(x[:rows], weight, parts=parts[: 2 * rows * 4096].view(2, rows, 4096))
        gated_linear(x[:rows], weight, out=out[:rows, :2048])

    for rows in (16, 32, 64, 128):
        launches(rows)
    before = allocations()
    with compilations() as compiled:
        for rows in (*range(1, 129, 5), 200, 300):
            launches(rows)
    assert (compiled, allocations() - before) == ([], 0)


@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_computes_the_same_whichever_kernel_takes_it(biased: bool) -> None:
    layer = Linear(1024, 4096, biased, torch.bfloat16, cuda)
    assert layer.weight is not None
    layer.weight.copy_(weights(4096, 1024))
    if layer.bias is not None:
        layer.bias.copy_(normal(4096, seed=2))
    layer.pack()
    x = normal(200, 1024)
    many = layer(x)
    close = [torch.allclose(layer(x[:n]).float(), many[:n].float(), rtol=2e-2, atol=5e-2) for n in (0, 1, 2, 64, 65, 128, 129)]
    ours = [torch.equal(layer(x[:n]), thin_linear(x[:n], layer.weight, layer.bias)) for n in (2, 64)]
    assert close == [True] * 7 and ours == [True] * 2


@pytest.mark.parametrize("biased", [False, True])
def test_the_fused_ops_are_the_layer_and_the_op_behind_it(biased: bool) -> None:
    layer = Linear(1024, 4096, biased, torch.bfloat16, cuda)
    assert layer.weight is not None
    layer.weight.copy_(weights(4096, 1024))
    if layer.bias is not None:
        layer.bias.copy_(normal(4096, seed=2))
    layer.pack()
    ops, norm, worst = triton_ops(), normal(4096, seed=3), 0.0
    for rows in (1, 2, 64, 65, 128, 129):
        x, residual, expected_residual = normal(rows, 1024), normal(rows, 4096, seed=4), normal(rows, 4096, seed=4)
        normed = ops.linear_add_rmsnorm(layer, x, residual, norm, 1e-5)
        expected = add_rmsnorm(layer(x), expected_residual, norm, 1e-5)
        worst = max(worst, error(normed, expected.double()), error(residual, expected_residual.double()))
        worst = max(worst, error(ops.linear_silu_mul(layer, x), silu_mul(layer(x)).double()))
    assert worst < 4e-3


@pytest.mark.parametrize("outputs, in_features, dtype", [(64, 60, torch.bfloat16), (64, 64, torch.float32)])
def test_a_weight_that_the_kernels_do_not_take_is_torchs(outputs: int, in_features: int, dtype: torch.dtype) -> None:
    layer = Linear(in_features, outputs, False, dtype, cuda)
    assert layer.weight is not None
    layer.weight.copy_(weights(outputs, in_features, dtype))
    layer.pack()
    x = normal(5, in_features, dtype=dtype)
    fused = layer.fused_weight(5)
    assert fused is None and torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight))
