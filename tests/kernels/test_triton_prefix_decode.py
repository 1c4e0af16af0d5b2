"""Decode attention whose shared leading chunks are computed once for several sequences, against a float64 oracle that knows
nothing of sharing. Caches, partial results and outputs are NaN wherever nothing valid was written; table entries that must not be
followed lead nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels import reference_prefix
from fairlane.kernels.decode_sched import DecodeWorkspace, Form
from fairlane.kernels.decode_tuning import ChunkRule, DecodeTuning
from fairlane.kernels.paged_decode import paged_decode
from fairlane.kernels.prefix_decode import prefix_decode
from fairlane.kernels.prefix_groups import PrefixGroup, PrefixGroups
from fairlane.kernels.prefix_sched import prefix_sched
from fairlane.kernels.prefix_tuning import CANDIDATES, PrefixTuning, tuning_for
from paged_oracle import PagedCase, dense_attention, make_case
from prefix_cases import share

COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: it would commit every page
SCALE = 0.2
NOWHERE = 2**31 - 1
NAN = float("nan")
CHUNKS = ChunkRule((32, 48, 64), (96, 160))  # up to 96 keys in chunks of 32, up to 160 of 48, beyond of 64
TUNING = DecodeTuning(block_n=16, chunks=CHUNKS)
PREFIX = PrefixTuning(block_m=16, block_n=16)
Groups = Sequence[PrefixGroup]


def shared_case(lens: list[int], num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16, **options: object) -> PagedCase:
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": 16}
    case = make_case([(n, 1) for n in lens], **{**sizes, **options})  # type: ignore[arg-type]
    for row, n in enumerate(lens):
        case.block_table[row, -(-n // case.kv.shape[3]) :] = NOWHERE
    case.pool[0] = NAN
    return case


def workspace_for(case: PagedCase, window: int | None = None, prefix: PrefixTuning = PREFIX, **options: int) -> DecodeWorkspace:
    _, num_heads, head_dim = case.q.shape
    num_kv_heads, block_size = case.kv.shape[2:4]
    sizes = {"max_batch": len(case.seq_lens) + 1, "max_items": 60, "num_programs": 3, **options}
    workspace = DecodeWorkspace(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, device=case.q.device, dtype=case.q.dtype,
        block_size=block_size, windows=frozenset({window}), tuning=TUNING, prefix=prefix, **sizes,
    )  # fmt: skip
    workspace.part_o.fill_(NAN)
    workspace.part_lse.fill_(NAN)
    return workspace


def groups_of(workspace: DecodeWorkspace) -> PrefixGroups:
    assert workspace.groups is not None
    return workspace.groups


def decode(
    case: PagedCase,
    groups: Groups,
    *,
    window: int | None = None,
    softcap: float | None = None,
    cascade: bool = True,
    max_seq_len: int | None = None,
    prefix: PrefixTuning = PREFIX,
    **options: int,
) -> Tensor:
    """The result [B, Hq, D]. Also claims that the cache was not written."""
    workspace = workspace_for(case, window, prefix, **options)
    groups_of(workspace).fill(groups)
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    workspace.schedule(seq_lens, window, max_seq_len=max_seq_len, cascade=cascade)
    before = bits(case.pool).clone()
    out = torch.full_like(case.q, NAN)
    paged_decode(
        case.q, case.kv, case.block_table, seq_lens, scale=SCALE, window=window, softcap=softcap, workspace=workspace, out=out
    )
    assert torch.equal(bits(case.pool), before)
    return out


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def deviation(found: Tensor, case: PagedCase, window: int | None = None, softcap: float | None = None) -> float:
    """The largest deviation from the oracle; NaN (from a poisoned slot) becomes infinite."""
    difference = (found.double() - dense_attention(case, SCALE, window, softcap)).abs()
    return float(difference.nan_to_num(nan=float("inf")).max())


# -- right results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
def test_members_of_two_groups_and_others_attend_to_what_is_theirs(block_size: int) -> None:
    case = shared_case([90, 70, 33, 96, 65, 81], block_size=block_size)
    groups = [share(case, [0, 3, 5], 64), share(case, [4, 1], 64)]
    assert deviation(decode(case, groups), case) < 1e-5


@pytest.mark.parametrize("group_size", [1, 2, 4, 5, 7, 8, 16, 20])
def test_query_heads_that_share_a_kv_head(group_size: int) -> None:
    case = shared_case([50, 70, 40], 2 * group_size, 2)
    assert deviation(decode(case, [share(case, [0, 1, 2], 32)]), case) < 1e-5


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims_that_are_no_power_of_two(head_dim: int) -> None:
    case = shared_case([37, 40], 4, 2, head_dim)
    assert deviation(decode(case, [share(case, [0, 1], 32)]), case) < 1e-5


def test_members_cut_differently_by_their_own_lengths_are_each_joined_right() -> None:
    """Chunks of 32, 48 and 64 keys in one tile of four; 128 shared tokens are 4, 2 and 2 chunks of these."""
    case = shared_case([96, 150, 170, 130], 2, 1)
    group = share(case, [0, 1, 2, 3], 80)
    assert deviation(decode(case, [group]), case) < 1e-5


def test_a_group_of_more_members_than_a_tile_holds() -> None:
    case = shared_case([40, 41, 50, 70, 36, 39, 60], 8, 2)
    group = share(case, list(range(7)), 32)
    assert deviation(decode(case, [group]), case) < 1e-5  # tiles of 4 and 3


def test_chunks_that_end_within_what_is_shared_only() -> None:
    """48 shared tokens hold one chunk of 32; the rest is the members' own business."""
    case = shared_case([70, 90], block_size=8)
    assert deviation(decode(case, [share(case, [0, 1], 48)]), case) < 1e-5


def test_a_softcap_bends_the_scores() -> None:
    case = shared_case([50, 70])
    group = share(case, [0, 1], 32)
    assert deviation(decode(case, [group], softcap=2.0), case, softcap=2.0) < 1e-5


@pytest.mark.parametrize("window", [1, 17, 40, 200])
def test_a_window_is_not_cascaded_and_hides_what_it_should(window: int) -> None:
    case = shared_case([50, 70])
    group = share(case, [0, 1], 32)
    plain = decode(case, [], window=window, cascade=False)
    found = decode(case, [group], window=window)
    assert torch.equal(bits(found), bits(plain)) and deviation(found, case, window) < 1e-5


def test_a_member_all_of_whose_chunks_are_shared() -> None:
    case = shared_case([64, 80])
    assert deviation(decode(case, [share(case, [0, 1], 64)]), case) < 1e-5


def test_half_precision_is_as_good_as_its_inputs() -> None:
    case = shared_case([50, 70], 4, 2, 64, dtype=torch.float16)
    found = decode(case, [share(case, [0, 1], 32)])
    exact = dense_attention(case, SCALE)
    assert float((found.double() - exact).norm() / exact.norm()) < 1e-3


@pytest.mark.parametrize("tuning", [tuning_for(32, torch.float32), PrefixTuning(), PrefixTuning(128, 16)], ids=str)
def test_tiles_of_other_sizes(tuning: PrefixTuning) -> None:
    tuning = replace(tuning, block_n=16)
    case = shared_case([50, 70, 40], 4, 2, 32)
    assert deviation(decode(case, [share(case, [0, 2, 1], 32)], prefix=tuning), case) < 1e-5


@pytest.mark.parametrize("num_programs", [1, 2, 64])
def test_the_number_of_programs_does_not_matter(num_programs: int) -> None:
    case = shared_case([70, 96, 50])
    group = share(case, [0, 1, 2], 32)
    assert torch.equal(bits(decode(case, [group], num_programs=num_programs)), bits(decode(case, [group])))


@settings(max_examples=15, derandomize=True, deadline=None)
@given(st.data())
def test_any_mix_of_groups(data: st.DataObject) -> None:
    block_size, kv_heads = data.draw(st.sampled_from([8, 16, 32])), data.draw(st.sampled_from([1, 2]))
    sharers = data.draw(st.lists(st.integers(64, 165), min_size=2, max_size=4))
    others = data.draw(st.lists(st.sampled_from([0, 1, 33, 65]), max_size=2))
    order = data.draw(st.permutations(range(len(sharers) + len(others))))
    lens = [(sharers + others)[row] for row in order]
    group_size = data.draw(st.sampled_from([1, 2, 4, 5, 8]))
    case = shared_case(lens, kv_heads * group_size, kv_heads, block_size=block_size, seed=data.draw(st.integers(0, 99)))
    group = share(case, [order.index(n) for n in range(len(sharers))], data.draw(st.sampled_from([32, 64])))
    softcap = data.draw(st.sampled_from([None, 2.0]))
    assert deviation(decode(case, [group], softcap=softcap), case, softcap=softcap) < 1e-5


# -- what cascading changes, and what not -----------------------------------------------------------------------------------


def test_without_groups_and_beside_groups_a_row_has_the_bits_it_has_without_cascade() -> None:
    case = shared_case([70, 96, 50, 3, 96])
    group = share(case, [0, 4], 64)
    plain = bits(decode(case, [], cascade=False))
    assert torch.equal(bits(decode(case, [])), plain) and torch.equal(bits(decode(case, [group]))[1:4], plain[1:4])


def test_rows_of_padding_and_without_keys_are_exactly_zero() -> None:
    case = shared_case([0, 64, 0, 70])
    group = share(case, [1, 3], 32)
    case.block_table[0] = 0
    found = decode(case, [group])
    assert (int(bits(found[[0, 2]]).count_nonzero()), deviation(found, case) < 1e-5) == (0, True)


@pytest.mark.parametrize("max_items", [0, 2, 4, 5])
def test_too_little_room_for_partial_results_costs_time_only(max_items: int) -> None:
    case = shared_case([90, 64, 90])  # 3, 2 and 3 rows
    group = share(case, [0, 1, 2], 64)
    assert deviation(decode(case, [group], max_items=max_items), case) < 1e-5


def test_a_sequence_that_is_never_cut_is_not_cascaded() -> None:
    case = shared_case([20, 30])
    found = decode(case, [share(case, [0, 1], 16)], max_seq_len=32)
    assert torch.equal(bits(found), bits(decode(case, [], cascade=False)))


def test_a_group_that_claims_more_than_a_member_has_is_taken_at_the_members_own_length() -> None:
    """The last member ends at 40: of the 64 tokens claimed it gets one chunk of 32, and nobody follows its table beyond."""
    case = shared_case([96, 90, 40])
    share(case, [0, 1], 64)
    case.block_table[2, :2] = case.block_table[0, :2]
    case.keys[2][:32], case.values[2][:32] = case.keys[0][:32], case.values[0][:32]
    workspace = workspace_for(case)
    groups_of(workspace).fill([PrefixGroup([0, 1, 2], 64)])
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    workspace.schedule(seq_lens, cascade=True)
    part_o, part_lse = workspace.part_o, workspace.part_lse
    prefix_decode(case.q, case.kv, case.block_table, scale=SCALE, groups=groups_of(workspace), part_o=part_o, part_lse=part_lse)
    written = (~part_lse.isnan()).all(1).nonzero().flatten().tolist()
    out = torch.full_like(case.q, NAN)
    paged_decode(case.q, case.kv, case.block_table, seq_lens, scale=SCALE, workspace=workspace, out=out)
    assert (written, deviation(out, case) < 1e-5) == ([0, 1, 3, 4, 6], True)


def test_rows_of_a_tile_beyond_its_members_write_nothing() -> None:
    """Tiles of 16 rows hold 3 members of 5 heads; the program that runs last has an item of the first tile."""
    case = shared_case([96] * 6, 5, 1)
    groups = [share(case, [0, 1, 2], 96), share(case, [3, 4, 5], 96)]
    assert deviation(decode(case, groups, num_programs=2), case) < 1e-5


def test_what_lies_behind_a_slab_is_not_read() -> None:
    case = shared_case([40, 40], 2, 2, 20)
    group = share(case, [0, 1], 32)
    blocks, _, heads, size, dim = case.kv.shape
    guarded = torch.full((blocks, 2, heads, 2, size, dim), NAN)
    guarded[:, :, :, 0] = case.kv
    found = replace(case, pool=guarded[:, :, :, 0].unsqueeze(1).expand(-1, 2, -1, -1, -1, -1))
    assert deviation(decode(found, [group]), case) < 1e-5


def test_the_decode_kernel_reads_no_shared_chunk() -> None:
    """Only one member's table leads to the shared blocks, whichever: the others' entries lead nowhere."""
    case = shared_case([70, 90, 80])
    group = share(case, [0, 1, 2], 64)
    right = decode(case, [group])
    case.block_table[:2, :4] = NOWHERE  # the tile's keys are looked up in the table of its last member
    assert torch.equal(bits(decode(case, [group])), bits(right))


# -- the schedule -----------------------------------------------------------------------------------------------------------


def scheduled(lens: list[int], groups: Groups, prefix: PrefixTuning = PREFIX, max_items: int = 60) -> DecodeWorkspace:
    workspace = DecodeWorkspace(
        len(lens) + 2, max_items, 4, 2, 16, torch.device("cpu"), torch.float32, tuning=TUNING, prefix=prefix, num_programs=2
    )
    groups_of(workspace).fill(groups)
    workspace.schedule(torch.tensor(lens, dtype=torch.int32), cascade=True)
    return workspace


def prefix_items(workspace: DecodeWorkspace) -> list[tuple[int, ...]]:
    """(member, begin, end, partial row) of everything that the prefix attention computes."""
    groups = groups_of(workspace)
    found = []
    for tile, begin, end, number in groups.items[: int(groups.num_items)].tolist():
        for member, first_row, size, covered in groups.info[:, tile].T.tolist():
            if member >= 0 and size == end - begin and number < covered:
                found.append((member, begin, end, first_row + number))
    return found


def decode_items(workspace: DecodeWorkspace) -> list[tuple[int, ...]]:
    plan = workspace.schedule_of(None)
    return [tuple(item) for item in plan.items[: int(plan.num_items)].tolist()]


def test_shared_chunks_move_from_one_list_to_the_other_and_keep_their_rows() -> None:
    lens = [96, 150, 170, 40, 96]
    together = scheduled(lens, [PrefixGroup([4, 1, 0, 2], 112)])
    alone = scheduled(lens, [])
    moved = prefix_items(together)
    assert sorted(moved) == [
        *((0, n, n + 32, n // 32) for n in (0, 32, 64)),
        *((1, n, n + 48, 3 + n // 48) for n in (0, 48)),
        (2, 0, 64, 7),
        *((4, n, n + 32, 12 + n // 32) for n in (0, 32, 64)),
    ]
    assert sorted(moved + decode_items(together)) == sorted(decode_items(alone))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    lens=st.lists(st.integers(0, 260), min_size=1, max_size=9),
    cuts=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 240)), max_size=3),
    max_items=st.sampled_from([0, 7, 60]),
)
def test_any_schedule_covers_each_key_once(lens: list[int], cuts: list[tuple[int, int]], max_items: int) -> None:
    """Groups are runs of rows; a member may be shorter than what the group says."""
    groups, begin = [], 0
    for size, shared in cuts:
        rows = list(range(begin, min(begin + size, len(lens))))
        groups += [PrefixGroup(rows, shared)] if rows else []
        begin += size
    workspace = scheduled(lens, groups, max_items=max_items)
    items = prefix_items(workspace) + decode_items(workspace)
    keys = sorted((b, at) for b, low, high, _ in items for at in range(low, high))
    rows = sorted(row for *_, row in items if row >= 0)
    cu_items = workspace.schedule_of(None).cu_items.tolist()
    assert keys == [(b, at) for b, n in enumerate(lens) for at in range(n)]
    assert rows == list(range(cu_items[len(lens)])) and all(
        cu_items[b] <= row < cu_items[b + 1] for b, _, _, row in items if row >= 0
    )


def test_the_reference_lists_the_same_items_and_computes_the_same_partial_results() -> None:
    case = shared_case([96, 150, 170, 40, 96], 6, 2)
    group = share(case, [4, 1, 0, 2], 96)
    workspace = workspace_for(case)
    groups = groups_of(workspace)
    groups.fill([group])
    workspace.schedule(torch.tensor(case.seq_lens, dtype=torch.int32), cascade=True)
    cu_items, found = workspace.schedule_of(None).cu_items, {}
    for name, sched, attend in (
        ("kernels", prefix_sched, prefix_decode),
        ("reference", reference_prefix.prefix_sched, reference_prefix.prefix_decode),
    ):
        groups.items.fill_(-1)
        sched(groups, cu_items, chunks=CHUNKS)
        part_o, part_lse = torch.full_like(workspace.part_o, NAN), torch.full_like(workspace.part_lse, NAN)
        attend(case.q, case.kv, case.block_table, scale=SCALE, groups=groups, part_o=part_o, part_lse=part_lse, softcap=3.0)
        listed = groups.items[: int(groups.num_items)].tolist(), groups.info.tolist()
        found[name] = listed, torch.cat([part_o, part_lse[..., None]], dim=-1)
    ours, theirs = found["kernels"], found["reference"]
    assert ours[0] == theirs[0] and int((~ours[1].isnan()).any(-1).any(-1).sum()) == 3 + 2 + 1 + 3
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-5, equal_nan=True)


def test_equal_chunk_sizes_are_listed_once() -> None:
    groups = groups_for()
    groups.fill([PrefixGroup([0, 1], 96)])
    groups.chunk_sizes.fill_(48)
    groups.covered.fill_(2)
    cu_items = torch.arange(9, dtype=torch.int32) * 3
    prefix_sched(groups, cu_items, chunks=ChunkRule((48, 48, 48), (96, 160)))
    assert groups.items[: int(groups.num_items)].tolist() == [[0, 0, 48, 0], [0, 48, 96, 1]]


# -- offsets ----------------------------------------------------------------------------------------------------------------


def partials(case: PagedCase, q: Tensor, kv: Tensor, table: Tensor) -> Tensor:
    """Of the shared chunk of two sequences of 48 keys, rows 1 and 2 of three."""
    workspace = workspace_for(case)
    groups_of(workspace).fill([PrefixGroup([1, 2], 32)])
    workspace.schedule(torch.tensor(case.seq_lens, dtype=torch.int32), cascade=True)
    part_o, part_lse = workspace.part_o, workspace.part_lse
    prefix_decode(q, kv, table, scale=SCALE, groups=groups_of(workspace), part_o=part_o, part_lse=part_lse)
    return part_o[[0, 2]]


def test_blocks_beyond_two_to_the_31_elements_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks 8 and 9 start at elements 2^31 and more; offsets of 32 bits would wrap to places before the cache."""
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    case = shared_case([0, 48, 48], 2, 1, dtype=torch.float16)
    share(case, [1, 2], 32)
    stride = 2**28
    memory = torch.empty(9 * stride + 2**10, dtype=torch.float16)
    far = memory.as_strided((10, *case.kv.shape[1:]), (stride, *case.kv[0].contiguous().stride()))
    for place, block in zip((9, 8), case.block_table[1, :2].tolist(), strict=True):
        far[place] = case.kv[block]
    table = torch.tensor([[NOWHERE] * 3, [9, 8, NOWHERE], [9, 8, NOWHERE]], dtype=torch.int32)
    found, expected = partials(case, case.q, far, table), partials(case, case.q, case.kv, case.block_table)
    assert bool(expected.isfinite().all()) and torch.equal(bits(found), bits(expected))


def test_rows_of_q_beyond_two_to_the_31_elements_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    case = shared_case([0, 48, 48], 2, 1, dtype=torch.float16)
    share(case, [1, 2], 32)
    far = torch.empty(2**31 + 2**10, dtype=torch.float16).as_strided(case.q.shape, (2**30, 16, 1))
    far.copy_(case.q)
    found, expected = partials(case, far, case.kv, case.block_table), partials(case, case.q, case.kv, case.block_table)
    assert bool(expected.isfinite().all()) and torch.equal(bits(found), bits(expected))


def test_a_layer_major_cache_and_a_view_of_q_give_the_same() -> None:
    case = shared_case([70, 90])
    group = share(case, [0, 1], 64)
    layer_major = replace(case, pool=case.pool.permute(1, 0, 2, 3, 4, 5).contiguous().permute(1, 0, 2, 3, 4, 5))
    wide = torch.full((2, 7, 16), NAN)
    wide[:, 2:6] = case.q
    strided = replace(case, q=wide[:, 2:6])
    right = bits(decode(case, [group]))
    assert torch.equal(bits(decode(layer_major, [group])), right) and torch.equal(bits(decode(strided, [group])), right)


# -- what it is given -------------------------------------------------------------------------------------------------------


def groups_for(max_batch: int = 8, group_size: int = 4, tuning: PrefixTuning = PREFIX) -> PrefixGroups:
    return PrefixGroups(max_batch, 20, group_size, torch.device("cpu"), tuning=tuning, chunks=CHUNKS, num_programs=2)


def test_groups_become_tiles_of_like_size_and_a_row_that_is_alone_none() -> None:
    groups = groups_for(12, 8)  # tiles of two
    groups.fill([PrefixGroup([5, 2, 7, 1, 0], 32), PrefixGroup([9], 64), PrefixGroup([3, 4], 0), PrefixGroup([10, 11], 48)])
    assert groups.members[:4].tolist() == [[5, 2], [7, 1], [10, 11], [-1, -1]]
    assert groups.row_shared.tolist() == [0, 32, 32, 0, 0, 32, 0, 32, 0, 0, 48, 48]


def test_new_groups_replace_the_old_ones() -> None:
    groups = groups_for()
    groups.fill([PrefixGroup([0, 1, 2], 32), PrefixGroup([3, 4], 32)])
    groups.fill([])
    assert (groups.row_shared.count_nonzero().item(), groups.members.eq(-1).all().item()) == (0, True)


@pytest.mark.parametrize("max_batch", [1, 2, 3, 7])
@pytest.mark.parametrize("group_size", [1, 8, 40])
def test_there_is_room_for_any_groups(max_batch: int, group_size: int) -> None:
    groups = groups_for(max_batch, group_size)
    pairs = [PrefixGroup([row, row + 1], 32) for row in range(0, max_batch - 1, 2)]
    for filled in ([PrefixGroup(range(max_batch), 32)], pairs):
        groups.fill(filled)
    assert groups.row_shared.count_nonzero().item() == max_batch // 2 * 2


@pytest.mark.parametrize(
    "bad",
    [
        [PrefixGroup([0, 8], 32)],
        [PrefixGroup([-1, 2], 32)],
        [PrefixGroup([1, 1], 32)],
        [PrefixGroup([0, 1], 32), PrefixGroup([1, 2], 32)],
        [PrefixGroup([0, 1], -16)],
        [PrefixGroup([], 32)],
    ],
)
def test_groups_that_do_not_fit_are_refused_and_change_nothing(bad: Groups) -> None:
    groups = groups_for()
    groups.fill([PrefixGroup([4, 5], 32)])
    with pytest.raises(ValueError):
        groups.fill(bad)
    assert (groups.row_shared.nonzero().flatten().tolist(), groups.members[0, :2].tolist()) == ([4, 5], [4, 5])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 6, 16)}, r"\[B, 4, 16\]"),
        ({"q": torch.zeros(2, 4, 16, dtype=torch.float16)}, "float32"),
        ({"q": torch.zeros(3, 4, 16)}, "3 queries"),
        ({"kv": torch.zeros(4, 2, 2, 12, 16)}, "8 to 64"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, "int32"),
        ({"part_o": torch.zeros(5, 4, 8)}, "part_o"),
        ({"part_lse": torch.zeros(5, 4, dtype=torch.float64)}, "float32"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(changes: dict[str, Tensor], message: str) -> None:
    given_ = {
        "q": torch.zeros(2, 4, 16),
        "kv": torch.zeros(4, 2, 2, 16, 16),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "part_o": torch.zeros(5, 4, 16),
        "part_lse": torch.zeros(5, 4),
    }
    with pytest.raises(ValueError, match=message):
        prefix_decode(**{**given_, **changes}, scale=SCALE, groups=groups_for(group_size=2))  # type: ignore[arg-type]


def test_a_workspace_without_room_for_groups_does_not_cascade() -> None:
    made = DecodeWorkspace(2, 8, 4, 2, 16, torch.device("cpu"), torch.float32, num_programs=2)
    with pytest.raises(ValueError, match="prefix groups"):
        made.schedule(torch.ones(2, dtype=torch.int32), cascade=True)
    assert made.schedule_of(None).form is Form.SPLIT


@pytest.mark.parametrize("bad", [{"block_m": 8}, {"block_n": 48}, {"num_stages": 0}])
def test_a_tuning_that_cannot_run_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        PrefixTuning(**bad)  # type: ignore[arg-type]


def test_chunks_must_hold_whole_tiles() -> None:
    with pytest.raises(ValueError, match="whole tiles of 64"):
        groups_for(tuning=PrefixTuning(block_n=64))


@pytest.mark.parametrize(("head_dim", "dtype"), [(257, torch.float16), (64, torch.float64)])
def test_there_is_no_tuning_for_what_cannot_be_computed(head_dim: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError):
        tuning_for(head_dim, dtype)


def test_every_candidate_goes_with_the_decode_attentions_chunks() -> None:
    assert all(size % tuning.block_n == 0 for tuning in CANDIDATES for size in ChunkRule().sizes)
