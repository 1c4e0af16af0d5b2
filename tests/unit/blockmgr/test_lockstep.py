"""Sequences that grow in lockstep end up with the tables that growing them one by one would have given them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.blockmgr.errors import NoFreeBlocks
from fairlane.blockmgr.lockstep import Lockstep
from fairlane.blockmgr.manager import BlockManager, KVGroup

BLOCK = 4
DOMAINS = ("a", "b")


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 13), min_size=1, max_size=6),
    groups=st.integers(1, 2),
    actions=st.lists(st.tuples(st.sampled_from(["step", "step", "step", "leave", "join"]), st.integers(0, 5)), max_size=40),
)
def test_tables_are_those_of_growing_one_by_one(prompts: list[int], groups: int, actions: list[tuple[str, int]]) -> None:
    together, alone = (BlockManager(400, BLOCK, groups=(KVGroup.full(),) * groups) for _ in range(2))
    lockstep = Lockstep(together)
    lengths = dict(enumerate(prompts))
    for manager in (together, alone):
        for number, length in lengths.items():
            manager.allocate(number, DOMAINS[number % 2], length)
    inside: set[int] = set()
    for action, which in actions:
        number = which % len(prompts)
        if action == "leave" and number in inside:
            lockstep.leave(number)
            inside.remove(number)
        elif action == "join" and number not in inside and lockstep.can_join(number, lengths[number]):
            lockstep.join(number, number, lengths[number])
            inside.add(number)
        elif action == "step":
            expected = sum(1 for one in inside if lengths[one] % BLOCK == 0)
            keys, blocks = lockstep.advance()
            assert sorted(keys) == sorted(one for one in inside if lengths[one] % BLOCK == 0)
            assert [len(row) for row in blocks] == ([expected] * groups if expected else [])
            for one in inside:
                alone.grow(one, lengths[one] + 1, lengths[one])
                lengths[one] += 1
    lockstep.update_tables()
    together.check_integrity()
    sizes = [{one: len(m.block_table(one)) for one in lengths} for m in (together, alone)]
    counts = [(m.num_used_blocks, m.domains(), {one: m.num_tokens_of(one) for one in lengths}) for m in (together, alone)]
    assert (sizes[0], counts[0]) == (sizes[1], counts[1])


def test_a_step_that_lacks_a_block_changes_nothing() -> None:
    manager = BlockManager(4, BLOCK)
    for number in (1, 2):
        manager.allocate(number, "a", BLOCK)
    lockstep = Lockstep(manager)
    for number in (1, 2):
        lockstep.join(number, number, BLOCK)
    with pytest.raises(NoFreeBlocks):
        lockstep.advance()
    manager.check_integrity()
    assert (manager.num_free_blocks, lockstep.num_new_blocks()) == (1, 2)


def test_a_sequence_that_needs_more_than_a_block_now_and_then_cannot_join() -> None:
    manager = BlockManager(40, BLOCK, groups=(KVGroup.full(), KVGroup.sliding(6)))
    manager.allocate(1, "a", 9)
    shared = BlockManager(40, BLOCK)
    shared.allocate(1, "a", 6)
    shared.fork(1, 2)
    ahead = BlockManager(40, BLOCK)
    ahead.allocate(1, "a", 9)
    assert not Lockstep(manager).can_join(1, 9)  # a window gives blocks back
    assert not Lockstep(shared).can_join(1, 6)  # its last block is shared
    assert not Lockstep(ahead).can_join(1, 8)  # a whole block ahead: it would meet the others a round too early
    with pytest.raises(ValueError, match="cannot grow in lockstep"):
        Lockstep(ahead).join(1, 1, 8)
