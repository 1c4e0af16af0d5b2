"""How a layer attends: a registry of backends. A backend plans once per step from the step's inputs, and runs once per layer
with that plan as an argument; it owns how the cache is written and read, the model only says what the layer is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from fairlane.kernels.reference import RopeStep, Workspace, paged_attention, plan_attention, plan_rope, rope_norm_write
from fairlane.worker.errors import ModelLoadError
from fairlane.worker.input_batch import StepInputs
from fairlane.worker.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer's attention is. index: its place in the KV cache; cos, sin float32 [P, D / 2]; norms [D] or None."""

    index: int
    num_heads: int
    scale: float
    window: int | None
    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    softcap: float | None = None


class AttentionBackend(Protocol):
    """One way to write and read the paged cache."""

    def plan(self, inputs: StepInputs, windows: frozenset[int | None]) -> Any:
        """Metadata for one step: whatever this backend's forward() wants, for layers with any of these windows."""

    def forward(self, layer: AttentionLayer, qkv: Tensor, metadata: Any) -> Tensor:
        """qkv [T, (Hq + 2 Hkv) * D] (may be changed) -> [T, Hq * D]. Writes the step's K and V before it reads."""


@dataclass(frozen=True, slots=True)
class _TorchMetadata:
    positions: Tensor
    slot_mapping: Tensor
    plans: dict[int | None, Any]
    rope: dict[int, RopeStep]  # by the identity of a layer's cos table: nearly always one for all layers


class TorchAttention:
    """The reference ops, for machines without a GPU."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._workspace = Workspace()

    def plan(self, inputs: StepInputs, windows: frozenset[int | None]) -> _TorchMetadata:
        view = self._cache.layers[0]
        plans = {w: plan_attention(inputs.query_start_loc, inputs.seq_lens, inputs.block_table, view, w) for w in windows}
        return _TorchMetadata(inputs.positions, inputs.slot_mapping, plans, {})

    def forward(self, layer: AttentionLayer, qkv: Tensor, metadata: _TorchMetadata) -> Tensor:
        kv = self._cache.layers[layer.index]
        step = metadata.rope.get(id(layer.cos))
        if step is None:
            block_size = kv.shape[3]
            step = plan_rope(metadata.positions, metadata.slot_mapping, layer.cos, layer.sin, block_size)
            metadata.rope[id(layer.cos)] = step
        q = rope_norm_write(
            qkv,
            metadata.positions,
            metadata.slot_mapping,
            layer.cos,
            layer.sin,
            kv,
            num_heads=layer.num_heads,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=layer.norm_eps,
            step=step,
        )
        plan = metadata.plans[layer.window]
        out = paged_attention(q, kv, scale=layer.scale, softcap=layer.softcap, plan=plan, workspace=self._workspace)
        return out.reshape(out.shape[0], -1)


BACKENDS: dict[str, Callable[[KVCache], AttentionBackend]] = {"torch": TorchAttention}


def make_backend(name: str, cache: KVCache) -> AttentionBackend:
    """Raises ModelLoadError for a name that is not registered."""
    if name not in BACKENDS:
        raise ModelLoadError(f"no attention backend {name!r}; there is: {', '.join(sorted(BACKENDS))}")
    return BACKENDS[name](cache)
