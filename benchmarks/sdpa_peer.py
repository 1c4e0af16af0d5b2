"""The same attention by torch's scaled_dot_product_attention over contiguous keys and values, for comparison: what a kernel may
reach that need not follow a block table."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial

from gpu_timing import Call
from kernel_case import World
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def calls(
    world: World, batch: int, heads: tuple[int, int], lengths: tuple[int, int], head_dim: int, bytes_per_set: float
) -> Mapping[str, Sequence[Call]]:
    """By backend, one call per input set; a backend that refuses raises when it is called.

    heads: of queries and of KV; lengths: query tokens, the last ones of so many tokens. One query sees everything.
    """
    sets, (queries, tokens) = world.sets(bytes_per_set), lengths
    q = world.normal(sets, batch, heads[0], queries, head_dim)
    k, v = (world.normal(sets, batch, heads[1], tokens, head_dim) for _ in range(2))
    # As a mask, a triangle that ends at the last token: torch's own is_causal begins at the first.
    bias = causal_lower_right(queries, tokens) if 1 < queries < tokens else None
    causal, grouped = queries == tokens, heads[0] != heads[1]

    def call(backend: SDPBackend, at: int) -> None:
        with warnings.catch_warnings(), sdpa_kernel(backend):
            warnings.simplefilter("ignore")  # a backend that refuses says why once per check
            scaled_dot_product_attention(q[at], k[at], v[at], attn_mask=bias, is_causal=causal, enable_gqa=grouped)

    return {name: [partial(call, backend, at) for at in range(sets)] for name, backend in BACKENDS.items()}
