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
            skipped.add(min(members - skipped))
            heap.skip()
        elif action == "restore":
            heap.restore()
            skipped.clear()
        head = heap.head()
        expected = min(members - skipped, default=None)
        assert (None if head is None else head.arrival_index) == expected
        assert len(heap) == len(members)


def test_one_that_left_while_set_aside_and_came_back_is_there_once() -> None:
    heap = Line()
    heap.push(SEQUENCES[0])
    heap.push(SEQUENCES[1])
    heap.skip()
    heap.remove(SEQUENCES[0])
    heap.push(SEQUENCES[0])
    heap.restore()
    heap.skip()
    assert heap.head() is SEQUENCES[1]
