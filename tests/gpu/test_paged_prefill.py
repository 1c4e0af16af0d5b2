"""The prefill attention on the device: bf16 and fp16 at real sizes against float64, on caches full of NaN, and the bits that must
not change: in other company, from other blocks, replayed from a CUDA graph."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from device import cuda
from fairlane.kernels.paged_prefill import paged_prefill
from fairlane.kernels.prefill_sched import PrefillPlan, TileBuffers, plan_prefill
from fairlane.kernels.prefill_tuning import CANDIDATES, PrefillConfig, PrefillTuning, tuning_for

NOWHERE = 2**31 - 1
LAYERS, LAYER = 3, 1
Lengths = list[tuple[int, int]]  # (seq_len, query_len) of each sequence


@dataclass(frozen=True)
class Model:
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None

    @property
    def tuning(self) -> PrefillTuning:
        return tuning_for(self.head_dim, self.num_heads // self.num_kv_heads, self.dtype)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


LLAMA = Model()


@dataclass(frozen=True)
class Step:
    """Sequences in a pool where whatever holds no token is NaN; keys, values: [seq_len, Hkv, D] of each."""

    model: Model
    lens: Lengths
    q: Tensor
    pool: Tensor
    block_table: Tensor
    keys: list[Tensor]
    values: list[Tensor]

    @property
    def kv(self) -> Tensor:
        return self.pool[:, LAYER]

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum([0, *(n for _, n in self.lens)])

    def rows(self, index: int) -> slice:
        return slice(int(self.starts[index]), int(self.starts[index + 1]))

    def plan(self, tuning: PrefillTuning | None = None, **options: object) -> PrefillPlan:
        return plan_prefill(
            self.starts,
            np.array([n for n, _ in self.lens]),
            self.model.num_heads,
            self.model.num_kv_heads,
            tuning=tuning or self.model.tuning,
            device=cuda,
            **options,
        )

    def attend(self, plan: PrefillPlan | None = None, out: Tensor | None = None) -> Tensor:
        out = torch.full_like(self.q, float("nan")) if out is None else out
        m = self.model
        options = {"scale": m.scale, "window": m.window, "softcap": m.softcap}
        return paged_prefill(self.q, self.kv, self.block_table, plan or self.plan(), out=out, **options)


def make_step(model: Model, lens: Lengths, seed: int = 0) -> Step:
    torch.manual_seed(seed)
    size, hkv, dim = model.block_size, model.num_kv_heads, model.head_dim
    needed = [-(-n // size) for n, _ in lens]
    order = torch.randperm(sum(needed) + 3, device=cuda) + 1
    pool = torch.full((len(order) + 1, LAYERS, 2, hkv, size, dim), float("nan"), dtype=model.dtype, device=cuda)
    table = torch.full((len(lens), max(needed) + 2), NOWHERE, dtype=torch.int32, device=cuda)
    keys, values, used = [], [], 0
    for row, (seq_len, _) in enumerate(lens):
        blocks = order[used : used + needed[row]]
        table[row, : len(blocks)] = blocks
        used += needed[row]
        at = torch.arange(seq_len, device=cuda)
        for plane, held in ((0, keys), (1, values)):
            held.append(torch.randn(seq_len, hkv, dim, device=cuda).to(model.dtype))
            pool[blocks[at // size], LAYER, plane, :, at % size] = held[-1]
    q = torch.randn(sum(n for _, n in lens), model.num_heads, dim, device=cuda).to(model.dtype)
    return Step(model, lens, q, pool, table, keys, values)


def dense(step: Step, index: int, dtype: torch.dtype) -> Tensor:
    """A sequence's result computed in dtype, the shares rounded to the model's dtype unless dtype is float64."""
    m, (seq_len, queries) = step.model, step.lens[index]
    q = step.q[step.rows(index)].to(dtype).view(queries, m.num_kv_heads, -1, m.head_dim)
    scores = torch.einsum("tkgd,skd->kgts", q, step.keys[index].to(dtype)) * m.scale
    if m.softcap is not None:
        scores = m.softcap * torch.tanh(scores / m.softcap)
    at = torch.arange(seq_len - queries, seq_len, device=cuda)[:, None]
    key = torch.arange(seq_len, device=cuda)
    hidden = (key > at) | (key <= at - (m.window or 2**40))
    shares = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1).nan_to_num(nan=0.0)
    if dtype != torch.float64:
        shares = shares.to(m.dtype).to(dtype)
    return torch.einsum("kgts,skd->tkgd", shares, step.values[index].to(dtype)).reshape(queries, m.num_heads, m.head_dim)


def errors(step: Step, result: Tensor, index: int) -> tuple[float, float, float]:
    """The largest deviation from float64, that of torch in the model's dtype, and the relative norm of ours."""
    exact = dense(step, index, torch.float64)
    ours = result[step.rows(index)].double() - exact
    plain = dense(step, index, torch.float32).to(step.model.dtype).double() - exact
    worst = float(ours.abs().nan_to_num(nan=float("inf")).max())
    return worst, float(plain.abs().max()), float(ours.norm() / exact.norm())


def within(step: Step, result: Tensor, indices: Sequence[int] | None = None) -> bool:
    """At most twice as far off as plain torch, and close as a whole."""
    ulp, norm = {torch.bfloat16: (2**-7, 5e-3), torch.float16: (2**-10, 1e-3), torch.float32: (2**-20, 1e-5)}[step.model.dtype]
    found = [errors(step, result, i) for i in (range(len(step.lens)) if indices is None else indices) if step.lens[i][1]]
    return all(ours <= 2 * plain + 2 * ulp and relative < norm for ours, plain, relative in found)


MIXED: Lengths = [(700, 700), (1500, 260), (33, 33), (900, 17), (64, 5), (17, 2), (129, 129), (1, 1)]


@pytest.mark.parametrize(
    "model",
    [
        LLAMA,
        replace(LLAMA, block_size=64, dtype=torch.float16),
        Model(32, 32),
        Model(32, 32, window=200),
        Model(28, 4, 128, 8, window=300),
        Model(10, 2, 80, 32, window=1),
        Model(14, 2, 64, 16),
        Model(8, 8, 96, 16, torch.float16),
        Model(8, 4, 256, 16, softcap=50.0, window=511),
    ],
    ids=lambda m: f"{m.num_heads}x{m.num_kv_heads}x{m.head_dim}-{m.block_size}-{m.window}-{m.softcap}",
)
def test_a_mixed_step_is_as_close_as_torch_in_the_same_dtype(model: Model) -> None:
    step = make_step(model, MIXED)
    assert within(step, step.attend())


def test_float32_runs_on_the_device_too() -> None:
    step = make_step(Model(4, 2, 64, 16, torch.float32), [(90, 40), (20, 3)])
    assert within(step, step.attend())


def test_the_error_does_not_grow_with_the_context() -> None:
    step = make_step(LLAMA, [(1024, 64), (16384, 64)])
    result = step.attend()
    short, long = (errors(step, result, i)[2] for i in range(2))
    assert long < 1.5 * short


@pytest.mark.parametrize("config", CANDIDATES, ids=str)
def test_every_candidate_computes_the_same(config: PrefillConfig) -> None:
    step = make_step(LLAMA, [(700, 700), (1500, 260)])
    assert within(step, step.attend(step.plan(replace(LLAMA.tuning, long=config))))


def test_random_steps() -> None:
    choice = random.Random(20)
    failed = []
    for seed in range(60):
        lens = []
        for _ in range(choice.randint(1, 6)):
            seq_len = choice.choice([1, 15, 16, 17, 63, 64, 65, 128, 200, 511, 513])
            lens.append((seq_len, choice.choice([1, seq_len, choice.randint(1, seq_len)])))
        step = make_step(LLAMA, lens, seed)
        if not within(step, step.attend()):
            failed.append(lens)
    assert failed == []


def test_queries_without_keys_padding_and_others_rows() -> None:
    lens = [(0, 3), (40, 40), (5, 30), (90, 1), (0, 0)]
    step = make_step(LLAMA, [(n, min(n, q)) for n, q in lens])
    step = replace(step, lens=lens, q=torch.full((100, 32, 128), float("nan"), dtype=torch.bfloat16, device=cuda))
    step.q[:74] = torch.randn(74, 32, 128, device=cuda).to(torch.bfloat16)
    result = step.attend(step.plan(sequences=np.array([0, 1, 2]), padded_rows=90))
    zeros = torch.cat([result[:3], result[43:68], result[74:90]])
    untouched = torch.cat([result[73:74], result[90:]])
    facts = within(step, result, [1]), int(zeros.count_nonzero()), bool(zeros.isnan().any()), bool(untouched.isnan().all())
    assert facts == (True, 0, False, True)


def test_a_sequence_gives_the_same_bits_alone_in_company_and_from_other_blocks() -> None:
    step = make_step(LLAMA, [(2500, 900), (300, 300), (2200, 12), (70, 70)])
    together = step.attend()
    alone = torch.cat([step.attend(step.plan(sequences=np.array([i])))[step.rows(i)] for i in (3, 1, 0, 2)])
    order = torch.randperm(len(step.pool) - 1, device=cuda) + 1
    pool = step.pool.clone()
    pool[order] = step.pool[1:]
    used = step.block_table != NOWHERE
    table = torch.where(used, order[(step.block_table.long() - 1) * used].int(), NOWHERE)
    moved = replace(step, pool=pool, block_table=table).attend()
    expected = torch.cat([together[step.rows(i)] for i in (3, 1, 0, 2)])
    assert (torch.equal(alone, expected), torch.equal(moved, together)) == (True, True)


def test_ten_runs_give_the_same_bits() -> None:
    step = make_step(LLAMA, MIXED)
    first = step.attend()
    assert all(torch.equal(step.attend(), first) for _ in range(9))


def test_a_prompt_in_chunks_is_as_close_as_in_one_piece() -> None:
    whole = make_step(LLAMA, [(2300, 2300)])
    done, chunks = 0, []
    for count in (512, 100, 1, 700, 987):
        chunks.append(replace(whole, lens=[(done + count, count)], q=whole.q[done : done + count]).attend())
        done += count
    assert within(whole, torch.cat(chunks))


def test_a_captured_step_replays_any_later_one_with_the_same_bits() -> None:
    first = make_step(LLAMA, [(700, 300), (90, 8), (64, 64)])
    second = replace(first, lens=[(650, 40), (90, 0), (64, 10)])
    buffers = TileBuffers(512, 4, 4, LLAMA.tuning, cuda)
    expected = [step.attend() for step in (first, second)]
    out = torch.full_like(first.q, float("nan"))
    plan = first.plan(buffers=buffers)
    first.attend(plan, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.attend(plan, out)
    same = []
    for step, wanted in zip((second, first, second), (expected[1], expected[0], expected[1]), strict=True):
        out.fill_(float("nan"))
        step.plan(buffers=buffers)
        graph.replay()
        same.append(torch.equal(out.nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0)))
    assert same == [True, True, True]


def test_a_planned_launch_allocates_nothing_and_does_not_wait() -> None:
    step = make_step(LLAMA, [(700, 300), (90, 8)])
    plan, out = step.plan(), torch.empty_like(step.q)
    step.attend(plan, out)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.attend(plan, out)
        step.plan()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 1  # the tiles of the second plan


def test_blocks_beyond_two_to_the_31_elements_are_found() -> None:
    near = make_step(LLAMA, [(500, 200), (40, 3)])
    stride = 2**20  # an all-layer block of a Llama-3.1-8B: the limit is block 2048
    memory = torch.empty(2200 * stride, dtype=torch.bfloat16, device=cuda)
    far = memory.as_strided((2200, *near.kv.shape[1:]), (stride, *near.kv.stride()[1:]))
    shift = 2100 - len(near.pool) // 2
    used = near.block_table != NOWHERE
    ids = near.block_table[used].long()
    far[ids + shift] = near.kv[ids]
    table = torch.where(used, near.block_table + shift, near.block_table)
    result = paged_prefill(near.q, far, table, near.plan(), scale=LLAMA.scale)
    assert torch.equal(result, near.attend())
