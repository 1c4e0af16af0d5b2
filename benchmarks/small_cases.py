"""The cases of the ops between the attention and the matrix products, at the sizes of an 8B model (hidden 4096, MLP 14336, 32
query and 8 KV heads of 128)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from attention_cases import Geometry, K
from gpu_timing import Call
from kernel_case import Bench, Case, World, worst_row
from kernel_targets import SMALL
from torch import Tensor

from fairlane.kernels import add_rmsnorm as norm_module
from fairlane.kernels import decode_tuning, reference_step
from fairlane.kernels import rope_norm_write as rope_module
from fairlane.kernels import silu_mul as silu_module
from fairlane.kernels import step_prep as step_module
from fairlane.kernels.decode_combine import decode_combine
from fairlane.kernels.decode_sched import DecodeWorkspace, max_items_for
from fairlane.kernels.decode_tuning import DecodeTuning

HIDDEN, GATE_UP = 4096, 28672
EPS = 1e-5


class NormBench(Bench):
    candidates = norm_module.CANDIDATES

    def __init__(self, world: World, tokens: int) -> None:
        tokens, width = world.size(tokens, 3), world.size(HIDDEN, 160)
        self.bytes_moved = 4.0 * tokens * width * world.dtype.itemsize
        sets = world.sets(self.bytes_moved)
        self._x, self._residual = (world.normal(sets, tokens, width) for _ in range(2))
        self._out, self._weight = torch.empty_like(self._x), world.normal(width)

    def calls(self, config: Any = None) -> Sequence[Call]:
        return [
            partial(norm_module.add_rmsnorm, x, residual, self._weight, EPS, out=out, config=config)
            for x, residual, out in zip(self._x, self._residual, self._out, strict=True)
        ]

    def error(self, config: Any = None) -> float:
        x, residual = self._x[0], self._residual[0].clone()
        total = (x.float() + residual.float()).to(x.dtype).double()
        exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * self._weight.double()
        found = norm_module.add_rmsnorm(x, residual, self._weight, EPS, out=torch.full_like(x, torch.nan), config=config)
        return max(worst_row(found, exact), worst_row(residual, total))


class SiluBench(Bench):
    candidates = silu_module.CANDIDATES

    def __init__(self, world: World, tokens: int) -> None:
        tokens, width = world.size(tokens, 3), world.size(GATE_UP, 320)
        self.bytes_moved = 1.5 * tokens * width * world.dtype.itemsize
        sets = world.sets(self.bytes_moved)
        self._gate_up = world.normal(sets, tokens, width)
        self._out = world.normal(sets, tokens, width // 2)

    def calls(self, config: Any = None) -> Sequence[Call]:
        config = config or silu_module.DEFAULT
        pairs = zip(self._gate_up, self._out, strict=True)
        return [partial(silu_module.silu_mul, gate_up, out=out, config=config) for gate_up, out in pairs]

    def error(self, config: Any = None) -> float:
        self._out[0] = torch.nan
        self.calls(config)[0]()
        gate, up = self._gate_up[0].double().chunk(2, dim=-1)
        return worst_row(self._out[0], gate * torch.sigmoid(gate) * up)


class RopeBench(Bench):
    """Also what the cache must hold afterwards is checked, and that nothing else in it changed."""

    candidates = rope_module.CANDIDATES

    def __init__(self, world: World, tokens: int, geometry: Geometry) -> None:
        self._geometry = g = geometry.shrunk() if world.tiny else geometry
        tokens = world.size(tokens, 5)
        rotated, written = (g.num_heads + g.num_kv_heads) * g.head_dim, 2 * g.num_kv_heads * g.head_dim
        read = rotated + written // 2
        self.bytes_moved = float(tokens * ((read + rotated + written) * world.dtype.itemsize + 4 * g.head_dim + 12))
        sets = world.sets(self.bytes_moved)
        num_blocks = 2 + -(-tokens // g.block_size)
        self._pool = world.normal(num_blocks, sets, 2, g.num_kv_heads, g.block_size, g.head_dim)
        self._qkv = world.normal(sets, tokens, read)
        free = torch.randperm((num_blocks - 1) * g.block_size, device=world.device)[:tokens]
        self._slots = free + g.block_size  # not in the null block
        self._positions = torch.randint(0, 8 * K, (tokens,), device=world.device, dtype=torch.int32)
        frequencies = 500000.0 ** -torch.linspace(0, 1, g.head_dim // 2, device=world.device)
        angles = torch.outer(torch.arange(8 * K, device=world.device), frequencies)
        self._cos, self._sin = angles.cos(), angles.sin()

    def calls(self, config: Any = None) -> Sequence[Call]:
        return [partial(self._write, qkv, self._pool[:, layer], config) for layer, qkv in enumerate(self._qkv)]

    def error(self, config: Any = None) -> float:
        g, tokens = self._geometry, len(self._positions)
        qkv, pool = self._qkv[0].clone(), self._pool[:, 0].clone()
        exact = qkv.double().view(tokens, -1, g.head_dim)
        turned = exact[:, : g.num_heads + g.num_kv_heads]
        low, high = turned.chunk(2, dim=-1)
        cos, sin = (table[self._positions.long()].double()[:, None] for table in (self._cos, self._sin))
        turned.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))
        kv = pool.double()
        fresh = exact[:, g.num_heads :].unflatten(1, (2, g.num_kv_heads))  # type: ignore[no-untyped-call]
        kv.permute(0, 3, 1, 2, 4)[self._slots // g.block_size, self._slots % g.block_size] = fresh
        self._write(qkv, pool, config)
        return max(worst_row(qkv.view_as(exact), exact), worst_row(pool, kv))

    def _write(self, qkv: Tensor, kv: Tensor, config: Any) -> None:
        tables = self._cos, self._sin
        heads = self._geometry.num_heads
        rope_module.rope_norm_write(qkv, self._positions, self._slots, *tables, kv, num_heads=heads, config=config)


class CombineBench(Bench):
    """Partial results come from the cache, since the attention has just written them."""

    warm = True
    candidates = decode_tuning.COMBINE_CANDIDATES
    tolerance = 8e-3  # one rounding to the result's dtype, of a row that many parts cancel in

    def __init__(self, world: World, lens: Sequence[int], geometry: Geometry) -> None:
        g = geometry.shrunk() if world.tiny else geometry
        lens = [world.size(n, 700) for n in lens[: world.size(len(lens), 2)]]
        tuning = decode_tuning.tuning_for(g.head_dim, g.group_size, world.dtype, g.block_size)
        workspace = DecodeWorkspace(
            len(lens), max_items_for(len(lens), max(lens), tuning), g.num_heads, g.num_kv_heads, g.head_dim, world.device,
            world.dtype, block_size=g.block_size, tuning=tuning,
        )  # fmt: skip
        workspace.schedule(torch.tensor(lens, dtype=torch.int32, device=world.device))
        self._tuning, self._cu_items = tuning, workspace.schedule_of(None).cu_items
        self._part_o, self._part_lse = workspace.part_o.normal_(), workspace.part_lse.normal_()
        self._out = world.normal(len(lens), g.num_heads, g.head_dim)
        parts = int(self._cu_items[-1]) * g.num_heads
        self.bytes_moved = float(4 * parts * (g.head_dim + 1) + self._out.numel() * world.dtype.itemsize)

    def calls(self, config: DecodeTuning | None = None) -> Sequence[Call]:
        return [partial(self._combine, config or self._tuning)]

    def error(self, config: DecodeTuning | None = None) -> float:
        self._out.fill_(torch.nan)
        self._combine(config or self._tuning)
        exact = torch.zeros(self._out.shape, dtype=torch.float64, device=self._out.device)
        bounds = self._cu_items.tolist()
        for row in range(len(exact)):
            rows = slice(bounds[row], bounds[row + 1])
            shares = torch.softmax(self._part_lse[rows].double() * torch.log(torch.tensor(2.0, dtype=torch.float64)), dim=0)
            exact[row] = (shares[:, :, None] * self._part_o[rows].double()).sum(0)
        return worst_row(self._out, exact)

    def _combine(self, tuning: DecodeTuning) -> None:
        decode_combine(
            self._part_o, self._part_lse, self._cu_items, self._out,
            rows_at_once=tuning.combine_rows, few=tuning.combine_few, few_heads=tuning.combine_few_heads,
            num_stages=tuning.combine_stages, num_warps=tuning.combine_warps,
        )  # fmt: skip


class StepPrepBench(Bench):
    """A step's inputs for 64 running sequences of 4k tokens out of 256 slots."""

    warm = True
    candidates = step_module.CANDIDATES
    tolerance = 0.0

    def __init__(self, world: World, rows: int, tokens: int) -> None:
        rows, tokens = world.size(rows, 3), world.size(tokens, 70)
        slots, blocks = world.size(256, 6), world.size(8 * K, 128) // 16
        ids = torch.randint(1, 1 << 20, (slots, blocks), dtype=torch.int32, device=world.device)
        last, lens = (torch.full((slots,), n, dtype=torch.int64, device=world.device) for n in (5, tokens))
        self._state = reference_step.SlotState(last, lens, ids)
        self._slots = torch.randperm(slots, device=world.device)[:rows].int()
        self._out = reference_step.DecodeInputs.allocate(rows, blocks, world.device)
        self.bytes_moved = 2.0 * 4 * rows * -(-tokens // 16)

    def calls(self, config: Any = None) -> Sequence[Call]:
        config = config or step_module.DEFAULT
        return [partial(step_module.step_prep, self._slots, self._state, 16, out=self._out, config=config)]

    def error(self, config: Any = None) -> float:
        self.calls(config)[0]()
        names = reference_step.DecodeInputs.__slots__
        expected = reference_step.DecodeInputs.allocate(len(self._slots), self._out.block_table.shape[1], self._slots.device)
        reference_step.step_prep(self._slots, self._state, 16, out=expected)
        return float(not all(torch.equal(getattr(self._out, name), getattr(expected, name)) for name in names))


def small_cases(block_size: int) -> list[Case]:
    geometry = Geometry(block_size=block_size)
    cases = []
    for kernel, tokens in (key for key in SMALL if key[0] in ("add_rmsnorm", "silu_mul")):
        bench, width = (NormBench, HIDDEN) if kernel == "add_rmsnorm" else (SiluBench, GATE_UP)
        cases.append(Case("small", kernel, f"{tokens}x{width}", partial(bench, tokens=tokens), SMALL[kernel, tokens]))
    for tokens in (32, 4096):
        prepare = partial(RopeBench, tokens=tokens, geometry=geometry)
        cases.append(Case("small", "rope_norm_write", f"T={tokens}", prepare, SMALL["rope_norm_write", tokens], block_size))
    for name, lens in (("64x4k", [4 * K] * 64), ("1x32k", [32 * K]), ("1x128k", [128 * K])):
        combine = partial(CombineBench, lens=lens, geometry=geometry)
        cases.append(Case("small", "decode_combine", name, combine, SMALL.get(("decode_combine", len(lens))), block_size))
    cases.append(Case("small", "step_prep", "64x4k", partial(StepPrepBench, rows=64, tokens=4 * K), None, 16))
    return cases
