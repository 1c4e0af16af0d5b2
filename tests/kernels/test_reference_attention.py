"""The torch attention against a float64 oracle, on caches where every slot it must not use is NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.kernels.reference import Workspace, paged_attention, plan_attention
from paged_oracle import PagedCase, dense_attention, make_case


def attend(case: PagedCase, **options: float | None) -> torch.Tensor:
    return paged_attention(case.q, case.kv, case.block_table, case.seq_lens, case.query_start_loc, scale=0.2, **options)


def worst(case: PagedCase, **options: float | None) -> float:
    """The largest deviation from the oracle; NaN (from a poisoned slot) becomes infinite."""
    deviation = (attend(case, **options).double() - dense_attention(case, 0.2, **options)).abs()
    return float(deviation.nan_to_num(nan=float("inf")).max()) if deviation.numel() else 0.0


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("ratio", [1, 2, 4, 7])
def test_decode_of_lengths_around_block_boundaries(block_size: int, ratio: int) -> None:
    lens = [1, block_size - 1, block_size, block_size + 1, 5 * block_size + 3]
    case = make_case([(n, 1) for n in lens], num_heads=2 * ratio, num_kv_heads=2, head_dim=16, block_size=block_size)
    assert worst(case) < 1e-5


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_head_dims_that_are_no_power_of_two(head_dim: int) -> None:
    case = make_case([(37, 1), (20, 20), (33, 5)], num_heads=4, num_kv_heads=2, head_dim=head_dim, block_size=16)
    assert worst(case) < 1e-5


@pytest.mark.parametrize("window", [1, 15, 16, 17, 45])
def test_a_window_hides_keys_older_than_its_size(window: int) -> None:
    lens = [(1, 1), (45, 1), (16, 1), (45, 45), (45, 7), (33, 17)]
    case = make_case(lens, num_heads=4, num_kv_heads=2, head_dim=16, block_size=16)
    assert worst(case, window=window) < 1e-5


def test_blocks_before_the_window_may_be_gone() -> None:
    case = make_case([(60, 1), (60, 4)], num_heads=2, num_kv_heads=1, head_dim=16, block_size=8)
    expected = attend(case, window=9)
    case.block_table[:, :5] = 0  # freed: the window starts at position 48 at the earliest
    case.pool[0] = float("nan")
    assert torch.equal(attend(case, window=9), expected)


@pytest.mark.parametrize("lens", [[(40, 1), (17, 1)], [(40, 9), (17, 17)]])
def test_softcap_bends_the_scores(lens: list[tuple[int, int]]) -> None:
    case = make_case(lens, num_heads=4, num_kv_heads=4, head_dim=16, block_size=16)
    assert worst(case, softcap=0.5) < 1e-5


def test_queries_without_keys_give_exact_zeros_and_disturb_nobody() -> None:
    case = make_case([(0, 1), (19, 1), (0, 3), (19, 4)], num_heads=2, num_kv_heads=2, head_dim=16, block_size=8)
    result = attend(case)
    empty = torch.cat([result[:1], result[2:5]])
    assert (worst(case) < 1e-5, int(empty.count_nonzero())) == (True, 0)


def test_a_step_without_queries_is_empty() -> None:
    case = make_case([(5, 0)], num_heads=2, num_kv_heads=1, head_dim=16, block_size=8)
    assert attend(case).shape == (0, 2, 16)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.data())
def test_any_mix_of_chunks_and_decodes(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 32]))
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 3 * block_size + 2]
    seq_lens = data.draw(st.lists(st.sampled_from(edges), min_size=1, max_size=5))
    lens = [(n, data.draw(st.integers(0, max(n, 1)))) for n in seq_lens]
    kv_heads = data.draw(st.sampled_from([1, 2]))
    ratio = data.draw(st.sampled_from([1, 2, 4, 7]))
    window = data.draw(st.sampled_from([None, 1, block_size - 1, block_size, block_size + 1]))
    softcap = data.draw(st.sampled_from([None, 2.0]))
    case = make_case(lens, num_heads=kv_heads * ratio, num_kv_heads=kv_heads, head_dim=16, block_size=block_size)
    assert worst(case, window=window, softcap=softcap) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_good_as_its_inputs(dtype: torch.dtype) -> None:
    case = make_case([(50, 1), (33, 8)], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    ulp = torch.finfo(dtype).eps
    assert worst(case) < 2 * ulp


def test_a_decode_row_has_the_same_bits_alone_and_in_company() -> None:
    lens = [(700, 1), (3, 1), (700, 1), (412, 1), (690, 1)]
    case = make_case(lens, num_heads=6, num_kv_heads=2, head_dim=32, block_size=16)
    together = attend(case)
    alone = [
        paged_attention(case.q[i : i + 1], case.kv, case.block_table[i : i + 1], [n], [0, 1], scale=0.2)
        for i, (n, _) in enumerate(lens)
    ]
    assert torch.equal(together, torch.cat(alone))


def test_the_order_of_blocks_in_memory_does_not_matter() -> None:
    first = make_case([(100, 1), (77, 9)], num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, seed=1)
    moved = torch.randperm(first.pool.shape[0] - 1, generator=torch.Generator().manual_seed(9)) + 1
    where = torch.cat([torch.zeros(1, dtype=torch.int64), moved])
    pool = torch.empty_like(first.pool)
    pool[where] = first.pool
    table = where[first.block_table.long()]
    second = PagedCase(first.q, pool, table, first.seq_lens, first.query_start_loc, first.keys, first.values)
    assert torch.equal(attend(first), attend(second))


def test_one_plan_and_one_workspace_serve_every_layer() -> None:
    case = make_case([(40, 1), (9, 1)], num_heads=2, num_kv_heads=2, head_dim=16, block_size=8)
    case.pool[:, 2] = case.pool[:, 1]
    plan = plan_attention(case.query_start_loc, case.seq_lens, case.block_table, case.pool[:, 0])
    workspace = Workspace()
    results = [paged_attention(case.q, case.pool[:, i], scale=0.2, plan=plan, workspace=workspace) for i in (1, 2)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], attend(case))


def test_a_result_outlives_the_next_use_of_its_plan() -> None:
    case = make_case([(40, 1), (35, 1)], num_heads=2, num_kv_heads=2, head_dim=16, block_size=8)
    plan = plan_attention(case.query_start_loc, case.seq_lens, case.block_table, case.kv)
    first = paged_attention(case.q, case.kv, scale=0.2, plan=plan)
    kept = first.clone()
    paged_attention(-case.q, case.kv, scale=0.2, plan=plan)
    assert torch.equal(first, kept)


def test_a_layer_major_cache_gives_the_same() -> None:
    case = make_case([(40, 1), (9, 4)], num_heads=2, num_kv_heads=2, head_dim=16, block_size=8)
    layer_major = case.kv.contiguous()
    result = paged_attention(case.q, layer_major, case.block_table, case.seq_lens, case.query_start_loc, scale=0.2)
    assert torch.equal(result, attend(case))


def test_a_cache_whose_blocks_are_scattered_inside_is_refused() -> None:
    case = make_case([(9, 1)], num_heads=2, num_kv_heads=2, head_dim=16, block_size=8)
    scattered = case.kv.transpose(2, 3)
    with pytest.raises(ValueError, match="contiguously"):
        plan_attention(case.query_start_loc, case.seq_lens, case.block_table, scattered)
