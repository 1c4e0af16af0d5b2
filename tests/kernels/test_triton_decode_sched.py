"""The decode step's schedule: where sequences are cut depends on their own length only, every key is in exactly one item, and
nothing is written beyond what the buffers hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels.decode_sched import DecodeWorkspace, Form, decode_sched, max_items_for
from fairlane.kernels.decode_tuning import (
    CANDIDATES,
    COMBINE_CANDIDATES,
    SHORT_CANDIDATES,
    ChunkRule,
    DecodeTuning,
    tuning_for,
)

GUARD = -77
SMALL = ChunkRule((4, 8, 16), (16, 40))


@dataclass(frozen=True)
class Listed:
    """A schedule, read back: items (sequence, begin, end, row) in their order, and each sequence's range of partial rows."""

    items: list[tuple[int, ...]]
    rows: list[tuple[int, int]]
    untouched: bool

    def ranges(self, sequence: int) -> list[tuple[int, int]]:
        return [(begin, end) for b, begin, end, _ in self.items if b == sequence]


def listed(
    lens: Sequence[int],
    *,
    chunks: ChunkRule = SMALL,
    max_rows: int = 1000,
    max_batch: int = 9,
    window: int | None = None,
) -> Listed:
    cu_items = torch.full((max_batch + 2,), GUARD, dtype=torch.int32)
    items = torch.full((max_rows + max_batch + 200, 4), GUARD, dtype=torch.int32)
    count = torch.full((2,), GUARD, dtype=torch.int32)
    seq_lens = torch.tensor([*lens, 10**6], dtype=torch.int32)[: len(lens)]  # what lies behind the lengths must not count
    decode_sched(seq_lens, cu_items, items, count[:1], chunks=chunks, max_rows=max_rows, max_batch=max_batch, window=window)
    total = int(count[0])
    assert total <= max_rows + max_batch
    untouched = bool((cu_items[len(lens) + 1 :] == GUARD).all() and (items[total:] == GUARD).all() and count[1] == GUARD)
    bounds = cu_items.tolist()
    rows = list(pairwise(bounds[: len(lens) + 1]))
    return Listed([tuple(item) for item in items[:total].tolist()], rows, untouched)


def cut(low: int, high: int, chunk: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + chunk, high)) for begin in range(low, high, chunk)] or [(high, high)]


def small_chunk(keys: int) -> int:
    return 4 if keys <= 16 else 8 if keys <= 40 else 16


@pytest.mark.parametrize(
    ("length", "chunk"),
    [(1, 256), (256, 256), (257, 256), (8192, 256), (8193, 512), (32768, 512), (32769, 1024), (131072, 1024)],
)
def test_chunks_grow_with_the_sequence(length: int, chunk: int) -> None:
    result = listed([length], chunks=ChunkRule(), max_rows=130, max_batch=1)
    assert result.ranges(0) == cut(0, length, chunk)


def test_full_chunks_come_first_and_then_what_is_left_the_longest_first() -> None:
    # 16 in fours, 13 in fours and a single key, 39 in eights and seven keys, 3 alone, nothing.
    result = listed([16, 13, 39, 3, 0])
    lengths = [(sequence, end - begin) for sequence, begin, end, _ in result.items]
    full = [(2, 8)] * 4 + [(0, 4)] * 3 + [(1, 4)] * 3
    assert lengths == [*full, (2, 7), (0, 4), (3, 3), (1, 1), (4, 0)]


def test_a_sequence_up_to_the_whole_limit_is_one_item() -> None:
    rule = ChunkRule((4, 8, 16), (16, 40), whole=7)
    lens = [6, 7, 8, 0, 1]
    result = listed(lens, chunks=rule)
    assert [result.ranges(b) for b in range(5)] == [[(0, 6)], [(0, 7)], [(0, 4), (4, 8)], [(0, 0)], [(0, 1)]]


def test_every_sequence_is_cut_into_its_own_chunks_with_rows_of_its_own() -> None:
    lens = [3, 41, 0, 16, 17, 4, 5]
    result = listed(lens)
    rows = [row for _, _, _, row in sorted(result.items) if row >= 0]
    assert [result.ranges(b) for b in range(7)] == [cut(0, n, small_chunk(n)) for n in lens]
    assert result.rows == [(0, 0), (0, 3), (3, 3), (3, 7), (7, 10), (10, 10), (10, 12)]
    assert rows == list(range(12))  # sorted by sequence and position: they are handed out in that order


def test_sequences_that_see_most_come_first() -> None:
    lens = [3, 41, 0, 16, 17, 4, 41]
    order = list(dict.fromkeys(b for b, _, _, _ in listed(lens).items))
    assert order == [1, 6, 4, 3, 5, 0, 2]


def test_an_item_that_is_alone_writes_its_result_itself() -> None:
    result = listed([4, 0, 5])
    assert [row for b, _, _, row in sorted(result.items) if b < 2] == [-1, -1] and result.rows[2] == (0, 2)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 16, 17, 50])
def test_a_window_counts_from_the_last_key_and_sets_the_chunk_size(window: int) -> None:
    lens = [0, 1, 4, 17, 49]
    expected = [cut(max(0, n - window), n, small_chunk(min(n, window))) for n in lens]
    result = listed(lens, window=window)
    assert [result.ranges(b) for b in range(5)] == expected


def test_more_items_than_are_written_at_once() -> None:
    result = listed([40 * 16 - 3, 150 * 16 + 1], max_rows=200)
    assert [result.ranges(0), result.ranges(1)] == [cut(0, 637, 16), cut(0, 2401, 16)] and result.untouched


@pytest.mark.parametrize("max_rows", [0, 1, 4, 5, 8, 9])
def test_sequences_whose_partial_results_do_not_fit_stay_whole(max_rows: int) -> None:
    lens = [16, 3, 17, 30]  # 4, 0, 3 and 4 rows
    split = [max_rows >= 4, False, max_rows >= 7, max_rows >= 11]
    result = listed(lens, max_rows=max_rows)
    expected = [cut(0, n, small_chunk(n)) if cuts else [(0, n)] for n, cuts in zip(lens, split, strict=True)]
    assert [result.ranges(b) for b in range(4)] == expected and result.untouched
    assert max(high for _, high in result.rows) <= max_rows


def test_a_step_without_sequences_has_no_items() -> None:
    result = listed([])
    assert (result.items, result.untouched) == ([], True)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    lens=st.lists(st.integers(0, 70), min_size=1, max_size=7),
    window=st.none() | st.integers(1, 60),
    max_rows=st.sampled_from([0, 5, 13, 100]),
)
def test_any_schedule_covers_each_visible_key_once(lens: list[int], window: int | None, max_rows: int) -> None:
    result = listed(lens, window=window, max_rows=max_rows)
    keys = [key for b, begin, end, _ in result.items for key in [(b, at) for at in range(begin, end)]]
    visible = [(b, at) for b, n in enumerate(lens) for at in range(0 if window is None else max(0, n - window), n)]
    rows = sorted(row for _, _, _, row in result.items if row >= 0)
    assert sorted(keys) == visible and rows == list(range(result.rows[-1][1])) and result.untouched
    assert len(rows) <= max_rows and {b for b, _, _, _ in result.items} == set(range(len(lens)))


@settings(max_examples=12, derandomize=True, deadline=None)
@given(lens=st.lists(st.integers(0, 70), min_size=2, max_size=7), seed=st.integers(0, 1000))
def test_companions_do_not_move_a_cut(lens: list[int], seed: int) -> None:
    order = torch.randperm(len(lens), generator=torch.Generator().manual_seed(seed)).tolist()
    together, moved, alone = listed(lens), listed([lens[b] for b in order]), listed([lens[0]])
    assert together.ranges(0) == alone.ranges(0)
    assert [moved.ranges(place) for place in range(len(lens))] == [together.ranges(b) for b in order]


@pytest.mark.parametrize("rule", [ChunkRule(), SMALL, ChunkRule((64, 512, 1024), (100, 4000)), ChunkRule(whole=300)])
def test_the_most_chunks_of_any_length_are_known(rule: ChunkRule) -> None:
    bounds = [1, 16, 17, 41, 257, 3000, 4001, 9000]
    assert [rule.max_chunks(n) for n in bounds] == [max(rule.num_chunks(k) for k in range(1, n + 1)) for n in bounds]


def test_room_for_the_worst_batch() -> None:
    tuning = DecodeTuning()
    found = [max_items_for(8, n, tuning, w) for n, w in [(256, None), (257, None), (8192, None), (40000, None), (40000, 300)]]
    assert found == [0, 16, 256, 512, 16]


def workspace(**changes: object) -> DecodeWorkspace:
    sizes: dict[str, object] = {
        "max_batch": 4,
        "max_items": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "num_programs": 3,
    }
    return DecodeWorkspace(**{**sizes, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("window", "max_seq_len", "form"),
    [
        (None, None, Form.SPLIT),
        (None, 257, Form.SPLIT),
        (None, 256, Form.WHOLE),
        (None, 65, Form.WHOLE),
        (None, 64, Form.SHORT),
        (64, None, Form.SHORT),
        (100, 5000, Form.WHOLE),
        (300, 5000, Form.SPLIT),
    ],
)
def test_the_longest_length_decides_which_kernels_run(window: int | None, max_seq_len: int | None, form: Form) -> None:
    made = workspace(windows=frozenset({window}))
    made.schedule(torch.tensor([3], dtype=torch.int32), window, max_seq_len=max_seq_len)
    assert made.schedule_of(window).form is form


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "evenly"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_items": -1}, "max_items"),
        ({"windows": frozenset({0})}, "window"),
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 257}, "257"),
    ],
)
def test_a_workspace_of_impossible_sizes_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workspace(**changes)


@pytest.mark.parametrize(
    ("seq_lens", "window", "message"),
    [
        (torch.ones(5, dtype=torch.int32), None, "at most 4"),
        (torch.ones(2, dtype=torch.int64), None, "int32"),
        (torch.ones(4, dtype=torch.int32)[::2], None, "contiguous"),
        (torch.ones(2, dtype=torch.int32), 7, "windows None, not for 7"),
    ],
)
def test_a_step_that_the_workspace_was_not_made_for_is_refused(seq_lens: torch.Tensor, window: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workspace().schedule(seq_lens, window)


@pytest.mark.parametrize(
    "bad",
    [
        {"block_n": 48},
        {"block_n": 8},
        {"num_stages": 0},
        {"chunks": ChunkRule((96, 128, 128))},
    ],
)
def test_a_tuning_that_cannot_run_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        DecodeTuning(**bad)  # type: ignore[arg-type]


def test_chunk_limits_must_ascend() -> None:
    with pytest.raises(ValueError, match="ascend"):
        ChunkRule((4, 8, 16), (40, 16))


def test_all_candidates_run_at_the_occupancy_they_name() -> None:
    every = [*CANDIDATES, *SHORT_CANDIDATES, *COMBINE_CANDIDATES, tuning_for(128, 4, torch.bfloat16, 16)]
    assert [t.programs_that_fit(128, 4, torch.bfloat16) for t in every] == [t.programs_per_sm for t in every]


def test_a_wide_group_leaves_room_for_fewer_programs() -> None:
    assert [DecodeTuning().programs_that_fit(128, group, torch.float16) for group in (16, 32, 64)] == [3, 2, 2]
