"""worker.yaml as a schema: which model, how much KV cache, how large a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from fairlane.config.fields import Bounds, Size, Text


class LoadFormat(Enum):
    SAFETENSORS = "safetensors"
    DUMMY = "dummy"


class Device(Enum):
    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process.

    model: a Hugging Face folder, or the name of an embedded model (smollm2).
    kv_cache: bytes for KV blocks; unset: 512 MiB on a CPU, on a GPU what gpu_memory_utilization leaves beside weights and steps.
    num_blocks, if set, wins (tests, benchmarks).
    host_kv_cache: bytes of host memory for the KV blocks of evicted sequences; unset: they are always computed again.
    cascade: on a GPU, K and V of a prefix that many sequences of a step share are read once for all of them.
    batch_invariant: on a GPU, a sequence gets the same bits whatever its company, chunks, prefix hits and preemptions.
    max_num_seqs: most sequences placed in one step. max_num_resident: most that may hold KV at once.
    max_num_batched_tokens: a step's token budget. max_prefill_chunk: most tokens of one sequence in a step (0: no cap).
    pipeline_depth: steps launched ahead of the results the scheduler has seen.
    step_log: a file for what every step did and how long it took.
    """

    model: Annotated[str, Text(r"\S.*", "a folder or an embedded model's name")] = "smollm2"
    served_name: Annotated[str, Text(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", "a model name")] | None = None
    load_format: LoadFormat = LoadFormat.SAFETENSORS
    device: Device = Device.CPU
    threads: Annotated[int, Bounds(0, 1024)] = 0
    seed: Annotated[int, Bounds(0, 2**63 - 1)] = 0
    max_model_len: Annotated[int, Bounds(1, 10_000_000)] | None = None
    block_size: Annotated[int, Bounds(1, 256)] = 16
    kv_cache: Annotated[int, Size(1 << 20)] | None = None
    gpu_memory_utilization: Annotated[float, Bounds(0.05, 0.98)] = 0.92
    num_blocks: Annotated[int, Bounds(2, 1 << 31)] | None = None
    host_kv_cache: Annotated[int, Size(1 << 20)] | None = None
    prefix_caching: bool = True
    cascade: bool = True
    batch_invariant: bool = False
    max_num_seqs: Annotated[int, Bounds(1, 65536)] = 64
    max_num_resident: Annotated[int, Bounds(1, 1_000_000)] = 256
    max_num_batched_tokens: Annotated[int, Bounds(1, 1_000_000)] = 512
    max_prefill_chunk: Annotated[int, Bounds(0, 1_000_000)] = 0
    pipeline_depth: Annotated[int, Bounds(0, 2)] = 0
    step_log: Annotated[str, Text(r"\S.*", "a file")] | None = None
