"""`within_tenant: deadline`: when a request's first token is due, which is what its tenant's requests go by (EDF), who can no
longer be in time, and how long a step may be for the streams that run. Slack and relegation are Niyama's (arXiv 2503.22562).

By due time and not by the latest time at which each must start: jobs that can all be in time are, if the one that is due first
is always worked on, prompts that are half read included (Dertouzos 1974). By latest start they need not be: a long prompt that is
due late may have to start before a short one that is due soon, which is then too late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from copy import copy
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING

from fairlane.scheduler.policies.base import BatchView
from fairlane.scheduler.policies.line import turn
from fairlane.scheduler.policies.pace import Pace
from fairlane.scheduler.request import Payer, RequestId, Sequence
from fairlane.scheduler.tenancy import Tier, WithinTenant

if TYPE_CHECKING:
    from fairlane.scheduler.policies.wait_tree import WaitTree

# What a capped step still leaves for prompts, so that somebody always gets on.
_LEAST_PREFILL = 16
# A request that arrives waits for the step under way and the one launched behind it (pipeline depth 1), then for its own.
_STEPS_TO_FIRST_TOKEN = 3


def step_towards(ttft_target_s: float | None) -> float:
    """The longest step, at any time, with which a prompt that fits in one has its first token in time; inf: any."""
    return inf if ttft_target_s is None else ttft_target_s / _STEPS_TO_FIRST_TOKEN


class Deadlines:
    """Stamps sequences with `due_s`, which lines sort by. With `fcfs` it stamps all alike and knows no misses.

    learns: the worker's speed, which only deadlines and bounds on steps need.
    """

    def __init__(self, within: WithinTenant, tiers: Collection[Tier]) -> None:
        self.active = within is WithinTenant.DEADLINE
        self._tiers = {tier.name: tier for tier in tiers}
        self._capping = [tier for tier in tiers if tier.tpot_target_s is not None] if self.active else []
        self.learns = self.active
        self._max_step_s = inf
        self._pace = Pace()
        self._budget = 1
        self._starts: list[tuple[float, int, Sequence]] = []
        self._entries = 0
        self._reading: dict[Payer | str, dict[RequestId, Sequence]] = {}  # by leaf: those that run and had not begun to stream

    def stamp(self, sequence: Sequence, since_s: float) -> None:
        """It waits from now on. One that was relegated stays so until it ends."""
        sequence.relegated = sequence.relegated and self.active
        sequence.due_s = sequence.latest_start_s = 0.0
        if not self.active:
            return
        if _has_begun(sequence):  # the next token is due
            sequence.due_s = since_s + (self._tiers[sequence.request.tier].tpot_target_s or 0.0)
        elif sequence.relegated:
            sequence.due_s = sequence.latest_start_s = inf
        else:
            pending = sequence.num_tokens - sequence.num_computed_tokens
            sequence.due_s = self._due_s(sequence)
            sequence.latest_start_s = sequence.due_s - self._pace.prefill_s(pending, self._budget)
            if sequence.latest_start_s < inf:
                self._entries += 1
                heappush(self._starts, (sequence.latest_start_s, self._entries, sequence))

    def _due_s(self, sequence: Sequence) -> float:
        """When its first token should be there: the tier's target, or sooner if it must have ended by then. inf: any time."""
        request = sequence.request
        target_s = self._tiers[request.tier].ttft_target_s
        due_s = inf if target_s is None else request.arrival_s + target_s
        return due_s if request.deadline_s is None else min(due_s, request.deadline_s)

    def runs(self, sequence: Sequence, leaf: Payer | str) -> None:
        """It reads its prompt from now on, or goes on with its stream."""
        if self.active and not sequence.relegated and not _has_begun(sequence):
            self._reading.setdefault(leaf, {})[sequence.request_id] = sequence

    def runs_no_more(self, sequence: Sequence, leaf: Payer | str) -> None:
        reading = self._reading.get(leaf)
        if reading is not None and reading.pop(sequence.request_id, None) is not None and not reading:
            del self._reading[leaf]

    def sort_places(self, tree_of: Callable[[Sequence], WaitTree]) -> None:
        """Before a step: at each leaf whoever is due first has the earliest place, of those that wait and of those that read.
        They exchange places among themselves; nobody else's changes."""
        for leaf, reading in list(self._reading.items()):
            for other in [one for one in reading.values() if one.steady_until or _has_begun(one)]:
                self.runs_no_more(other, leaf)
            by_due = sorted(reading.values(), key=turn)
            for one, place in zip(by_due, sorted(one.place for one in by_due), strict=True):
                one.place = place
            tree = tree_of(by_due[0]) if by_due else None
            line = None if tree is None else tree.line_beside(by_due[0])
            head = None if line is None else line.head()
            if tree is None or line is None or head is None:
                continue
            for one in by_due:
                if turn(one) < turn(head) and one.place > line.place():
                    tree.exchange_place(one)
            for one in reversed(by_due):
                if turn(one) > turn(head) and one.place < line.place():
                    tree.exchange_place(one)

    def missed(self, now_s: float, waiting: Collection[RequestId]) -> Iterator[tuple[Sequence, float]]:
        """Those of `waiting` that cannot make it any more, and since when."""
        starts = self._starts
        if len(starts) > 64 and len(starts) > 2 * len(waiting):
            starts[:] = [entry for entry in starts if entry[2].request_id in waiting]
            heapify(starts)
        while starts and starts[0][0] < now_s:
            latest_s, _, sequence = heappop(starts)
            if sequence.request_id in waiting and sequence.latest_start_s == latest_s:
                sequence.due_s = sequence.latest_start_s = inf
                yield sequence, max(latest_s, sequence.queued_at_s)

    def next_miss_s(self) -> float:
        """After this time missed() may have somebody; inf for never."""
        return self._starts[0][0] if self._starts else inf

    def step_tokens(self, view: BatchView) -> int:
        """The step's token budget: no longer a step than allowed, and than the tightest tpot_target of the streams in it."""
        self._budget = view.token_budget
        decoding = [t for t in self._capping if view.running.get(t.name, 0) > view.prefilling.get(t.name, 0)]
        target_s = min((tier.tpot_target_s or inf for tier in decoding), default=inf)
        target_s = min(target_s, self._max_step_s)
        tokens = self._pace.tokens_within(target_s)
        if tokens >= view.token_budget:
            return view.token_budget
        return min(view.token_budget, max(int(tokens), sum(view.running.values()) + _LEAST_PREFILL))

    def bound_steps(self, max_step_s: float) -> None:
        """No step is to be longer, whoever is in it."""
        self._max_step_s = max_step_s
        self.learns |= max_step_s < inf

    def prompt_tokens(self, view: BatchView, step_s: float) -> float:
        """How many tokens of prompts fit beside the streams that run into a step of step_s, at least _LEAST_PREFILL; inf while
        nothing is known of the worker's speed."""
        streams = sum(view.running.values()) - sum(view.prefilling.values())
        return max(self._pace.tokens_within(step_s) - streams, _LEAST_PREFILL)

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        """One step of so many tokens took so long."""
        if self.learns:
            self._pace.observe(num_tokens, elapsed_s)

    def take_over(self, previous: Deadlines) -> None:
        """Starts with another's idea of the worker's speed; either goes on for itself."""
        self._pace, self._budget = copy(previous._pace), previous._budget


def _has_begun(sequence: Sequence) -> bool:
    """Whether its stream has."""
    return sequence.num_output_tokens > len(sequence.request.output_token_ids)
