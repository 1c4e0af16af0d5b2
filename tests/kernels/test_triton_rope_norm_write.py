"""The rope + norm + cache write kernel, run by Triton's interpreter, against the definition in float64, over poisoned pools whose
every byte is compared: exactly the named slots change, in exactly this layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels.rope_norm_write import CANDIDATES, RopeConfig, default_config, rope_norm_write

COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: too much for huge ones
LAYERS, LAYER, POSITIONS, EPS = 3, 1, 64, 1e-6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, slots=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 8
    num_blocks: int = 5

    @property
    def all_heads(self) -> int:
        return self.num_heads + 2 * self.num_kv_heads

    def pool(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """NaN everywhere but in the null block."""
        shape = (self.num_blocks, LAYERS, 2, self.num_kv_heads, self.block_size, self.head_dim)
        pool = torch.full(shape, float("nan"), dtype=dtype)
        pool[0] = 0.0
        return pool

    def qkv(self, tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return random(tokens, self.all_heads * self.head_dim).to(dtype)

    def angles(self) -> Tensor:
        """Float64 [P, D / 2]."""
        half = self.head_dim // 2
        return torch.arange(POSITIONS).double().unsqueeze(1) * (10000.0 ** -(torch.arange(half).double() / half))


def norm64(x: Tensor, weight: Tensor | None) -> Tensor:
    """Float64, rounded to x's dtype after the division and after the weight."""
    if weight is None:
        return x.double()
    wide = x.double()
    normed = (wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + EPS)).to(x.dtype)
    return (normed.double() * weight.double()).to(x.dtype).double()


def rotate64(x: Tensor, angle: Tensor) -> Tensor:
    """Each pair (x[i], x[i + D/2]) as a complex number times e^(i angle)."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag], dim=-1)


@dataclass(frozen=True, slots=True)
class Expected:
    qkv: Tensor
    pool: Tensor


def expect(
    shape: Shape, qkv: Tensor, positions: list[int], slots: list[int], pool: Tensor, norms: tuple[Tensor | None, Tensor | None]
) -> Expected:
    """What qkv and the pool hold afterwards, slot by slot."""
    heads = qkv.clone().view(len(slots), shape.all_heads, shape.head_dim)
    k_first, v_first = shape.num_heads, shape.num_heads + shape.num_kv_heads
    at = shape.angles()[positions].unsqueeze(1)
    heads[:, :k_first] = rotate64(norm64(heads[:, :k_first], norms[0]), at).to(qkv.dtype)
    heads[:, k_first:v_first] = rotate64(norm64(heads[:, k_first:v_first], norms[1]), at).to(qkv.dtype)
    after = pool.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            block, offset = slot // shape.block_size, slot % shape.block_size
            after[block, LAYER, 0, :, offset] = heads[token, k_first:v_first].to(pool.dtype)
            after[block, LAYER, 1, :, offset] = heads[token, v_first:].to(pool.dtype)
    return Expected(heads.view(len(slots), -1), after)


def run(
    shape: Shape, qkv: Tensor, positions: list[int], slots: list[int], pool: Tensor,
    norms: tuple[Tensor | None, Tensor | None] = (None, None), config: RopeConfig | None = None,
    position_dtype: torch.dtype = torch.int64,
) -> Tensor:  # fmt: skip
    angles = shape.angles()
    where = torch.tensor(positions, dtype=position_dtype), torch.tensor(slots, dtype=torch.int64)
    q_norm, k_norm = norms
    return rope_norm_write(
        qkv, *where, angles.cos().float(), angles.sin().float(), pool[:, LAYER],
        num_heads=shape.num_heads, q_norm=q_norm, k_norm=k_norm, eps=EPS, config=config,
    )  # fmt: skip


def matches(got: Tensor, expected: Tensor, atol: float) -> bool:
    return torch.allclose(got.double(), expected.double(), rtol=1e-5, atol=atol, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_changes_exactly_the_slots_it_names(data: st.DataObject) -> None:
    num_heads, num_kv_heads = data.draw(st.sampled_from([(1, 1), (3, 1), (4, 2), (9, 3), (5, 5)]))
    head_dim = data.draw(st.sampled_from([16, 64, 80, 96]))
    shape = Shape(num_heads, num_kv_heads, head_dim, data.draw(st.sampled_from([8, 16, 32])))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    tokens = data.draw(st.integers(1, 4))
    slots = data.draw(st.permutations(range(shape.block_size, shape.num_blocks * shape.block_size)))[:tokens]
    padding = data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    slots = [-1 if padded else slot for slot, padded in zip(slots, padding, strict=True)]
    positions = [0 if padded else data.draw(st.integers(0, POSITIONS - 1)) for padded in padding]
    norms = tuple(random(head_dim, seed=i).to(dtype) if data.draw(st.booleans()) else None for i in (3, 4))
    qkv, pool = shape.qkv(tokens, dtype), shape.pool(dtype)
    expected = expect(shape, qkv, positions, slots, pool, (norms[0], norms[1]))
    position_dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    q = run(shape, qkv, positions, slots, pool, (norms[0], norms[1]), position_dtype=position_dtype)
    atol = 1e-5 if dtype == torch.float32 else 4e-3  # an ulp of the largest value
    assert matches(pool, expected.pool, atol) and matches(qkv, expected.qkv, atol)
    assert torch.equal(pool[0], torch.zeros_like(pool[0])) and q.data_ptr() == qkv.data_ptr()
    assert q.shape == (tokens, num_heads, head_dim)


def test_v_and_what_is_not_written_keep_their_bits() -> None:
    shape = Shape(head_dim=80)
    qkv, pool = shape.qkv(3), shape.pool()
    v = qkv[:, -2 * 80 :].clone().view(3, 2, 80)
    run(shape, qkv, [7, 1, 0], [33, 14, -1], pool)
    assert torch.equal(pool[4, LAYER, 1, :, 1], v[0]) and torch.equal(pool[1, LAYER, 1, :, 6], v[1])
    assert torch.equal(qkv[:, -2 * 80 :].view(3, 2, 80), v)


@pytest.mark.parametrize("slot", [-1, -2, -9])
def test_a_padding_row_leaves_the_cache_alone(slot: int) -> None:
    shape = Shape()
    pool = torch.zeros_like(shape.pool())
    q = run(shape, shape.qkv(2), [0, 0], [slot, slot], pool)
    assert not bool(pool.any()) and bool(q.isfinite().all())


def test_position_zero_without_norms_changes_nothing_but_the_cache() -> None:
    shape = Shape()
    qkv = shape.qkv(2)
    before = qkv.clone()
    run(shape, qkv, [0, 0], [9, -1], shape.pool())
    assert torch.equal(qkv, before)


def test_half_precision_rounds_where_the_reference_does() -> None:
    # Rounding once instead of twice in the norm changes a good part of the values by an ulp.
    shape = Shape(num_heads=8, num_kv_heads=4, head_dim=64)
    norms = random(64, seed=3).half(), random(64, seed=4).half()
    qkv, pool = shape.qkv(3, torch.float16), shape.pool(torch.float16)
    expected = expect(shape, qkv, [5, 61, 17], [8, 30, -1], pool, norms)
    run(shape, qkv, [5, 61, 17], [8, 30, -1], pool, norms)
    assert float((qkv == expected.qkv).double().mean()) > 0.98


def test_the_cache_may_have_a_dtype_of_its_own() -> None:
    shape = Shape()
    qkv, pool = shape.qkv(2), shape.pool(torch.float16)
    expected = expect(shape, qkv, [3, 4], [12, 20], pool, (None, None))
    run(shape, qkv, [3, 4], [12, 20], pool)
    assert matches(pool, expected.pool, 2e-3) and matches(qkv, expected.qkv, 1e-5)


def test_rows_of_qkv_may_lie_apart() -> None:
    shape = Shape(head_dim=80)
    memory = torch.full((3, shape.all_heads * 80 + 16), float("nan"))
    qkv, pool = memory[:2, 8:-8], shape.pool()
    qkv.copy_(shape.qkv(2))
    expected = expect(shape, qkv.contiguous(), [9, 1], [11, 8], pool, (None, None))
    q = run(shape, qkv, [9, 1], [11, 8], pool)
    right = matches(qkv, expected.qkv, 1e-5) and matches(pool, expected.pool, 1e-5) and q.data_ptr() == qkv.data_ptr()
    qkv.fill_(float("nan"))
    assert right and bool(memory.isnan().all())


@pytest.mark.parametrize("config", CANDIDATES)
def test_every_candidate_computes_the_same(config: RopeConfig) -> None:
    shape = Shape(num_heads=9, num_kv_heads=3)
    norms = random(16, seed=3), random(16, seed=4)
    results = []
    for each in (default_config(16), config):
        qkv, pool = shape.qkv(2), shape.pool()
        run(shape, qkv, [4, 50], [39, 8], pool, norms, each)
        results.append((qkv, pool.nan_to_num(7.0)))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_token_does_not_depend_on_its_company() -> None:
    shape = Shape()
    qkv, alone = shape.qkv(3), shape.qkv(3)[1:2].clone()
    together, apart = shape.pool(), shape.pool()
    run(shape, qkv, [4, 50, 0], [39, 8, -1], together)
    run(shape, alone, [50], [8], apart)
    assert torch.equal(qkv[1:2], alone) and torch.equal(together[1, LAYER, :, :, 0], apart[1, LAYER, :, :, 0])


def test_blocks_further_apart_than_an_int32_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Block 2 starts 2^31 values after block 0. Wrapped, that is 2^31 before it, memory of ours too, and block 2 stays NaN.
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    shape = Shape(num_heads=2, num_kv_heads=1)
    storage = torch.empty(2**32 + 256, dtype=torch.float16)  # committed page by page, as it is touched
    kv = storage.as_strided((3, 2, 1, 8, 16), (2**30, 128, 128, 16, 1), 2**31)
    kv.fill_(float("nan"))
    qkv = shape.qkv(1, torch.float16)
    v = qkv[0, -16:].clone()
    angles = shape.angles()
    rope_norm_write(
        qkv, torch.tensor([3]), torch.tensor([21]), angles.cos().float(), angles.sin().float(), kv, num_heads=2
    )  # fmt: skip
    assert torch.equal(kv[2, 1, 0, 5], v) and torch.equal(kv[2, 0, 0, 5], qkv[0, 32:48])
    kv[2, :, 0, 5] = float("nan")
    assert bool(kv.isnan().all())


def test_heads_further_apart_than_an_int32_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    shape = Shape(num_heads=3, num_kv_heads=3, num_blocks=2)
    storage = torch.empty(2**32 + 1024, dtype=torch.float16)
    kv = storage.as_strided((2, 2, 3, 8, 16), (512, 256, 2**30, 16, 1), 2**31)
    qkv = shape.qkv(1, torch.float16)
    v = qkv[0, -16:].clone()
    angles = shape.angles()
    rope_norm_write(
        qkv, torch.tensor([3]), torch.tensor([13]), angles.cos().float(), angles.sin().float(), kv, num_heads=3
    )  # fmt: skip
    assert torch.equal(kv[1, 1, 2, 5], v)


def test_rows_of_qkv_further_apart_than_an_int32_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    shape = Shape()
    storage = torch.empty(2**32 + 256, dtype=torch.float16)
    far, near = storage.as_strided((3, 128), (2**30, 1), 2**31), shape.qkv(3, torch.float16)
    far.copy_(near)
    pools = shape.pool(torch.float16), shape.pool(torch.float16)
    for qkv, pool in ((near, pools[0]), (far, pools[1])):
        run(shape, qkv, [3, 1, 2], [8, 9, 10], pool)
    assert torch.equal(far, near) and torch.equal(pools[0].nan_to_num(7.0), pools[1].nan_to_num(7.0))


def test_no_rows_are_no_launch() -> None:
    shape = Shape()
    assert run(shape, shape.qkv(0), [], [], shape.pool()).shape == (0, 4, 16)


def bad_calls() -> dict[str, Callable[[], object]]:
    shape = Shape()
    good = {
        "qkv": shape.qkv(2), "positions": torch.tensor([0, 1]), "slot_mapping": torch.tensor([8, 9]),
        "cos": torch.ones(4, 8), "sin": torch.ones(4, 8), "kv": shape.pool()[:, LAYER],
    }  # fmt: skip

    def call(**changed: Tensor) -> Callable[[], object]:
        return lambda: rope_norm_write(**{**good, **changed}, num_heads=4)

    return {
        "width": call(qkv=torch.ones(2, 100)),
        "columns apart": call(qkv=torch.ones(128, 2).t()),
        "positions": call(positions=torch.tensor([0.0, 1.0])),
        "too few positions": call(positions=torch.tensor([0])),
        "slots int32": call(slot_mapping=torch.tensor([8, 9], dtype=torch.int32)),
        "slots apart": call(slot_mapping=torch.tensor([8, 0, 9, 0])[::2]),
        "table width": call(cos=torch.ones(4, 16)),
        "table dtype": call(sin=torch.ones(4, 8).double()),
        "one plane": call(kv=torch.ones(3, 1, 2, 8, 16)),
        "slots of the cache apart": call(kv=torch.ones(3, 2, 2, 16, 8).transpose(3, 4)),
        "norm width": call(q_norm=torch.ones(8)),
        "norm dtype": call(k_norm=torch.ones(16).half()),
    }


@pytest.mark.parametrize("what", sorted(bad_calls()))
def test_what_does_not_fit_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        bad_calls()[what]()
