"""The Executor port on one GPU: loads the model, finds out how many KV blocks fit beside it, captures the decode graphs, and
launches steps without waiting for them. What a step does is the CudaRunner's business."""

from __future__ import annotations

import gc
import logging

import torch

from fairlane.scheduler.executor import ExecutorInfo, StepError
from fairlane.scheduler.output import NewSequence, ScheduledSequence, ScheduleOutput, StepResult
from fairlane.worker.attention_triton import TritonAttention
from fairlane.worker.config import WorkerConfig
from fairlane.worker.cuda_batch import CudaBatch
from fairlane.worker.cuda_runner import CudaRunner, CudaStep
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.kv_cache import KVCache, block_bytes
from fairlane.worker.loading import LoadedModel, load_model

log = logging.getLogger("fairlane.worker")

_RESERVE = 1 << 30  # for graphs, library workspaces and fragmentation
_HEAD_DIMS = range(16, 257)
_LAUNCH_S = 0.025  # 32 layers of 11 launches, measured on the host of an H200
_RATE = 7e14  # operations a second of large bfloat16 products there


class CudaExecutor:
    """Implements fairlane.scheduler.executor.Executor. Constructing it loads the model; raises ModelLoadError."""

    def __init__(self, config: WorkerConfig) -> None:
        try:
            loaded = load_model(config)
            _check_kernels(loaded, config)
            num_blocks = config.num_blocks or _num_blocks(loaded, config)
            self.runner = _runner(loaded, config, num_blocks)
            self.runner.capture_graphs(_max_mixed_tokens(loaded, config))
        except torch.cuda.OutOfMemoryError as error:
            raise ModelLoadError(_out_of_memory(config)) from error
        info = loaded.config
        self._info = ExecutorInfo(
            loaded.name, info.vocab_size, loaded.max_model_len, config.block_size, num_blocks, info.eos_token_ids
        )
        self._closed = False

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, output: ScheduleOutput) -> CudaStep:
        """Starts a step and returns at once. Raises StepError if it could not be started."""
        if self._closed:
            raise StepError("the executor is closed")
        try:
            return self.runner.launch(output)
        except (ValueError, RuntimeError) as error:
            raise StepError(f"step {output.step_id} failed: {type(error).__name__}: {error}") from error

    def result(self, handle: CudaStep) -> StepResult:
        """Waits for a launched step. Raises StepError if it failed."""
        try:
            return self.runner.result(handle)
        except RuntimeError as error:
            raise StepError(f"step {handle.step_id} failed: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Abandons launched steps."""
        self._closed = True
        torch.cuda.synchronize()


def _max_mixed_tokens(loaded: LoadedModel, config: WorkerConfig) -> int:
    """Tokens that the device computes in about the time in which the host launches a step op by op."""
    operations = 2 * sum(tensor.numel() for tensor in loaded.model.tensors().values())
    return max(16, min(config.max_num_batched_tokens, int(_LAUNCH_S * _RATE / operations)))


def _check_kernels(loaded: LoadedModel, config: WorkerConfig) -> None:
    if loaded.config.head_dim not in _HEAD_DIMS:
        raise ModelLoadError(f"head_dim {loaded.config.head_dim} has no kernel; 16 to 256 have")
    if config.block_size not in (8, 16, 32, 64):
        raise ModelLoadError(f"block_size {config.block_size} has no kernel; 8, 16, 32 and 64 have")


def _runner(loaded: LoadedModel, config: WorkerConfig, num_blocks: int) -> CudaRunner:
    slots = max(config.max_num_resident, config.max_num_seqs)
    with torch.inference_mode():
        cache = KVCache(loaded.config, num_blocks, config.block_size, loaded.dtype, loaded.device)
        batch = CudaBatch(slots, loaded.max_model_len, config.block_size, num_blocks, loaded.config.vocab_size, loaded.device)
        attention = TritonAttention(loaded.config, cache, config.max_num_seqs, loaded.max_model_len)
        return CudaRunner(loaded.model, cache, batch, attention, config.max_num_seqs)


def _num_blocks(loaded: LoadedModel, config: WorkerConfig) -> int:
    """As many as the configured part of the device's memory holds beside the weights and the largest step's activations,
    measured by running one; or what `kv_cache` says."""
    size = block_bytes(loaded.config, config.block_size, loaded.dtype)
    if config.kv_cache is not None:
        return max(2, config.kv_cache // size)
    _run_largest_step(loaded, config)
    peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    used = total - free
    room = int(total * config.gpu_memory_utilization) - used - peak - _RESERVE
    if room < 2 * size:
        raise ModelLoadError(_out_of_memory(config))
    log.info(
        "weights and context take %.1f GiB, a step up to %.1f GiB, %.1f GiB are left for KV",
        used / 2**30,
        peak / 2**30,
        room / 2**30,
    )
    return room // size


def _run_largest_step(loaded: LoadedModel, config: WorkerConfig) -> None:
    """A step of max_num_batched_tokens prompt tokens, over a cache just large enough for it."""
    torch.cuda.reset_peak_memory_stats()
    tokens = min(config.max_num_batched_tokens, loaded.max_model_len)
    num_sequences = max(1, config.max_num_batched_tokens // tokens)
    blocks_each = -(-tokens // config.block_size)
    runner = _runner(loaded, config, 1 + blocks_each)
    ids = list(range(1, blocks_each + 1))
    new = [NewSequence(slot, [1] * tokens, tokens, [ids], {}) for slot in range(num_sequences)]
    scheduled = [ScheduledSequence(slot, 0, tokens, True) for slot in range(num_sequences)]
    runner.result(runner.launch(ScheduleOutput(0, new=new, scheduled=scheduled)))


def _out_of_memory(config: WorkerConfig) -> str:
    free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
    return (
        f"the GPU's memory ({free:.1f} of {total:.1f} GiB free) does not hold the model, its KV cache and a step; lower "
        f"max_num_batched_tokens ({config.max_num_batched_tokens}), max_num_seqs ({config.max_num_seqs}) or max_model_len, "
        "or set kv_cache or num_blocks to less"
    )
