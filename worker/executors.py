"""From a worker's settings to the executor for its device and the limits of its scheduler. Nothing heavy is imported before the
settings are known to be right."""

from __future__ import annotations

from fairlane.clock import Clock
from fairlane.scheduler.executor import Executor
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.worker.config import Device, WorkerConfig
from fairlane.worker.errors import ModelLoadError


def make_executor(config: WorkerConfig, clock: Clock) -> Executor:
    """The executor for the configured device, with its model loaded. Raises ModelLoadError."""
    if config.device is Device.CUDA:
        return _cuda_executor(config)
    from fairlane.worker.executor import LocalExecutor  # loads torch: seconds, so only once the settings are right

    return LocalExecutor(config, clock)


def _cuda_executor(config: WorkerConfig) -> Executor:
    from fairlane.worker.loading import device_for

    device_for(config)  # on a machine without a GPU, that is what must be said, not that Triton is missing
    try:
        from fairlane.worker.cuda_executor import CudaExecutor
    except ModuleNotFoundError as error:
        raise ModelLoadError(f"device: cuda needs the package {error.name}, which is not installed") from error
    return CudaExecutor(config)


def limits_of(config: WorkerConfig, max_model_len: int) -> SchedulerLimits:
    """Raises ValueError for limits that contradict each other."""
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_resident=max(config.max_num_resident, config.max_num_seqs),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_model_len=max_model_len,
    )
