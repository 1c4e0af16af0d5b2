"""A layer's decode attention from the product's q, k and v on: rope_norm_write and paged_decode, in one kernel where that is
faster. Which it is depends on the number of rows and the schedule; the bits do not.

    rope_norm_write ▶ paged_decode (▶ decode_combine)        two launches, each key written before the second begins
    paged_decode with the new tokens (▶ decode_combine)      one; each key written by the program that needs it

Why no program of the one launch can miss a key: the slot that a sequence's new key takes is read for the key at seq_len - 1 only,
since every tile is masked at its item's end. Each KV head of a sequence has exactly one item that ends there. The program that
draws it writes the slot, waits for its own threads at a barrier and then reads; all other items of the sequence end before. A
block that another sequence has too is full and was written in an earlier step. The prefix groups' kernel knows no new tokens, so
steps with groups take two launches.
"""

from __future__ import annotations

from torch import Tensor

from fairlane.kernels.decode_sched import DecodeWorkspace
from fairlane.kernels.decode_tuning import padded
from fairlane.kernels.new_tokens import NewTokens, check_new_tokens
from fairlane.kernels.paged_decode import paged_decode, takes_new_tokens
from fairlane.kernels.rope_norm_write import default_config, rope_norm_write


def rope_decode(
    new: NewTokens,
    kv: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    num_heads: int,
    scale: float,
    workspace: DecodeWorkspace,
    out: Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """rope_norm_write of the new tokens, then paged_decode of their queries: the cache and `out`, which is returned, get the bits
    that these two give. What new.qkv holds afterwards is undefined. Arguments are theirs, and so are the errors. The launches
    depend on shapes, the schedule and the tuning's fuse_rope_rows."""
    rows, head_dim = len(new.qkv), kv.shape[4]
    if _fits(new, workspace) and rows <= workspace.tuning.fuse_rope_rows and takes_new_tokens(workspace, window):
        check_new_tokens(new, kv, num_heads, rows)
        q = new.qkv[:, : num_heads * head_dim].view(rows, num_heads, head_dim)
        return paged_decode(
            q, kv, block_table, seq_lens, scale=scale, workspace=workspace, out=out, window=window, softcap=softcap, new=new
        )
    q = rope_norm_write(
        new.qkv, new.positions, new.slot_mapping, new.cos, new.sin, kv,
        num_heads=num_heads, q_norm=new.q_norm, k_norm=new.k_norm, eps=new.eps,
    )  # fmt: skip
    return paged_decode(q, kv, block_table, seq_lens, scale=scale, workspace=workspace, out=out, window=window, softcap=softcap)


def _fits(new: NewTokens, workspace: DecodeWorkspace) -> bool:
    """Whether one kernel would give the bits of two: a norm's sum is taken first within a thread, then across threads, so in
    both a thread must hold as many neighbouring columns of a head."""
    if new.q_norm is None or new.k_norm is None:
        return new.q_norm is new.k_norm
    head_dim, itemsize = workspace.head_dim, workspace.dtype.itemsize
    rope, tile = default_config(head_dim), padded(workspace.num_heads // workspace.num_kv_heads) * padded(head_dim)
    alone = rope.heads * (1 << (head_dim // 2 - 1).bit_length()) // (32 * rope.num_warps)
    within = tile // (32 * workspace.tuning.num_warps)
    return min(alone, 16 // itemsize) == min(within, 16 // itemsize)
