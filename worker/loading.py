"""From a worker's configuration to a model on its device: which folder, which device and dtype, how long a sequence may be. It
says clearly why something cannot be served; how steps are run is the executors' business."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from fairlane import embedded
from fairlane.kernels.decode_tuning import tuning_for as decode_tuning
from fairlane.kernels.prefill_tuning import tuning_for as prefill_tuning
from fairlane.worker.config import Device, LoadFormat, WorkerConfig
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.loader import load_weights
from fairlane.worker.models.config import ModelConfig, load_model_config
from fairlane.worker.models.llama import LlamaModel
from fairlane.worker.models.registry import model_class

log = logging.getLogger("fairlane.worker")

_HEAD_DIMS = (16, 256)
_BLOCK_SIZES = (8, 16, 32, 64)
_CAPABILITY = (8, 0)  # the first with bfloat16


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights. name: what gateways call it. max_model_len: of prompt and output together."""

    model: LlamaModel
    config: ModelConfig
    name: str
    max_model_len: int
    dtype: torch.dtype
    device: torch.device


def load_model(config: WorkerConfig) -> LoadedModel:
    """Raises ModelLoadError; for what no weight is needed to know, before it reads any."""
    device = device_for(config)
    if config.batch_invariant and device.type != "cuda":
        raise ModelLoadError("batch_invariant is for device: cuda; on a CPU a sequence gets the same tokens without it")
    folder = _resolve(config)
    model_config = load_model_config(folder)
    dtype = torch.float32 if device.type == "cpu" else _gpu_dtype(model_config)
    if device.type == "cuda":
        refuse_without_kernels(model_config, config.block_size, dtype)
    max_model_len = _max_model_len(config, model_config)
    with torch.inference_mode():
        model = model_class(model_config.architecture)(model_config, max_model_len, dtype, device)
        std, tied = model_config.initializer_range, model_config.tie_word_embeddings
        load_weights(
            model, folder, config.load_format, seed=config.seed, std=std, tied=tied, batch_invariant=config.batch_invariant
        )
    return LoadedModel(model, model_config, _name(config, folder), max_model_len, dtype, device)


def _name(config: WorkerConfig, folder: Path) -> str:
    if config.served_name:
        return config.served_name
    if config.model in embedded.EMBEDDED:
        return config.model
    return folder.stem if folder.is_file() else folder.resolve().name


def _resolve(config: WorkerConfig) -> Path:
    """The model's folder; random weights need no more than a config file, so for them that may be given alone."""
    file = Path(config.model).expanduser()
    if config.load_format is LoadFormat.DUMMY and file.suffix == ".json" and file.is_file():
        return file
    try:
        return embedded.resolve(config.model)
    except embedded.EmbeddedModelError as error:
        raise ModelLoadError(str(error)) from error


def device_for(config: WorkerConfig) -> torch.device:
    """The configured device. Raises ModelLoadError if this machine has none, or an older one than the kernels are made for."""
    if config.device is Device.CUDA:
        if not torch.cuda.is_available():
            raise ModelLoadError(
                "device: cuda, but this machine shows no CUDA device to torch; set device: cpu or fix the driver"
            )
        found = torch.cuda.get_device_capability()
        if found < _CAPABILITY:
            needed = ".".join(map(str, _CAPABILITY))
            raise ModelLoadError(f"the GPU has compute capability {found[0]}.{found[1]}; device: cuda needs {needed} or later")
    return torch.device(config.device.value)


def refuse_without_kernels(model: ModelConfig, block_size: int, dtype: torch.dtype) -> None:
    """Raises ModelLoadError for what the GPU's attention does not compute, saying what it does."""
    first, last = _HEAD_DIMS
    if not first <= model.head_dim <= last:
        raise ModelLoadError(f"head_dim {model.head_dim} has no kernel on a GPU; {first} to {last} have. Set device: cpu")
    if block_size not in _BLOCK_SIZES:
        sizes = ", ".join(map(str, _BLOCK_SIZES))
        raise ModelLoadError(f"block_size {block_size} has no kernel on a GPU; these have: {sizes}")
    group = model.num_heads // model.num_kv_heads
    try:
        decode_tuning(model.head_dim, group, dtype, block_size)
        prefill_tuning(model.head_dim, group, dtype)
    except ValueError as error:
        raise ModelLoadError(f"this model's attention has no kernel on a GPU: {error}. Set device: cpu") from error


def _gpu_dtype(config: ModelConfig) -> torch.dtype:
    """The checkpoint's own, if it is a half precision."""
    if config.dtype == "float16":
        return torch.float16
    if config.dtype != "bfloat16":
        log.info("weights of type %s are served in bfloat16", config.dtype)
    return torch.bfloat16


def _max_model_len(config: WorkerConfig, model: ModelConfig) -> int:
    limit = model.max_supported_len
    if config.max_model_len is None:
        return model.max_position_embeddings  # beyond it dynamic NTK stretches every sequence, so it must be asked for
    if config.max_model_len > limit:
        raise ModelLoadError(f"max_model_len {config.max_model_len} exceeds the {limit} tokens that config.json allows")
    return config.max_model_len
