"""What the engine did in a step, as far as a shadow asks; looked at only when there is one, and never changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairlane.scheduler.policies.base import BatchView
from fairlane.scheduler.request import Sequence

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler
    from fairlane.scheduler.step_pass import StepPass


@dataclass(frozen=True, slots=True)
class StepFacts:
    """chunks: prompt or recompute placed, in that order, with tokens; decodes: placed with one token, the lane's included;
    paused: decodes left out for a protected chunk, and whoever's ceil binds; running: everybody, after the step. num_tokens: of
    the step.
    """

    chunks: list[tuple[Sequence, int]]
    decodes: list[Sequence]
    paused: list[Sequence]
    running: list[Sequence]
    num_tokens: int


class World:
    """The engine that a shadow looks at."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.limits = scheduler.limits
        self.blocks = scheduler.blocks
        self._scheduler = scheduler

    def slots_left(self) -> int:
        return self.limits.max_num_resident - len(self._scheduler.running)

    def blocks_left(self) -> int:
        """Free ones, without those that the step's decodes still take and the least that any admission leaves."""
        scheduler = self._scheduler
        least = scheduler.room.least(len(scheduler.running))
        return self.blocks.num_free_blocks - scheduler.lane.num_new_blocks() - least

    def kept_from(self, twin: Sequence) -> int:
        """Blocks beyond the least that one which evicts nobody leaves free, by the policy in force."""
        scheduler = self._scheduler
        num_running = len(scheduler.running)
        kept = scheduler.room.kept_from(twin.request.tier, scheduler.policy, num_running)
        return kept - scheduler.room.least(num_running)

    def is_over_quota(self, twin: Sequence) -> bool:
        """Whether a KV limit in force keeps it out, whatever a policy says of it."""
        quotas = self._scheduler.census.quotas
        return quotas is not None and quotas.full_for(twin, self.blocks.blocks_for(twin.num_tokens)) is not None

    def allocated(self, sequence: Sequence) -> int:
        """Blocks that one which is being admitted took from the free ones; a swapped one, none of whose tokens has retired
        again, finds nothing in the prefix cache."""
        hit = sequence.num_computed_tokens if sequence.num_retired_tokens else 0
        return len(self.blocks.block_table(sequence.request_id)) - hit // self.blocks.block_size

    def facts(self, step: StepPass) -> StepFacts:
        """After step.run()."""
        chunks = step.placement.chunks
        chunked = {sequence for sequence, _ in chunks}
        lane = self._scheduler.lane.members if step.places_lane else []
        decodes = [*lane, *(sequence for sequence in step.placement.sequences if sequence not in chunked)]
        running = list(self._scheduler.running)
        return StepFacts(chunks, decodes, step.placement.paused, running, len(decodes) + sum(tokens for _, tokens in chunks))

    def steady(self) -> tuple[BatchView, StepFacts]:
        """Of a step in which all that runs decodes and nobody gets in, and what a policy would be shown of it."""
        running = list(self._scheduler.running)
        scheduler = self._scheduler
        most = self.limits.max_num_batched_tokens
        view = BatchView(most, scheduler.running.by_tier, {}, scheduler.cost, scheduler.step_id)
        return view, StepFacts([], running, [], running, len(running))
