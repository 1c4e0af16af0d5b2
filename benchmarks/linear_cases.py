"""The cases of the linear layers, at the sizes of the models that the engine is measured with: cuBLAS for many rows, our kernels
for one row, and for the batches of a decode step together with what follows the product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from gpu_timing import Call
from kernel_case import Bench, Case, World, worst_row
from kernel_targets import LINEAR, Target
from torch import Tensor

from fairlane.kernels import skinny_linear as skinny_module
from fairlane.kernels import thin_linear as thin_module
from fairlane.kernels.add_rmsnorm import add_rmsnorm, join_add_rmsnorm
from fairlane.kernels.silu_mul import silu_mul

EPS = 1e-5
LINEARS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}  # inputs, outputs
SMALL_LINEARS = {"qkv": (1024, 4096), "o": (2048, 1024), "gate_up": (1024, 6144), "down": (3072, 1024)}  # Qwen3-0.6B's

# Of one row: accept and good, and what cuBLAS takes, its second launch included.
SKINNY = {
    ("8B", "qkv"): Target(16.25, 13.5, 16.25, "cuBLAS in a graph, H200"),
    ("8B", "o"): Target(12.5, 9.5, 12.5, "cuBLAS in a graph, H200"),
    ("8B", "down"): Target(31.25, 29.5, 31.25, "cuBLAS in a graph, H200"),
    **{("0.6B", name): Target(4) for name in SMALL_LINEARS},
}
THIN = {
    "8B": LINEARS | {"head": (4096, 128256)},
    "7B": {"qkv": (4096, 12288), "o": (4096, 4096), "gate_up": (4096, 22016), "down": (11008, 4096)},
    "0.6B": SMALL_LINEARS | {"head": (1024, 151936)},
}
_SUMMED = ("o", "down")  # computed in partial sums, which the norm behind them adds up


class SkinnyBench(Bench):
    """A linear layer of one row."""

    tolerance = 8e-3

    def __init__(self, world: World, inputs: int, outputs: int) -> None:
        inputs, outputs = world.size(inputs, 136), world.size(outputs, 40)
        self.bytes_moved = float((inputs + outputs + inputs * outputs) * world.dtype.itemsize)
        sets = world.sets(self.bytes_moved)
        self._x, self._weight = world.normal(sets, 1, inputs), world.normal(sets, outputs, inputs)
        self._out = world.normal(sets, 1, outputs)
        self.candidates = [one for one in skinny_module.CANDIDATES if one.block_k <= max(1024, 2 * inputs) or world.tiny]

    def calls(self, config: Any = None) -> Sequence[Call]:
        triples = zip(self._x, self._weight, self._out, strict=True)
        return [partial(skinny_module.skinny_linear, x, weight, out=out, config=config) for x, weight, out in triples]

    def error(self, config: Any = None) -> float:
        self._out[0] = torch.nan
        self.calls(config)[0]()
        return worst_row(self._out[0], self._x[0].double() @ self._weight[0].double().t())

    def peers(self) -> Mapping[str, Sequence[Call]]:
        triples = zip(self._x, self._weight, self._out, strict=True)
        return {"cuBLAS": [partial(torch.mm, x, weight.t(), out=out) for x, weight, out in triples]}


class LinearBench(Bench):
    """torch's own product: what the engine's linear layers take, beside the rate of a large square product."""

    tolerance = 8e-3

    def __init__(self, world: World, tokens: int, inputs: int, outputs: int) -> None:
        tokens, inputs, outputs = (world.size(n, 48) for n in (tokens, inputs, outputs))
        self.flops = 2.0 * tokens * inputs * outputs
        self.bytes_moved = float((tokens * (inputs + outputs) + inputs * outputs) * world.dtype.itemsize)
        sets = world.sets(self.bytes_moved)
        self._x, self._weight = world.normal(sets, tokens, inputs), world.normal(sets, outputs, inputs)
        self._out = world.normal(sets, tokens, outputs)

    def calls(self, config: Any = None) -> Sequence[Call]:
        triples = zip(self._x, self._weight, self._out, strict=True)
        return [partial(torch.mm, x, weight.t(), out=out) for x, weight, out in triples]

    def error(self, config: Any = None) -> float:
        self.calls()[0]()
        rows = slice(0, 16)
        return worst_row(self._out[0, rows], self._x[0, rows].double() @ self._weight[0].double().t())


class ThinBench(Bench):
    """A linear layer of a decode batch with what follows it in a layer: nothing (qkv, head), the activation (gate_up), or the sum
    into the residual and its norm (o, down). Beside it: cuBLAS and the kernel that then follows."""

    tolerance = 8e-3

    def __init__(self, world: World, name: str, tokens: int, inputs: int, outputs: int) -> None:
        tokens, inputs, outputs = world.size(tokens, 5), world.size(inputs, 136), world.size(outputs, 96)
        self.bytes_moved = float((tokens * (inputs + outputs) + inputs * outputs) * world.dtype.itemsize)
        sets = world.sets(self.bytes_moved)
        self._name = name
        self._x, self._weight = world.normal(sets, tokens, inputs), world.normal(sets, outputs, inputs)
        self._weight.mul_(inputs**-0.5)
        width = outputs // 2 if name == "gate_up" else outputs
        self._out, self._full = world.normal(sets, tokens, width), world.normal(sets, tokens, outputs)
        self._residual, self._norm = world.normal(tokens, outputs), world.normal(outputs)
        splits = thin_module.num_splits(outputs, inputs)
        self._parts = world.normal(splits, tokens, outputs, dtype=torch.float32)
        self._rows = tokens
        now = thin_module.config_for(tokens, outputs, inputs, splits=splits if name in _SUMMED else 1, gated=name == "gate_up")
        self.candidates = [now, *(one for one in thin_module.CANDIDATES if one != now and self._fits(one))]

    def entry(self, config: Any) -> str:
        """In thin_linear's MEASURED."""
        _, outputs, inputs = self._weight.shape
        return f"({self._name == 'gate_up'}, {outputs}, {inputs}, {thin_module.padded_rows(self._rows)})"

    def _fits(self, config: Any) -> bool:
        return int(config.shared_bytes(self._rows, gated=self._name == "gate_up")) <= 220_000

    def calls(self, config: Any = None) -> Sequence[Call]:
        triples = zip(self._x, self._weight, self._out, strict=True)
        return [partial(self._ours, x, weight, out, config) for x, weight, out in triples]

    def error(self, config: Any = None) -> float:
        self._out[0] = torch.nan
        self._parts.fill_(torch.nan)
        x, weight, before = self._x[0], self._weight[0], self._residual.clone()
        self._ours(x, weight, self._out[0], config)
        exact = x.double() @ weight.double().t()
        if self._name == "gate_up":
            gate, up = exact.chunk(2, dim=-1)
            exact = gate * torch.sigmoid(gate) * up
        elif self._name in _SUMMED:
            total = before.double() + exact
            exact = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * self._norm.double()
        return worst_row(self._out[0], exact)

    def peers(self) -> Mapping[str, Sequence[Call]]:
        quads = zip(self._x, self._weight, self._full, self._out, strict=True)
        return {"cuBLAS and the next op": [partial(self._theirs, *quad) for quad in quads]}

    def _ours(self, x: Tensor, weight: Tensor, out: Tensor, config: Any) -> None:
        if self._name in ("qkv", "head"):
            thin_module.thin_linear(x, weight, out=out, config=config)
        elif self._name == "gate_up":
            thin_module.gated_linear(x, weight, out=out, config=config)
        else:
            parts = thin_module.split_linear(x, weight, parts=self._parts, config=config)
            join_add_rmsnorm(parts, self._residual, self._norm, EPS, out=out)

    def _theirs(self, x: Tensor, weight: Tensor, full: Tensor, out: Tensor) -> None:
        torch.mm(x, weight.t(), out=full)
        if self._name == "gate_up":
            silu_mul(full, out=out)
        elif self._name in _SUMMED:
            add_rmsnorm(full, self._residual, self._norm, EPS, out=out)


def linear_cases() -> list[Case]:
    cases = []
    for name, (inputs, outputs) in LINEARS.items():
        prepare = partial(LinearBench, tokens=4096, inputs=inputs, outputs=outputs)
        cases.append(Case("linear", "linear (cuBLAS)", f"4096 tokens, {name}", prepare, LINEAR))
    for model, layers in (("8B", LINEARS), ("0.6B", SMALL_LINEARS)):
        for name, (inputs, outputs) in layers.items():
            skinny = partial(SkinnyBench, inputs=inputs, outputs=outputs)
            cases.append(Case("linear", "skinny_linear", f"{model} {name}", skinny, SKINNY.get((model, name))))
    for model, layers in THIN.items():
        for name, (inputs, outputs) in layers.items():
            for tokens in (8, 32, 64, 128):
                prepared = partial(ThinBench, name=name, tokens=tokens, inputs=inputs, outputs=outputs)
                cases.append(Case("linear", "thin_linear", f"{model} {name}, M={tokens}", prepared))
    return cases
