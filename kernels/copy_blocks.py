"""Whole KV blocks on the move, in Triton: into and out of a contiguous buffer (swap goes through one), and from block to block
within the pool. Which blocks, and when, is the block manager's business.

Copies within the pool go through a buffer too, slice of the blocks by slice: all sources are gathered, then all destinations
are written by a second launch, so that chains and cycles of pairs come out right whatever the number of pairs, and the buffer
stays small beside a pool that fills the device.

    block  |.. slice 0 ..|.. slice 1 ..|.. slice 2 ..|     for each slice:  pool[sources] -> buffer,  buffer -> pool[destinations]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

WORKSPACE_BYTES = 64 << 20  # what copy_blocks allocates at most where none is given; 32 blocks of 2 MiB in one slice


@dataclass(frozen=True, slots=True)
class CopyConfig:
    """chunk_bytes: what one program copies, a power of two."""

    chunk_bytes: int
    num_warps: int


DEFAULT = CopyConfig(chunk_bytes=16384, num_warps=8)  # four 16-byte loads in flight per thread
CANDIDATES = (DEFAULT, CopyConfig(8192, 4), CopyConfig(8192, 8), CopyConfig(32768, 8))


@triton.jit  # type: ignore[untyped-decorator]
def _chunk(ids, stride_ids, first_chunk, num_chunks, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's place among the ids, the block id there, and its elements within the block and within the buffer's row."""
    program = tl.program_id(0)
    place = (program // num_chunks).to(tl.int64)
    chunk = program % num_chunks
    block = tl.load(ids + place * stride_ids).to(tl.int64)
    elements = tl.arange(0, CHUNK)
    return place, block, (first_chunk + chunk) * CHUNK + elements, chunk * CHUNK + elements


@triton.jit(do_not_specialize=["first_chunk", "num_chunks"], do_not_specialize_on_alignment=["ids"])  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    pool, ids, buffer, stride_block, stride_ids, stride_buffer, first_chunk, num_chunks, SIZE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    place, block, in_block, in_row = _chunk(ids, stride_ids, first_chunk, num_chunks, CHUNK)
    inside = (in_block < SIZE) & (block >= 0)
    values = tl.load(pool + block * stride_block + in_block, mask=inside)
    tl.store(buffer + place * stride_buffer + in_row, values, mask=inside)


@triton.jit(do_not_specialize=["first_chunk", "num_chunks"], do_not_specialize_on_alignment=["ids"])  # type: ignore[untyped-decorator]
def _scatter_kernel(  # type: ignore[no-untyped-def]
    pool, ids, buffer, stride_block, stride_ids, stride_buffer, first_chunk, num_chunks, SIZE: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    place, block, in_block, in_row = _chunk(ids, stride_ids, first_chunk, num_chunks, CHUNK)
    inside = (in_block < SIZE) & (block >= 0)
    values = tl.load(buffer + place * stride_buffer + in_row, mask=inside)
    tl.store(pool + block * stride_block + in_block, values, mask=inside)


def gather_blocks(pool: Tensor, ids: Tensor, out: Tensor, *, config: CopyConfig = DEFAULT) -> Tensor:
    """out[i] = pool[ids[i]]; returns out.

    pool [num_blocks, ...], each block contiguous, the distance between blocks free (so that a layer's view will do too). ids:
    int32 or int64 [n], each in [0, num_blocks), or negative for padding: out[i] is left as it is. out [n, ...]: of pool's dtype,
    contiguous, a block's size per id, no part of pool. Raises ValueError for what does not fit.
    """
    _launch_whole(_gather_kernel, pool, ids, out, config)
    return out


def scatter_blocks(pool: Tensor, ids: Tensor, src: Tensor, *, config: CopyConfig = DEFAULT) -> None:
    """pool[ids[i]] = src[i]; all other blocks stay as they are. Arguments as for gather_blocks; no id may come twice."""
    _launch_whole(_scatter_kernel, pool, ids, src, config)


def copy_blocks(pool: Tensor, pairs: Tensor, *, workspace: Tensor | None = None, config: CopyConfig = DEFAULT) -> None:
    """Copies whole blocks in every layer. pool as for gather_blocks; pairs: int32 or int64 [n, 2] of (source, destination).

    Every source is read before any destination is written, so a block may be both; no block may be a destination twice. A pair
    of two negative ids is padding. workspace: contiguous, of pool's dtype, at least n chunks (config.chunk_bytes each); the
    larger, the fewer launches. Without one, one of at most about 64 MiB is allocated. Raises ValueError for what does not fit.
    """
    if pairs.dim() != 2 or pairs.shape[1] != 2:
        raise ValueError(f"pairs must be [n, 2]; they are {list(pairs.shape)}")
    count, sources, destinations = pairs.shape[0], pairs[:, 0], pairs[:, 1]
    size, chunk, num_chunks = _extent(pool, sources, config)
    if count == 0:
        return
    if workspace is None:
        per_slice = min(num_chunks, max(1, WORKSPACE_BYTES // (config.chunk_bytes * count)))
        workspace = torch.empty(count * per_slice * chunk, dtype=pool.dtype, device=pool.device)
    if workspace.dtype != pool.dtype or not workspace.is_contiguous() or workspace.numel() < count * chunk:
        raise ValueError(f"workspace must be contiguous {pool.dtype}, {count * chunk} elements or more for {count} pairs")
    per_slice = min(num_chunks, workspace.numel() // (count * chunk))
    strides = pool.stride(0), pairs.stride(0), per_slice * chunk
    for first in range(0, num_chunks, per_slice):
        chunks = min(per_slice, num_chunks - first)
        for kernel, ids in ((_gather_kernel, sources), (_scatter_kernel, destinations)):
            kernel[(count * chunks,)](
                pool, ids, workspace, *strides, first, chunks, SIZE=size, CHUNK=chunk, num_warps=config.num_warps
            )


def _launch_whole(kernel: Any, pool: Tensor, ids: Tensor, blocks: Tensor, config: CopyConfig) -> None:
    """One launch of a kernel over whole blocks: ids [n] of pool, and n blocks, one after the other."""
    size, chunk, num_chunks = _extent(pool, ids, config)
    count = ids.shape[0]
    if blocks.dtype != pool.dtype or not blocks.is_contiguous() or blocks.numel() != count * size:
        raise ValueError(
            f"{count} blocks of {size} {pool.dtype} must be contiguous; they are {list(blocks.shape)} {blocks.dtype}"
        )
    if count:
        strides = pool.stride(0), ids.stride(0), size
        kernel[(count * num_chunks,)](
            pool, ids, blocks, *strides, 0, num_chunks, SIZE=size, CHUNK=chunk, num_warps=config.num_warps
        )


def _extent(pool: Tensor, ids: Tensor, config: CopyConfig) -> tuple[int, int, int]:
    """Elements of a block, elements of a chunk, chunks of a block."""
    block = pool[0]
    if not block.is_contiguous():
        raise ValueError("each block of the pool must be contiguous")
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"ids must be int32 or int64 [n]; they are {ids.dtype} {list(ids.shape)}")
    size, chunk = block.numel(), config.chunk_bytes // pool.element_size()
    return size, chunk, -(-size // chunk)
