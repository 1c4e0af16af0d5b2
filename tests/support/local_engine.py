"""Prompts through the real engine and the real executor, without a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine_world import snapshot
from fairlane.clock import FakeClock
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import Request, RequestId, SamplingParams
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executor import LocalExecutor

GREEDY = SamplingParams(temperature=0.0)


@contextmanager
def engine(config: WorkerConfig, *, min_swap_tokens: int = 1) -> Iterator[EngineDriver]:
    """A driver over a LocalExecutor, with all invariants checked after every turn."""
    executor = LocalExecutor(config, FakeClock())
    limits = SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_resident=config.max_num_resident,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_chunk=config.max_prefill_chunk,
        max_model_len=executor.info.max_model_len,
        min_swap_tokens=min_swap_tokens,
    )
    try:
        yield EngineDriver(
            executor,
            FakeClock(),
            snapshot(),
            limits,
            depth=config.pipeline_depth,
            prefix_caching=config.prefix_caching,
            check=True,
        )
    finally:
        executor.close()


def prompt_request(number: int, prompt: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY) -> Request:
    """A request of one tenant, tiers in turn; exactly max_tokens (no stop tokens)."""
    tier = ("gold", "standard", "batch")[number % 3]
    return Request(RequestId(number), "org/app", tier, tuple(prompt), max_tokens, sampling, cache_domain="tenant:org/app")


def run_prompts(
    prompts: Sequence[Sequence[int]], max_tokens: int, config: WorkerConfig, sampling: SamplingParams = GREEDY
) -> list[list[int]]:
    """All prompts at once."""
    with engine(config) as driver:
        for number, prompt in enumerate(prompts):
            driver.add(prompt_request(number, prompt, max_tokens, sampling))
        driver.run_until_idle()
        return [driver.transcripts[RequestId(number)].token_ids for number in range(len(prompts))]
