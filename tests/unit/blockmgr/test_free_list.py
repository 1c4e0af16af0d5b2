"""The free list against a plain Python list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.blockmgr.errors import NoFreeBlocks
from fairlane.blockmgr.free_list import FreeList


def test_starts_with_every_block_but_the_null_block_in_order() -> None:
    assert list(FreeList(5)) == [1, 2, 3, 4]


def test_too_few_blocks_are_not_taken_in_part() -> None:
    free = FreeList(4)
    with pytest.raises(NoFreeBlocks) as error:
        free.pop_many(4)
    assert (error.value.needed, error.value.free, list(free)) == (4, 3, [1, 2, 3])


def test_an_emptied_list_fills_again_from_either_end() -> None:
    free = FreeList(4)
    free.pop_many(3)
    free.push_back_many([2])
    free.push_front_many([3, 1])
    assert (list(free), len(free)) == ([3, 1, 2], 3)


@given(
    st.integers(1, 8), st.lists(st.tuples(st.sampled_from(["pop", "front", "back", "remove"]), st.integers(0, 8)), max_size=40)
)
def test_behaves_like_a_list(num_blocks: int, operations: list[tuple[str, int]]) -> None:
    free, model, taken = FreeList(num_blocks), list(range(1, num_blocks)), []
    for name, number in operations:
        if name == "pop":
            count = min(number, len(model))
            assert free.pop_many(count) == model[:count]
            taken += model[:count]
            del model[:count]
        elif name == "remove" and model:
            block = model.pop(number % len(model))
            free.remove(block)
            taken.append(block)
        elif name == "front":
            free.push_front_many(taken[:number])
            model[:0] = taken[:number]
            del taken[:number]
        elif name == "back":
            free.push_back_many(taken[:number])
            model += taken[:number]
            del taken[:number]
        assert list(free) == model
        assert [block for block in range(num_blocks) if block in free] == sorted(model)
    backwards, block = [], free.prev[0]
    while block:
        backwards.append(block)
        block = free.prev[block]
    assert (backwards, len(free)) == (model[::-1], len(model))
