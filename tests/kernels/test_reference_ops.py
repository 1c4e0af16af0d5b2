"""Norms, activation, rotary embedding with cache write, and block copies against their definitions in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlane.kernels.reference import add_rmsnorm, copy_blocks, plan_rope, rmsnorm, rope_norm_write, silu_mul

HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 16, 3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.double()


def rotate64(x: Tensor, angle: Tensor) -> Tensor:
    """Each pair (x[i], x[i + D/2]) as a complex number times e^(i angle)."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_add_rmsnorm_updates_the_residual_and_norms_it(dtype: torch.dtype) -> None:
    x, residual, weight = (random(5, 48, seed=i).to(dtype) for i in range(3))
    weight = weight[0]
    total = x + residual
    result = add_rmsnorm(x, residual, weight, 1e-5)
    error = (result.double() - norm64(total, weight, 1e-5)).abs().max() / norm64(total, weight, 1e-5).abs().max()
    assert torch.equal(residual, total) and float(error) < 2 * torch.finfo(dtype).eps


def test_rmsnorm_of_zeros_is_zero() -> None:
    assert torch.equal(rmsnorm(torch.zeros(2, 8), torch.ones(8), 1e-6), torch.zeros(2, 8))


def test_silu_mul_gates_the_second_half() -> None:
    gate_up = random(7, 24)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate / (1 + torch.exp(-gate)) * up
    assert torch.allclose(silu_mul(gate_up.clone()).double(), expected, atol=1e-6)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.data())
def test_rope_norm_write_changes_exactly_the_slots_it_names(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 32]))
    normed = data.draw(st.booleans())
    tokens = data.draw(st.integers(0, 12))
    num_blocks = 4
    free = list(range(block_size, num_blocks * block_size))
    slots = data.draw(st.permutations(free))[:tokens]
    slots = [-1 if data.draw(st.integers(0, 3)) == 0 else slot for slot in slots]
    positions = torch.tensor(data.draw(st.lists(st.integers(0, 63), min_size=tokens, max_size=tokens)), dtype=torch.int64)
    pool = torch.full((num_blocks, LAYERS, 2, KV_HEADS, block_size, DIM), float("nan"))
    pool[0] = 0.0
    expected = pool.clone()
    qkv = random(tokens, (HEADS + 2 * KV_HEADS) * DIM)
    angle = torch.arange(64).double().unsqueeze(1) * (10000.0 ** -(torch.arange(DIM // 2).double() / (DIM // 2)))
    q_norm, k_norm = (random(DIM, seed=3), random(DIM, seed=4)) if normed else (None, None)

    heads = qkv.view(tokens, HEADS + 2 * KV_HEADS, DIM)
    q, k, v = heads[:, :HEADS], heads[:, HEADS : HEADS + KV_HEADS], heads[:, HEADS + KV_HEADS :].clone()
    at = angle[positions].unsqueeze(1)
    want_q = rotate64(q if q_norm is None else norm64(q, q_norm, 1e-6), at)
    want_k = rotate64(k if k_norm is None else norm64(k, k_norm, 1e-6), at)
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // block_size, 1, 0, :, slot % block_size] = want_k[token].float()
            expected[slot // block_size, 1, 1, :, slot % block_size] = v[token]

    cos, sin = angle.cos().float(), angle.sin().float()
    mapping = torch.tensor(slots, dtype=torch.int64)
    got = rope_norm_write(qkv, positions, mapping, cos, sin, pool[:, 1], num_heads=HEADS, q_norm=q_norm, k_norm=k_norm)
    written = torch.allclose(pool, expected, atol=2e-5, equal_nan=True)
    assert written and torch.allclose(got.double(), want_q, atol=2e-5) and torch.equal(pool[0], torch.zeros_like(pool[0]))


def test_a_planned_step_gives_what_an_unplanned_one_gives() -> None:
    qkv = random(4, (HEADS + 2 * KV_HEADS) * DIM)
    cos, sin = random(64, DIM // 2, seed=5), random(64, DIM // 2, seed=6)
    positions, mapping = torch.tensor([3, 60, 0, 9]), torch.tensor([17, -1, 9, 30])
    pools = [torch.zeros(4, LAYERS, 2, KV_HEADS, 8, DIM) for _ in range(2)]
    plain = rope_norm_write(qkv.clone(), positions, mapping, cos, sin, pools[0][:, 1], num_heads=HEADS)
    step = plan_rope(positions, mapping, cos, sin, 8)
    planned = rope_norm_write(qkv.clone(), positions, mapping, cos, sin, pools[1][:, 1], num_heads=HEADS, step=step)
    assert torch.equal(plain, planned) and torch.equal(pools[0], pools[1]) and bool(pools[0].any())


def test_rope_in_half_precision_rotates_in_float32() -> None:
    qkv = random(3, (HEADS + 2 * KV_HEADS) * DIM).half()
    angle = torch.arange(8).double().unsqueeze(1) * torch.linspace(0.1, 1.0, DIM // 2).double()
    q = qkv.view(3, -1, DIM)[:, :HEADS].clone()
    positions = torch.tensor([1, 5, 7])
    pool = torch.zeros(2, 2, KV_HEADS, 8, DIM, dtype=torch.float16)
    got = rope_norm_write(
        qkv, positions, torch.tensor([-1, -1, -1]), angle.cos().float(), angle.sin().float(), pool, num_heads=HEADS
    )
    expected = rotate64(q, angle[positions].unsqueeze(1))
    assert float((got.double() - expected).abs().max()) < 2e-3


def test_copy_blocks_reads_every_source_before_it_writes() -> None:
    pool = random(6, 2, 2, 1, 4, 8)
    before = pool.clone()
    copy_blocks(pool, torch.tensor([[1, 2], [2, 3], [3, 1]]))
    expected = before[[0, 3, 1, 2, 4, 5]]
    assert torch.equal(pool, expected)


def test_copying_nothing_changes_nothing() -> None:
    pool = random(3, 2, 2, 1, 4, 8)
    before = pool.clone()
    copy_blocks(pool, torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(pool, before)
