"""The waiting queue against a plain sorted list, with removals, set-asides and returns in any order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import request
from fairlane.blockmgr.hashing import HashChain
from fairlane.scheduler.policies.line import Line
from fairlane.scheduler.request import Sequence

SEQUENCES = [Sequence(request(number + 1), number, HashChain("d", 16)) for number in range(12)]


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "skip", "restore"]), st.integers(0, 11)), max_size=60))
def test_peek_is_the_earliest_member_that_is_not_set_aside(steps: list[tuple[str, int]]) -> None:
    heap, members, skipped = Line(), set[int](), set[int]()
    for action, number in steps:
        if action == "push" and number not in members:
            heap.push(SEQUENCES[number])
            members.add(number)
        elif action == "remove" and number in members:
            heap.remove(SEQUENCES[number])
            members.discard(number)
            skipped.discard(number)
        elif action == "skip" and members - skipped:
            one = sorted(members - skipped)[number % len(members - skipped)]
            skipped.add(one)
            heap.skip(SEQUENCES[one])
        elif action == "restore":
            heap.restore()
            skipped.clear()
        head = heap.head()
        expected = min(members - skipped, default=None)
        assert (None if head is None else head.arrival_index) == expected
        assert len(heap) == len(members)
        first = [one.arrival_index for one in heap.first(12)]
        assert (sorted(first), first[:1]) == (sorted(members - skipped), [min(members - skipped)] if members - skipped else [])


def test_one_that_left_while_set_aside_and_came_back_is_there_once() -> None:
    heap = Line()
    heap.push(SEQUENCES[0])
    heap.push(SEQUENCES[1])
    heap.skip(SEQUENCES[0])
    heap.remove(SEQUENCES[0])
    heap.push(SEQUENCES[0])
    heap.restore()
    heap.skip(SEQUENCES[0])
    assert heap.head() is SEQUENCES[1]


def test_only_those_of_the_same_order_are_as_urgent_as_the_head() -> None:
    line = Line()
    for number, order in enumerate((0, 1, 0, 1, -1)):
        line.push(Sequence(request(number + 1, order=order), number, HashChain("d", 16)))
    assert [one.arrival_index for one in line.first(9)] == [1, 3]
