"""A waiting queue: a binary heap by arrival, with removal by tombstone and a per-step set-aside. O(log n) amortised."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from fairlane.scheduler.request import RequestId, Sequence

Entry = tuple[int, int, RequestId]


class WaitingHeap:
    """Sequences by arrival_index. Removed ones are swept when they surface or when they outnumber the living.

    Every push has its own ticket, so that a sequence which left and came back (evicted twice) is not found through the
    tombstone of its earlier stay.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._members: dict[RequestId, tuple[int, Sequence]] = {}
        self._skipped: list[Entry] = []
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        self._ticket += 1
        self._members[sequence.request_id] = (self._ticket, sequence)
        heappush(self._heap, (sequence.arrival_index, self._ticket, sequence.request_id))

    def peek(self) -> Sequence | None:
        """The first member not set aside, or None."""
        heap = self._heap
        while heap:
            member = self._live(heap[0])
            if member is not None:
                return member
            heappop(heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Removes a member, set aside or not. KeyError if it is not one."""
        del self._members[sequence.request_id]
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if self._live(entry) is not None]
            heapify(self._heap)

    def skip(self) -> None:
        """Sets the head aside until restore(); it stays a member. LookupError when there is none."""
        if self.peek() is None:
            raise LookupError("nothing to skip")
        self._skipped.append(heappop(self._heap))

    def restore(self) -> None:
        """Ends the step: what was set aside is in order again."""
        for entry in self._skipped:
            heappush(self._heap, entry)
        self._skipped.clear()

    def _live(self, entry: Entry) -> Sequence | None:
        member = self._members.get(entry[2])
        return member[1] if member is not None and member[0] == entry[1] else None
