"""Which decodes form groups: found from block tables alone, worth what the rule asks, and looked for only when somebody came or
went."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.kernels.decode_tuning import ChunkRule
from fairlane.kernels.prefix_groups import PrefixGroups
from fairlane.kernels.prefix_tuning import PrefixTuning
from fairlane.scheduler.output import BlockAppend, NewSequence, ScheduleOutput
from fairlane.worker.cascade import Cascade, CascadeRule, find_groups, rule_for
from fairlane.worker.config import WorkerConfig
from fairlane.worker.cuda_batch import CudaBatch

BS = 4
RULE = CascadeRule(token_bytes=1, granule=8, min_members=3, min_shared=8, min_saved_bytes=0)
Found = list[tuple[list[int], int]]


def found(tables: list[list[int]], rule: CascadeRule = RULE, lens: list[int] | None = None) -> Found:
    """Groups of sequences with these block ids, each of whose blocks is full unless lens says otherwise."""
    width = max(len(table) for table in tables)
    block_table = np.array([table + [0] * (width - len(table)) for table in tables], dtype=np.int64)
    tokens = np.array(lens or [len(table) * BS for table in tables])
    groups = find_groups(block_table, np.arange(len(tables)), tokens, BS, rule)
    return sorted((sorted(np.asarray(group.rows).tolist()), group.shared) for group in groups)


def table(*prefix: int, own: int, count: int = 2) -> list[int]:
    return [*prefix, *range(1000 + 10 * own, 1000 + 10 * own + count)]


def test_sequences_with_the_same_beginning_form_a_group_and_others_none() -> None:
    tables = [table(1, 2, 3, 4, own=n) for n in range(3)] + [table(5, 6, own=7), table(8, own=8, count=5)]
    assert found(tables) == [([0, 1, 2], 16)]


def test_several_prompts_give_several_groups_whatever_the_order_of_rows() -> None:
    tables = [table(*([1, 2, 3, 4] if n % 2 else [5, 6]), own=n) for n in range(7)]
    assert found(tables) == [([0, 2, 4, 6], 8), ([1, 3, 5], 16)]


def test_only_whole_granules_count() -> None:
    assert found([table(1, 2, 3, own=n) for n in range(3)]) == [([0, 1, 2], 8)]


def test_only_full_blocks_count() -> None:
    """Siblings of one prompt have its last block in common until one of them writes to it."""
    tables = [[1, 2, 3, 4]] * 3
    assert found(tables, lens=[13, 13, 14]) == [([0, 1, 2], 8)]


def test_a_block_in_the_same_place_behind_another_block_is_not_a_common_beginning() -> None:
    tables = [table(1, 2, 3, 4, own=0), table(9, 2, 3, 4, own=1), table(1, 2, 3, 4, own=2), table(1, 2, 3, 4, own=3)]
    assert found(tables) == [([0, 2, 3], 16)]


def test_of_nested_beginnings_those_are_taken_that_save_most_together() -> None:
    """All share 8 tokens, three of them 24 and three others 16: 2 x 24 + 2 x 16 are saved in two groups, against 8 for each but
    one in a single group."""
    deep = [table(1, 2, 3, 4, 5, 6, own=n) for n in range(3)]
    less = [table(1, 2, 7, 8, own=n) for n in range(3, 6)]
    others = [table(1, 2, own=n) for n in range(6, 13)]
    assert found([*deep, *less, *others[:4]]) == [([0, 1, 2], 24), ([3, 4, 5], 16)]  # 9 x 8
    assert found([*deep, *less, *others]) == [(list(range(13)), 8)]  # 12 x 8


def test_prompts_that_part_late_give_a_group_each() -> None:
    tables = [table(*range(1, 80), *([500 + n % 2] * 30), own=n) for n in range(8)]
    assert found(tables) == [([0, 2, 4, 6], 432), ([1, 3, 5, 7], 432)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [([0, 1, 2], 16)]),
        ({"min_members": 4}, []),
        ({"min_shared": 17}, []),
        ({"min_saved_bytes": 31}, [([0, 1, 2], 16)]),
        ({"min_saved_bytes": 32}, []),
        ({"min_saved_bytes": 32, "token_bytes": 2}, [([0, 1, 2], 16)]),
    ],
)
def test_a_group_must_be_worth_it(changes: dict[str, int], expected: Found) -> None:
    assert found([table(1, 2, 3, 4, own=n) for n in range(3)], replace(RULE, **changes)) == expected


def test_long_beginnings_are_compared_to_their_end() -> None:
    prefix = list(range(1, 500))
    odd = [*prefix[:300], 777, *prefix[301:]]
    tables = [table(*prefix, own=n) for n in range(3)] + [table(*odd, own=n) for n in range(3, 6)]
    assert found(tables) == [([0, 1, 2], 1992), ([3, 4, 5], 1992)]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.data())
def test_any_groups_are_disjoint_and_share_what_they_say(data: st.DataObject) -> None:
    branches = st.lists(st.integers(1, 2), min_size=1, max_size=9)  # block ids by place: like beginnings are likely
    tables = data.draw(st.lists(branches, min_size=1, max_size=12))
    groups = found(tables)
    rows = [row for members, _ in groups for row in members]
    true = all(
        len(members) >= 3 and shared % 8 == 0 and len({tuple(tables[row][: shared // BS]) for row in members}) == 1
        and all(len(tables[row]) * BS >= shared for row in members)
        for members, shared in groups
    )  # fmt: skip
    assert len(rows) == len(set(rows)) and true


# -- shown to the device ----------------------------------------------------------------------------------------------------


class World:
    """Six slots, whose sequences share blocks 1 .. 4 unless told otherwise."""

    def __init__(self) -> None:
        self.batch = CudaBatch(6, 64, 8, 100, 50, torch.device("cpu"))
        chunks = ChunkRule((32, 32, 32), (32, 32))
        self.groups = PrefixGroups(6, 20, 2, torch.device("cpu"), tuning=PrefixTuning(16, 16), chunks=chunks, num_programs=1)
        self.cascade = Cascade(self.batch, self.groups, replace(RULE, min_shared=32, granule=32))
        self.fills = 0
        fill = self.groups.fill

        def counted(groups: Any) -> None:
            self.fills += 1
            fill(groups)

        self.groups.fill = counted  # type: ignore[method-assign]

    def add(self, *slots: int, blocks: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        new = [NewSequence(slot, [1] * 34, 34, [[*blocks, 10 + slot]], {}) for slot in slots]
        self.batch.apply(ScheduleOutput(1, new=new))

    def show(self, *slots: int) -> tuple[bool, list[int]]:
        active = self.cascade.show(np.array(slots, dtype=np.int64))
        return active, self.groups.row_shared[: len(slots)].tolist()


def test_rows_are_those_of_the_step() -> None:
    world = World()
    world.add(0, 2, 5)
    world.add(1, blocks=(6, 7, 8, 9))
    assert world.show(5, 1, 0, 2) == (True, [32, 0, 32, 32])


def test_the_same_sequences_are_looked_at_once_however_long_they_grow() -> None:
    world = World()
    world.add(0, 2, 5)
    shown = [world.show(0, 2, 5)]
    world.batch.advance(np.array([0, 2, 5]))
    world.batch.apply(ScheduleOutput(2, appends=[BlockAppend(2, [[20]])]))
    shown.append(world.show(0, 2, 5))
    assert (shown, world.fills) == ([(True, [32, 32, 32])] * 2, 1)


def test_a_group_dissolves_when_members_leave_and_forms_when_others_come() -> None:
    world = World()
    world.add(0, 1, 2)
    active = [world.show(0, 1, 2)[0], world.show(0, 1)[0]]
    world.add(3)
    active.append(world.show(0, 1, 3)[0])
    assert active == [True, False, True]


def test_a_slot_that_changed_hands_is_looked_at_again() -> None:
    world = World()
    world.add(0, 1, 2)
    before = world.show(0, 1, 2)[0]
    world.batch.apply(ScheduleOutput(2, released_slots=[1]))
    world.add(1, blocks=(6, 7, 8, 9))
    assert (before, world.show(0, 1, 2)[0]) == (True, False)


def test_without_groups_nothing_is_uploaded() -> None:
    world = World()
    world.add(0, 1)
    assert (world.show(0, 1)[0], world.show()[0], world.fills) == (False, False, 0)


# -- whether to look at all -------------------------------------------------------------------------------------------------


def loaded(**changes: Any) -> Any:
    model = SimpleNamespace(num_heads=32, num_kv_heads=8, head_dim=128, windows=(None, 4096))
    for name, value in changes.items():
        setattr(model, name, value)
    return SimpleNamespace(config=model, dtype=torch.bfloat16, max_model_len=8192)


@pytest.mark.parametrize(
    ("model", "config", "expected"),
    [
        ({}, {}, (4096, 256)),
        ({"windows": (4096,)}, {}, None),
        ({}, {"cascade": False}, None),
        ({}, {"prefix_caching": False}, None),
        ({}, {"max_num_seqs": 3}, None),
        ({"num_kv_heads": 1, "head_dim": 8}, {"max_num_seqs": 16}, None),  # 15 * 8192 tokens of 32 bytes are 4 MB
    ],
)
def test_nobody_looks_where_nothing_can_be_found(
    model: dict[str, Any], config: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    rule = rule_for(loaded(**model), WorkerConfig(**config))
    assert (rule and (rule.token_bytes, rule.granule)) == expected
