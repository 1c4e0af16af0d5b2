"""How an engine is doing, in one immutable answer: what heartbeats, metrics and tests read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairlane.scheduler.census import largest
from fairlane.scheduler.policies.guard import GuardedPolicy

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts at one moment; safe to read from another thread."""

    step_id: int
    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    block_utilization_ratio: float
    fragmentation_rate: float
    preemptions: int
    recomputed_tokens: int
    swaps_out: int
    swaps_in: int
    host_blocks_used: int
    policy_generation: int
    policy_fault: str
    running_by_tier: Mapping[str, int]
    waiting_by_tier: Mapping[str, int]
    running_by_node: Mapping[str, int]
    waiting_by_node: Mapping[str, int]
    blocks_by_domain: Mapping[str, int]


def stats_of(scheduler: Scheduler) -> SchedulerStats:
    """Call it from the engine's thread."""
    scheduler.lane.update_tables()
    return SchedulerStats(
        step_id=scheduler.step_id,
        running=len(scheduler.running),
        waiting=scheduler.policy.num_waiting(),
        blocks_used=scheduler.blocks.num_used_blocks,
        blocks_cached=scheduler.blocks.num_cached_blocks,
        block_utilization_ratio=scheduler.blocks.block_utilization_ratio(),
        fragmentation_rate=scheduler.blocks.fragmentation_rate(),
        preemptions=scheduler.num_preemptions,
        recomputed_tokens=scheduler.num_recomputed_tokens,
        swaps_out=scheduler.swaps.num_out,
        swaps_in=scheduler.swaps.num_in,
        host_blocks_used=scheduler.blocks.host.num_used_blocks,
        policy_generation=scheduler.policy_generation,
        policy_fault=scheduler.policy.fault if isinstance(scheduler.policy, GuardedPolicy) else "",
        running_by_tier=scheduler.census.running_by_tier.copy(),
        waiting_by_tier=scheduler.census.waiting_by_tier.copy(),
        running_by_node=scheduler.census.running_by_node.largest(),
        waiting_by_node=scheduler.census.waiting_by_node.largest(),
        blocks_by_domain=largest(scheduler.blocks.domains()),
    )
