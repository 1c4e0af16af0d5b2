"""The engine's ops in plain torch: what every Triton kernel must compute, and the path that runs where there is no GPU. Any
dtype, any device; 16-bit inputs are computed in float32. Attention and sampling have files of their own and are re-exported.

Shapes: T tokens of a step, B sequences, Hq / Hkv query / KV heads, D head_dim, BS block_size, MB blocks per table row.
One layer's KV cache is a view `kv[num_blocks, 2, Hkv, BS, D]` (0 = K, 1 = V); block 0 is the null block, never written.

    slot_mapping[t] = block_id * BS + offset of the token's place in the cache; negative: the token is not written
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fairlane.kernels.reference_attention import AttentionPlan, Workspace, paged_attention, plan_attention
from fairlane.kernels.reference_sampling import SamplingTensors, gumbel_noise, philox4x32, sample

__all__ = [
    "AttentionPlan",
    "RopeStep",
    "SamplingTensors",
    "Workspace",
    "add_rmsnorm",
    "copy_blocks",
    "gumbel_noise",
    "paged_attention",
    "philox4x32",
    "plan_attention",
    "plan_rope",
    "rmsnorm",
    "rope_norm_write",
    "sample",
    "silu_mul",
]


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension. x [..., N], weight [N]; statistics in float32, result in x's dtype."""
    compute = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(compute)
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype) * weight


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x [T, N] to residual [T, N] in place and returns rmsnorm(residual)."""
    residual.add_(x)
    return rmsnorm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate_up [T, 2N] holds gate in its first N columns. Returns [T, N]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


@dataclass(frozen=True, slots=True)
class RopeStep:
    """What a step's positions and slots come to, for all layers that share cos and sin.

    cos, sin: [T, 1, D / 2] of the step's positions. written: rows of the step that go to the cache, None for all;
    blocks, offsets: int64, where they go.
    """

    cos: Tensor
    sin: Tensor
    written: Tensor | None
    blocks: Tensor
    offsets: Tensor


def plan_rope(positions: Tensor, slot_mapping: Tensor, cos: Tensor, sin: Tensor, block_size: int) -> RopeStep:
    """Arguments as for rope_norm_write. Worth it where many layers share it: half of a layer's calls are made here instead."""
    written = None
    if bool((slot_mapping < 0).any()):
        written = torch.nonzero(slot_mapping >= 0).flatten()
        slot_mapping = slot_mapping.index_select(0, written)
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    at_cos, at_sin = (table.index_select(0, positions).unsqueeze(1) for table in (cos, sin))
    return RopeStep(at_cos, at_sin, written, blocks, slot_mapping - blocks * block_size)


def rope_norm_write(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv: Tensor,
    *,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    step: RopeStep | None = None,
) -> Tensor:
    """Norms (where weights are given) and rotates q and k in place, writes K and V to the cache, returns q [T, Hq, D].

    qkv [T, (Hq + 2 Hkv) * D], contiguous, changed in place; positions int [T]; slot_mapping int64 [T], negative skips the
    write; cos, sin [P, D / 2] by position; q_norm, k_norm [D], applied per head before the rotation; step: what plan_rope made
    of positions, slot_mapping, cos and sin, if it is at hand.

        x1 = x[..., : D/2]   x2 = x[..., D/2 :]      (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    """
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    tokens = qkv.shape[0]
    step = step or plan_rope(positions, slot_mapping, cos, sin, block_size)
    heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, head_dim)
    rotated = heads[:, : num_heads + num_kv_heads]
    if q_norm is not None:
        rotated[:, :num_heads] = rmsnorm(rotated[:, :num_heads], q_norm, eps)
    if k_norm is not None:
        rotated[:, num_heads:] = rmsnorm(rotated[:, num_heads:], k_norm, eps)
    _rotate(rotated, step.cos, step.sin)
    fresh = heads[:, num_heads:].view(tokens, 2, num_kv_heads, head_dim)
    if step.written is not None:
        fresh = fresh.index_select(0, step.written)
    kv.permute(0, 3, 1, 2, 4)[step.blocks, step.offsets] = fresh.to(kv.dtype)
    return heads[:, :num_heads]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotates x [T, H, D] in place; cos, sin [T, 1, D / 2]."""
    half = x.shape[-1] // 2
    if x.dtype == cos.dtype:
        low, high = x[..., :half], x[..., half:]
        new_low = (low * cos).addcmul_(high, sin, value=-1)
        torch.mul(high, cos, out=high).addcmul_(low, sin)
        low.copy_(new_low)
        return
    low, high = x[..., :half].to(cos.dtype), x[..., half:].to(cos.dtype)
    x[..., :half] = low * cos - high * sin
    x[..., half:] = high * cos + low * sin


def copy_blocks(pool: Tensor, pairs: Tensor) -> None:
    """Copies whole blocks in every layer. pool [num_blocks, ...]; pairs int64 [n, 2] of (source, destination).

    Every source is read before any destination is written, so a block may be both.
    """
    if pairs.numel():
        pool[pairs[:, 1]] = pool[pairs[:, 0]]
