"""Lists the items of a step's prefix attention, on the device, once per step for all layers: the chunks that lie wholly in what
the members of a tile share. decode_sched.py has decided how each member is cut and how many of its chunks that covers; members of
different lengths may be cut differently, and only those cut alike share an item.

    item (tile, begin, end, number)    for each chunk size, number 0, 1, ... up to the most that a member so cut has
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fairlane.kernels.decode_tuning import ChunkRule
from fairlane.kernels.prefix_groups import PrefixGroups

_WRITE = 64  # items written at once


@triton.jit  # type: ignore[untyped-decorator]
def _list(items_ptr, counts, before, index, tile, CHUNK: tl.constexpr, WRITE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes this tile's items of one chunk size. counts [TILES]: each tile's; before: items that precede all of these."""
    first = before + tl.sum(tl.where(index < tile, counts, 0), 0)
    mine = tl.sum(tl.where(index == tile, counts, 0), 0)
    for base in range(0, mine, WRITE):
        number = base + tl.arange(0, WRITE)
        inside = number < mine
        record = items_ptr + (first + number) * 4
        tl.store(record, tile + tl.zeros_like(number), mask=inside)
        tl.store(record + 1, number * CHUNK, mask=inside)
        tl.store(record + 2, number * CHUNK + CHUNK, mask=inside)
        tl.store(record + 3, number, mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])  # type: ignore[untyped-decorator]
def _prefix_sched_kernel(  # type: ignore[no-untyped-def]
    members_ptr, chunk_sizes_ptr, covered_ptr, cu_items_ptr, info_ptr, items_ptr, num_items_ptr, num_tiles,
    CHUNK_0: tl.constexpr, CHUNK_1: tl.constexpr, CHUNK_2: tl.constexpr,
    MEMBERS: tl.constexpr, PADDED_MEMBERS: tl.constexpr, TILES: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Program t lists tile t's items. Each looks at all tiles, which is cheaper than a second launch would be."""
    tile = tl.program_id(0)
    index = tl.arange(0, TILES)
    place = tl.arange(0, PADDED_MEMBERS)
    cells = index[:, None] * MEMBERS + place[None, :]
    members = tl.load(members_ptr + cells, mask=(index < num_tiles)[:, None] & (place < MEMBERS)[None, :], other=-1)
    sizes = tl.load(chunk_sizes_ptr + members, mask=members >= 0, other=0)
    covered = tl.load(covered_ptr + members, mask=members >= 0, other=0)
    counts_0 = tl.max(tl.where(sizes == CHUNK_0, covered, 0), 1)
    counts_1 = tl.max(tl.where((sizes == CHUNK_1) & (CHUNK_1 != CHUNK_0), covered, 0), 1)
    counts_2 = tl.max(tl.where((sizes == CHUNK_2) & (CHUNK_2 != CHUNK_0) & (CHUNK_2 != CHUNK_1), covered, 0), 1)
    longest = tl.sum(counts_2, 0)  # long items first, so that short ones fill the gaps at the end of the launch
    longer = longest + tl.sum(counts_1, 0)
    _list(items_ptr, counts_2, 0, index, tile, CHUNK_2, WRITE)
    _list(items_ptr, counts_1, longest, index, tile, CHUNK_1, WRITE)
    _list(items_ptr, counts_0, longer, index, tile, CHUNK_0, WRITE)
    if tile == 0:
        tl.store(num_items_ptr, longer + tl.sum(counts_0, 0))

    here = place < MEMBERS
    plane = num_tiles * MEMBERS
    cell = tile * MEMBERS + place
    member = tl.load(members_ptr + cell, mask=here, other=-1)
    named = here & (member >= 0)
    tl.store(info_ptr + cell, member, mask=here)
    tl.store(info_ptr + plane + cell, tl.load(cu_items_ptr + member, mask=named, other=0), mask=here)
    tl.store(info_ptr + 2 * plane + cell, tl.load(chunk_sizes_ptr + member, mask=named, other=0), mask=here)
    tl.store(info_ptr + 3 * plane + cell, tl.load(covered_ptr + member, mask=named, other=0), mask=here)


def prefix_sched(groups: PrefixGroups, cu_items: Tensor, *, chunks: ChunkRule) -> None:
    """Writes the groups' info, items and num_items for the step whose decode_sched was given them and wrote cu_items [.. B + 1].
    Reads nothing on the host."""
    _prefix_sched_kernel[(groups.max_tiles,)](
        groups.members,
        groups.chunk_sizes,
        groups.covered,
        cu_items,
        groups.info,
        groups.items,
        groups.num_items,
        groups.max_tiles,
        CHUNK_0=chunks.sizes[0],
        CHUNK_1=chunks.sizes[1],
        CHUNK_2=chunks.sizes[2],
        MEMBERS=groups.members_per_tile,
        PADDED_MEMBERS=triton.next_power_of_2(groups.members_per_tile),
        TILES=triton.next_power_of_2(groups.max_tiles),
        WRITE=_WRITE,
        num_warps=4,
    )
