"""What a worker looks like to the simulator."""

from __future__ import annotations

from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executors import limits_of


def shape_of(config: WorkerConfig, info: ExecutorInfo) -> WorkerShape:
    """All but the times of its steps, which are the defaults."""
    limits = limits_of(config, info.max_model_len)
    return WorkerShape(
        num_blocks=info.num_blocks - 1,
        block_size=info.block_size,
        num_host_blocks=info.num_host_blocks,
        max_num_seqs=limits.max_num_seqs,
        max_num_resident=limits.max_num_resident,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_prefill_chunk=limits.max_prefill_chunk,
        max_model_len=info.max_model_len,
        depth=config.pipeline_depth,
        prefix_caching=config.prefix_caching,
    )
