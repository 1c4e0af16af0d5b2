"""The linear layers of few rows on the device: real shapes, the same bits in any company, graph replay, launches that neither
allocate nor compile again, and the layer that takes them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from device import cuda
from fairlane.kernels.skinny_linear import CANDIDATES, DOTS, MAX_VECTOR_ROWS, SkinnyConfig, config_for, skinny_linear
from fairlane.worker.linear import Linear, skinny_rows
from launches import allocations, captured, compilations, normal

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-6}
SHAPES = [(6144, 4096), (4096, 14336), (1024, 2048), (1024, 3072), (577, 1000)]  # outputs, K


def error(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """The worst row's ||error|| / ||exact||; NaN where a result is."""
    exact = x.double() @ weight.double().t()
    exact = exact if bias is None else exact + bias.double()
    return float(((got.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())


@pytest.mark.parametrize("outputs, in_features", SHAPES)
def test_agrees_with_the_product(outputs: int, in_features: int) -> None:
    weight, bias = normal(outputs, in_features, seed=1), normal(outputs, seed=2)
    errors = []
    for rows in (1, 2, 3, 8):
        x, out = normal(rows, in_features), torch.full((rows, outputs), torch.nan, dtype=torch.bfloat16, device=cuda)
        errors.append(error(skinny_linear(x, weight, out=out), x, weight))
        errors.append(error(skinny_linear(x, weight, bias), x, weight, bias))
    assert [found for found in errors if not found < TOLERANCE[torch.bfloat16]] == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_agrees_in_other_types(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = normal(rows, 1000, dtype=dtype), normal(577, 1000, seed=1, dtype=dtype), normal(577, seed=2, dtype=dtype)
    assert error(skinny_linear(x, weight, bias), x, weight, bias) < TOLERANCE[dtype]


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_agrees(config: SkinnyConfig) -> None:
    x, weight = normal(8 if config.dots else MAX_VECTOR_ROWS, 4096), normal(1000, 4096, seed=1)
    assert error(skinny_linear(x, weight, config=config), x, weight) < TOLERANCE[torch.bfloat16]


def test_random_shapes_touch_nothing_else() -> None:
    chosen = random.Random(5)
    wrong = []
    for case in range(40):
        rows, outputs, in_features = chosen.randint(1, 8), chosen.randint(30, 3000), chosen.choice([8, 72, 576, 896, 4096])
        x = torch.full((rows + 2, in_features + 16), torch.nan, dtype=torch.bfloat16, device=cuda)[1:-1, 8:-8]
        weight = torch.full((outputs + 2, in_features + 16), torch.nan, dtype=torch.bfloat16, device=cuda)[1:-1, 8:-8]
        memory = torch.full((rows + 2, outputs + 6), torch.nan, dtype=torch.bfloat16, device=cuda)
        x.copy_(normal(rows, in_features, seed=case))
        weight.copy_(normal(outputs, in_features, seed=case + 99))
        out = memory[1:-1, 3:-3]
        found = error(skinny_linear(x, weight, out=out), x, weight)
        out.fill_(torch.nan)
        if not (found < 2 * TOLERANCE[torch.bfloat16] and bool(memory.isnan().all())):
            wrong.append((case, rows, outputs, in_features, found))
    assert wrong == []


@pytest.mark.parametrize("outputs, in_features", SHAPES)
def test_a_row_has_the_same_bits_in_any_company(outputs: int, in_features: int) -> None:
    x, weight = normal(8, in_features), normal(outputs, in_features, seed=1)
    for config, most in ((config_for(1, outputs, in_features), MAX_VECTOR_ROWS), (DOTS, 8)):
        alone = torch.cat([skinny_linear(x[i : i + 1], weight, config=config) for i in range(most)])
        same = [torch.equal(skinny_linear(x[:n], weight, config=config), alone[:n]) for n in range(1, most + 1)]
        backwards = skinny_linear(x[:most].flip(0), weight, config=config).flip(0)
        assert same == [True] * most and torch.equal(backwards, alone)


def test_the_same_bits_every_time_under_load() -> None:
    x, weight = normal(8, 4096), normal(6144, 4096, seed=1)
    first = skinny_linear(x[:1], weight), skinny_linear(x, weight)
    again = [(skinny_linear(x[:1], weight), skinny_linear(x, weight)) for _ in range(20)]
    assert all(torch.equal(a, first[0]) and torch.equal(b, first[1]) for a, b in again)


def test_weights_beyond_an_int32_of_values() -> None:
    weight = torch.empty(131_096, 16_384, dtype=torch.bfloat16, device=cuda)  # 2^31 values end with row 131071
    weight.fill_(torch.nan)
    wanted = torch.tensor([0, 131_071, 131_072, 131_095], device=cuda)
    weight[wanted] = normal(4, 16_384)
    x = normal(3, 16_384, seed=1)
    few, more = skinny_linear(x[:1], weight)[:, wanted], skinny_linear(x, weight)[:, wanted]
    expected = x.double() @ weight[wanted].double().t()
    assert torch.allclose(few.double(), expected[:1], rtol=1e-2, atol=1.0) and torch.allclose(
        more.double(), expected, rtol=1e-2, atol=1.0
    )


def test_replay_equals_eager_on_new_data() -> None:
    x, weight, bias = normal(8, 4096), normal(6144, 4096, seed=1), normal(6144, seed=2)
    outs = [torch.empty(rows, 6144, dtype=torch.bfloat16, device=cuda) for rows in (1, 2, 8)]

    def step() -> None:
        for out in outs:
            skinny_linear(x[: len(out)], weight, bias, out=out)

    graph = captured(step)
    x.copy_(normal(8, 4096, seed=7))
    weight.copy_(normal(6144, 4096, seed=8))
    graph.replay()
    replayed = [out.clone() for out in outs]
    step()
    assert all(torch.equal(a, b) for a, b in zip(replayed, outs, strict=True))


def test_a_warm_launch_allocates_nothing_and_compiles_nothing() -> None:
    x, weight = normal(8, 4096), normal(4096, 4096, seed=1)
    out = torch.empty(8, 4096, dtype=torch.bfloat16, device=cuda)
    for rows in (1, 2, 8):
        skinny_linear(x[:rows], weight, out=out[:rows])
    before = allocations()
    with compilations() as compiled:
        for rows in range(1, 9):
            skinny_linear(x[:rows], weight, out=out[:rows])
    assert (compiled, allocations() - before) == ([], 0)


@pytest.mark.parametrize("biased", [False, True])
def test_a_layer_of_few_rows_computes_what_many_rows_do(biased: bool) -> None:
    layer = Linear(1024, 4096, biased, torch.bfloat16, cuda)
    assert layer.weight is not None
    layer.weight.copy_(normal(4096, 1024, seed=1))
    if layer.bias is not None:
        layer.bias.copy_(normal(4096, seed=2))
    layer.pack()
    most = skinny_rows(layer.weight)
    x = normal(16, 1024)
    many = layer(x)
    close = [torch.allclose(layer(x[:n]).float(), many[:n].float(), rtol=2e-2, atol=0.2) for n in range(17)]
    ours = [torch.equal(layer(x[:n]), skinny_linear(x[:n], layer.weight, layer.bias)) for n in range(1, most + 1)]
    assert most >= 1 and close == [True] * 17 and ours == [True] * most


@pytest.mark.parametrize(
    "outputs, in_features, dtype", [(128_256, 4096, torch.bfloat16), (64, 60, torch.bfloat16), (64, 64, torch.float32)]
)
def test_a_layer_that_the_kernel_does_not_suit_is_not_given_to_it(outputs: int, in_features: int, dtype: torch.dtype) -> None:
    assert skinny_rows(torch.empty(outputs, in_features, dtype=dtype, device=cuda)) == 0
