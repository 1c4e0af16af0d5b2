"""First come, first served: one queue by arrival, nobody evicts for rank. The baseline the others are measured against."""

from __future__ import annotations

from fairlane.scheduler.policies.base import BatchView, Rank, StepPlan
from fairlane.scheduler.policies.waiting import WaitingHeap
from fairlane.scheduler.request import Sequence


class FCFSPolicy:
    """Rank = arrival. Blocks are taken only by a running sequence that must grow, from the latest arrival."""

    name = "fcfs"

    def __init__(self) -> None:
        self._waiting = WaitingHeap()

    def begin_step(self, now_s: float) -> None:
        pass

    def plan(self, view: BatchView) -> StepPlan:
        return StepPlan(token_budget=view.token_budget)

    def rank(self, sequence: Sequence) -> Rank:
        return (sequence.arrival_index,)

    def priority(self, sequence: Sequence) -> int:
        return 0

    def push(self, sequence: Sequence, now_s: float) -> None:
        self._waiting.push(sequence)

    def peek(self) -> Sequence | None:
        return self._waiting.peek()

    def pop(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    def skip(self, sequence: Sequence) -> None:
        self._waiting.skip()

    def remove(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)

    def end_step(self) -> None:
        self._waiting.restore()

    def num_waiting(self) -> int:
        return len(self._waiting)

    def position(self, sequence: Sequence) -> int:
        return len(self._waiting) - 1

    def may_preempt(self, candidate: Sequence, victim: Sequence) -> bool:
        return False

    def victim_key(self, sequence: Sequence) -> Rank:
        return (-sequence.arrival_index,)

    def on_admit(self, sequence: Sequence, now_s: float) -> None:
        pass

    def on_charge(self, sequence: Sequence, cost: int) -> None:
        pass
