"""Prompts through the real engine and the real executor, without a network."""

from __future__ import annotations

from collections.abc import Sequence

from engine_world import snapshot
from fairlane.clock import FakeClock
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import Request, RequestId, SamplingParams
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executor import LocalExecutor


def run_prompts(
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    config: WorkerConfig,
    sampling: SamplingParams = SamplingParams(temperature=0.0),  # noqa: B008 (frozen)
    executor: LocalExecutor | None = None,
) -> list[list[int]]:
    """All prompts at once; exactly max_tokens each (no stop tokens)."""
    executor = executor or LocalExecutor(config, FakeClock())
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_resident=config.max_num_resident,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_model_len=executor.info.max_model_len,
    )
    driver = EngineDriver(
        executor, FakeClock(), snapshot(), limits, depth=config.pipeline_depth, prefix_caching=config.prefix_caching, check=True
    )
    for number, prompt in enumerate(prompts):
        tier = ("gold", "standard", "batch")[number % 3]
        driver.add(
            Request(RequestId(number), "org/app", tier, tuple(prompt), max_tokens, sampling, cache_domain="tenant:org/app")
        )
    driver.run_until_idle()
    return [driver.transcripts[RequestId(number)].token_ids for number in range(len(prompts))]
