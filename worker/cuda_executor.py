"""The Executor port on one GPU: loads the model, has its KV cache sized, captures the graphs, and launches steps without waiting
for them. What a step does is the CudaRunner's business, how many blocks fit is cuda_memory.py's."""

from __future__ import annotations

import gc
import logging

import torch

from fairlane.scheduler.executor import ExecutorInfo, StepError
from fairlane.scheduler.output import ScheduleOutput, StepResult
from fairlane.worker.attention_triton import TritonAttention
from fairlane.worker.cascade import Cascade, rule_for
from fairlane.worker.config import WorkerConfig
from fairlane.worker.cuda_batch import CudaBatch
from fairlane.worker.cuda_memory import (
    is_out_of_memory,
    num_blocks_beside,
    num_blocks_that_fit,
    out_of_memory,
    run_largest_step,
    weights_too_large,
)
from fairlane.worker.cuda_runner import CudaRunner, CudaStep
from fairlane.worker.cuda_swap import CudaHostCache, PinnedBlocks
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.host_memory import num_host_blocks_for
from fairlane.worker.kv_cache import KVCache, block_bytes, block_shape, num_blocks_for
from fairlane.worker.loading import LoadedModel, load_model
from fairlane.worker.side_stream import SideStream
from fairlane.worker.tracing import span

log = logging.getLogger("fairlane.worker")

_LAUNCH_S = 0.025  # 32 layers of 11 launches, measured on the host of an H200
_RATE = 7e14  # operations a second of large bfloat16 products there


class DeviceLostError(Exception):
    """CUDA can run no further step in this process, as after an illegal address; only a new process can."""


class CudaExecutor:
    """Implements fairlane.scheduler.executor.Executor. Constructing it loads the model; raises ModelLoadError.

    launch() and result() raise DeviceLostError when no step can follow: the engine must not go on with an executor that fails
    every request it is given.
    """

    def __init__(self, config: WorkerConfig) -> None:
        loaded: LoadedModel | None = None
        host: PinnedBlocks | None = None
        num_blocks = 0
        try:
            loaded = load_model(config)
            host = _host_blocks(loaded, config)
            num_blocks = self._set_up(loaded, config, host)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.info("out of memory: %s", error)
        if loaded is None or host is None or not num_blocks:
            # Here, where the failed attempt's tensors are gone, what would fit can be measured.
            vars(self).pop("runner", None)
            raise ModelLoadError(_out_of_memory(loaded, config, host))
        info = loaded.config
        self._info = ExecutorInfo(
            loaded.name,
            info.vocab_size,
            loaded.max_model_len,
            config.block_size,
            num_blocks,
            info.eos_token_ids,
            self.runner.host.num_blocks,
        )
        self._closed = False

    def _set_up(self, loaded: LoadedModel, config: WorkerConfig, host: PinnedBlocks) -> int:
        """The number of blocks."""
        mixed = _max_mixed_tokens(loaded, config)
        num_blocks = _num_blocks(loaded, config, host, mixed)
        self.runner = _runner(loaded, config, host, num_blocks)
        run_largest_step(self.runner, config, loaded.max_model_len)  # rather now than in front of users
        self.runner.compile_samplers()
        self.runner.compile_block_moves()
        self.runner.capture_graphs(mixed)
        return num_blocks

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, output: ScheduleOutput) -> CudaStep:
        """Starts a step and returns at once. Raises StepError if it could not be started."""
        if self._closed:
            raise StepError("the executor is closed")
        try:
            with span("launch"):
                return self.runner.launch(output)
        except Exception as error:
            raise _failure(output.step_id, error) from error

    def result(self, handle: CudaStep) -> StepResult:
        """Waits for a launched step. Raises StepError if it failed or was abandoned by close()."""
        if self._closed:
            raise StepError(f"step {handle.step_id} was abandoned: the executor is closed")
        try:
            with span("result"):
                return self.runner.result(handle)
        except Exception as error:
            raise _failure(handle.step_id, error) from error

    def close(self) -> None:
        """Abandons launched steps and lets go of the model. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:  # a device that is lost needs no closing
            log.warning("the device did not finish its work: %s", error)
            return
        del self.runner
        gc.collect()  # graphs and runner hold each other
        torch.cuda.empty_cache()


def _failure(step_id: int, error: Exception) -> Exception:
    """What a failed step raises: a StepError only if others can follow it."""
    message = f"step {step_id} failed: {type(error).__name__}: {error}"
    if isinstance(error, RuntimeError) and not isinstance(error, torch.cuda.OutOfMemoryError):
        try:
            torch.cuda.synchronize()  # once a kernel has gone wrong, every call says so
        except RuntimeError as lost:
            return DeviceLostError(f"{message}; the device is lost: {lost}")
    return StepError(message)


def _out_of_memory(loaded: LoadedModel | None, config: WorkerConfig, host: PinnedBlocks | None) -> str:
    if loaded is None or host is None:
        return weights_too_large()
    model, pinned, mixed = loaded, host, _max_mixed_tokens(loaded, config)
    fits = num_blocks_that_fit(model, config, mixed, lambda num_blocks: _runner(model, config, pinned, num_blocks))
    return out_of_memory(config, fits, block_bytes(model.config, config.block_size, model.dtype))


def _max_mixed_tokens(loaded: LoadedModel, config: WorkerConfig) -> int:
    """Tokens that the device computes in about the time in which the host launches a step op by op."""
    operations = 2 * sum(tensor.numel() for tensor in loaded.model.tensors().values())
    return min(config.max_num_batched_tokens, max(16, int(_LAUNCH_S * _RATE / operations)))


def _host_blocks(loaded: LoadedModel, config: WorkerConfig) -> PinnedBlocks:
    count = num_host_blocks_for(config.host_kv_cache, loaded.config, config.block_size, loaded.dtype)
    return PinnedBlocks(count, block_shape(loaded.config, config.block_size), loaded.dtype, loaded.device)


def _num_blocks(loaded: LoadedModel, config: WorkerConfig, host: PinnedBlocks, mixed_tokens: int) -> int:
    """As configured, or what fits beside the weights."""
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_cache is not None:
        return num_blocks_for(config.kv_cache, loaded.config, config.block_size, loaded.dtype)
    return num_blocks_beside(loaded, config, mixed_tokens, lambda num_blocks: _runner(loaded, config, host, num_blocks))


def _runner(loaded: LoadedModel, config: WorkerConfig, host: PinnedBlocks, num_blocks: int) -> CudaRunner:
    slots = max(config.max_num_resident, config.max_num_seqs)
    with torch.inference_mode():
        cache = KVCache(loaded.config, num_blocks, config.block_size, loaded.dtype, loaded.device)
        batch = CudaBatch(slots, loaded.max_model_len, config.block_size, num_blocks, loaded.config.vocab_size, loaded.device)
        rule = rule_for(loaded, config)
        attention = TritonAttention(
            *(loaded.config, cache, config.max_num_seqs, loaded.max_model_len),
            cascade=rule is not None,
            batch_invariant=config.batch_invariant,
        )
        groups = attention.prefix_groups
        cascade = Cascade(batch, groups, rule) if rule is not None and groups is not None else None
        swapped = CudaHostCache(cache, host, SideStream(loaded.device))
        return CudaRunner(loaded.model, cache, swapped, batch, attention, config.max_num_seqs, cascade)
