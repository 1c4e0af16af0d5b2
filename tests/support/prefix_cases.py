"""Paged cases in which sequences share their leading blocks, and the groups that say so. Blocks that sharing leaves without an
owner are poison."""

from __future__ import annotations

from collections.abc import Sequence

from fairlane.kernels.prefix_groups import PrefixGroup
from paged_oracle import PagedCase


def share(case: PagedCase, rows: Sequence[int], shared: int) -> PrefixGroup:
    """Makes the first `shared` tokens of these rows the first row's, block for block; whole blocks only."""
    block_size = case.kv.shape[3]
    assert shared % block_size == 0 and all(case.seq_lens[row] >= shared for row in rows)
    first, blocks = rows[0], shared // block_size
    for row in rows[1:]:
        case.pool[case.block_table[row, :blocks].long()] = float("nan")
        case.block_table[row, :blocks] = case.block_table[first, :blocks]
        case.keys[row][:shared] = case.keys[first][:shared]
        case.values[row][:shared] = case.values[first][:shared]
    return PrefixGroup(rows, shared)
