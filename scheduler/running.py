"""The running set: sequences that hold blocks and a slot, in rank order, with counts by tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from math import inf

from fairlane.scheduler.policies.base import Rank
from fairlane.scheduler.request import Sequence, Slot


class RunningSet:
    """Slots are stable while a sequence runs and are handed out lowest first, so device state stays dense."""

    def __init__(self, max_num_resident: int) -> None:
        self.by_tier: dict[str, int] = {}
        self._ordered: list[Sequence] = []
        self._sorted = True
        self._free_slots = list(range(max_num_resident))

    def __len__(self) -> int:
        return len(self._ordered)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._ordered)

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def in_order(self, rank: Callable[[Sequence], Rank], *, ranks_change: bool = False) -> list[Sequence]:
        """A copy in rank order; sorted only when ranks change, something came, or the policy was swapped."""
        if ranks_change or not self._sorted:
            self._ordered.sort(key=rank)
            self._sorted = True
        return list(self._ordered)

    def unsteady_in_order(self, rank: Callable[[Sequence], Rank]) -> list[Sequence]:
        """Those outside the decode lane, in rank order."""
        return sorted([sequence for sequence in self._ordered if not sequence.steady_until], key=rank)

    def shortest_lease(self) -> float:
        """Fewest tokens that some sequence must still compute before its lease ends; inf where nobody has one."""
        left = (s.lease_until_tokens - s.num_computed_tokens for s in self._ordered if s.lease_until_tokens)
        return min((tokens for tokens in left if tokens > 0), default=inf)

    def add(self, sequence: Sequence) -> None:
        """Gives the sequence a slot, and a list of tokens of its own. IndexError when there is no slot."""
        sequence.slot = Slot(heappop(self._free_slots))
        sequence.token_ids = list(sequence.token_ids)
        self._ordered.append(sequence)
        self._sorted = False
        tier = sequence.request.tier
        self.by_tier[tier] = self.by_tier.get(tier, 0) + 1

    def remove(self, sequence: Sequence) -> Slot:
        """Takes the slot back and returns it."""
        slot = sequence.held_slot
        sequence.slot = None
        self._ordered.remove(sequence)
        heappush(self._free_slots, slot)
        self.by_tier[sequence.request.tier] -= 1
        return slot

    def mark_unsorted(self) -> None:
        self._sorted = False

    def check_integrity(self) -> None:
        """Raises RuntimeError when a slot is held twice or the counts are off."""
        slots = [sequence.slot for sequence in self._ordered]
        if len(set(slots)) != len(slots) or set(slots) & set(self._free_slots) or None in slots:
            raise RuntimeError("a slot is held twice")
        counts: dict[str, int] = {}
        for sequence in self._ordered:
            counts[sequence.request.tier] = counts.get(sequence.request.tier, 0) + 1
        if counts != {tier: count for tier, count in self.by_tier.items() if count}:
            raise RuntimeError(f"by_tier says {self.by_tier}, counted {counts}")
