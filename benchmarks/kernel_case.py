"""What a kernel benchmark consists of: the world it runs in, a case (what is asked, and what it is judged by) and its bench (the
case laid out on the device)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from gpu_timing import Call
from kernel_targets import Target
from torch import Tensor

MIN_FOOTPRINT = 256 << 20  # of all input sets together: several times the L2 cache of any GPU
MAX_SETS = 256


@dataclass(frozen=True)
class World:
    """tiny: sizes for Triton's interpreter, which is how a benchmark is tried where there is no GPU."""

    device: torch.device
    dtype: torch.dtype
    tiny: bool = False

    def sets(self, bytes_per_set: float) -> int:
        """How many input sets to make: at least three, and so many that they do not fit in the cache, or MAX_SETS."""
        return 2 if self.tiny else min(MAX_SETS, max(3, math.ceil(MIN_FOOTPRINT / bytes_per_set)))

    def size(self, full: int, tiny: int) -> int:
        return min(full, tiny) if self.tiny else full

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random normal data: zeros would be faster than what a model holds."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device).normal_()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Bench(ABC):
    """A case on the device.

    bytes_moved: each input read once, each output written once. flops: 0 where bytes are what counts. warm: the kernel finds its
    inputs in the cache in practice too. candidates: what a sweep tries. tolerance: of error().
    """

    bytes_moved: float
    flops: float = 0.0
    warm: ClassVar[bool] = False
    candidates: Sequence[Any] = ()
    tolerance: float = 5e-3

    @abstractmethod
    def calls(self, config: Any = None) -> Sequence[Call]:
        """One call per input set, with the default configuration or the given one."""

    @abstractmethod
    def error(self, config: Any = None) -> float:
        """The worst row's ||error|| / ||exact|| of a call on the first set, over the rows that are checked; infinite where a
        result is not finite. Ops that give ids: the share of ids that differ."""

    def entry(self, config: Any) -> str:
        """The key under which a tuning table would hold a configuration for this case; empty where there is no such table."""
        return ""

    def peers(self) -> Mapping[str, Sequence[Call]]:
        """The same work by others, by name."""
        return {}


@dataclass(frozen=True)
class Case:
    """prepare lays it out. block_size: of the KV cache, 0 where there is none."""

    group: str
    kernel: str
    name: str
    prepare: Callable[[World], Bench]
    target: Target | None = None
    block_size: int = 0


def worst_row(found: Tensor, exact: Tensor) -> float:
    """found, exact [N, ...]: the largest ||found - exact|| / ||exact|| of a row; infinite if anything is not finite."""
    error = (found.double() - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1).clamp_min(1e-30)
    return float(error.max()) if bool(torch.isfinite(error).all()) else math.inf
