"""Decode attention with shared prefixes on the device: bfloat16, real sizes, every candidate, CUDA graphs, and which bits stay
the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from decode_steps import LLAMA, NAN, TOLERANCE, Geometry, Step, bits, error, make_step, share
from device import cuda
from fairlane.kernels.decode_sched import DecodeWorkspace
from fairlane.kernels.paged_decode import paged_decode
from fairlane.kernels.prefix_decode import prefix_decode
from fairlane.kernels.prefix_groups import PrefixGroup, PrefixGroups
from fairlane.kernels.prefix_tuning import CANDIDATES, PrefixTuning, tuning_for
from launches import allocations, captured, compilations

Groups = Sequence[PrefixGroup]


def workspace_for(shape: Geometry, max_batch: int, tuning: PrefixTuning | None = None, max_items: int = 4096) -> DecodeWorkspace:
    workspace = DecodeWorkspace(
        max_batch, max_items, shape.num_heads, shape.num_kv_heads, shape.head_dim, cuda, shape.dtype,
        block_size=shape.block_size, prefix=tuning or tuning_for(shape.head_dim, shape.dtype),
    )  # fmt: skip
    workspace.part_o.fill_(NAN)
    workspace.part_lse.fill_(NAN)
    return workspace


def groups_of(workspace: DecodeWorkspace) -> PrefixGroups:
    assert workspace.groups is not None
    return workspace.groups


def run(
    step: Step, workspace: DecodeWorkspace, out: Tensor, seq_lens: Tensor, softcap: float | None = None, cascade: bool = True
) -> Tensor:
    workspace.schedule(seq_lens, cascade=cascade)
    scale = step.shape.head_dim**-0.5
    return paged_decode(step.q, step.kv, step.table, seq_lens, scale=scale, softcap=softcap, workspace=workspace, out=out)


def decode(step: Step, groups: Groups, softcap: float | None = None, tuning: PrefixTuning | None = None) -> Tensor:
    workspace = workspace_for(step.shape, len(step.lens), tuning)
    groups_of(workspace).fill(groups)
    return run(step, workspace, torch.full_like(step.q, NAN), step.seq_lens, softcap, cascade=bool(groups))


def shared_step(lens: list[int], groups: Groups, shape: Geometry = LLAMA, **options: int) -> Step:
    step = make_step(lens, shape, **options)
    for group in groups:
        share(step, list(group.rows), group.shared)
    return step


# Two prompts, members of three chunk sizes, and others; shared lengths that are no multiple of a chunk.
MIXED = [4400, 4099, 9000, 1, 4352, 0, 700, 4097, 1100, 33000, 1040, 4360, 1025, 5000, 300]
MIXED_GROUPS = [PrefixGroup([9, 0, 1, 2, 4, 7, 11, 13], 4096), PrefixGroup([12, 8, 10], 1024 - 16)]


def test_members_of_two_groups_and_others_attend_to_what_is_theirs() -> None:
    step = shared_step(MIXED, MIXED_GROUPS)
    assert error(decode(step, MIXED_GROUPS), step) < TOLERANCE[torch.bfloat16]


def test_many_members_with_a_long_prompt() -> None:
    lens = [4096 + 16 * (row % 17) + row for row in range(64)]
    group = PrefixGroup(range(64), 4096)
    step = shared_step(lens, [group])
    assert error(decode(step, [group]), step) < TOLERANCE[torch.bfloat16]


GEOMETRIES = [
    Geometry(14, 2, 64, 32, torch.float16),
    Geometry(3, 3, 80, 8),
    Geometry(10, 2, 96, 64),
    Geometry(4, 2, 128, 16, torch.float32),
    Geometry(16, 1, 256, 16),
    Geometry(6, 3, 16, 8, torch.float16),
    Geometry(32, 32, 128, 16),
    Geometry(40, 1, 64, 16),
]


@pytest.mark.parametrize("shape", GEOMETRIES, ids=str)
def test_every_geometry(shape: Geometry) -> None:
    groups = [PrefixGroup([0, 2, 3, 4, 6], 1024), PrefixGroup([5, 1], 576)]
    step = shared_step([1301, 600, 1100, 1025, 2000, 577, 9000, 63], groups, shape)
    assert error(decode(step, groups), step) < TOLERANCE[shape.dtype]


def test_a_softcap_bends_the_scores() -> None:
    group = PrefixGroup([0, 1, 2], 512)
    step = shared_step([600, 700, 900], [group])
    found = [error(decode(step, [group], cap), step, softcap=cap) for cap in (0.5, 30.0)]
    assert max(found) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("tuning", CANDIDATES, ids=str)
def test_every_candidate_of_the_tuning_is_right(tuning: PrefixTuning) -> None:
    step = shared_step(MIXED, MIXED_GROUPS)
    assert error(decode(step, MIXED_GROUPS, tuning=tuning), step) < TOLERANCE[torch.bfloat16]


def test_random_steps() -> None:
    worst, generator = 0.0, torch.Generator().manual_seed(torch.seed() % 2**31)
    workspace = workspace_for(LLAMA, 48)
    for seed in range(40):
        count = int(torch.randint(2, 33, (1,), generator=generator))
        order = torch.randperm(count, generator=generator).tolist()
        first = int(torch.randint(2, count + 1, (1,), generator=generator))
        lens, groups = torch.randint(1, 300, (count,), generator=generator), []
        for rows in (order[:first], order[first:]):
            shared = int(torch.randint(1, 300, (1,), generator=generator)) * 16
            lens[rows] += shared
            groups += [PrefixGroup(rows, shared)] if rows else []
        step = shared_step(lens.tolist(), groups, seed=seed)
        groups_of(workspace).fill(groups)
        out = torch.full_like(step.q, NAN)
        worst = max(worst, error(run(step, workspace, out, step.seq_lens), step))
    assert worst < TOLERANCE[torch.bfloat16], f"seed {generator.initial_seed()}"


# -- bits -------------------------------------------------------------------------------------------------------------------


def test_a_members_bits_do_not_depend_on_who_shares_or_where_it_stands_ten_times() -> None:
    step = shared_step(MIXED, MIXED_GROUPS)
    together, members = bits(decode(step, MIXED_GROUPS)), list(MIXED_GROUPS[0].rows)
    same = []
    for turn in range(10):
        generator = torch.Generator().manual_seed(turn)
        company = [members[at] for at in torch.randperm(8, generator=generator).tolist()][: 8 - turn % 6]
        order = torch.tensor([*company, 3, 6])[torch.randperm(len(company) + 2, generator=generator)].tolist()
        rows = [order.index(row) for row in company]
        found = bits(decode(step.pick(order), [PrefixGroup(rows, 4096)]))
        same.append(torch.equal(found[rows], together[company]))
    assert same == [True] * 10


@pytest.mark.parametrize("concurrent", [False, True])
def test_rows_of_no_group_have_the_bits_they_have_without_cascade(concurrent: bool) -> None:
    step = shared_step(MIXED, MIXED_GROUPS)
    others = [row for row in range(len(MIXED)) if not any(row in group.rows for group in MIXED_GROUPS)]
    found = decode(step, MIXED_GROUPS, tuning=PrefixTuning(concurrent=concurrent))
    assert torch.equal(bits(found)[others], bits(decode(step, []))[others])


def test_cascaded_and_plain_differ_by_rounding_only() -> None:
    step = shared_step(MIXED, MIXED_GROUPS)
    cascaded, plain = decode(step, MIXED_GROUPS).float(), decode(step, []).float()
    assert float((cascaded - plain).abs().max()) < 2 * torch.finfo(torch.bfloat16).eps


# -- CUDA graphs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_graph_follows_the_groups_and_the_lengths(concurrent: bool) -> None:
    step = shared_step(MIXED, MIXED_GROUPS)
    tuning = PrefixTuning(concurrent=concurrent)
    workspace = workspace_for(LLAMA, len(MIXED), tuning)
    seq_lens, out = torch.zeros_like(step.seq_lens), torch.full_like(step.q, NAN)
    graph = captured(lambda: run(step, workspace, out, seq_lens))
    same = []
    for groups, shorter in (([], 0), (MIXED_GROUPS, 0), (MIXED_GROUPS[1:], 0), (MIXED_GROUPS, 300)):
        lens = [max(n - shorter, 0) if n < 1000 else n for n in MIXED]
        seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        groups_of(workspace).fill(groups)
        out.fill_(NAN)
        graph.replay()
        eager = workspace_for(LLAMA, len(MIXED), tuning)
        groups_of(eager).fill(groups)
        expected = run(step, eager, torch.full_like(step.q, NAN), seq_lens)
        same.append(torch.equal(bits(out), bits(expected)))
    assert same == [True] * 4


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_warm_call_allocates_compiles_and_waits_for_nothing(concurrent: bool) -> None:
    step = shared_step(MIXED, MIXED_GROUPS)
    workspace = workspace_for(LLAMA, len(MIXED), PrefixTuning(concurrent=concurrent))
    groups_of(workspace).fill(MIXED_GROUPS)
    seq_lens, out = step.seq_lens, torch.full_like(step.q, NAN)
    run(step, workspace, out, seq_lens)
    torch.cuda.synchronize()
    other = shared_step([n + 7 for n in MIXED], MIXED_GROUPS)
    other_lens = other.seq_lens
    before = allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with compilations() as compiled:
            groups_of(workspace).fill(MIXED_GROUPS[:1])
            run(other, workspace, out, other_lens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (allocations(), compiled) == (before, [])


# -- offsets beyond 2^31 ----------------------------------------------------------------------------------------------------


def test_blocks_beyond_two_to_the_31_elements() -> None:
    """32 layers: a block is 2^20 elements, and from block 2048 on its offset no longer fits in 32 bits."""
    group = PrefixGroup([0, 1], 512)
    step = shared_step([700, 600], [group], Geometry(layers=32), num_blocks=2200)
    assert int(step.table[:, 0].min()) > 2048 and error(decode(step, [group]), step) < TOLERANCE[torch.bfloat16]


def test_partial_results_beyond_two_to_the_31_elements() -> None:
    group = PrefixGroup([0, 1], 512)
    step = shared_step([700, 600], [group])
    offset = 2**31 // (LLAMA.num_heads * LLAMA.head_dim) + 1
    near, far = workspace_for(LLAMA, 2), workspace_for(LLAMA, 2, max_items=offset + 20)
    for workspace in (near, far):
        groups_of(workspace).fill([group])
        workspace.schedule(step.seq_lens, cascade=True)
    groups_of(far).info[1] += offset
    for workspace in (near, far):
        prefix_decode(
            step.q, step.kv, step.table, scale=LLAMA.head_dim**-0.5, groups=groups_of(workspace),
            part_o=workspace.part_o, part_lse=workspace.part_lse,
        )  # fmt: skip
    rows = [0, 1, 3, 4]  # of three chunks each sequence has, the first two are shared
    there, here = far.part_o[offset:][rows], near.part_o[rows]
    assert bool(here.isfinite().all()) and torch.equal(bits(there), bits(here))


def test_the_order_of_blocks_in_memory_does_not_matter() -> None:
    step = shared_step(MIXED, MIXED_GROUPS)
    place = torch.randperm(len(step.pool), device=cuda)
    pool = torch.empty_like(step.pool)
    pool[place] = step.pool
    table = torch.where(step.table == 2**31 - 1, 2**31 - 1, place[step.table.long() % len(place)].int())
    moved = replace(step, pool=pool, table=table)
    assert torch.equal(bits(decode(moved, MIXED_GROUPS)), bits(decode(step, MIXED_GROUPS)))
