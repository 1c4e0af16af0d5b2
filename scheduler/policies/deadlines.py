"""`within_tenant: deadline`: when a waiting request must start so that its first token comes in time (EDF by latest start), who
can no longer make it, and how long a step may be for the streams that run. Slack and relegation are Niyama's (arXiv 2503.22562).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import copy
from heapq import heapify, heappop, heappush
from math import inf

from fairlane.scheduler.policies.base import BatchView
from fairlane.scheduler.policies.pace import Pace
from fairlane.scheduler.request import RequestId, Sequence
from fairlane.scheduler.tenancy import Tier, WithinTenant

# What a capped step still leaves for prompts, so that somebody always gets on.
_LEAST_PREFILL = 16


class Deadlines:
    """Stamps sequences with `latest_start_s`, which lines sort by. With `fcfs` it stamps all alike and knows no misses.

    max_step_s: no step is to be longer, whoever is in it.
    """

    def __init__(self, within: WithinTenant, tiers: Collection[Tier]) -> None:
        self.active = within is WithinTenant.DEADLINE
        self._tiers = {tier.name: tier for tier in tiers}
        self._capping = [tier for tier in tiers if tier.tpot_target_s is not None] if self.active else []
        self.max_step_s = inf
        self._pace = Pace()
        self._budget = 1
        self._starts: list[tuple[float, int, Sequence]] = []
        self._entries = 0

    def stamp(self, sequence: Sequence, since_s: float) -> None:
        """It waits from now on. One that was relegated stays so until it ends."""
        sequence.relegated = sequence.relegated and self.active
        sequence.latest_start_s = 0.0
        if not self.active:
            return
        if sequence.num_output_tokens > len(sequence.request.output_token_ids):  # its stream has begun: the next token is due
            sequence.latest_start_s = since_s + (self._tiers[sequence.request.tier].tpot_target_s or 0.0)
        elif sequence.relegated:
            sequence.latest_start_s = inf
        else:
            pending = sequence.num_tokens - sequence.num_computed_tokens
            sequence.latest_start_s = self._due_s(sequence) - self._pace.prefill_s(pending, self._budget)
            if sequence.latest_start_s < inf:
                self._entries += 1
                heappush(self._starts, (sequence.latest_start_s, self._entries, sequence))

    def _due_s(self, sequence: Sequence) -> float:
        """When its first token should be there: the tier's target, or sooner if it must have ended by then. inf: any time."""
        request = sequence.request
        target_s = self._tiers[request.tier].ttft_target_s
        due_s = inf if target_s is None else request.arrival_s + target_s
        return due_s if request.deadline_s is None else min(due_s, request.deadline_s)

    def missed(self, now_s: float, waiting: Collection[RequestId]) -> Iterator[tuple[Sequence, float]]:
        """Those of `waiting` that cannot make it any more, and since when."""
        starts = self._starts
        if len(starts) > 64 and len(starts) > 2 * len(waiting):
            starts[:] = [entry for entry in starts if entry[2].request_id in waiting]
            heapify(starts)
        while starts and starts[0][0] < now_s:
            latest_s, _, sequence = heappop(starts)
            if sequence.request_id in waiting and sequence.latest_start_s == latest_s:
                sequence.latest_start_s = inf
                yield sequence, max(latest_s, sequence.queued_at_s)

    def next_miss_s(self) -> float:
        """After this time missed() may have somebody; inf for never."""
        return self._starts[0][0] if self._starts else inf

    def step_tokens(self, view: BatchView) -> int:
        """The step's token budget: no longer a step than max_step_s and the tightest tpot_target of the streams in it."""
        self._budget = view.token_budget
        decoding = [t for t in self._capping if view.running.get(t.name, 0) > view.prefilling.get(t.name, 0)]
        target_s = min((tier.tpot_target_s or inf for tier in decoding), default=inf)
        target_s = min(target_s, self.max_step_s)
        tokens = self._pace.tokens_within(target_s)
        if tokens >= view.token_budget:
            return view.token_budget
        return min(view.token_budget, max(int(tokens), sum(view.running.values()) + _LEAST_PREFILL))

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        """One step of so many tokens took so long."""
        if self.active or self.max_step_s < inf:
            self._pace.observe(num_tokens, elapsed_s)

    def take_over(self, previous: Deadlines) -> None:
        """Starts with another's idea of the worker's speed."""
        self._pace, self._budget = copy(previous._pace), previous._budget
