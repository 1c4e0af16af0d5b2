"""Who waits and who runs, counted by tier and by tenant as it changes, so that a report never walks the queues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import nlargest
from operator import itemgetter

from fairlane.scheduler.kv_quotas import KVQuotas
from fairlane.scheduler.request import Sequence

# Tenants a report names; the rest would only be noise, and messages must stay small.
TOP = 50


class Counts:
    """Non-zero counts by name."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def add(self, name: str, by: int) -> None:
        count = self._counts.get(name, 0) + by
        if count:
            self._counts[name] = count
        else:
            self._counts.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._counts)

    def copy(self) -> dict[str, int]:
        return dict(self._counts)

    def largest(self) -> dict[str, int]:
        return largest(self._counts)


def largest(counts: Mapping[str, int]) -> dict[str, int]:
    """The TOP largest of them, largest first."""
    return dict(nlargest(TOP, counts.items(), key=itemgetter(1)))


class Census:
    """Waiting and running sequences. quotas: told who waits for KV cache; None where nobody has a quota."""

    def __init__(self) -> None:
        self.quotas: KVQuotas | None = None
        self.waiting_by_tier, self.running_by_tier = Counts(), Counts()
        self.waiting_by_node, self.running_by_node = Counts(), Counts()

    def waits(self, sequence: Sequence, by: int) -> None:
        self.waiting_by_tier.add(sequence.request.tier, by)
        self.waiting_by_node.add(sequence.request.tenant, by)
        if self.quotas is not None:
            self.quotas.accounts.wait(sequence.request.cache_domain, by)

    def runs(self, sequence: Sequence, by: int) -> None:
        self.running_by_tier.add(sequence.request.tier, by)
        self.running_by_node.add(sequence.request.tenant, by)
