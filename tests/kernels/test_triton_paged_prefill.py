"""The Triton prefill attention in the interpreter, against the float64 oracle, on caches where every slot it must not use is NaN
and every table entry it must not follow is 2**31 - 1; and the plan of its tiles, against the definition."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import interpreted  # noqa: F401  (first: it selects the interpreter)
from fairlane.kernels.paged_prefill import paged_prefill
from fairlane.kernels.prefill_sched import PrefillPlan, TileBuffers, plan_prefill
from fairlane.kernels.prefill_tuning import CANDIDATES, PrefillConfig, PrefillTuning, invariant, tuning_for
from paged_oracle import PagedCase, dense_attention, make_case

SCALE = 0.2
NOWHERE = 2**31 - 1
SMALL = PrefillTuning(
    long=PrefillConfig(32, 16, num_warps=4, num_stages=2, overlap=True),
    short=PrefillConfig(16, 16, num_warps=4, num_stages=2),
)


def case_of(lens: list[tuple[int, int]], ratio: int = 2, **options: object) -> PagedCase:
    """(seq_len, query_len) of each sequence; two KV heads; unused table entries lead nowhere."""
    shape = {"num_heads": 2 * ratio, "num_kv_heads": 2, "head_dim": 16, "block_size": 8} | options
    case = make_case(lens, **shape)
    for row, seq_len in enumerate(case.seq_lens):
        case.block_table[row, -(-seq_len // case.kv.shape[3]) :] = NOWHERE
    case.pool[0] = float("nan")  # masked keys may be looked up in the null block, but never count
    return case


def plan_of(case: PagedCase, tuning: PrefillTuning = SMALL, **options: object) -> PrefillPlan:
    starts, lens = np.array(case.query_start_loc), np.array(case.seq_lens)
    num_heads, num_kv_heads = case.q.shape[1], case.kv.shape[2]
    return plan_prefill(starts, lens, num_heads, num_kv_heads, tuning=tuning, device="cpu", **options)


def attend(case: PagedCase, plan: PrefillPlan | None = None, **options: float | None) -> Tensor:
    """Into NaN, so that a row nobody wrote shows."""
    out = torch.full_like(case.q, float("nan"))
    return paged_prefill(case.q, case.kv, case.block_table, plan or plan_of(case), scale=SCALE, out=out, **options)


def worst(case: PagedCase, **options: float | None) -> float:
    """The largest deviation from the oracle; NaN becomes infinite."""
    deviation = (attend(case, **options).double() - dense_attention(case, SCALE, **options)).abs()
    return float(deviation.nan_to_num(nan=float("inf")).max())


# -- values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_prompts_chunks_and_cached_prefixes(block_size: int) -> None:
    case = case_of([(37, 37), (70, 21), (block_size + 1, 2), (block_size, 1), (1, 1)], block_size=block_size)
    assert worst(case) < 1e-6


@pytest.mark.parametrize("ratio", [1, 3, 4, 5, 7, 8, 16])
def test_groups_of_any_size_are_packed_into_a_tile(ratio: int) -> None:
    case = case_of([(23, 5), (19, 19)], ratio, num_heads=2 * ratio)
    assert worst(case) < 1e-6


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_head_dims_that_are_no_power_of_two(head_dim: int) -> None:
    assert worst(case_of([(45, 12), (9, 9)], head_dim=head_dim)) < 1e-5


@pytest.mark.parametrize("window", [1, 7, 8, 9, 16, 17, 40, 45, 2**31 - 1, 10**10])
def test_a_window_hides_keys_older_than_its_size(window: int) -> None:
    assert worst(case_of([(45, 45), (70, 9), (11, 14)]), window=window) < 1e-6


def test_what_lies_before_the_window_may_be_gone() -> None:
    case = case_of([(90, 20), (61, 3)])
    expected = dense_attention(case, SCALE, window=13)
    for row, (seq_len, queries) in enumerate([(90, 20), (61, 3)]):
        gone = (seq_len - queries - 12) // 8
        case.pool[case.block_table[row, :gone].long()] = float("nan")
        case.block_table[row, :gone] = NOWHERE
    assert float((attend(case, window=13) - expected).abs().max()) < 1e-6


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap_bends_the_scores(softcap: float) -> None:
    case = case_of([(45, 20), (17, 2)])
    case.q.mul_(20)
    assert worst(case, softcap=softcap, window=33) < 1e-5


@pytest.mark.parametrize("window", [None, 1, 16, 50, 70, 2**31 - 1])
def test_an_invariant_tuning_gives_a_token_the_same_bits_in_any_chunk(window: int | None) -> None:
    """Scores are whole numbers and shares powers of two, and one key of a tile has values: whatever numpy's products do, a
    result's bits tell in which order tiles were taken, and nothing else."""
    length, tile, generator = 150, 16, torch.Generator().manual_seed(0)
    pool = torch.randint(-1, 2, (11, 2, 1, tile, 16), generator=generator).float()
    pool[:, 1] = 0.0
    pool[:, 1, :, 5] = torch.randn(11, 1, 16, generator=generator)
    q = torch.randint(-1, 2, (length, 2, 16), generator=generator).float()
    table = torch.arange(1, 11, dtype=torch.int32)[None]
    results = []
    for starts, lens in (([0, length], [length]), (range(length + 1), range(1, length + 1))):
        plan = plan_prefill(np.array(starts), np.array(lens), 2, 1, tuning=invariant(SMALL), device="cpu")
        rows = table.expand(len(lens), -1)
        results.append(paged_prefill(q, pool, rows, plan, scale=math.log(2), window=window))
    assert torch.equal(*results)


def test_half_precision_stays_within_its_rounding() -> None:
    case = case_of([(45, 45), (70, 9)], dtype=torch.float16, head_dim=64)
    assert worst(case, window=50) < 2e-3


def test_scores_far_below_zero_and_far_apart_are_weighed_correctly() -> None:
    case = case_of([(40, 11)])
    for row in case.keys:
        row.fill_(1.0)
    case.pool[case.block_table[0, :5].long(), 1, 0] = 1.0
    case.q.copy_(-30000.0 * torch.rand(case.q.shape, generator=torch.Generator().manual_seed(0)))
    assert worst(case) < 1e-6


def test_queries_without_keys_give_exact_zeros_and_disturb_nobody() -> None:
    case = case_of([(0, 3), (19, 19), (4, 30), (0, 40), (12, 2)])
    result = attend(case)
    before_start = torch.cat([result[:3], result[22:48], result[52:92]])
    assert (worst(case) < 1e-6, int(before_start.count_nonzero()), bool(before_start.isnan().any())) == (True, 0, False)


# -- addresses ------------------------------------------------------------------------------------------------------------


def test_only_rows_of_planned_sequences_are_written() -> None:
    case = case_of([(30, 1), (37, 20), (9, 4), (50, 1)])
    result = attend(case, plan_of(case, sequences=np.array([2, 1])))
    planned = result[1:25].double() - dense_attention(case, SCALE)[1:25]
    assert (float(planned.abs().max()) < 1e-6, bool(result[[0, 25]].isnan().all())) == (True, True)


def test_rows_of_padding_are_set_to_zero() -> None:
    case = case_of([(9, 4)])
    plan = plan_of(case, padded_rows=60)
    case = replace(case, q=torch.cat([case.q, torch.full((60, 4, 16), float("nan"))]))
    result = attend(case, plan)
    assert (int(result[4:60].count_nonzero()), bool(result[60:].isnan().all())) == (0, True)


def test_q_and_out_may_be_views_and_nothing_else_is_written() -> None:
    case = case_of([(37, 20), (9, 4)])
    pool, table = case.pool.clone(), case.block_table.clone()
    qkv = torch.full((24, 8, 16), float("nan"))
    qkv[:, :4] = case.q
    wide = torch.full((24, 6, 20), 7.0)
    paged_prefill(qkv[:, :4], case.kv, table.long(), plan_of(case), scale=SCALE, out=wide[:, 1:5, 2:18])
    expected = torch.full((24, 6, 20), 7.0)
    expected[:, 1:5, 2:18] = attend(case)
    same = torch.equal(case.pool.view(torch.int32), pool.view(torch.int32)), torch.equal(case.block_table, table)
    assert (torch.equal(wide, expected), *same) == (True, True, True)


class Fence:
    """Wraps the interpreter's load: collects the addresses it is asked for outside what is allowed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *allowed: Tensor) -> None:
        self.strays = 0
        self._allowed = np.concatenate([self._addresses(tensor) for tensor in allowed])
        self._load = sys.modules["triton.runtime.interpreter"]._interpreter.load
        monkeypatch.setattr("triton.runtime.interpreter._interpreter.load", self)

    @staticmethod
    def _addresses(tensor: Tensor) -> np.ndarray:
        """Of every element, in bytes."""
        offsets = sum(
            np.arange(n).reshape(-1, *[1] * i) * step
            for i, (n, step) in enumerate(zip(tensor.shape[::-1], tensor.stride()[::-1], strict=True))
        )
        return np.asarray(tensor.data_ptr() + offsets * tensor.element_size()).reshape(-1)

    def __call__(self, pointers: np.ndarray, mask: np.ndarray, *rest: object) -> object:
        self.strays += int((~np.isin(pointers[mask.astype(bool)], self._allowed)).sum())
        return self._load(pointers, mask, *rest)


@pytest.mark.parametrize("window", [None, 1, 11, 30])
def test_nothing_is_read_but_what_the_rows_need(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of([(61, 20), (90, 40), (19, 19), (0, 3), (2, 7)], head_dim=24)
    plan = plan_of(case)
    slots, entries = [], []
    for row, seq_len in enumerate(case.seq_lens):
        queries = case.query_start_loc[row + 1] - case.query_start_loc[row]
        oldest = 0 if window is None else max(seq_len - queries - window + 1, 0)
        entries.append(case.block_table[row, oldest // 8 : -(-seq_len // 8)])
        slots += [case.kv[case.block_table[row, key // 8], :, :, key % 8] for key in range(oldest, seq_len)]
    fence = Fence(monkeypatch, case.q, *slots, *entries, *[group.tiles for group in plan.groups])
    attend(case, plan, window=window)
    assert fence.strays == 0


def test_without_out_other_rows_are_zero() -> None:
    case = case_of([(9, 4), (30, 1)])
    result = paged_prefill(case.q, case.kv, case.block_table, plan_of(case, sequences=np.array([0])), scale=SCALE)
    assert (torch.equal(result[:4], attend(case)[:4]), int(result[4].count_nonzero())) == (True, 0)


def sparse(elements: int) -> Tensor:
    """float16 memory of which only what is touched exists."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.float16)


@pytest.fixture
def nothing_copied_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter copies every argument's storage onto itself after a launch, which would make all of it exist."""
    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)


@pytest.mark.usefixtures("nothing_copied_back")
def test_blocks_beyond_two_to_the_31_elements_are_found() -> None:
    case = case_of([(61, 13)], dtype=torch.float16)
    stride = 2**27  # ids up to 18: an int32 product would wrap to before the view, where there are zeros
    far = sparse(2**31 + 19 * stride).as_strided((19, *case.kv.shape[1:]), (stride, *case.kv.stride()[1:]), 2**31)
    far[11:] = case.kv[case.block_table[0, :8].long()]
    table = torch.tensor([[*range(11, 19), NOWHERE]], dtype=torch.int32)
    out = torch.full_like(case.q, float("nan"))
    result = paged_prefill(case.q, far, table, plan_of(case), scale=SCALE, out=out)
    assert torch.equal(result, attend(case))


@pytest.mark.usefixtures("nothing_copied_back")
def test_rows_beyond_two_to_the_31_elements_are_found() -> None:
    case = case_of([(40, 21)], dtype=torch.float16)
    stride = 2**27
    q, out = (sparse(2**31 + 21 * stride).as_strided(case.q.shape, (stride, 16, 1), 2**31) for _ in range(2))
    q.copy_(case.q)
    paged_prefill(q, case.kv, case.block_table, plan_of(case), scale=SCALE, out=out)
    assert torch.equal(out.contiguous(), attend(case))


# -- determinism ----------------------------------------------------------------------------------------------------------


def test_a_sequence_gives_the_same_bits_alone_and_in_company_and_from_other_blocks() -> None:
    lens = [(50, 21), (7, 7), (33, 12), (90, 2)]
    company = case_of(lens, seed=3)
    together = attend(company)
    alone = attend(company, plan_of(company, sequences=np.array([2])))[28:40]
    order = torch.randperm(company.pool.shape[0] - 1, generator=torch.Generator().manual_seed(5)) + 1
    pool = company.pool.clone()
    pool[order] = company.pool[1:]
    used = company.block_table != NOWHERE
    table = torch.where(used, order[(company.block_table.long() - 1) * used].int(), NOWHERE)
    moved = attend(replace(company, pool=pool, block_table=table))
    assert (torch.equal(alone, together[28:40]), torch.equal(moved, together)) == (True, True)


def test_a_prompt_gives_the_same_in_one_piece_and_in_chunks() -> None:
    whole = case_of([(70, 70)])
    expected, chunks, done = attend(whole), [], 0
    for count in (16, 1, 30, 23):
        step = replace(whole, q=whole.q[done : done + count], seq_lens=[done + count], query_start_loc=[0, count])
        chunks.append(attend(step))
        done += count
    assert float((torch.cat(chunks) - expected).abs().max()) < 1e-6


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.data())
def test_any_step(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 32]))
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 2 * block_size + 2]
    seq_lens = data.draw(st.lists(st.sampled_from(edges), min_size=1, max_size=2))
    lens = [(n, data.draw(st.integers(1, max(n, 1) + 1))) for n in seq_lens]
    ratio = data.draw(st.sampled_from([1, 2, 4, 5, 7, 8]))
    head_dim = data.draw(st.sampled_from([16, 64, 80]))
    window = data.draw(st.sampled_from([None, 1, block_size - 1, block_size, block_size + 1]))
    softcap = data.draw(st.sampled_from([None, 2.0]))
    case = case_of(lens, ratio, num_heads=ratio, num_kv_heads=1, block_size=block_size, head_dim=head_dim)
    assert worst(case, window=window, softcap=softcap) < 3e-6


# -- the plan -------------------------------------------------------------------------------------------------------------


def tiles_of(plan: PrefillPlan) -> list[tuple[PrefillConfig, tuple[int, ...]]]:
    return [(group.config, tuple(tile)) for group in plan.groups for tile in group.tiles.tolist() if tile[2]]


def test_tiles_start_at_a_sequences_own_first_query_and_the_longest_come_first() -> None:
    # 32 rows / 2 heads = 16 tokens; 8 tokens or fewer fit in a short tile
    plan = plan_prefill(np.array([0, 8, 41, 44]), np.array([50, 40, 9]), 4, 2, tuning=SMALL, device="cpu")
    long, short = SMALL.long, SMALL.short
    assert tiles_of(plan) == [
        (long, (1, 40, 1, 39)),
        (long, (1, 24, 16, 23)),
        (long, (1, 8, 16, 7)),
        (short, (0, 0, 8, 42)),
        (short, (2, 41, 3, 6)),
    ]


def test_with_a_window_no_tile_counts_for_more_than_its_window() -> None:
    plan = plan_prefill(np.array([0, 3, 19]), np.array([900, 40]), 4, 2, tuning=replace(SMALL, short=SMALL.long), device="cpu")
    windowed = plan_prefill(
        np.array([0, 3, 19]), np.array([900, 40]), 4, 2, tuning=replace(SMALL, short=SMALL.long), device="cpu", window=8
    )
    orders = [[tile[0] for _, tile in tiles_of(p)] for p in (plan, windowed)]
    assert orders == [[0, 1], [1, 0]]


def test_sequences_run_one_after_the_other_and_few_queries_behind_many_keys_first() -> None:
    plan = plan_prefill(np.array([0, 40, 88, 97]), np.array([40, 48, 39]), 4, 2, tuning=SMALL, device="cpu")
    keys = [(tile[0], tile[2] + tile[3]) for _, tile in tiles_of(plan)]
    assert keys == [(2, 39), (1, 48), (1, 32), (1, 16), (0, 40), (0, 32), (0, 16)]


steps = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 90)), max_size=6)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(steps, st.sampled_from([1, 2, 4, 5, 7, 8, 16, 32]), st.integers(0, 20))
@example([(5, 0)], 2, 3)
@example([(32, 0), (33, 0)], 2, 33)
def test_every_row_is_in_exactly_one_tile_and_any_step_fits_the_buffers(
    step: list[tuple[int, int]], ratio: int, padding: int
) -> None:
    starts, lens = np.cumsum([0] + [n for n, _ in step]), np.array([n + cached for n, cached in step], np.int64)
    rows = int(starts[-1]) + padding
    buffers = TileBuffers(max(rows, 1), max(len(step), 1), ratio, SMALL, "cpu")
    plans = [
        plan_prefill(starts, lens, ratio, 1, tuning=SMALL, device="cpu", padded_rows=rows, buffers=b) for b in (None, buffers)
    ]
    covered = [
        sorted(
            (row, position)
            for _, (_, first, count, at) in tiles_of(plan)
            for row, position in zip(range(first, first + count), range(at, at + count), strict=True)
        )
        for plan in plans
    ]
    expected = [(int(starts[b]) + i, cached + i) for b, (n, cached) in enumerate(step) for i in range(n)]
    expected += [(int(starts[-1]) + i, i - padding) for i in range(padding)]
    assert covered == [expected, expected]


def test_a_buffer_forgets_the_step_before_and_keeps_its_addresses() -> None:
    case = case_of([(70, 40), (9, 4)])
    buffers = TileBuffers(64, 4, 2, SMALL, "cpu")
    before = [(group.tiles.data_ptr(), len(group.tiles)) for group in plan_of(case, buffers=buffers).groups]
    plan = plan_of(case, buffers=buffers, sequences=np.array([1]))
    result = attend(case, plan)
    after = [(group.tiles.data_ptr(), len(group.tiles)) for group in plan.groups]
    assert (after == before, bool(result[:40].isnan().all()), torch.equal(result[40:], attend(case)[40:])) == (True, True, True)


def test_a_step_without_queries_launches_nothing() -> None:
    plan = plan_prefill(np.array([0, 0]), np.array([5]), 4, 2, tuning=SMALL, device="cpu")
    assert plan.groups == ()


@pytest.mark.parametrize(
    ("starts", "lens", "heads", "options", "says"),
    [
        ([0, 3], [3, 4], (4, 2), {}, "B \\+ 1"),
        ([0, 3, 2], [3, 4], (4, 2), {}, "decrease"),
        ([0, 3], [-1], (4, 2), {}, "negative"),
        ([0, 2**30], [1], (4, 2), {}, "below"),
        ([0, 3], [3], (5, 2), {}, "multiple"),
        ([0, 3], [3], (66, 2), {}, "fit in a tile"),
        ([0, 3], [3], (4, 2), {"sequences": np.array([1])}, "indices"),
        ([0, 99], [99], (4, 2), {"buffers": TileBuffers(64, 1, 2, SMALL, "cpu")}, "buffers hold"),
        ([0, 3], [3], (4, 4), {"buffers": TileBuffers(64, 1, 2, SMALL, "cpu")}, "another"),
    ],
)
def test_a_plan_refuses_what_it_cannot_cut(
    starts: Sequence[int], lens: Sequence[int], heads: tuple[int, int], options: dict[str, object], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        plan_prefill(np.array(starts), np.array(lens), *heads, tuning=SMALL, device="cpu", **options)


# -- the launcher's contract and the table --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.zeros(9, 6, 16)}, "q must be"),
        ({"q": torch.zeros(8, 4, 16)}, "reaches row"),
        ({"q": torch.zeros(9, 4, 16, dtype=torch.float16)}, "one dtype"),
        ({"q": torch.zeros(9, 4, 32)[..., ::2]}, "dense along D"),
        ({"kv": torch.zeros(9, 2, 2, 12, 16)}, "BS in"),
        ({"kv": torch.zeros(9, 2, 2, 16, 16)[:, :, :, ::2]}, "contiguous"),
        ({"block_table": torch.zeros(0, 4, dtype=torch.int32)}, "reaches sequence"),
        ({"block_table": torch.zeros(1, 4)}, "int32 or int64"),
        ({"out": torch.zeros(9, 4, 8)}, "out must be"),
        ({"scale": 0.0}, "positive"),
        ({"window": 0}, "positive"),
        ({"softcap": -1.0}, "positive"),
    ],
)
def test_a_call_outside_the_contract_is_refused(change: dict[str, object], says: str) -> None:
    case = case_of([(9, 9)])
    arguments = {"q": case.q, "kv": case.kv, "block_table": case.block_table, "plan": plan_of(case), "scale": SCALE} | change
    with pytest.raises(ValueError, match=says):
        paged_prefill(**arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group_size", [1, 5, 8, 71, 128])
def test_the_table_has_an_entry_for_every_model(head_dim: int, group_size: int, dtype: torch.dtype) -> None:
    assert tuning_for(head_dim, group_size, dtype).long.tokens_per_tile(group_size) >= 1


@pytest.mark.parametrize(
    ("head_dim", "group_size", "dtype"),
    [(257, 1, torch.float16), (0, 1, torch.float16), (64, 129, torch.float16), (64, 1, torch.int8)],
)
def test_the_table_refuses_what_no_tile_holds(head_dim: int, group_size: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"head_dim|heads|dtype|no prefill"):
        tuning_for(head_dim, group_size, dtype)


def test_a_model_without_groups_has_a_measured_entry_in_half_precision() -> None:
    own = [tuning_for(128, 1, dtype) != tuning_for(128, 4, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert own == [True, True, False]


def test_a_candidate_computes_what_the_table_does() -> None:
    case = case_of([(150, 70)], 4)
    results = [attend(case, plan_of(case, replace(SMALL, long=config))) for config in CANDIDATES]
    expected = dense_attention(case, SCALE)
    assert max(float((result - expected).abs().max()) for result in results) < 1e-6


def test_a_tile_is_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="block_n"):
        PrefillConfig(64, 48, num_warps=4, num_stages=2)
