"""One leaf's waiting requests: who of them goes next, and which place in the common line that one takes. `order`, and due times
where the policy has deadlines, sort only among them: whoever goes first takes their earliest place, so nobody else's position
changes."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from fairlane.scheduler.request import RequestId, Sequence

Entry = tuple[int, float, int, int, RequestId]


def turn(sequence: Sequence) -> tuple[int, float, int]:
    """Of one leaf's requests whoever has the smallest goes next: order, due time, arrival."""
    return (-sequence.request.order, sequence.due_s, sequence.arrival_index)


class Line:
    """Sequences by turn(). Removed ones are swept when they surface or outnumber the living.

    Every push has its own ticket, so that a sequence which left and came back (evicted twice) is not found through the
    tombstone of its earlier stay.
    """

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._members: dict[RequestId, tuple[int, Sequence]] = {}
        self._places: list[int] = []
        self._owners: dict[int, Sequence] = {}
        self._skipped: list[Entry] = []
        self._aside: set[int] = set()  # their places, which nobody takes meanwhile
        self._aside_popped: list[int] = []
        self._ticket = 0

    def __len__(self) -> int:
        return len(self._members)

    def push(self, sequence: Sequence) -> None:
        self._ticket += 1
        self._members[sequence.request_id] = (self._ticket, sequence)
        heappush(self._heap, (*turn(sequence), self._ticket, sequence.request_id))
        self._owners[sequence.place] = sequence
        heappush(self._places, sequence.place)

    def head(self) -> Sequence | None:
        """The first member not set aside, or None."""
        heap = self._heap
        while heap:
            member = self._live(heap[0])
            if member is not None and member.place not in self._aside:
                return member
            entry = heappop(heap)
            if member is not None:
                self._skipped.append(entry)
        return None

    def place(self) -> int:
        """The earliest place that members not set aside hold. LookupError when there is none."""
        places = self._places
        while places:
            first = places[0]
            if first in self._owners and first not in self._aside:
                return first
            heappop(places)
            if first in self._owners:
                self._aside_popped.append(first)
        raise LookupError("an empty line holds no place")

    def remove(self, sequence: Sequence) -> None:
        """Removes a member, set aside or not; its place goes with it. KeyError if it is not one."""
        del self._members[sequence.request_id]
        del self._owners[sequence.place]
        self._aside.discard(sequence.place)
        stored = max(len(self._heap), len(self._places))
        if stored > 64 and stored > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if self._live(entry) is not None]
            heapify(self._heap)
            self._places = list(self._owners)
            self._aside_popped.clear()
            heapify(self._places)

    def take_first_place(self, sequence: Sequence) -> None:
        """Gives a member the line's earliest place; whoever had it gets the member's."""
        first = self.place()
        if first == sequence.place:
            return
        other = self._owners[first]
        other.place, sequence.place = sequence.place, first
        self._owners[other.place], self._owners[first] = other, sequence

    def exchange_first_place(self, other: Sequence) -> None:
        """One that is no member takes the line's earliest place; whoever had it gets the other's."""
        first = self.place()
        owner = self._owners.pop(first)
        owner.place, other.place = other.place, first
        self._owners[owner.place] = owner
        heappush(self._places, owner.place)

    def first(self, most: int) -> list[Sequence]:
        """Members not set aside that are as urgent as the head, itself the first: alike but for their arrival. At most so many,
        of the first entries of the heap."""
        if self.head() is None:
            return []
        heap, found, places = self._heap, list[Sequence](), [0]
        for place in places:
            if place >= len(heap) or heap[place][:2] != heap[0][:2]:
                continue  # nor is anybody below it in the heap as urgent
            member = self._live(heap[place])
            if member is not None and member.place not in self._aside:
                found.append(member)
            if len(places) < 4 * most:
                places += (2 * place + 1, 2 * place + 2)
        return found[:most]

    def skip(self, sequence: Sequence) -> None:
        """Sets a member aside until restore(); it stays one. KeyError if it is none."""
        if sequence.request_id not in self._members:
            raise KeyError(sequence.request_id)
        self._aside.add(sequence.place)

    def restore(self) -> None:
        """Ends the step: what was set aside is in order again."""
        for entry in self._skipped:
            heappush(self._heap, entry)
        for place in self._aside_popped:
            heappush(self._places, place)
        self._skipped.clear()
        self._aside.clear()
        self._aside_popped.clear()

    def _live(self, entry: Entry) -> Sequence | None:
        member = self._members.get(entry[4])
        return member[1] if member is not None and member[0] == entry[3] else None
