"""The Executor port on this machine: loads the model, sizes the KV cache, and runs steps in launch order, on the calling thread
at pipeline depth 0 and on one thread of its own beyond. What a step does is the ModelRunner's business."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from fairlane.clock import Clock
from fairlane.scheduler.executor import ExecutorInfo, StepError
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.worker.config import WorkerConfig
from fairlane.worker.host_cache import CpuHostCache
from fairlane.worker.host_memory import num_host_blocks_for
from fairlane.worker.input_batch import InputBatch
from fairlane.worker.kv_cache import KVCache, num_blocks_for
from fairlane.worker.loading import load_model
from fairlane.worker.model_runner import ModelRunner

_KV_CACHE = 512 << 20

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
        self._threads = config.threads or len(os.sched_getaffinity(0))
        self._set_up_thread()
        loaded = load_model(config)
        num_blocks = config.num_blocks or num_blocks_for(
            config.kv_cache or _KV_CACHE, loaded.config, config.block_size, loaded.dtype
        )
        num_host_blocks = num_host_blocks_for(config.host_kv_cache, loaded.config, config.block_size, loaded.dtype)
        with torch.inference_mode():
            cache = KVCache(loaded.config, num_blocks, config.block_size, loaded.dtype, loaded.device)
            host = CpuHostCache(cache, num_host_blocks)
        slots, vocab = max(config.max_num_resident, config.max_num_seqs), loaded.config.vocab_size
        batch = InputBatch(slots, loaded.max_model_len, config.block_size, num_blocks, vocab, loaded.device)
        self.runner = ModelRunner(loaded.model, cache, host, batch, clock)
        self._info = ExecutorInfo(
            loaded.name,
            vocab,
            loaded.max_model_len,
            config.block_size,
            num_blocks,
            loaded.config.eos_token_ids,
            num_host_blocks,
        )
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
