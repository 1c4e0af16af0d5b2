"""The cases of the sampler over a vocabulary of 128k, and of moving whole KV blocks: within the pool, and into the buffer that
swap goes through."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from gpu_timing import Call
from kernel_case import Bench, Case, World, worst_row
from kernel_targets import SAMPLE, SAMPLE_FILTERED

from fairlane.kernels import copy_blocks as copy_module
from fairlane.kernels import reference_sampling
from fairlane.kernels import sample as sample_module
from fairlane.kernels.reference_sampling import SamplingTensors
from fairlane.kernels.sample import SampleWorkspace

VOCAB = 128256
SPREAD = 3.0  # of the logits: as peaked as those of text


class SampleBench(Bench):
    """error() is the share of rows whose token is not the reference's; rounding may excuse one."""

    candidates = sample_module.CANDIDATES
    tolerance = 0.05

    def __init__(self, world: World, rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
        rows, self._vocab = world.size(rows, 3), world.size(VOCAB, 3000)
        asked = [(temperature, top_k, top_p, 0.0)] * rows
        self._mode = sample_module.mode_for(asked)
        self.bytes_moved = float(rows * self._vocab * world.dtype.itemsize)
        self._logits = world.normal(world.sets(self.bytes_moved), rows, self._vocab).mul_(SPREAD)
        self._params = _params(rows, temperature, top_k, top_p, world.device)
        self._ids = torch.empty(rows, dtype=torch.int64, device=world.device)
        self._ok = torch.empty(rows, dtype=torch.bool, device=world.device)

    def calls(self, config: Any = None) -> Sequence[Call]:
        rows = len(self._ids)
        workspace = SampleWorkspace.allocate(rows, self._vocab, self._ids.device, config or sample_module.DEFAULT)
        sample = partial(sample_module.sample, workspace=workspace, out_ids=self._ids, out_ok=self._ok, mode=self._mode)
        return [partial(sample, logits, self._params) for logits in self._logits]

    def error(self, config: Any = None) -> float:
        self._ids.fill_(-1)
        self.calls(config)[0]()
        expected = reference_sampling.sample(self._logits[0], self._params)
        return float(((self._ids != expected) | ~self._ok).double().mean())


def _params(rows: int, temperature: float, top_k: int, top_p: float, device: torch.device) -> SamplingTensors:
    def floats(value: float) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.float32, device=device)

    def ints(value: int) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.int64, device=device)

    seeds = torch.arange(rows, device=device) * 7919 + 1
    return SamplingTensors(
        temperature=floats(temperature),
        top_k=ints(top_k),
        top_p=floats(top_p),
        min_p=floats(0.0),
        seed=seeds,
        position=ints(1000),
        sibling=ints(0),
    )


class CopyBench(Bench):
    """Pairs of blocks of 2 MiB: a block and its copy, in random places."""

    candidates = copy_module.CANDIDATES
    tolerance = 0.0

    def __init__(self, world: World, pairs: int) -> None:
        pairs = world.size(pairs, 3)
        shape = (8, 2, 2, 16, 32) if world.tiny else (32, 2, 8, 16, 128)
        self._pool = world.normal(2 * pairs + 1, *shape)
        order = torch.randperm(2 * pairs, device=world.device) + 1
        self._pairs = order.view(pairs, 2)
        size = self._pool[0].numel()
        self._buffer = world.normal(pairs, size)
        self._workspace = world.normal(min(pairs * size, copy_module.WORKSPACE_BYTES // world.dtype.itemsize))
        self.bytes_moved = 2.0 * pairs * size * world.dtype.itemsize

    def calls(self, config: Any = None) -> Sequence[Call]:
        config = config or copy_module.DEFAULT
        return [partial(copy_module.copy_blocks, self._pool, self._pairs, workspace=self._workspace, config=config)]

    def error(self, config: Any = None) -> float:
        expected = self._pool.clone()
        expected[self._pairs[:, 1]] = expected[self._pairs[:, 0]]
        self.calls(config)[0]()
        return worst_row(self._pool, expected.double())


class GatherBench(CopyBench):
    """The same blocks into a contiguous buffer."""

    def calls(self, config: Any = None) -> Sequence[Call]:
        config = config or copy_module.DEFAULT
        return [partial(copy_module.gather_blocks, self._pool, self._pairs[:, 0], self._buffer, config=config)]

    def error(self, config: Any = None) -> float:
        self._buffer.fill_(torch.nan)
        self.calls(config)[0]()
        return worst_row(self._buffer, self._pool[self._pairs[:, 0]].flatten(1).double())


class ScatterBench(CopyBench):
    """A contiguous buffer into the same blocks."""

    def calls(self, config: Any = None) -> Sequence[Call]:
        config = config or copy_module.DEFAULT
        return [partial(copy_module.scatter_blocks, self._pool, self._pairs[:, 1], self._buffer, config=config)]

    def error(self, config: Any = None) -> float:
        expected = self._pool.clone()
        expected[self._pairs[:, 1]] = self._buffer.view_as(expected[self._pairs[:, 1]])
        self.calls(config)[0]()
        return worst_row(self._pool, expected.double())


def sample_cases() -> list[Case]:
    asked: list[tuple[str, Any, dict[str, Any]]] = [
        ("1, greedy", SAMPLE[1], {"rows": 1, "temperature": 0.0}),
        ("1, drawn", SAMPLE[1], {"rows": 1, "temperature": 0.8}),
        ("64, greedy", SAMPLE[64], {"rows": 64, "temperature": 0.0}),
        ("64, drawn", SAMPLE[64], {"rows": 64, "temperature": 0.8}),
        ("64, top_p 0.95", SAMPLE_FILTERED, {"rows": 64, "temperature": 0.8, "top_p": 0.95}),
        ("64, top_k 50, top_p 0.95", SAMPLE_FILTERED, {"rows": 64, "temperature": 0.8, "top_k": 50, "top_p": 0.95}),
    ]
    return [Case("sample", "sample", name, partial(SampleBench, **options), target) for name, target, options in asked]


def copy_cases() -> list[Case]:
    benches = {"copy_blocks": CopyBench, "gather_blocks": GatherBench, "scatter_blocks": ScatterBench}
    return [Case("copy", kernel, "128 of 2 MiB", partial(bench, pairs=128), None, 16) for kernel, bench in benches.items()]
