"""The Llama shape, natively: Llama, Mistral, Qwen2, Qwen3 and SmolLM2. q/k/v and gate/up are merged into one matrix each. It
holds weights and runs layers; what attention reads and writes is the backend's business, what is sampled the sampler's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairlane.worker.attention import AttentionBackend, AttentionLayer
from fairlane.worker.input_batch import MAX_AHEAD
from fairlane.worker.linear import Linear
from fairlane.worker.models.config import ModelConfig
from fairlane.worker.models.rope import rope_tables
from fairlane.worker.ops import ops_for


class _Layer:
    """One decoder layer's weights, by role."""

    def __init__(self, config: ModelConfig, attention: AttentionLayer, dtype: torch.dtype, device: torch.device) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        q, kv = config.num_heads * dim, config.num_kv_heads * dim
        self.attention = attention
        self.input_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.post_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.qkv = Linear(hidden, q + 2 * kv, config.qkv_bias, dtype, device)
        self.o = Linear(q, hidden, config.o_bias, dtype, device)
        self.gate_up = Linear(hidden, 2 * config.intermediate_size, config.mlp_bias, dtype, device)
        self.down = Linear(config.intermediate_size, hidden, config.mlp_bias, dtype, device)
        self._parts = {
            "self_attn.q_proj": (self.qkv, 0, q),
            "self_attn.k_proj": (self.qkv, q, kv),
            "self_attn.v_proj": (self.qkv, q + kv, kv),
            "self_attn.o_proj": (self.o, 0, hidden),
            "mlp.gate_proj": (self.gate_up, 0, config.intermediate_size),
            "mlp.up_proj": (self.gate_up, config.intermediate_size, config.intermediate_size),
            "mlp.down_proj": (self.down, 0, hidden),
        }

    def tensors(self) -> dict[str, Tensor]:
        """Checkpoint name (within the layer) -> the view it is copied into."""
        found = {"input_layernorm.weight": self.input_norm, "post_attention_layernorm.weight": self.post_norm}
        if self.attention.q_norm is not None and self.attention.k_norm is not None:
            found["self_attn.q_norm.weight"] = self.attention.q_norm
            found["self_attn.k_norm.weight"] = self.attention.k_norm
        for name, (linear, start, rows) in self._parts.items():
            assert linear.weight is not None
            found[f"{name}.weight"] = linear.weight[start : start + rows]
            if linear.bias is not None:
                found[f"{name}.bias"] = linear.bias[start : start + rows]
        return found

    def pack(self, batch_invariant: bool) -> None:
        for linear in (self.qkv, self.o, self.gate_up, self.down):
            linear.pack(batch_invariant=batch_invariant)


class LlamaModel:
    """Fill `tensors()`, call `finish_loading()`, then run. max_len: the longest sequence served."""

    def __init__(self, config: ModelConfig, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._ops = ops_for(device)
        self.windows = frozenset(config.windows)
        cos, sin = rope_tables(config, max_len, max_len + MAX_AHEAD, device)
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
        self._layers = [
            _Layer(config, _attention_layer(config, i, cos, sin, dtype), dtype, device) for i in range(config.num_layers)
        ]
        self._head = (
            Linear(config.hidden_size, config.vocab_size, False, dtype, device) if not config.tie_word_embeddings else None
        )

    def tensors(self) -> dict[str, Tensor]:
        """Checkpoint name -> the view it is copied into; all of them are needed."""
        found = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if self._head is not None and self._head.weight is not None:
            found["lm_head.weight"] = self._head.weight
        for index, layer in enumerate(self._layers):
            found.update({f"model.layers.{index}.{name}": tensor for name, tensor in layer.tensors().items()})
        return found

    def finish_loading(self, *, batch_invariant: bool = False) -> None:
        """Lays the weights out for speed; tensors() may not be written any more. batch_invariant: as Linear.pack's, whose
        ValueError it raises."""
        for layer in self._layers:
            layer.pack(batch_invariant)
        if self._head is None:
            self._head = Linear.around(self._embedding)
        self._head.pack(batch_invariant=batch_invariant)

    def forward(self, input_ids: Tensor, attention: AttentionBackend, metadata: Any, rows: Tensor | None = None) -> Tensor:
        """input_ids int64 [T] -> normed hidden states [T, H]; K and V of these tokens are written to the cache.

        rows: int64 [S], ascending, the only rows wanted: [S, H]. Beyond the last layer's attention no other row is computed.
        """
        eps, ops = self.config.rms_norm_eps, self._ops
        residual = self._embedding.index_select(0, input_ids)
        x = ops.rmsnorm(residual, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            x = attention.forward(layer.attention, layer.qkv(x), metadata)
            last = index + 1 == len(self._layers)
            if last and rows is not None and len(rows) < len(x):
                x, residual = x.index_select(0, rows), residual.index_select(0, rows)
            x = ops.linear_add_rmsnorm(layer.o, x, residual, layer.post_norm, eps)
            x = ops.linear_silu_mul(layer.gate_up, x)
            next_norm = self._norm if last else self._layers[index + 1].input_norm
            x = ops.linear_add_rmsnorm(layer.down, x, residual, next_norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, H] -> [S, V] in the weights' dtype."""
        assert self._head is not None
        return self._head(hidden)


def _attention_layer(config: ModelConfig, index: int, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> AttentionLayer:
    def norm() -> Tensor | None:
        return torch.empty(config.head_dim, dtype=dtype, device=cos.device) if config.qk_norm else None

    return AttentionLayer(
        index=index,
        num_heads=config.num_heads,
        scale=config.head_dim**-0.5,
        window=config.windows[index],
        cos=cos,
        sin=sin,
        q_norm=norm(),
        k_norm=norm(),
        norm_eps=config.rms_norm_eps,
    )
