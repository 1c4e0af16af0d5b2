"""The paged decode attention on the device: bfloat16, real sizes, the same bits whoever is in the batch, and CUDA graphs. Slots
that hold no token are NaN, table entries that must not be followed lead nowhere, outputs are NaN before each call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_steps import LLAMA, NAN, NOWHERE, TOLERANCE, Geometry, Step, bits, error, make_step
from device import cuda
from fairlane.kernels.decode_sched import DecodeWorkspace, Form, max_items_for
from fairlane.kernels.decode_tuning import CANDIDATES, COMBINE_CANDIDATES, SHORT_CANDIDATES, DecodeTuning
from fairlane.kernels.paged_decode import paged_decode


def workspace_for(
    shape: Geometry, max_batch: int, windows: frozenset[int | None], tuning: DecodeTuning | None = None, max_items: int = 2048
) -> DecodeWorkspace:
    workspace = DecodeWorkspace(
        max_batch,
        max_items,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        cuda,
        shape.dtype,
        block_size=shape.block_size,
        windows=windows,
        tuning=tuning,
    )
    workspace.part_o.fill_(NAN)
    workspace.part_lse.fill_(NAN)
    return workspace


def run(
    step: Step,
    workspace: DecodeWorkspace,
    out: Tensor,
    seq_lens: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    max_seq_len: int | None = None,
) -> Tensor:
    workspace.schedule(seq_lens, window, max_seq_len=max_seq_len)
    scale = step.shape.head_dim**-0.5
    return paged_decode(
        step.q, step.kv, step.table, seq_lens, scale=scale, window=window, softcap=softcap, workspace=workspace, out=out
    )


def decode(
    step: Step,
    window: int | None = None,
    softcap: float | None = None,
    *,
    tuning: DecodeTuning | None = None,
    max_seq_len: int | None = None,
    form: Form | None = None,
) -> Tensor:
    workspace = workspace_for(step.shape, max(16, len(step.lens)), frozenset({window}), tuning)
    out = torch.full_like(step.q, NAN)
    run(step, workspace, out, step.seq_lens, window, softcap, max_seq_len)
    assert form is None or workspace.schedule_of(window).form is form
    return out


def test_lengths_from_nothing_to_three_kinds_of_chunks() -> None:
    step = make_step([1, 0, 15, 64, 65, 256, 257, 1000, 4099, 8192, 8193, 33000])
    assert error(decode(step, form=Form.SPLIT), step) < TOLERANCE[torch.bfloat16]


def test_the_error_does_not_grow_with_the_context() -> None:
    step = make_step([1024, 4096, 32768, 65536])
    found = decode(step)
    errors = [error(found[row : row + 1], step.pick([row])) for row in range(4)]
    assert max(errors) < TOLERANCE[torch.bfloat16]


GEOMETRIES = [
    Geometry(14, 2, 64, 32, torch.float16),
    Geometry(3, 3, 80, 8),
    Geometry(10, 2, 96, 64),
    Geometry(4, 2, 128, 16, torch.float32),
    Geometry(16, 1, 256, 16),
    Geometry(6, 3, 16, 8, torch.float16),
    Geometry(16, 2, 128, 64),
    Geometry(32, 32, 128, 16),
]


@pytest.mark.parametrize("shape", GEOMETRIES, ids=str)
def test_every_geometry_with_and_without_window(shape: Geometry) -> None:
    step = make_step([0, 1, 63, 129, 700, 1301], shape)
    windows = [None, 1, shape.block_size + 1, 300]
    assert max(error(decode(step, window), step, window) for window in windows) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("window", [None, 500])
def test_softcap_bends_the_scores(window: int | None) -> None:
    step = make_step([5, 64, 900])
    found = [error(decode(step, window, cap), step, window, cap) for cap in (0.5, 30.0)]
    assert max(found) < TOLERANCE[torch.bfloat16]


def test_random_steps() -> None:
    worst, generator = 0.0, torch.Generator().manual_seed(torch.seed() % 2**31)
    workspace = workspace_for(LLAMA, 16, frozenset({None}))
    for seed in range(60):
        count = int(torch.randint(1, 17, (1,), generator=generator))
        scale = 2 ** int(torch.randint(3, 13, (1,), generator=generator))
        step = make_step(torch.randint(0, scale, (count,), generator=generator).tolist(), seed=seed)
        out = torch.full_like(step.q, NAN)
        worst = max(worst, error(run(step, workspace, out, step.seq_lens), step))
    assert worst < TOLERANCE[torch.bfloat16], f"seed {generator.initial_seed()}"


@pytest.mark.parametrize("tuning", [*CANDIDATES, *SHORT_CANDIDATES, *COMBINE_CANDIDATES], ids=str)
def test_every_candidate_of_the_tuning_is_right(tuning: DecodeTuning) -> None:
    step = make_step([0, 7, 30, 2100, 12000])
    short = step.pick([0, 1, 2])
    errors = error(decode(step, tuning=tuning), step), error(decode(short, tuning=tuning, max_seq_len=32), short)
    assert max(errors) < TOLERANCE[torch.bfloat16]


# -- the same bits, whoever is in the batch ---------------------------------------------------------------------------------

MIXED = [2100, 3, 9001, 0, 300, 2100, 64, 257, 40000]


def test_a_row_has_the_same_bits_in_any_batch_and_at_any_place_ten_times() -> None:
    step = make_step(MIXED)
    together = bits(decode(step))
    same = []
    for turn in range(10):
        order = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(turn)).tolist()[: 9 - turn % 5]
        same.append(torch.equal(bits(decode(step.pick(order))), together[order]))
    same += [torch.equal(bits(decode(step.pick([row]))), together[[row]]) for row in range(len(MIXED))]
    assert all(same)


def test_a_large_batch_changes_no_bit() -> None:
    step = make_step([2100, 513] * 2 + [200 + 7 * row for row in range(124)])
    assert torch.equal(bits(decode(step.pick([0, 1]))), bits(decode(step))[:2])


def test_the_order_of_blocks_in_memory_does_not_matter() -> None:
    step = make_step(MIXED)
    place = torch.randperm(len(step.pool), device=cuda)
    pool = torch.empty_like(step.pool)
    pool[place] = step.pool
    table = torch.where(step.table == NOWHERE, NOWHERE, place[step.table.long() % len(place)].int())
    moved = replace(step, pool=pool, table=table)
    assert torch.equal(bits(decode(moved)), bits(decode(step)))


@pytest.mark.parametrize(
    "shape", [LLAMA, Geometry(14, 2, 64, 32, torch.float16), Geometry(4, 2, 128, 16, torch.float32)], ids=str
)
def test_knowing_the_longest_length_changes_no_bit(shape: Geometry) -> None:
    step = make_step([1, 0, 17, 31, 32, 30], shape)
    forms = [(None, Form.SPLIT), (256, Form.WHOLE), (32, Form.SHORT)]
    split, whole, short = (bits(decode(step, max_seq_len=n, form=form)) for n, form in forms)
    assert torch.equal(split, whole) and torch.equal(split, short)


# -- CUDA graphs ------------------------------------------------------------------------------------------------------------


def captured(
    step: Step, workspace: DecodeWorkspace, out: Tensor, seq_lens: Tensor, max_seq_len: int | None
) -> torch.cuda.CUDAGraph:
    run(step, workspace, out, seq_lens, max_seq_len=max_seq_len)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(step, workspace, out, seq_lens, max_seq_len=max_seq_len)
    return graph


@pytest.mark.parametrize(("max_seq_len", "long"), [(None, 9001), (256, 250), (64, 64)])
def test_a_graph_follows_the_lengths_and_its_padding_rows_are_zero(max_seq_len: int | None, long: int) -> None:
    step = make_step([long, 64, 3, long, 33, 0, 0, 0])
    workspace = workspace_for(LLAMA, 8, frozenset({None}))
    seq_lens, out = torch.zeros(8, dtype=torch.int32, device=cuda), torch.full_like(step.q, NAN)
    graph = captured(step, workspace, out, seq_lens, max_seq_len)
    table, same = step.table.clone(), []
    for used in (5, 1, 3):
        lens = step.lens[:used] + [0] * (8 - used)
        step.table.copy_(table)
        step.table[used:] = 0  # padding rows
        seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(NAN)
        graph.replay()
        eager = decode(replace(step.pick(list(range(used))), lens=lens[:used]))
        same.append((torch.equal(bits(out[:used]), bits(eager)), int(bits(out[used:]).count_nonzero())))
    assert same == [(True, 0)] * 3


def test_a_call_neither_allocates_nor_waits_for_the_device() -> None:
    step = make_step([2100, 0, 64])
    workspace = workspace_for(LLAMA, 4, frozenset({None}))
    seq_lens, out = step.seq_lens, torch.full_like(step.q, NAN)
    run(step, workspace, out, seq_lens)  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(step, workspace, out, seq_lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# -- offsets beyond 2^31 ----------------------------------------------------------------------------------------------------


def test_blocks_beyond_two_to_the_31_elements() -> None:
    """32 layers: a block is 2^20 elements, and from block 2048 on its offset no longer fits in 32 bits."""
    shape = Geometry(layers=32)
    step = make_step([700, 65], shape, num_blocks=2200)
    assert int(step.table[:, 0].min()) > 2048 and error(decode(step), step) < TOLERANCE[torch.bfloat16]


def test_partial_results_beyond_two_to_the_31_elements() -> None:
    step = make_step([700, 2100])
    offset = 2**31 // (LLAMA.num_heads * LLAMA.head_dim) + 1
    workspace = workspace_for(LLAMA, 2, frozenset({None}), max_items=offset + 20)
    plan = workspace.schedule_of(None)
    workspace.schedule(step.seq_lens)
    plan.items[:, 3] += torch.where(plan.items[:, 3] >= 0, offset, 0).int()
    plan.cu_items += offset
    out = torch.full_like(step.q, NAN)
    scale = LLAMA.head_dim**-0.5
    paged_decode(step.q, step.kv, step.table, step.seq_lens, scale=scale, workspace=workspace, out=out)
    assert torch.equal(bits(out), bits(decode(step)))


def test_room_for_the_worst_batch_is_enough() -> None:
    lens = [8192] * 4
    tuning = DecodeTuning()
    workspace = workspace_for(LLAMA, 4, frozenset({None}), tuning, max_items=max_items_for(4, 8192, tuning))
    workspace.schedule(torch.tensor(lens, dtype=torch.int32, device=cuda))
    plan = workspace.schedule_of(None)
    assert (int(plan.num_items), plan.cu_items.tolist()) == (128, [0, 32, 64, 96, 128])
