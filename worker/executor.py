"""The Executor port on this machine: loads the model, sizes the KV cache, and runs steps in launch order, on the calling thread
at pipeline depth 0 and on one thread of its own beyond. What a step does is the ModelRunner's business."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from fairlane import embedded
from fairlane.clock import Clock
from fairlane.scheduler.executor import ExecutorInfo, StepError
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.worker.config import Device, LoadFormat, WorkerConfig
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.input_batch import InputBatch
from fairlane.worker.kv_cache import KVCache, num_blocks_for
from fairlane.worker.loader import load_weights
from fairlane.worker.model_runner import ModelRunner
from fairlane.worker.models.config import ModelConfig, load_model_config
from fairlane.worker.models.registry import model_class

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class StepHandle:
    """A launched step."""

    step_id: int
    future: Future[StepResult]


class LocalExecutor:
    """Implements fairlane.scheduler.executor.Executor. Constructing it loads the model; raises ModelLoadError."""

    def __init__(self, config: WorkerConfig, clock: Clock) -> None:
        folder = _resolve(config)
        device, model_config = _device(config), load_model_config(folder)
        dtype = torch.float32 if device.type == "cpu" else _gpu_dtype(model_config)
        max_model_len = _max_model_len(config, model_config)
        self._threads = config.threads or len(os.sched_getaffinity(0))
        self._set_up_thread()
        with torch.inference_mode():
            model = model_class(model_config.architecture)(model_config, max_model_len, dtype, device)
            std, tied = model_config.initializer_range, model_config.tie_word_embeddings
            load_weights(model, folder, config.load_format, seed=config.seed, std=std, tied=tied)
            num_blocks = config.num_blocks or num_blocks_for(config.kv_cache, model_config, config.block_size, dtype)
            cache = KVCache(model_config, num_blocks, config.block_size, dtype, device)
        slots, vocab = max(config.max_num_resident, config.max_num_seqs), model_config.vocab_size
        batch = InputBatch(slots, max_model_len, config.block_size, num_blocks, vocab, device)
        self.runner = ModelRunner(model, cache, batch, clock)
        name = config.served_name or (
            config.model if config.model in embedded.EMBEDDED else (folder.stem if folder.is_file() else folder.resolve().name)
        )
        self._info = ExecutorInfo(name, vocab, max_model_len, config.block_size, num_blocks, model_config.eos_token_ids)
        self._thread = ThreadPoolExecutor(1, "model-runner", self._set_up_thread) if config.pipeline_depth else None
        self._closed = False
        self._run(self.runner.warm_up).result()

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, output: ScheduleOutput) -> StepHandle:
        """Starts a step (at depth 0: runs it). A step that fails says so in result(). Raises StepError once closed."""
        if self._closed:
            raise StepError("the executor is closed")
        return StepHandle(output.step_id, self._run(self.runner.execute, output))

    def result(self, handle: StepHandle) -> StepResult:
        """Waits for a launched step. Raises StepError if it failed or was abandoned by close()."""
        if handle.future.cancelled():
            raise StepError(f"step {handle.step_id} was abandoned: the executor is closed")
        try:
            return handle.future.result()
        except Exception as error:
            raise StepError(f"step {handle.step_id} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Abandons launched steps and lets go of the model. May be called twice."""
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _run(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> Future[R]:
        if self._thread is not None:
            return self._thread.submit(function, *arguments, **named)
        future: Future[R] = Future()
        try:
            future.set_result(function(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - whatever went wrong belongs to this step; result() raises it
            future.set_exception(error)
        return future

    def _set_up_thread(self) -> None:
        torch.set_num_threads(self._threads)


def _resolve(config: WorkerConfig) -> Path:
    """The model's folder; random weights need no more than a config file, so for them that may be given alone."""
    file = Path(config.model).expanduser()
    if config.load_format is LoadFormat.DUMMY and file.suffix == ".json" and file.is_file():
        return file
    try:
        return embedded.resolve(config.model)
    except embedded.EmbeddedModelError as error:
        raise ModelLoadError(str(error)) from error


def _device(config: WorkerConfig) -> torch.device:
    if config.device is Device.CUDA and not torch.cuda.is_available():
        raise ModelLoadError("device: cuda, but this machine shows no CUDA device to torch; set device: cpu or fix the driver")
    return torch.device(config.device.value)


def _gpu_dtype(config: ModelConfig) -> torch.dtype:
    return torch.float16 if config.dtype == "float16" else torch.bfloat16


def _max_model_len(config: WorkerConfig, model: ModelConfig) -> int:
    limit = model.max_supported_len
    if config.max_model_len is None:
        return model.max_position_embeddings  # beyond it dynamic NTK stretches every sequence, so it must be asked for
    if config.max_model_len > limit:
        raise ModelLoadError(f"max_model_len {config.max_model_len} exceeds the {limit} tokens that config.json allows")
    return config.max_model_len
