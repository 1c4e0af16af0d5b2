"""RMSNorm and the gated activation on the device: bfloat16, real widths, in place under load, the same bits in any company, graph
replay, and launches that neither allocate nor compile again."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from device import cuda
from fairlane.kernels import reference
from fairlane.kernels.add_rmsnorm import CANDIDATES as NORM_CANDIDATES
from fairlane.kernels.add_rmsnorm import NormConfig, add_rmsnorm, gather_add_rmsnorm, rmsnorm
from fairlane.kernels.silu_mul import CANDIDATES as SILU_CANDIDATES
from fairlane.kernels.silu_mul import SiluConfig, silu_mul
from launches import allocations, captured, compilations, normal

EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def norm64(x: Tensor, weight: Tensor) -> Tensor:
    """The definition in float64, rounded to x's dtype after the division and after the weight."""
    wide = x.double()
    normed = wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + EPS)
    return (normed.to(x.dtype).double() * weight.double()).to(x.dtype)


def gated64(gate_up: Tensor) -> Tensor:
    """The definition in float64, rounded after the activation and after the product."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return ((gate / (1 + torch.exp(-gate))).to(gate_up.dtype).double() * up).to(gate_up.dtype)


def agrees(got: Tensor, expected: Tensor) -> bool:
    """Float32: to a few ulps. 16 bits: bit by bit but for the odd value that float32 arithmetic rounds the other way."""
    if got.dtype == torch.float32:
        return torch.allclose(got, expected, rtol=4e-6, atol=1e-6)
    near = torch.allclose(got.double(), expected.double(), rtol=3 * torch.finfo(got.dtype).eps, atol=1e-6)
    return near and float((got == expected).double().mean()) > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 4096, 5120, 16384])
def test_the_residual_takes_the_sum_and_that_is_normed(width: int, dtype: torch.dtype) -> None:
    x, residual, weight = (normal(*s, seed=i, dtype=dtype) for i, s in enumerate([(37, width), (37, width), (width,)]))
    total = x + residual
    got = add_rmsnorm(x, residual, weight, EPS, out=torch.full_like(x, float("nan")))
    assert torch.equal(residual, total) and agrees(got, norm64(total, weight)) and agrees(rmsnorm(total, weight, EPS), got)


@pytest.mark.parametrize("config", NORM_CANDIDATES)
def test_every_candidate_norms_correctly(config: NormConfig) -> None:
    x, residual, weight = normal(5, 4096), normal(5, 4096, seed=1), normal(4096, seed=2)
    expected = norm64(x + residual, weight)
    assert agrees(add_rmsnorm(x, residual, weight, EPS, config=config), expected)


def test_gathering_equals_selecting_first_and_pads_with_zeros() -> None:
    x, residual, weight = normal(300, 4096), normal(300, 4096, seed=1), normal(4096, seed=2)
    rows = torch.tensor([299, 0, 17, 17, -1, 255], device=cuda)
    got, total = gather_add_rmsnorm(x, residual, rows, weight, EPS)
    expected_total = (x + residual)[rows]
    expected_total[4] = 0
    expected = add_rmsnorm(x, residual, weight, EPS)[rows]
    expected[4] = 0
    assert torch.equal(total, expected_total) and torch.equal(got, expected)


def test_in_place_under_load_equals_out_of_place() -> None:
    x, residual, weight = normal(8192, 4096), normal(8192, 4096, seed=1), normal(4096, seed=2)
    kept = residual.clone()
    expected = add_rmsnorm(x, kept, weight, EPS)
    same = []
    for _ in range(10):
        into, stream = x.clone(), residual.clone()
        add_rmsnorm(into, stream, weight, EPS, out=into)
        same.append(torch.equal(into, expected) and torch.equal(stream, kept))
    assert same == [True] * 10


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, residual, weight = normal(513, 4096), normal(513, 4096, seed=1), normal(4096, seed=2)
    order = torch.randperm(513, device=cuda)
    expected = add_rmsnorm(x, residual.clone(), weight, EPS)
    permuted = add_rmsnorm(x[order], residual[order], weight, EPS)
    alone = add_rmsnorm(x[7:8].clone(), residual[7:8].clone(), weight, EPS)
    assert torch.equal(permuted, expected[order]) and torch.equal(alone, expected[7:8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1536, 11008, 14336])
def test_gates_each_value(width: int, dtype: torch.dtype) -> None:
    gate_up = normal(33, 2 * width, dtype=dtype) * 3
    got = silu_mul(gate_up, out=torch.full((33, width), float("nan"), dtype=dtype, device=cuda))
    assert agrees(got, gated64(gate_up)) and agrees(got, reference.silu_mul(gate_up.clone()))


@pytest.mark.parametrize("config", SILU_CANDIDATES)
def test_every_candidate_gates_the_same(config: SiluConfig) -> None:
    gate_up = normal(5, 2 * 14336)
    assert torch.equal(silu_mul(gate_up, config=config), silu_mul(gate_up))


def test_gates_beyond_an_int32_of_values_and_in_place() -> None:
    gate_up = torch.empty(76000, 28672, dtype=torch.bfloat16, device=cuda)  # 2.18e9 values
    gate_up.fill_(float("nan"))
    wanted = [0, 74898, 74899, 75999]  # 2^31 lies in row 74898
    gate_up[wanted] = normal(4, 28672)
    expected = gated64(gate_up[wanted])
    silu_mul(gate_up, out=gate_up[:, :14336])
    assert agrees(gate_up[wanted][:, :14336], expected)


def test_random_shapes_agree() -> None:
    chosen = random.Random(7)
    wrong = []
    for case in range(60):
        rows, width = chosen.randint(1, 700), chosen.choice([576, 1000, 4096])
        x, residual, weight = normal(rows, width, seed=case), normal(rows, width, seed=case + 99), normal(width, seed=case)
        total, gate_up = x + residual, torch.cat([x, residual], dim=1)
        normed = add_rmsnorm(x, residual, weight, EPS)
        right = agrees(normed, norm64(total, weight)) and torch.equal(residual, total)
        if not (right and agrees(silu_mul(gate_up), gated64(gate_up))):
            wrong.append((case, rows, width))
    assert wrong == []


def test_replay_equals_eager_on_new_data() -> None:
    x, residual, weight, gate_up = normal(64, 4096), normal(64, 4096, seed=1), normal(4096, seed=2), normal(64, 8192, seed=3)
    out, gathered, total, gated = (torch.empty_like(x) for _ in range(4))
    rows = torch.arange(64, device=cuda)

    def step() -> None:
        add_rmsnorm(x, residual, weight, EPS, out=out)
        gather_add_rmsnorm(x, residual, rows, weight, EPS, out=gathered, residual_out=total)
        silu_mul(gate_up, out=gated)

    graph = captured(step)
    fresh = normal(64, 4096, seed=10), normal(64, 4096, seed=11), normal(64, 8192, seed=12)
    rows.copy_(torch.randperm(64, device=cuda))
    for buffer, values in zip((x, residual, gate_up), fresh, strict=True):
        buffer.copy_(values)
    graph.replay()
    replayed = [t.clone() for t in (residual, out, gathered, total, gated)]
    for buffer, values in zip((x, residual, gate_up), fresh, strict=True):
        buffer.copy_(values)
    step()
    assert all(torch.equal(a, b) for a, b in zip(replayed, (residual, out, gathered, total, gated), strict=True))


def test_a_warm_launch_allocates_nothing_and_compiles_nothing() -> None:
    x, residual, weight, gate_up = normal(64, 4096), normal(64, 4096, seed=1), normal(4096, seed=2), normal(64, 8192)
    out, gathered, total = (torch.empty_like(x) for _ in range(3))
    rows = torch.arange(64, device=cuda)

    def step(n: int) -> None:
        rmsnorm(x[:n], weight, EPS, out=out[:n])
        add_rmsnorm(x[:n], residual[:n], weight, EPS, out=out[:n])
        gather_add_rmsnorm(x, residual, rows[64 - n :], weight, EPS, out=gathered[:n], residual_out=total[:n])
        silu_mul(gate_up[:n], out=out[:n])

    step(64)
    before = allocations()
    with compilations() as compiled:
        for n in (1, 2, 7, 16, 33, 63):
            step(n)
    assert (compiled, allocations() - before) == ([], 0)
