"""The paged decode attention against a float64 oracle, on caches, partial results and outputs that are NaN wherever nothing valid
was written, with table entries that must not be followed pointing nowhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels.decode_combine import decode_combine
from fairlane.kernels.decode_sched import DecodeWorkspace, Form
from fairlane.kernels.decode_tuning import ChunkRule, DecodeTuning
from fairlane.kernels.paged_decode import paged_decode
from paged_oracle import PagedCase, dense_attention, make_case

COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: it would commit every page
SCALE = 0.2
NOWHERE = 2**31 - 1
SMALL = DecodeTuning(block_n=16, chunks=ChunkRule((32, 48, 64), (96, 128)), combine_rows=2)
NAN = float("nan")


def decode_case(lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int = 16, **options: object) -> PagedCase:
    """Each sequence with one query, its last token. Table entries beyond a sequence lead nowhere, and the null block is as
    poisonous as the rest: a slot that holds no token must not be read, rather than read as 0."""
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": 16}
    case = make_case([(n, 1) for n in lens], **{**sizes, **options})  # type: ignore[arg-type]
    for row, n in enumerate(lens):
        case.block_table[row, -(-n // case.kv.shape[3]) :] = NOWHERE
    case.pool[0] = NAN
    return case


def hide_before_window(case: PagedCase, window: int) -> None:
    """Blocks wholly before the window are gone: their entries lead nowhere."""
    for row, n in enumerate(case.seq_lens):
        case.block_table[row, : max(0, n - window) // case.kv.shape[3]] = NOWHERE


def workspace_for(case: PagedCase, tuning: DecodeTuning, windows: frozenset[int | None], **options: int) -> DecodeWorkspace:
    _, num_heads, head_dim = case.q.shape
    num_kv_heads, block_size = case.kv.shape[2:4]
    sizes = {"max_batch": len(case.seq_lens) + 1, "max_items": 60, "num_programs": 3, **options}
    workspace = DecodeWorkspace(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        device=case.q.device,
        dtype=case.q.dtype,
        block_size=block_size,
        windows=windows,
        tuning=tuning,
        **sizes,
    )
    workspace.part_o.fill_(NAN)
    workspace.part_lse.fill_(NAN)
    return workspace


def decode(
    case: PagedCase,
    *,
    window: int | None = None,
    softcap: float | None = None,
    tuning: DecodeTuning = SMALL,
    max_seq_len: int | None = None,
    form: Form | None = None,
    **options: int,
) -> Tensor:
    """The result [B, Hq, D]. Also claims that nothing around it was written, nor the cache, and that `form` was used if given."""
    batch, num_heads, head_dim = case.q.shape
    workspace = workspace_for(case, tuning, frozenset({window}), **options)
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    workspace.schedule(seq_lens, window, max_seq_len=max_seq_len)
    before = bits(case.pool).clone()
    around = torch.full((batch + 2, num_heads + 2, head_dim), NAN, dtype=case.q.dtype)
    out = around[1:-1, 1:-1]
    result = paged_decode(
        case.q, case.kv, case.block_table, seq_lens, scale=SCALE, window=window, softcap=softcap, workspace=workspace, out=out
    )
    assert result is out and torch.equal(bits(case.pool), before)
    assert form is None or workspace.schedule_of(window).form is form
    found = out.clone()
    out.fill_(NAN)
    assert bool(around.isnan().all())
    return found


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def deviation(found: Tensor, case: PagedCase, window: int | None = None, softcap: float | None = None) -> float:
    """The largest deviation from the oracle; NaN (from a poisoned slot) becomes infinite."""
    difference = (found.double() - dense_attention(case, SCALE, window, softcap)).abs()
    return float(difference.nan_to_num(nan=float("inf")).max())


@pytest.mark.parametrize("num_programs", [1, 3, 40])
def test_a_schedule_serves_layer_after_layer_however_many_programs_draw_its_items(num_programs: int) -> None:
    # Every launch leaves the tickets as it found them; a layer that found some drawn already would leave rows out.
    case = decode_case([130, 1, 97, 40], 4, 2)
    workspace = workspace_for(case, SMALL, frozenset({None}), num_programs=num_programs)
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    workspace.schedule(seq_lens)
    outs = [torch.full_like(case.q, NAN) for _ in range(3)]
    for out in outs:
        paged_decode(case.q, case.kv, case.block_table, seq_lens, scale=SCALE, workspace=workspace, out=out)
    same = [torch.equal(out, outs[0]) for out in outs]
    assert (same, workspace.schedule_of(None).tickets.tolist()) == ([True] * 3, [0, 0]) and deviation(outs[0], case) < 1e-5


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_lengths_around_tile_block_and_chunk_boundaries(block_size: int) -> None:
    lens = [1, 15, 17, 32, 33, 64, 97, 130]
    case = decode_case(lens, 4, 2, block_size=block_size)
    assert deviation(decode(case, form=Form.SPLIT), case) < 1e-5


@pytest.mark.parametrize("group_size", [1, 2, 4, 5, 7, 8, 16, 20])
def test_query_heads_that_share_a_kv_head(group_size: int) -> None:
    case = decode_case([5, 70], 2 * group_size, 2)
    assert deviation(decode(case), case) < 1e-5


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims_that_are_no_power_of_two(head_dim: int) -> None:
    case = decode_case([37, 3], 4, 2, head_dim)
    assert deviation(decode(case), case) < 1e-5


@pytest.mark.parametrize("window", [1, 15, 16, 17, 45, 70, 200])
def test_a_window_hides_keys_older_than_its_size_even_if_their_blocks_are_gone(window: int) -> None:
    case = decode_case([1, 16, 45, 70], 4, 2)
    hide_before_window(case, window)
    for row, n in enumerate(case.seq_lens):  # and what is left of a block before the window may be anything
        for position in range(max(0, n - window) // 16 * 16, max(0, n - window)):
            case.pool[case.block_table[row, position // 16], :, :, :, position % 16] = NAN
    assert deviation(decode(case, window=window), case, window) < 1e-5


def test_softcap_bends_the_scores() -> None:
    case = decode_case([7, 50], 4, 4)
    found = [deviation(decode(case, softcap=cap), case, softcap=cap) for cap in (0.5, 30.0)]
    assert max(found) < 1e-5


def test_scores_so_large_that_only_the_largest_counts() -> None:
    case = decode_case([90], 2, 1)
    loud = replace(case, q=case.q * 1e4)
    assert deviation(decode(loud), loud) < 1e-5


@pytest.mark.parametrize("max_seq_len", [None, 20, 10])
def test_rows_without_keys_are_exactly_zero_and_disturb_nobody(max_seq_len: int | None) -> None:
    case = decode_case([0, 9, 0, 10, 0], 6, 3)
    case.block_table[0] = 0  # a padding row of a captured graph
    found = decode(case, max_seq_len=max_seq_len)
    assert (int(bits(found[[0, 2, 4]]).count_nonzero()), deviation(found, case) < 1e-5) == (0, True)


def test_half_precision_is_as_good_as_its_inputs() -> None:
    case = decode_case([50, 33], 4, 2, 64, dtype=torch.float16)
    found, exact = decode(case), dense_attention(case, SCALE)
    relative = float((found.double() - exact).norm() / exact.norm())
    assert deviation(found, case) < 2 * torch.finfo(torch.float16).eps and relative < 1e-3


def test_default_sizes() -> None:
    case = decode_case([600, 64], 2, 1, 64)
    found = decode(case, tuning=DecodeTuning(), form=Form.SPLIT)
    assert deviation(found, case) < 1e-5


# -- the same bits, whoever is in the batch ---------------------------------------------------------------------------------

MIXED = [130, 3, 97, 0, 33, 130, 16]


def test_a_row_has_the_same_bits_in_any_batch_and_at_any_place() -> None:
    case = decode_case(MIXED, 6, 2)
    together = decode(case)
    order = [5, 1, 3, 0, 6, 2, 4]
    moved = decode(pick(case, order))
    alone = torch.cat([decode(pick(case, [row])) for row in range(len(MIXED))])
    assert torch.equal(bits(moved), bits(together[order])) and torch.equal(bits(alone), bits(together))


def pick(case: PagedCase, rows: list[int]) -> PagedCase:
    lens = [case.seq_lens[row] for row in rows]
    keys, values = [case.keys[row] for row in rows], [case.values[row] for row in rows]
    return PagedCase(case.q[rows], case.pool, case.block_table[rows], lens, list(range(len(rows) + 1)), keys, values)


@pytest.mark.parametrize("num_programs", [1, 2, 64])
def test_the_number_of_programs_does_not_matter(num_programs: int) -> None:
    case = decode_case([70, 20], 4, 2)
    assert torch.equal(bits(decode(case, num_programs=num_programs)), bits(decode(case)))


def test_the_order_of_blocks_in_memory_does_not_matter() -> None:
    case = decode_case([100, 33], 4, 2)
    place = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(len(case.pool) - 1) + 1])
    pool = torch.empty_like(case.pool)
    pool[place] = case.pool
    table = torch.where(case.block_table == NOWHERE, NOWHERE, place[case.block_table.long() % len(place)].int())
    moved = replace(case, pool=pool, block_table=table)
    assert torch.equal(bits(decode(moved)), bits(decode(case)))


def test_a_layer_major_cache_gives_the_same() -> None:
    case = decode_case([70, 20], 4, 2)
    layer_major = replace(case, pool=case.pool.permute(1, 0, 2, 3, 4, 5).contiguous().permute(1, 0, 2, 3, 4, 5))
    assert torch.equal(bits(decode(layer_major)), bits(decode(case)))


def test_knowing_the_longest_length_changes_no_bit() -> None:
    case = decode_case([16, 0, 1, 7, 13], 10, 5)
    forms = [(None, Form.SPLIT), (32, Form.WHOLE), (16, Form.SHORT)]
    split, whole, short = (bits(decode(case, max_seq_len=n, form=form)) for n, form in forms)
    assert torch.equal(split, whole) and torch.equal(split, short)


@pytest.mark.parametrize("short_heads", [1, 3, 4, 7])
def test_the_short_kernel_takes_several_heads_per_program(short_heads: int) -> None:
    case = decode_case([16, 0, 30], 10, 5, block_size=8)
    tuning = replace(SMALL, short_heads=short_heads)
    found = decode(case, window=11, tuning=tuning, form=Form.SHORT)
    assert deviation(found, case, 11) < 1e-5


def test_a_broken_promise_of_short_sequences_shows_in_their_rows_only() -> None:
    case = decode_case([16, 17, 9], 4, 2)
    found = decode(case, max_seq_len=16, form=Form.SHORT)
    right = decode(case)
    assert bool(found[1].isnan().all()) and torch.equal(bits(found[[0, 2]]), bits(right[[0, 2]]))


def test_a_broken_promise_of_unsplit_sequences_costs_time_only() -> None:
    case = decode_case([16, 90], 4, 2)
    assert deviation(decode(case, max_seq_len=32, form=Form.WHOLE), case) < 1e-5


@pytest.mark.parametrize("max_items", [0, 3, 4])
def test_too_little_room_for_partial_results_costs_time_only(max_items: int) -> None:
    case = decode_case([90, 17, 90], 4, 2)
    assert deviation(decode(case, max_items=max_items), case) < 1e-5


# -- what it is given -------------------------------------------------------------------------------------------------------


def test_offsets_beyond_two_to_the_31_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks 8 and 9 start at elements 2^31 and more; offsets of 32 bits would wrap to places before the cache."""
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    case = decode_case([20], 2, 1, dtype=torch.float16)
    stride = 2**28
    memory = torch.empty(9 * stride + 2**10, dtype=torch.float16)
    far = memory.as_strided((10, *case.kv.shape[1:]), (stride, *case.kv[0].contiguous().stride()))
    near = case.block_table[0, :2].tolist()
    for place, block in zip((9, 8), near, strict=True):
        far[place] = case.kv[block]
    table = torch.tensor([[9, 8, NOWHERE]], dtype=torch.int32)
    workspace = workspace_for(case, SMALL, frozenset({None}))
    seq_lens = torch.tensor([20], dtype=torch.int32)
    workspace.schedule(seq_lens)
    out = torch.full_like(case.q, NAN)
    paged_decode(case.q, far, table, seq_lens, scale=SCALE, workspace=workspace, out=out)
    assert torch.equal(bits(out), bits(decode(case)))


def test_q_may_be_a_part_of_a_wider_matrix() -> None:
    case = decode_case([40, 7], 4, 2)
    wide = torch.full((2, 9, 16), NAN)
    wide[:, :4] = case.q
    assert torch.equal(bits(decode(replace(case, q=wide[:, :4]))), bits(decode(case)))


def test_one_workspace_serves_all_layers_and_windows_of_a_step() -> None:
    case = decode_case([70, 9, 40], 4, 2)
    workspace = workspace_for(case, SMALL, frozenset({None, 20}))
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    workspace.schedule(seq_lens)
    workspace.schedule(seq_lens, 20)
    found = {}
    for layer, window in enumerate((None, 20, None, 20)):
        out = found[layer] = torch.full_like(case.q, NAN)
        paged_decode(case.q, case.kv, case.block_table, seq_lens, scale=SCALE, window=window, workspace=workspace, out=out)
    full, windowed = bits(decode(case)), bits(decode(case, window=20))
    assert all(torch.equal(bits(found[layer]), full if layer % 2 == 0 else windowed) for layer in range(4))


def test_a_step_without_sequences_does_nothing() -> None:
    case = pick(decode_case([5], 2, 1), [])
    assert decode(case).shape == (0, 2, 16)


@dataclass(frozen=True)
class Call:
    """Arguments of a call that works, to be spoilt one at a time."""

    q: Tensor
    kv: Tensor
    block_table: Tensor
    seq_lens: Tensor
    out: Tensor
    window: int | None = None


@pytest.mark.parametrize(
    ("argument", "spoil", "message"),
    [
        ("q", lambda q: q[:, :2], "q and out"),
        ("q", lambda q: q.half(), "float32"),
        ("q", lambda q: q.transpose(1, 2).contiguous().transpose(1, 2), "last dimension"),
        ("out", lambda out: out[:1], "q and out"),
        ("kv", lambda kv: kv[:, :, :1], "kv must be"),
        ("kv", lambda kv: kv[:, :, :, :8], "kv must be"),
        ("kv", lambda kv: kv.transpose(2, 3).contiguous().transpose(2, 3), "contiguous"),
        ("block_table", lambda table: table[:1], "2 queries"),
        ("block_table", lambda table: table.long(), "int32"),
        ("seq_lens", lambda lens: lens[:1], "2 queries"),
        ("seq_lens", lambda lens: lens.long(), "int32"),
        ("window", lambda _: 5, "windows None"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(argument: str, spoil: object, message: str) -> None:
    case = decode_case([5, 6], 4, 2)
    workspace = workspace_for(case, SMALL, frozenset({None}))
    call = Call(case.q, case.kv, case.block_table, torch.tensor([5, 6], dtype=torch.int32), torch.empty_like(case.q))
    workspace.schedule(call.seq_lens)
    bad = replace(call, **{argument: spoil(getattr(call, argument))})  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        paged_decode(bad.q, bad.kv, bad.block_table, bad.seq_lens, scale=1.0, window=bad.window, workspace=workspace, out=bad.out)


def test_a_schedule_of_another_batch_is_refused() -> None:
    case = decode_case([5, 6], 4, 2)
    workspace = workspace_for(case, SMALL, frozenset({None}))
    seq_lens = torch.tensor([5, 6], dtype=torch.int32)
    workspace.schedule(seq_lens[:1])
    with pytest.raises(ValueError, match="last schedule"):
        paged_decode(case.q, case.kv, case.block_table, seq_lens, scale=1.0, workspace=workspace, out=torch.empty_like(case.q))


# -- joining partial results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows_at_once", "few", "few_heads"), [(1, 0, 1), (4, 0, 8), (16, 2, 2), (4, 16, 8), (4, 16, 1)])
def test_partial_results_are_weighed_by_their_denominators(rows_at_once: int, few: int, few_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    part_o = torch.full((20, 3, 10), NAN)
    part_lse = torch.full((20, 3), NAN)
    part_o[:13] = torch.randn(13, 3, 10, generator=generator)
    part_lse[:13] = torch.randn(13, 3, generator=generator) * 30
    bounds = [0, 2, 2, 13]
    out = torch.full((3, 3, 10), 7.0)
    decode_combine(
        part_o,
        part_lse,
        torch.tensor(bounds, dtype=torch.int32),
        out,
        rows_at_once=rows_at_once,
        few=few,
        few_heads=few_heads,
    )
    expected = torch.full((3, 3, 10), 7.0, dtype=torch.float64)
    for row, (low, high) in enumerate(pairwise(bounds)):
        if low < high:
            weights = torch.softmax(part_lse[low:high].double() * math.log(2), dim=0)
            expected[row] = (weights[..., None] * part_o[low:high].double()).sum(0)
    assert float((out.double() - expected).abs().max()) < 1e-5


@settings(max_examples=15, derandomize=True, deadline=None)
@given(st.data())
def test_any_mix_of_sequences(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 32, 64]))
    edges = [0, 1, block_size - 1, block_size, block_size + 1, 31, 32, 33, 65, 96, 97]
    lens = data.draw(st.lists(st.sampled_from(edges), min_size=1, max_size=4))
    kv_heads, group_size = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 2, 4, 5, 7, 8]))
    window = data.draw(st.sampled_from([None, None, 1, block_size - 1, block_size, block_size + 1, 40]))
    softcap = data.draw(st.sampled_from([None, 2.0]))
    case = decode_case(lens, kv_heads * group_size, kv_heads, block_size=block_size, seed=data.draw(st.integers(0, 99)))
    if window is not None:
        hide_before_window(case, window)
    found = decode(case, window=window, softcap=softcap, max_seq_len=max(lens) if data.draw(st.booleans()) else None)
    assert deviation(found, case, window, softcap) < 1e-5
