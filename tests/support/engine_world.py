"""A small world to run the scheduler in: three tiers, a fake executor on a fake clock, and the plain-Python oracle that says
which tokens a request must get whatever happens to it on the way."""

from __future__ import annotations

from collections.abc import Iterable

from fairlane.clock import FakeClock
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.fake_executor import FakeExecutor, StepTime, crc_token
from fairlane.scheduler.request import CacheMode, Request, RequestId
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.tenancy import (
    CostName,
    GroupShare,
    NodeShare,
    PolicySnapshot,
    Shaping,
    Tier,
    TiersPolicy,
    WithinTenant,
    WithinTier,
)

VOCAB = 50_000
GOLD = Tier("gold", 100, shaping=Shaping.BALANCED)
STANDARD = Tier("standard", 50, patience_s=60.0, min_share=0.1)
BATCH = Tier("batch", 10, patience_s=600.0, min_share=0.05)
TIERS = (GOLD, STANDARD, BATCH)


def snapshot(policy: TiersPolicy = TiersPolicy.VIP, tiers: tuple[Tier, ...] = TIERS, generation: int = 1) -> PolicySnapshot:
    return PolicySnapshot(generation, "0" * 64, policy, tiers)


def request(
    number: int,
    tier: str = "batch",
    *,
    prompt: int | tuple[int, ...] = 16,
    max_tokens: int = 8,
    arrival_s: float = 0.0,
    deadline_s: float | None = None,
    stop: Iterable[int] = (),
    cache_mode: CacheMode = CacheMode.READ_WRITE,
    tenant: str | None = None,
    order: int = 0,
    max_wait_s: float | None = None,
    cache_domain: str | None = None,
) -> Request:
    """A request whose prompt is its own, unless it is given."""
    ids = prompt if isinstance(prompt, tuple) else tuple((number * 7919 + 31 * i) % VOCAB for i in range(prompt))
    tenant = tenant or f"org/{tier}"
    return Request(
        RequestId(number),
        tenant,
        tier,
        ids,
        max_tokens,
        arrival_s=arrival_s,
        deadline_s=deadline_s,
        stop_token_ids=frozenset(stop),
        cache_domain=f"tenant:{tenant}" if cache_domain is None else cache_domain,
        cache_mode=cache_mode,
        order=order,
        max_wait_s=max_wait_s,
    )


def expected_tokens(asked: Request) -> list[int]:
    """The tokens the fake model gives to this request when it runs alone on paper."""
    context = list(asked.prompt_token_ids)
    for _ in range(asked.max_tokens):
        context.append(crc_token(context, VOCAB))
        if context[-1] in asked.stop_token_ids:
            break
    return context[len(asked.prompt_token_ids) :]


def world(
    *,
    policy: TiersPolicy = TiersPolicy.VIP,
    tiers: tuple[Tier, ...] = TIERS,
    num_blocks: int = 64,
    block_size: int = 16,
    depth: int = 0,
    max_num_seqs: int = 8,
    budget: int = 64,
    max_resident: int = 64,
    step_time: StepTime | None = None,
    fail_steps: frozenset[int] = frozenset(),
    fail_launches: frozenset[int] = frozenset(),
    within: WithinTier = WithinTier.FCFS,
    nodes: tuple[NodeShare, ...] = (),
    gap_ms: float | None = None,
    prefix_caching: bool = True,
    max_prefill_chunk: int = 0,
    check: bool = True,
    num_host_blocks: int = 0,
    min_swap_tokens: int = 1,
    cost: CostName = CostName.TOKENS,
    within_tenant: WithinTenant = WithinTenant.FCFS,
    groups: tuple[GroupShare, ...] = (),
    predict: bool = False,
    window_ms: float = 0.0,
) -> EngineDriver:
    """An engine over num_blocks usable blocks."""
    clock = FakeClock()
    info = ExecutorInfo("fake", VOCAB, 4096, block_size, num_blocks + 1, (2,), num_host_blocks)
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_resident=max_resident,
        max_num_batched_tokens=budget,
        max_prefill_chunk=max_prefill_chunk,
        max_model_len=info.max_model_len,
        min_swap_tokens=min_swap_tokens,
    )
    executor = FakeExecutor(info, clock, step_time=step_time, fail_steps=fail_steps, fail_launches=fail_launches)
    policy_in_force = PolicySnapshot(
        1,
        "0" * 64,
        policy,
        tiers,
        within,
        nodes,
        gap_ms,
        cost,
        within_tenant,
        predict_output=predict,
        groups=groups,
        locality_window_ms=window_ms,
    )
    return EngineDriver(executor, clock, policy_in_force, limits, depth=depth, prefix_caching=prefix_caching, check=check)


def mean_ttft_s(driver: EngineDriver, requests: Iterable[Request]) -> float:
    """Mean time to first token from arrival, seconds."""
    times = [(driver.transcripts[r.request_id].first_token_s or float("inf")) - r.arrival_s for r in requests]
    return sum(times) / len(times)
