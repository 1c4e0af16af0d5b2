"""From what a user asked for to the settings of an engine in this process, checked before any weight is loaded: which device,
which model, whether the loads fit its context and this machine's memory."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import torch

from fairlane.bench.loads import Load
from fairlane.bench.models import model_config_file, num_parameters
from fairlane.config.overrides import override
from fairlane.config.schema import field_at
from fairlane.config.strict import load_file
from fairlane.embedded import resolve
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.worker.config import Device, LoadFormat, WorkerConfig
from fairlane.worker.executors import limits_of
from fairlane.worker.host_memory import available_bytes
from fairlane.worker.loading import device_for
from fairlane.worker.models.config import ModelConfig, load_model_config

GPU_SETTINGS = "worker-gpu.yaml"


@dataclass(frozen=True, slots=True)
class Asked:
    """The flags of a command that runs an engine. model_config: a shape to run with random weights, instead of a model.
    device: None for a GPU if there is one. settings: of worker.yaml, as they were written."""

    model: str | None = None
    model_config: str | None = None
    load_format: str | None = None
    device: str | None = None
    worker_config: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


def settings_for(asked: Asked) -> WorkerConfig:
    """The worker's settings: the file's, or those that suit the device, under the flags. Prefixes are not cached: a second run of
    the same prompts would measure the cache. Raises ConfigError, ValueError, ModelLoadError, EmbeddedModelError."""
    unknown = [name for name in asked.settings if field_at(WorkerConfig, (name,)) is None]
    if unknown:
        raise ValueError(f"--set: a worker has no setting {', '.join(unknown)}; worker.yaml has them all")
    config = override(_base(asked), {"device": asked.device, "load_format": asked.load_format})
    config = override(dataclasses.replace(config, prefix_caching=False), asked.settings)
    limits_of(config, 1)
    device_for(config)
    if asked.model_config is None:
        config = config if asked.model is None else dataclasses.replace(config, model=asked.model)
        resolve(config.model)  # not there: say so now
        return config
    if asked.model is not None:
        raise ValueError("--model and --model-config are two models: give one of them")
    if asked.load_format not in (None, LoadFormat.DUMMY.value):
        raise ValueError("--model-config is a shape without weights: --load dummy is all it can have")
    file = model_config_file(asked.model_config)
    return dataclasses.replace(config, model=str(file), load_format=LoadFormat.DUMMY)


def _base(asked: Asked) -> WorkerConfig:
    if asked.worker_config is not None:
        return load_file(asked.worker_config, WorkerConfig)
    if asked.device == Device.CPU.value or (asked.device is None and not torch.cuda.is_available()):
        return WorkerConfig()
    return load_file(Path(str(files("fairlane.configs").joinpath(GPU_SETTINGS))), WorkerConfig)


def refuse_what_cannot_run(config: WorkerConfig, loads: Mapping[str, Load]) -> None:
    """Raises ValueError for a load that the model's context is too short for, and for weights that this machine's memory does
    not hold; ModelLoadError for a config.json that cannot be used."""
    limit = context_of(config)
    for name, load in loads.items():
        if load.longest > limit:
            raise ValueError(f"load {name} has a request of {load.longest:,} tokens, and the model's context is {limit:,}")
    if config.device is Device.CPU:
        _refuse_too_large(_model_config(config), available_bytes())


def context_of(config: WorkerConfig) -> int:
    """The most tokens of a request. Raises ModelLoadError for a config.json that cannot be used."""
    return config.max_model_len or _model_config(config).max_position_embeddings


def _model_config(config: WorkerConfig) -> ModelConfig:
    return load_model_config(Path(config.model) if config.model.endswith(".json") else resolve(config.model))


def _refuse_too_large(model: ModelConfig, available: int | None) -> None:
    """float32 weights on a CPU; without this the kernel would kill us halfway."""
    needed = 4 * num_parameters(model)
    if available is not None and needed > available:
        raise ValueError(
            f"the weights take {needed / 2**30:.1f} GiB as float32, and {available / 2**30:.1f} GiB of memory are available; "
            "choose a smaller model, or a GPU with --device cuda"
        )


# -- facts of a loaded engine ------------------------------------------------------------------------------------------------


def kv_tokens(info: ExecutorInfo) -> int:
    """Tokens that the KV cache holds; block 0 is never used."""
    return (info.num_blocks - 1) * info.block_size


def device_name(config: WorkerConfig) -> str:
    return torch.cuda.get_device_name() if config.device is Device.CUDA else f"cpu, {torch.get_num_threads()} threads"


def peak_memory_bytes(config: WorkerConfig) -> int:
    """The most that this process has had: of the GPU's memory as torch counts it, or of this machine's."""
    if config.device is Device.CUDA:
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
