"""How an engine is doing, in one immutable answer: what heartbeats, metrics and tests read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING, NamedTuple

from fairlane.blockmgr.accounts import UNLIMITED, Account
from fairlane.scheduler.ceilings import Ceilings
from fairlane.scheduler.census import TOP, largest
from fairlane.scheduler.kv_quotas import KVQuotas
from fairlane.scheduler.policies.guard import GuardedPolicy
from fairlane.scheduler.shadow.shadow import ShadowReport
from fairlane.scheduler.shadow.tee import without_shadow

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class AccountStats:
    """An account with a KV quota, in blocks. guarantee 0: none; limit None: none."""

    name: str
    used: int
    guarantee: int
    limit: int | None


class CeilStats(NamedTuple):
    """A tier (`tier_gate` of its name) or node with a ceil. used_s: of the worker's time so far."""

    gate: str
    share: float
    used_s: float
    binds: bool


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts at one moment; safe to read from another thread. kv_accounts: the fullest of those with a KV quota. ceilings: those
    that have used most."""

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
    shadow: ShadowReport | None
    running_by_tier: Mapping[str, int]
    waiting_by_tier: Mapping[str, int]
    running_by_node: Mapping[str, int]
    waiting_by_node: Mapping[str, int]
    blocks_by_domain: Mapping[str, int]
    kv_accounts: tuple[AccountStats, ...]
    evictions_by_reason: Mapping[str, int]
    ceilings: tuple[CeilStats, ...]


def stats_of(scheduler: Scheduler, now_s: float) -> SchedulerStats:
    """Of the engine's thread, between two steps."""
    policy = without_shadow(scheduler.policy)
    scheduler.lane.update_tables()
    quotas = scheduler.census.quotas
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
        policy_fault=policy.fault if isinstance(policy, GuardedPolicy) else "",
        shadow=None if scheduler.shadow is None else scheduler.shadow.report(now_s),
        running_by_tier=scheduler.census.running_by_tier.copy(),
        waiting_by_tier=scheduler.census.waiting_by_tier.copy(),
        running_by_node=scheduler.census.running_by_node.largest(),
        waiting_by_node=scheduler.census.waiting_by_node.largest(),
        blocks_by_domain=largest(scheduler.blocks.domains()),
        kv_accounts=() if quotas is None else _accounts(quotas),
        evictions_by_reason={reason.value: count for reason, count in scheduler.decisions.evictions_by_reason.items()},
        ceilings=_ceilings(scheduler.ceilings),
    )


def account_stats(account: Account) -> AccountStats:
    return AccountStats(account.name, account.used, account.guarantee, None if account.limit == UNLIMITED else account.limit)


def _ceilings(ceilings: Ceilings) -> tuple[CeilStats, ...]:
    most = nlargest(TOP, ceilings.buckets.items(), key=lambda item: item[1].used_s)
    return tuple(CeilStats(gate, bucket.share, bucket.used_s, gate in ceilings.shut) for gate, bucket in most)


def _accounts(quotas: KVQuotas) -> tuple[AccountStats, ...]:
    fullest = nlargest(TOP, quotas.accounts, key=lambda account: (account.used, account.name))
    return tuple(account_stats(account) for account in fullest)
