"""Rope, norm and the cache write on the device: bfloat16 against the reference over poisoned pools, block ids beyond an int32,
tokens that do not know of each other, graph replay with padding, and launches that neither allocate nor compile again."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from triton import knobs

from device import cuda
from fairlane.kernels import reference
from fairlane.kernels.rope_norm_write import CANDIDATES, RopeConfig, rope_norm_write
from launches import captured, normal

LAYERS, LAYER, POSITIONS = 3, 1, 4096


@dataclass(frozen=True, slots=True)
class Case:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    normed: bool
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @property
    def num_blocks(self) -> int:
        return 2 + 2 * self.tokens // self.block_size

    def pool(self) -> Tensor:
        """NaN everywhere but in the null block."""
        shape = (self.num_blocks, LAYERS, 2, self.num_kv_heads, self.block_size, self.head_dim)
        pool = torch.full(shape, float("nan"), dtype=self.dtype, device=cuda)
        pool[0] = 0
        return pool

    def qkv(self) -> Tensor:
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return normal(self.tokens, width, seed=self.seed, dtype=self.dtype)

    def slots(self) -> Tensor:
        """Shuffled over all blocks but the null block; every fifth row is padding."""
        generator = torch.Generator().manual_seed(self.seed)
        usable = (self.num_blocks - 1) * self.block_size
        slots = torch.randperm(usable, generator=generator)[: self.tokens] + self.block_size
        slots[4::5] = -1
        return slots.to(cuda)

    def positions(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.where(self.slots() < 0, 0, torch.randint(POSITIONS, (self.tokens,), generator=generator).to(cuda))

    def norms(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.normed:
            return None, None
        return normal(self.head_dim, seed=5, dtype=self.dtype), normal(self.head_dim, seed=6, dtype=self.dtype)

    def tables(self) -> tuple[Tensor, Tensor]:
        half = self.head_dim // 2
        angles = torch.arange(POSITIONS).double().unsqueeze(1) * (10000.0 ** -(torch.arange(half).double() / half))
        return angles.cos().float().to(cuda), angles.sin().float().to(cuda)


def both(case: Case, config: RopeConfig | None = None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(qkv, pool) after the kernel, and after the reference."""
    q_norm, k_norm = case.norms()
    cos, sin = case.tables()
    shared = {"num_heads": case.num_heads, "q_norm": q_norm, "k_norm": k_norm}
    where = case.positions(), case.slots()
    got, expected = (case.qkv(), case.pool()), (case.qkv(), case.pool())
    rope_norm_write(got[0], *where, cos, sin, got[1][:, LAYER], **shared, config=config)
    reference.rope_norm_write(expected[0], *where, cos, sin, expected[1][:, LAYER], **shared)
    return got, expected


def agrees(got: Tensor, expected: Tensor) -> bool:
    """NaN where NaN is expected; else equal, but for the odd value that rounds the other way, by an ulp of its head's largest."""
    bound = 2e-5 if got.dtype == torch.float32 else 4 * torch.finfo(got.dtype).eps
    scale = float(expected.nan_to_num(0).abs().max())
    near = torch.allclose(got.double(), expected.double(), rtol=0, atol=bound * scale, equal_nan=True)
    share = float(((got == expected) | (got.isnan() & expected.isnan())).double().mean())
    return near and (got.dtype == torch.float32 or share > 0.99)


CASES = [
    Case(32, 8, 128, 16, False, 33),
    Case(32, 8, 128, 16, True, 33),
    Case(9, 3, 64, 16, False, 40),
    Case(14, 2, 64, 32, False, 7),
    Case(32, 32, 80, 16, False, 21),
    Case(24, 8, 96, 8, True, 21),
    Case(8, 4, 256, 64, True, 70),
    Case(5, 1, 16, 8, True, 70),
    Case(32, 8, 128, 16, True, 33, torch.float16),
    Case(32, 8, 80, 16, True, 33, torch.float32),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference_over_the_whole_pool(case: Case) -> None:
    got, expected = both(case)
    written = int((~got[1][:, LAYER].isnan()).any(-1).sum())
    slots = int((case.slots() >= 0).sum()) + case.block_size
    assert agrees(got[0], expected[0]) and agrees(got[1], expected[1])
    assert not bool(got[1][0].any()) and written == slots * 2 * case.num_kv_heads


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_equals_the_reference(config: RopeConfig) -> None:
    got, expected = both(Case(32, 8, 128, 16, True, 19), config)
    assert agrees(got[0], expected[0]) and agrees(got[1], expected[1])


def test_random_steps_equal_the_reference() -> None:
    chosen = random.Random(3)
    wrong = []
    for seed in range(60):
        shape = chosen.choice(CASES[:4])
        case = Case(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, shape.normed, chosen.randint(1, 600), seed=seed
        )
        got, expected = both(case)
        if not (agrees(got[0], expected[0]) and agrees(got[1], expected[1])):
            wrong.append(case)
    assert wrong == []


def test_a_long_step_is_the_same_ten_times_over() -> None:
    case = Case(32, 8, 128, 16, True, 4096)
    first, expected = both(case)
    again = [both(case)[0] for _ in range(9)]
    same = [torch.equal(q, first[0]) and torch.equal(pool.nan_to_num(7), first[1].nan_to_num(7)) for q, pool in again]
    assert agrees(first[0], expected[0]) and same == [True] * 9


def test_blocks_beyond_an_int32_of_values() -> None:
    # A block of this shape is 2^20 values: block 2048 starts at 2^31, block 4199 beyond 2^32.
    pool = torch.full((4200, 32, 2, 8, 16, 128), float("nan"), dtype=torch.bfloat16, device=cuda)
    pool[0] = 0
    blocks, case = torch.tensor([2047, 2048, 4096, 4199], device=cuda), Case(32, 8, 128, 16, False, 4)
    qkv, (cos, sin) = case.qkv(), case.tables()
    positions = torch.tensor([5, 6, 7, 8], device=cuda)
    rope_norm_write(qkv, positions, blocks * 16 + 3, cos, sin, pool[:, 31], num_heads=32)
    heads = qkv.view(4, 48, 128)
    stored = pool[blocks, 31, :, :, 3]
    right = torch.equal(stored[:, 0], heads[:, 32:40]) and torch.equal(stored[:, 1], heads[:, 40:])
    pool[blocks, 31, :, :, 3] = float("nan")
    assert right and not bool(pool[0].any()) and bool(pool[1:].isnan().all())


def test_a_token_has_the_same_bits_in_any_company() -> None:
    case = Case(32, 8, 128, 16, True, 257)
    (whole, pool), _ = both(case)
    (q_norm, k_norm), (cos, sin) = case.norms(), case.tables()
    order = torch.randperm(257, device=cuda)
    shuffled, other = case.qkv()[order], case.pool()
    rope_norm_write(
        shuffled, case.positions()[order], case.slots()[order], cos, sin, other[:, LAYER],
        num_heads=32, q_norm=q_norm, k_norm=k_norm,
    )  # fmt: skip
    assert torch.equal(shuffled, whole[order]) and torch.equal(other.nan_to_num(7), pool.nan_to_num(7))


def test_replay_equals_eager_with_a_new_number_of_padding_rows() -> None:
    case = Case(32, 8, 128, 16, False, 32)
    cos, sin = case.tables()
    qkv, pool, positions, slots = case.qkv(), case.pool(), case.positions(), case.slots()

    def step() -> None:
        rope_norm_write(qkv, positions, slots, cos, sin, pool[:, LAYER], num_heads=32)

    graph = captured(step)
    results = []
    for launch in (graph.replay, step):
        qkv.copy_(normal(*qkv.shape, seed=9))
        slots.copy_(torch.where(torch.arange(32, device=cuda) < 21, torch.arange(32, device=cuda) + 16, -1))
        positions.copy_(torch.where(slots < 0, 0, slots))
        pool.fill_(float("nan"))
        launch()
        results.append((qkv.clone(), pool.nan_to_num(7)))
    untouched = int((results[0][1][:, LAYER] == 7).all(-1).sum())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert untouched == (pool.shape[0] * 16 - 21) * 16


def test_a_warm_launch_allocates_nothing_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(32, 8, 128, 16, False, 64)
    cos, sin = case.tables()
    qkv, pool, positions, slots = case.qkv(), case.pool(), case.positions(), case.slots()
    view, compiled = pool[:, LAYER], []

    def step(begin: int, end: int) -> None:
        rope_norm_write(qkv[begin:end], positions[begin:end], slots[begin:end], cos, sin, view, num_heads=32)

    step(0, 64)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **what: compiled.append(what["fn"].name))
    for begin, end in ((0, 1), (1, 2), (3, 64), (5, 21), (8, 9)):
        step(begin, end)
    assert (compiled, torch.cuda.memory_stats()["allocation.all.allocated"] - before) == ([], 0)
