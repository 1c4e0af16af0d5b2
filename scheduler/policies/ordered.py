"""A base for policies of your own: say in which order requests go (`key`), and the rest is done. How to install one is in
docs/policies.md; whether it keeps the engine's rules, conformance.py tells."""

# ruff: noqa: B027 a hook with nothing to do is an answer, too

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from math import inf

from fairlane.scheduler.cost import Ledger, Rate
from fairlane.scheduler.policies.base import BatchView, Rank, StepPlan
from fairlane.scheduler.policies.caps import RunningCaps, prefixes, tier_gate
from fairlane.scheduler.request import Payer, RequestId, Sequence
from fairlane.scheduler.tenancy import PolicySnapshot

Entry = tuple[Rank, int, Sequence]


class OrderedPolicy(ABC):
    """One queue by `key`, smallest first, ties by arrival; `max_running` and `ceil` hold. Nobody evicts for rank unless
    may_preempt() is overridden. Whatever it overrides, a policy must not change the sequences it is shown."""

    name = "ordered"
    ranks_change = False
    leads_evict = False
    predicts = False

    def __init__(self, snapshot: PolicySnapshot) -> None:
        self.tiers = {tier.name: tier for tier in snapshot.tiers}
        self._caps = RunningCaps({node.path: node for node in snapshot.nodes})
        self._ranks: dict[RequestId, Rank] = {}
        self._stays: dict[RequestId, int] = {}
        self._heap: list[Entry] = []
        self._aside: list[Entry] = []
        self._skipped: set[RequestId] = set()
        self._closed = False
        self._entries = 0

    @abstractmethod
    def key(self, sequence: Sequence) -> Rank:
        """Numbers to sort by. Asked for when a sequence comes to wait, and kept until it ends or is evicted."""

    def may_preempt(self, candidate: Sequence, victim: Sequence) -> bool:
        """Whether a waiting candidate may take a running victim's blocks. Must be a strict partial order."""
        return False

    def plan(self, view: BatchView) -> StepPlan:
        """The shape of the next step; none here."""
        return StepPlan(view.token_budget)

    # -- order ---------------------------------------------------------------------------------------------------------

    def rank(self, sequence: Sequence) -> Rank:
        return self._ranks[sequence.request_id]

    def priority(self, sequence: Sequence) -> int:
        return self.tiers[sequence.request.tier].priority

    def is_owed(self, sequence: Sequence) -> bool:
        return False

    def could_preempt(self, tier: str, others: Iterable[str]) -> bool:
        return type(self).may_preempt is not OrderedPolicy.may_preempt

    def may_take(self, grower: Sequence, victim: Sequence) -> bool:
        return True  # it ranks before it

    def victim_key(self, sequence: Sequence) -> Rank:
        return tuple(-part for part in self.rank(sequence))

    # -- the waiting queue ---------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence, since_s: float) -> None:
        self._rank(sequence)
        self._entries += 1
        self._stays[sequence.request_id] = self._entries
        heappush(self._heap, (self._ranks[sequence.request_id], self._entries, sequence))

    def peek(self) -> Sequence | None:
        while self._heap and not self._closed:
            _, stay, sequence = self._heap[0]
            if self._stays.get(sequence.request_id) != stay:
                heappop(self._heap)
            elif sequence.request_id in self._skipped or self._is_kept_out(sequence):
                self._aside.append(heappop(self._heap))
            else:
                return sequence
        return None

    def peek_below(self, path: str) -> Sequence | None:
        if self._caps.bars(path):
            return None
        below = [
            entry
            for entry in (*self._heap, *self._aside)
            if self._stays.get(entry[2].request_id) == entry[1]
            and entry[2].request_id not in self._skipped
            and path in prefixes(entry[2].request.tenant)
            and not self._caps.is_shut(tier_gate(entry[2].request.tier))
            and not any(self._caps.is_full(prefix) for prefix in prefixes(entry[2].request.tenant) if len(prefix) > len(path))
        ]
        return min(below)[2] if below else None

    def hold(self, path: str) -> None:
        self._caps.hold(path)

    def let_go(self, path: str) -> None:
        self._caps.let_go(path)

    def shut(self, gate: str) -> None:
        self._caps.shut(gate)

    def reopen(self, gate: str) -> None:
        self._caps.reopen(gate)

    def _is_kept_out(self, sequence: Sequence) -> bool:
        return self._caps.keeps_out(sequence.request.tenant) or self._caps.is_shut(tier_gate(sequence.request.tier))

    def pop(self, sequence: Sequence) -> None:
        del self._stays[sequence.request_id]
        self._sweep()
        self._caps.add(sequence.request.tenant)

    def skip(self, sequence: Sequence) -> None:
        self._skipped.add(sequence.request_id)

    def close(self, sequence: Sequence) -> None:
        self._closed = True

    def remove(self, sequence: Sequence) -> None:
        del self._stays[sequence.request_id], self._ranks[sequence.request_id]
        self._sweep()

    def end_step(self) -> None:
        self._closed = False
        for entry in self._aside:
            heappush(self._heap, entry)
        self._aside.clear()
        self._skipped.clear()

    def num_waiting(self) -> int:
        return len(self._stays)

    def position(self, sequence: Sequence) -> int:
        return len(self._stays) - 1

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def adopt(self, sequence: Sequence) -> None:
        self._rank(sequence)
        self._caps.add(sequence.request.tenant)

    def on_release(self, sequence: Sequence) -> None:
        del self._ranks[sequence.request_id]
        self._caps.remove(sequence.request.tenant)

    def begin_step(self, now_s: float) -> None:
        """Nothing changes with time."""

    def next_change_s(self) -> float:
        return inf

    def skip_step(self, now_s: float) -> None:
        """Nothing changes with time."""

    def on_admit(self, sequence: Sequence) -> None:
        """pop() follows."""

    def on_unserved(self, sequence: Sequence) -> None:
        """Nothing is owed to it."""

    def on_step_time(self, cost: int, num_tokens: int, elapsed_s: float) -> None:
        """Time is not reckoned with."""

    def on_charge(self, payer: Payer, cost: int, ledger: Ledger = Ledger.WORK) -> None:
        """Nobody is compared by what they got."""

    def on_recompute(self, payer: Payer, cost: int) -> None:
        """Nobody is compared by what they got."""

    def on_decoding(self, payer: Payer, change: int, tokens: int) -> None:
        """Nobody is compared by what they got."""

    def on_steady_step(self, rate: Rate, ledger: Ledger) -> None:
        """Nobody is compared by what they got."""

    def _rank(self, sequence: Sequence) -> None:
        self._ranks[sequence.request_id] = (*self.key(sequence), sequence.arrival_index)

    def _sweep(self) -> None:
        """Drops the entries of those that wait no more, once they are the majority."""
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._stays):
            self._heap = [entry for entry in self._heap if self._stays.get(entry[2].request_id) == entry[1]]
            heapify(self._heap)
