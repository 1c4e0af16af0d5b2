"""The step kernels, run by Triton's interpreter, against the torch reference over whole buffers: padding rows, unknown slots,
sequences without blocks or room, stale outputs. The reference itself against one example worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels import reference_step as reference
from fairlane.kernels.reference_step import DecodeInputs, SlotState
from fairlane.kernels.step_prep import CANDIDATES, StepConfig, step_prep, store_sampled

COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: too much for huge ones
SMALL = StepConfig(tile=4, rows=4, num_warps=1)
SLOTS, MAX_BLOCKS, MAX_TOKENS = 7, 9, 80  # two tiles of the table and one entry; blocks of 8: 72 positions
FIELDS = ("input_ids", "positions", "slot_mapping", "seq_lens", "block_table")
UNREAD, STALE = 2**31 - 1, 123456  # in tables where nothing may look; in outputs, from an earlier batch


def i32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def state_of(lengths: list[int], block_size: int, index: torch.dtype = torch.int32) -> SlotState:
    """Shuffled blocks where a sequence needs them, and beyond them what must never be read."""
    blocks = torch.randperm(SLOTS * MAX_BLOCKS, generator=torch.Generator().manual_seed(sum(lengths))).to(torch.int32) + 1
    table = blocks.view(SLOTS, MAX_BLOCKS).clone()
    for slot, length in enumerate(lengths):
        table[slot, -(-length // block_size) :] = UNREAD
    return SlotState(torch.arange(SLOTS, dtype=index) + 500, torch.tensor(lengths, dtype=index), table)


def stale(rows: int, max_blocks: int = MAX_BLOCKS, index: torch.dtype = torch.int64) -> DecodeInputs:
    """Outputs as an earlier batch left them, the table's rows apart."""
    ids, positions = torch.full((rows,), 77, dtype=index), torch.full((rows,), 77, dtype=index)
    table = torch.full((rows, max_blocks + 3), STALE, dtype=torch.int32)[:, :max_blocks]
    return DecodeInputs(ids, positions, torch.full((rows,), 77), torch.full((rows,), 77, dtype=torch.int32), table)


def equal(one: DecodeInputs, other: DecodeInputs) -> list[str]:
    """The names of the outputs that differ, the table's space between rows included."""
    names = [name for name in FIELDS if not torch.equal(getattr(one, name), getattr(other, name))]
    return names + ["space between rows"] * (not (one.block_table._base == other.block_table._base).all())


def test_the_reference_makes_the_inputs_worked_out_by_hand() -> None:
    # slot 1 knows 9 tokens: the step's input is at position 8, the first of its third block of 4; slot 0's is a block's last
    table = i32([[5, 0, 0], [9, 2, 7], [0, 0, 0]])
    state = SlotState(i32([41, 42, 43]), i32([4, 9, 0]), table)
    out = DecodeInputs.allocate(4, 3, "cpu")
    reference.step_prep(i32([1, -1, 0, 2]), state, 4, out=out)
    made = [getattr(out, name).tolist() for name in FIELDS]
    assert made == [
        [42, 0, 41, 0],
        [8, 0, 3, 0],
        [7 * 4 + 0, -1, 5 * 4 + 3, -1],
        [9, 0, 4, 0],
        [[9, 2, 7], [0, 0, 0], [5, 0, 0], [0, 0, 0]],
    ]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 7, 8, 9, 31, 32, 33, 64, 71, 72]), min_size=SLOTS, max_size=SLOTS),
    named=st.permutations(range(SLOTS)),
    rows=st.integers(1, SLOTS),
    padding=st.lists(st.sampled_from([-1, -5, SLOTS, 2**31 - 1]), max_size=2),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_inputs_are_the_references_and_nothing_else_is_written(
    lengths: list[int], named: list[int], rows: int, padding: list[int], index: torch.dtype
) -> None:
    slots = i32([*padding[:1], *named[:rows], *padding[1:]])
    state = state_of(lengths, 8, index)
    before = [getattr(state, name).clone() for name in SlotState.__slots__]
    out, expected = stale(len(slots), index=index), stale(len(slots), index=index)
    step_prep(slots, state, 8, out=out, config=SMALL)
    reference.step_prep(slots, state, 8, out=expected)
    after = [getattr(state, name) for name in SlotState.__slots__]
    assert (equal(out, expected), all(map(torch.equal, before, after))) == ([], True)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_every_block_size_splits_positions_alike(block_size: int) -> None:
    lengths = [1, block_size - 1, block_size, block_size + 1, 3 * block_size, MAX_BLOCKS * block_size - 1, 2 * block_size + 1]
    state = state_of(lengths, block_size)
    out, expected = stale(SLOTS), stale(SLOTS)
    step_prep(i32(list(range(SLOTS))), state, block_size, out=out)
    reference.step_prep(i32(list(range(SLOTS))), state, block_size, out=expected)
    assert equal(out, expected) == []


def test_a_position_without_a_block_is_not_written_to_the_null_block() -> None:
    # slot 0's table is shorter than its sequence, slot 1 has one position more than its table has blocks for
    state = state_of([20, MAX_BLOCKS * 8 + 1, *[0] * (SLOTS - 2)], 8)
    state.block_table[0, 2] = 0
    out, expected = stale(2), stale(2)
    step_prep(i32([0, 1]), state, 8, out=out, config=SMALL)
    reference.step_prep(i32([0, 1]), state, 8, out=expected)
    assert (out.slot_mapping.tolist(), out.positions.tolist(), equal(out, expected)) == ([-1, -1], [19, MAX_BLOCKS * 8], [])


def test_block_ids_beyond_an_int32_of_slots_are_mapped() -> None:
    state = state_of([8, *[0] * (SLOTS - 1)], 8)
    state.block_table[0, 0] = 2**28 + 5
    out = stale(1)
    step_prep(i32([0]), state, 8, out=out)
    assert out.slot_mapping.tolist() == [(2**28 + 5) * 8 + 7]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 40, MAX_TOKENS - 1, MAX_TOKENS]), min_size=SLOTS, max_size=SLOTS),
    slots=st.lists(st.integers(-2, SLOTS + 1), min_size=1, max_size=9, unique=True),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_sampled_tokens_are_stored_where_the_reference_puts_them(
    lengths: list[int], slots: list[int], index: torch.dtype
) -> None:
    def fresh() -> tuple[Tensor, Tensor, Tensor]:
        apart = torch.full((SLOTS, MAX_TOKENS + 5), -3, dtype=torch.int64)
        return apart[:, :MAX_TOKENS], torch.tensor(lengths, dtype=index), torch.arange(SLOTS, dtype=index) + 100

    made, expected = fresh(), fresh()
    sampled = torch.arange(len(slots)) + 1000
    store_sampled(i32(slots), sampled, *made, config=SMALL)
    reference.store_sampled(i32(slots), sampled, *expected)
    whole = torch.equal(made[0]._base, expected[0]._base)  # type: ignore[arg-type]
    assert (whole, made[1].tolist(), made[2].tolist()) == (True, expected[1].tolist(), expected[2].tolist())


def test_steps_follow_one_another_on_the_device_alone() -> None:
    # Three steps of two sequences, each step's tokens known to the device only: what the host would have kept in lists
    state = state_of([6, 0, 7, 0, 0, 0, 0], 4)
    state.block_table[:3, :3] = i32([[3, 8, 4], [0, 0, 0], [9, 1, 6]])
    tokens = torch.zeros(SLOTS, MAX_TOKENS, dtype=torch.int64)
    slots, out = i32([2, -1, 0]), stale(3)
    fed, written = [], []
    for step in range(3):
        step_prep(slots, state, 4, out=out)
        fed.append(out.input_ids.tolist())
        written.append(out.slot_mapping.tolist())
        store_sampled(slots, out.input_ids + 10 * (step + 1), tokens, state.num_tokens, state.last_token)
    assert (fed, written, tokens[0, 6:9].tolist(), tokens[2, 7:10].tolist()) == (
        [[502, 0, 500], [512, 0, 510], [532, 0, 530]],
        [[1 * 4 + 2, -1, 8 * 4 + 1], [1 * 4 + 3, -1, 8 * 4 + 2], [6 * 4, -1, 8 * 4 + 3]],
        [510, 530, 560],
        [512, 532, 562],
    )


def test_slots_beyond_an_int32_of_elements_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    stride = 2**30 + 8
    wide = torch.empty(2 * stride + 8, dtype=torch.int32).as_strided((3, 8), (stride, 1))  # only its pages in use cost memory
    wide.copy_(i32([[1] * 8, [2] * 8, [3] * 8]))
    state = SlotState(i32([11, 12, 13]), i32([5, 5, 5]), wide)
    out = stale(1, 8)
    step_prep(i32([2]), state, 4, out=out)
    mapped, row = out.slot_mapping.tolist(), out.block_table[0, :2].tolist()
    store_sampled(i32([2]), torch.tensor([99]), wide, state.num_tokens, state.last_token)
    assert (mapped, row, wide[2].tolist()) == ([3 * 4 + 0], [3, 3], [3, 3, 3, 3, 3, 99, 3, 3])


def test_what_does_not_fit_is_refused() -> None:
    state, out, slots = state_of([1] * SLOTS, 8), stale(2), i32([0, 1])
    tokens = torch.zeros(SLOTS, MAX_TOKENS, dtype=torch.int64)
    with pytest.raises(ValueError, match="slots"):
        step_prep(slots.long(), state, 8, out=out)
    with pytest.raises(ValueError, match="positions"):
        step_prep(slots, state, 8, out=replace(out, positions=out.positions[:1]))
    with pytest.raises(ValueError, match="block table"):
        step_prep(slots, state, 8, out=stale(2, MAX_BLOCKS - 1))
    with pytest.raises(ValueError, match="sampled"):
        store_sampled(slots, torch.zeros(3, dtype=torch.int64), tokens, state.num_tokens, state.last_token)
    with pytest.raises(ValueError, match="token_ids"):
        store_sampled(slots, torch.zeros(2, dtype=torch.int64), tokens[1:], state.num_tokens, state.last_token)
    assert tokens.count_nonzero() == 0


def test_no_rows_are_no_work() -> None:
    state, none = state_of([1] * SLOTS, 8), i32([])
    step_prep(none, state, 8, out=stale(0))
    store_sampled(none, none, torch.zeros(SLOTS, 4, dtype=torch.int64), state.num_tokens, state.last_token)
    assert state.num_tokens.tolist() == [1] * SLOTS


def test_candidate_configurations_are_powers_of_two() -> None:
    assert all(value & (value - 1) == 0 for c in CANDIDATES for value in (c.tile, c.rows, c.num_warps))
