"""What a simulated worker is: its KV pool, its limits, how long its steps take, how it is reached. `fairlane calibrate`
writes one as a file; some have names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.step_time import H100, H200, StepModel

# Of outputs; the model is not there, so any two ids would do.
TOKEN, END_OF_TEXT = 7, 2
# Prefix ids are hashed like token ids, so that they have to fit in the same place.
VOCAB = 1 << 31
# What a file says of where it comes from; nothing reads it.
ABOUT = "about"


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """Defaults: an 80 GB GPU with an 8B model (400,000 tokens of KV), steps of 512 tokens.

    num_blocks: without the null block. max_num_resident: 0: max_num_seqs. max_prefill_chunk: most tokens of one sequence in a
    step; 0: no limit but the step's. network_s: from the gateway to the worker, and back. depth: pipeline depth, 0 to 2.
    prefix_caching: also for a workload without prefixes, where only an evicted request finds its own blocks again; hashing them
    takes time.
    """

    step: StepModel = H100
    num_blocks: int = 25_000
    block_size: int = 16
    num_host_blocks: int = 0
    max_num_seqs: int = 256
    max_num_resident: int = 0
    max_num_batched_tokens: int = 512
    max_prefill_chunk: int = 0
    max_model_len: int = 131_072
    depth: int = 1
    network_s: float = 0.3e-3
    prefix_caching: bool = False

    def info(self) -> ExecutorInfo:
        """The null block comes on top of num_blocks."""
        return ExecutorInfo(
            "simulated", VOCAB, self.max_model_len, self.block_size, self.num_blocks + 1, (END_OF_TEXT,), self.num_host_blocks
        )

    def limits(self) -> SchedulerLimits:
        """Raises ValueError for limits that contradict each other."""
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_resident=self.max_num_resident or self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_chunk=self.max_prefill_chunk,
            max_model_len=self.max_model_len,
        )

    def document(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """What load() reads."""
        return {ABOUT: dict(about)} | asdict(self)

    @classmethod
    def load(cls, path: Path) -> WorkerShape:
        """From a JSON object whose keys are field names; what it leaves out keeps its default. Raises SimulationInputError."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise SimulationInputError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise SimulationInputError(f"{path}: is not JSON: {error}") from None
        try:
            return cls.of(values)
        except SimulationInputError as error:
            raise SimulationInputError(f"{path}: {error}") from None

    @classmethod
    def of(cls, values: object) -> WorkerShape:
        """From what such a file holds. Raises SimulationInputError."""
        known = [field.name for field in fields(cls)]
        if not isinstance(values, dict):
            raise SimulationInputError(f"an object with {', '.join(known)} is needed")
        found: dict[str, Any] = {}
        for name, value in values.items():
            if name in known:
                found[name] = _value(name, value)
            elif name != ABOUT:
                raise SimulationInputError(f"unknown key {name!r}: one of {', '.join(known)} is allowed")
        shape = cls(**found)
        try:
            shape.limits()
        except ValueError as error:
            raise SimulationInputError(str(error)) from None
        return shape


# The least that a count may be; 1 for the others.
_LEAST = {"num_host_blocks": 0, "max_num_resident": 0, "max_prefill_chunk": 0, "depth": 0}
# The most: all of a worker's blocks are there, and more tokens or sequences than these no worker takes into a step.
_MOST = {
    "depth": 2, "num_blocks": 20_000_000, "num_host_blocks": 20_000_000, "block_size": 65_536, "max_num_seqs": 1 << 20,
    "max_num_resident": 1 << 20, "max_num_batched_tokens": 1 << 24, "max_prefill_chunk": 1 << 24, "max_model_len": 1 << 24,
}  # fmt: skip
_MAX_NETWORK_S = 3600.0


def _value(name: str, value: object) -> StepModel | float | int:
    if name == "step":
        return StepModel.of(value)
    if name == "prefix_caching":
        if not isinstance(value, bool):
            raise SimulationInputError(f"{name}: {value!r}: true or false is needed")
        return value
    if name == "network_s":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_NETWORK_S:
            raise SimulationInputError(f"{name}: {value!r}: a number of seconds, from 0 to {_MAX_NETWORK_S:g}, is needed")
        return float(value)
    least, most = _LEAST.get(name, 1), _MOST[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SimulationInputError(f"{name}: {value!r}: a whole number, from {least} to {most}, is needed")
    return value


# With an 8B model in bfloat16. What 141 GB leave beside the weights is KV for 864,000 tokens.
NAMED: Mapping[str, WorkerShape] = {"h100-8b": WorkerShape(), "h200-8b": WorkerShape(step=H200, num_blocks=54_000)}


def shape_named(name: str) -> WorkerShape:
    """One of NAMED, or that of a file. Raises SimulationInputError."""
    if name in NAMED:
        return NAMED[name]
    if not Path(name).exists():
        raise SimulationInputError(
            f"{name}: there is no such file: a file of `fairlane calibrate`, or {', '.join(NAMED)}, is needed"
        )
    return WorkerShape.load(Path(name))
