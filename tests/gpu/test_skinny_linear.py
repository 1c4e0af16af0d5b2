"""The linear layers of one row on the device: real shapes, the same bits every time, graph replay, launches that neither allocate
nor compile again."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from device import cuda
from fairlane.kernels.skinny_linear import CANDIDATES, SkinnyConfig, skinny_linear
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
    weight, bias, x = normal(outputs, in_features, seed=1), normal(outputs, seed=2), normal(1, in_features)
    out = torch.full((1, outputs), torch.nan, dtype=torch.bfloat16, device=cuda)
    errors = [error(skinny_linear(x, weight, out=out), x, weight), error(skinny_linear(x, weight, bias), x, weight, bias)]
    assert [found for found in errors if not found < TOLERANCE[torch.bfloat16]] == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_agrees_in_other_types(dtype: torch.dtype) -> None:
    x, weight, bias = normal(1, 1000, dtype=dtype), normal(577, 1000, seed=1, dtype=dtype), normal(577, seed=2, dtype=dtype)
    assert error(skinny_linear(x, weight, bias), x, weight, bias) < TOLERANCE[dtype]


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_agrees(config: SkinnyConfig) -> None:
    x, weight = normal(1, 4096), normal(1000, 4096, seed=1)
    assert error(skinny_linear(x, weight, config=config), x, weight) < TOLERANCE[torch.bfloat16]


def test_random_shapes_touch_nothing_else() -> None:
    chosen = random.Random(5)
    wrong = []
    for case in range(40):
        outputs, in_features = chosen.randint(30, 3000), chosen.choice([8, 72, 576, 896, 4096])
        x = torch.full((3, in_features + 16), torch.nan, dtype=torch.bfloat16, device=cuda)[1:-1, 8:-8]
        weight = torch.full((outputs + 2, in_features + 16), torch.nan, dtype=torch.bfloat16, device=cuda)[1:-1, 8:-8]
        memory = torch.full((3, outputs + 6), torch.nan, dtype=torch.bfloat16, device=cuda)
        x.copy_(normal(1, in_features, seed=case))
        weight.copy_(normal(outputs, in_features, seed=case + 99))
        out = memory[1:-1, 3:-3]
        found = error(skinny_linear(x, weight, out=out), x, weight)
        out.fill_(torch.nan)
        if not (found < 2 * TOLERANCE[torch.bfloat16] and bool(memory.isnan().all())):
            wrong.append((case, outputs, in_features, found))
    assert wrong == []


def test_the_same_bits_every_time_under_load() -> None:
    x, weight = normal(1, 4096), normal(6144, 4096, seed=1)
    first = skinny_linear(x, weight)
    again = [skinny_linear(x, weight) for _ in range(40)]
    assert all(torch.equal(one, first) for one in again)


def test_weights_beyond_an_int32_of_values() -> None:
    weight = torch.empty(131_096, 16_384, dtype=torch.bfloat16, device=cuda)  # 2^31 values end with row 131071
    weight.fill_(torch.nan)
    wanted = torch.tensor([0, 131_071, 131_072, 131_095], device=cuda)
    weight[wanted] = normal(4, 16_384)
    x = normal(1, 16_384, seed=1)
    found, expected = skinny_linear(x, weight)[:, wanted], x.double() @ weight[wanted].double().t()
    assert torch.allclose(found.double(), expected, rtol=1e-2, atol=1.0)


def test_replay_equals_eager_on_new_data() -> None:
    x, weight, bias = normal(1, 4096), normal(6144, 4096, seed=1), normal(6144, seed=2)
    out = torch.empty(1, 6144, dtype=torch.bfloat16, device=cuda)
    graph = captured(lambda: skinny_linear(x, weight, bias, out=out))
    x.copy_(normal(1, 4096, seed=7))
    weight.copy_(normal(6144, 4096, seed=8))
    graph.replay()
    assert torch.equal(out.clone(), skinny_linear(x, weight, bias))


def test_a_warm_launch_allocates_nothing_and_compiles_nothing() -> None:
    x, weight = normal(1, 4096), normal(4096, 4096, seed=1)
    out = torch.empty(1, 4096, dtype=torch.bfloat16, device=cuda)
    skinny_linear(x, weight, out=out)
    before = allocations()
    with compilations() as compiled:
        skinny_linear(x, weight, out=out)
    assert (compiled, allocations() - before) == ([], 0)
