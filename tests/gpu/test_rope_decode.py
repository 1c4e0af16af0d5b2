"""A decode's rope, norm, cache write and attention in one kernel, on the device: the bits of the two kernels that it stands for,
in the result and in the cache; in graphs, under load, and in a whole model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decode_steps import LLAMA, NAN, Geometry, Step, bits, make_step
from device import cuda
from fairlane.kernels import decode_tuning
from fairlane.kernels.decode_sched import DecodeWorkspace
from fairlane.kernels.decode_tuning import DecodeTuning, tuning_for
from fairlane.kernels.new_tokens import NewTokens
from fairlane.kernels.rope_decode import rope_decode
from fairlane.worker.config import Device, WorkerConfig
from fairlane.worker.cuda_executor import CudaExecutor
from gpu_models import prompt, save_model
from gpu_steps import Run
from launches import allocations, captured, compilations, normal

POSITIONS = 40_000
MIXED = [1, 0, 15, 16, 17, 64, 65, 256, 257, 1000, 4099, 8193, 33_000]
QWEN = Geometry(16, 8, 128, 16)
GEOMETRIES = [
    (LLAMA, False),
    (LLAMA, True),
    (QWEN, True),
    (Geometry(32, 32, 128, 16), False),
    (Geometry(32, 4, 128, 64), True),
    (Geometry(14, 2, 64, 32, torch.float16), False),
    (Geometry(16, 8, 64, 16), True),
    (Geometry(8, 8, 64, 16), True),
    (Geometry(10, 2, 96, 64), True),
    (Geometry(3, 3, 80, 8), True),
    (Geometry(8, 2, 256, 16), True),
    (Geometry(4, 2, 128, 16, torch.float32), True),
    (Geometry(6, 3, 16, 8, torch.float16), True),
]


@dataclass(frozen=True)
class Case:
    """A step whose new tokens are not in the cache yet."""

    step: Step
    lens: Tensor
    new: NewTokens
    place: tuple[Tensor, Tensor]  # blocks and offsets of the new tokens, of the rows that have one

    def run(self, tuning: DecodeTuning, window: int | None = None, softcap: float | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(out, all of the layer's cache, qkv) of a call on a cache without the new tokens."""
        workspace = self.workspace(tuning, window)
        out, qkv = torch.full_like(self.step.q, NAN), self.new.qkv.clone()
        self.clear()
        self.launch(workspace, out, qkv, window, softcap)
        return out, self.step.kv.clone(), qkv

    def workspace(self, tuning: DecodeTuning, window: int | None = None) -> DecodeWorkspace:
        shape, batch = self.step.shape, len(self.step.lens)
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
        windows = frozenset({window})
        workspace = DecodeWorkspace(
            batch, 2048, *sizes, cuda, shape.dtype, block_size=shape.block_size, windows=windows, tuning=tuning
        )
        workspace.schedule(self.lens, window)
        return workspace

    def clear(self) -> None:
        blocks, offsets = self.place
        self.step.kv.permute(0, 3, 1, 2, 4)[blocks, offsets] = NAN

    def launch(
        self, workspace: DecodeWorkspace, out: Tensor, qkv: Tensor, window: int | None = None, softcap: float | None = None
    ) -> None:
        shape = self.step.shape
        rope_decode(
            replace(self.new, qkv=qkv),
            self.step.kv,
            self.step.table,
            self.lens,
            num_heads=shape.num_heads,
            scale=shape.head_dim**-0.5,
            workspace=workspace,
            out=out,
            window=window,
            softcap=softcap,
        )


def make_case(lens: list[int], shape: Geometry = LLAMA, normed: bool = False, seed: int = 0) -> Case:
    step, half = make_step(lens, shape, seed=seed), shape.head_dim // 2
    positions = (step.seq_lens.long() - 1).clamp_min(0)
    blocks = step.table.long().gather(1, (positions // shape.block_size)[:, None])[:, 0]
    offsets, real = positions % shape.block_size, step.seq_lens > 0
    slots = torch.where(real, blocks * shape.block_size + offsets, -1)
    angles = torch.arange(POSITIONS).double().unsqueeze(1) * (10000.0 ** -(torch.arange(half).double() / half))
    norms = [normal(shape.head_dim, seed=seed + n, dtype=shape.dtype) if normed else None for n in (5, 6)]
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = normal(len(lens), width, seed=seed + 7, dtype=shape.dtype)
    new = NewTokens(qkv, positions, slots, angles.cos().float().to(cuda), angles.sin().float().to(cuda), *norms, 1e-6)
    return Case(step, step.seq_lens, new, (blocks[real], offsets[real]))


def tunings(shape: Geometry) -> tuple[DecodeTuning, DecodeTuning]:
    """In one kernel, and in two."""
    tuning = tuning_for(shape.head_dim, shape.num_heads // shape.num_kv_heads, shape.dtype, shape.block_size)
    return replace(tuning, fuse_rope_rows=1 << 30), replace(tuning, fuse_rope_rows=0)


def same_bits(case: Case, window: int | None = None, softcap: float | None = None) -> bool:
    """Whether result and cache are the same, bit for bit, and one kernel did it, which only reads qkv."""
    one, two = (case.run(tuning, window, softcap) for tuning in tunings(case.step.shape))
    only_read = torch.equal(bits(one[2]), bits(case.new.qkv)) and not torch.equal(bits(two[2]), bits(case.new.qkv))
    equal = torch.equal(bits(one[0]), bits(two[0])) and torch.equal(bits(one[1]), bits(two[1]))
    return equal and only_read and bool(one[0].isfinite().all())


@pytest.mark.parametrize(("shape", "normed"), GEOMETRIES, ids=str)
def test_every_geometry_has_the_bits_of_two_kernels(shape: Geometry, normed: bool) -> None:
    assert same_bits(make_case(MIXED, shape, normed))


@pytest.mark.parametrize("window", [40, 500])
def test_windows_and_softcaps(window: int) -> None:
    assert same_bits(make_case(MIXED), window, 30.0)


@pytest.mark.parametrize("lens", [[1024], [1024] * 8, [576] * 64, [600] * 128, [4096] * 32], ids=len)
def test_batches_with_and_without_dependent_launch(lens: list[int]) -> None:
    assert same_bits(make_case(lens, QWEN, normed=True))


def test_random_steps() -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**31)
    wrong = []
    for seed in range(60):
        count, scale = (int(torch.randint(low, high, (1,), generator=generator)) for low, high in ((1, 40), (3, 13)))
        lens = torch.randint(0, 2**scale, (count,), generator=generator).tolist()
        if not same_bits(make_case([*lens, 20], QWEN if seed % 2 else LLAMA, bool(seed % 2), seed)):
            wrong.append(seed)
    assert not wrong, f"seed {generator.initial_seed()}"


def test_a_new_key_is_seen_at_once_hundreds_of_times_under_load() -> None:
    """Every launch finds the slots NaN: whoever read one before it was written, or an old copy of it, would show."""
    case = make_case([33, 64, 257, 600, 31] * 12)
    one, two = tunings(LLAMA)
    right = case.run(two)[0]
    workspace, outs = case.workspace(one), torch.full((300, *right.shape), NAN, dtype=right.dtype, device=cuda)
    for out in outs:
        case.clear()
        case.launch(workspace, out, case.new.qkv)
    assert bool((bits(outs) == bits(right)).all())


def test_a_graph_follows_the_tokens_and_a_warm_launch_allocates_nothing_and_compiles_nothing() -> None:
    case = make_case([0, 900, 17], QWEN, normed=True)
    one, two = tunings(QWEN)
    workspace, out, qkv = case.workspace(one), torch.full_like(case.step.q, NAN), case.new.qkv.clone()
    graph = captured(lambda: case.launch(workspace, out, qkv))
    qkv.copy_(normal(*qkv.shape, seed=99, dtype=qkv.dtype))
    right = replace(case, new=replace(case.new, qkv=qkv.clone())).run(two)[0]
    case.clear()
    graph.replay()
    replayed = torch.equal(bits(out), bits(right))
    torch.cuda.synchronize()
    before = allocations()
    with compilations() as compiled:
        rope_decode(
            replace(case.new, qkv=qkv), case.step.kv, case.step.table, case.lens,
            num_heads=16, scale=QWEN.head_dim**-0.5, workspace=workspace, out=out,
        )  # fmt: skip
    assert (replayed, allocations() - before, compiled) == (True, 0, [])


@pytest.mark.parametrize("shape", ["Llama", "Qwen3", "Mistral"])
def test_a_models_tokens_and_logits_are_the_same_either_way(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With decode graphs, over lengths at which sequences are whole and cut."""
    save_model(tmp_path, shape)
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_resident": 8, "max_num_batched_tokens": 4096}
    found = []
    for rows in (64, 0):
        for key, tuning in list(decode_tuning._BY_SIZE.items()):
            monkeypatch.setitem(decode_tuning._BY_SIZE, key, replace(tuning, fuse_rope_rows=rows))
        run = Run(CudaExecutor(WorkerConfig(model=str(tmp_path), device=Device.CUDA, num_blocks=600, **settings)))
        tokens, logits = [], []
        for length in (5, 250, 700):
            tokens += run.generate(0, prompt(length, length), 40)
            logits += [rows_of.clone() for rows_of in run.logits]
        found.append((tokens, torch.cat(logits)))
        run.executor.close()
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
