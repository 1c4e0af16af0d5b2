"""The rules that recompute is measured against: a growing or higher-ranked sequence takes the blocks of whoever came last; and
vLLM's, where admission besides leaves one part in a hundred of the blocks free, whatever is to be expected."""

from __future__ import annotations

from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.kv_quotas import Losses
from fairlane.scheduler.policies.base import Policy
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.room import LARGEST_PART, Room
from fairlane.scheduler.scheduler import Scheduler
from fairlane.scheduler.victims import CostOf


def evict_last_come(scheduler: Scheduler) -> None:
    """Of a scheduler that has no requests yet. The policy's ranks still come first."""

    def pick(
        candidates: list[Sequence],
        blocks_missing: int,
        slots_missing: int,
        policy: Policy,
        blocks: BlockManager,
        cost_of: CostOf,
        losses: Losses | None = None,  # its runs have no KV quotas
    ) -> list[Sequence] | None:
        victims: list[Sequence] = []
        held: dict[int, int] = {}
        for victim in sorted(candidates, key=lambda sequence: (policy.victim_key(sequence), -sequence.arrival_index)):
            if blocks_missing <= 0 and len(victims) >= slots_missing:
                break
            victims.append(victim)
            blocks_missing -= blocks.freed_with(victim.request_id, held)
        return victims if blocks_missing <= 0 and len(victims) >= slots_missing else None

    scheduler.pick_victims = pick


def evict_and_admit_like_vllm(scheduler: Scheduler) -> None:
    """The same, with nothing left free for what is to come."""
    evict_last_come(scheduler)
    leave_free(scheduler, 0.0)


def leave_free(scheduler: Scheduler, times: float, most: float = LARGEST_PART) -> None:
    """Admissions leave so many times what is expected free, and at most that part of all blocks."""
    blocks, least = scheduler.blocks, scheduler.limits.watermark
    scheduler.room = Room(blocks.num_usable_blocks, blocks.block_size, least, scheduler.swaps, times, most)
