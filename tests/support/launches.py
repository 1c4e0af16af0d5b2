"""What the tests in tests/gpu ask of a launch: its graph, what it allocates, what it compiles; and numbers to launch it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from triton import knobs

from device import cuda


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(cuda).manual_seed(seed), device=cuda).to(dtype)


def captured(launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
    launch()  # compiles before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that are compiled inside."""
    seen: list[str] = []
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = lambda **what: seen.append(what["fn"].name)
    try:
        yield seen
    finally:
        knobs.runtime.jit_cache_hook = before
