"""A linear layer that knows how its weight is best laid out. On a CPU the weight is packed once into oneDNN's blocked layout:
measured 2.5 to 4 times faster than the BLAS behind F.linear (SmolLM2's 120 layers at 16 rows: 15 ms against 47 ms).

The packed kernel's result for a row does not depend on the other rows, except that a single row may take another path; where
that shows, one row is computed as two, which costs nothing measurable. So a sequence gets the same bits alone and in company.

On a GPU the weight stays as it is; it is read at the memory's rate by cuBLAS where it is large or rows are many, and by a kernel
of ours where both are few: there cuBLAS takes a second launch to sum, or leaves SMs idle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

_PACK_ROWS = 16  # oneDNN picks the blocked layout for this many rows; it was the same for 16 and 256

# On a GPU: (bytes of the weight, rows); up to so many of both, kernels/skinny_linear.py computes the product. Ascending in bytes.
_SKINNY = ((150 * 10**6, 8), (300 * 10**6, 1))  # measured on an H200: beyond, cuBLAS is as fast


class Linear:
    """y = x W^T + b. `weight` [N, K] and `bias` [N] are filled by the loader; pack() ends the filling."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.weight: Tensor | None = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias: Tensor | None = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self._packed: Tensor | None = None
        self._pairs_single_row = False
        self._skinny: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
        self._skinny_rows = 0

    @classmethod
    def around(cls, weight: Tensor) -> Linear:
        """A layer without bias that uses this weight [N, K] as it is (a tied embedding); packing copies it."""
        layer = cls(0, 0, False, weight.dtype, weight.device)
        layer.out_features, layer.in_features = weight.shape
        layer.weight = weight
        return layer

    def pack(self) -> None:
        """Lays the weight out for speed; where that makes a copy, this layer lets go of the plain weight."""
        if self.weight is None:
            return
        self._skinny_rows = skinny_rows(self.weight)
        if self._skinny_rows:
            from fairlane.kernels.skinny_linear import skinny_linear  # Triton is imported only where there is a GPU for it

            self._skinny = skinny_linear
        if not can_pack(self.weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_ROWS)
        self._pairs_single_row = _single_row_differs(self.in_features, self.out_features)
        self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        if self._packed is None:
            assert self.weight is not None
            if self._skinny is not None and x.shape[0] <= self._skinny_rows:
                return self._skinny(x, self.weight, self.bias)
            return torch.nn.functional.linear(x, self.weight, self.bias)
        if self._pairs_single_row and x.shape[0] == 1:
            return _packed_linear(x.repeat(2, 1), self._packed, self.bias)[:1]
        return _packed_linear(x, self._packed, self.bias)


def skinny_rows(weight: Tensor) -> int:
    """Up to how many rows a product with this weight [N, K] is our kernel's; 0 where that does not take it or does not gain."""
    if weight.device.type != "cuda" or weight.dtype not in (torch.float16, torch.bfloat16) or weight.shape[1] % 8:
        return 0
    size = weight.numel() * weight.element_size()
    return next((rows for limit, rows in _SKINNY if size <= limit), 0)


def can_pack(weight: Tensor) -> bool:
    """True where oneDNN's packed float32 linear exists in this build of torch."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


@lru_cache(maxsize=256)
def _single_row_differs(in_features: int, out_features: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    x = torch.randn(2, in_features, generator=generator)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
    return not torch.equal(_packed_linear(x[:1].contiguous(), packed, None), _packed_linear(x, packed, None)[:1])
