"""The prefix attention in plain torch: what the kernels of prefix_sched.py and prefix_decode.py must compute. It decides nothing
about who shares what: that stands in the PrefixGroups."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fairlane.kernels.decode_tuning import ChunkRule
from fairlane.kernels.prefix_groups import PrefixGroups


def prefix_sched(groups: PrefixGroups, cu_items: Tensor, *, chunks: ChunkRule) -> None:
    """For every tile and chunk size, the largest first: one item for each chunk that some member so cut shares."""
    members = groups.members.long()
    there = members >= 0
    groups.info[0] = groups.members
    for field, source in enumerate((cu_items, groups.chunk_sizes, groups.covered), 1):
        groups.info[field] = torch.where(there, source[members.clamp_min(0)], 0)
    _, _, sizes, covered = groups.info
    listed = []
    for size in sorted(set(chunks.sizes), reverse=True):
        for tile in range(groups.max_tiles):
            count = int(torch.where(sizes[tile] == size, covered[tile], 0).max())
            listed += [(tile, number * size, (number + 1) * size, number) for number in range(count)]
    if listed:
        groups.items[: len(listed)] = torch.tensor(listed, dtype=torch.int32)
    groups.num_items.fill_(len(listed))


def prefix_decode(
    q: Tensor,
    kv: Tensor,
    block_table: Tensor,
    *,
    scale: float,
    groups: PrefixGroups,
    part_o: Tensor,
    part_lse: Tensor,
    softcap: float | None = None,
) -> None:
    """Partial results of the listed items: part_o float32 [rows, Hq, D], and part_lse [rows, Hq], the logarithm to base 2 of the
    softmax's denominator. q [B, Hq, D], kv [num_blocks, 2, Hkv, BS, D], block_table int32 [B, MB]; any float dtype, computed in
    float32. Only rows of members that share an item's chunk are written."""
    block_size, group_size = kv.shape[3], q.shape[1] // kv.shape[2]
    for tile, begin, end, number in groups.items[: int(groups.num_items)].tolist():
        for member, first_row, size, covered in groups.info[:, tile].T.tolist():
            if member < 0 or size != end - begin or number >= covered:
                continue
            position = torch.arange(begin, end, device=q.device)
            blocks = block_table[member, position // block_size].long()
            keys = kv.permute(0, 3, 1, 2, 4)[blocks, position % block_size].float()  # [n, 2, Hkv, D]
            heads = q[member].float().view(-1, group_size, q.shape[2])
            scores = torch.einsum("hgd,nhd->hgn", heads, keys[:, 0]) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            row = first_row + number
            part_o[row] = torch.einsum("hgn,nhd->hgd", scores.softmax(-1), keys[:, 1]).flatten(0, 1)
            part_lse[row] = scores.logsumexp(-1).flatten() / math.log(2)
