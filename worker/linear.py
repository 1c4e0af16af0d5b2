"""A linear layer that knows how its weight is best laid out. On a CPU the weight is packed once into oneDNN's blocked layout:
measured 2.5 to 4 times faster than the BLAS behind F.linear (SmolLM2's 120 layers at 16 rows: 15 ms against 47 ms).

The packed kernel's result for a row does not depend on the other rows, except that a single row may take another path; where
that shows, one row is computed as two, which costs nothing measurable. So a sequence gets the same bits alone and in company.

On a GPU the weight stays as it is. Kernels of ours read it for a row or a few (skinny_linear) and for a decode batch
(thin_linear), where cuBLAS takes a second launch to sum, or leaves SMs idle; cuBLAS computes the products of many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

_PACK_ROWS = 16  # oneDNN picks the blocked layout for this many rows; it was the same for 16 and 256

# Up to how many rows kernels of ours are faster than cuBLAS on a GPU; measured on an H200.
_ONE_ROW_BYTES = 300 * 10**6  # of the weight: beyond, thin_linear is as fast as skinny_linear
_ALONE_ROWS = 64
_FUSED_ROWS = 128  # where the kernel saves another one
_LARGE_BYTES = 190 * 10**6  # of a gated weight: 235 MB takes 65 us, not 71, at 128 rows, 180 MB takes 56, not 53
_ANY_ROWS = 2**31
_MIN_OUTPUTS = 4096  # of a product alone: fewer leave SMs idle

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Linear:
    """y = x W^T + b. `weight` [N, K] and `bias` [N] are filled by the loader; pack() ends the filling."""

    def __init__(self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.weight: Tensor | None = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias: Tensor | None = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        self._packed: Tensor | None = None
        self._pairs_single_row = False
        self._batch_invariant = self._fuses = False
        self._kernels: list[tuple[int, Product]] = []  # (rows up to which it computes the product, kernel), ascending

    @classmethod
    def around(cls, weight: Tensor) -> Linear:
        """A layer without bias that uses this weight [N, K] as it is (a tied embedding); packing copies it."""
        layer = cls(0, 0, False, weight.dtype, weight.device)
        layer.out_features, layer.in_features = weight.shape
        layer.weight = weight
        return layer

    def pack(self, *, batch_invariant: bool = False) -> None:
        """Lays the weight out for speed; where that makes a copy, this layer lets go of the plain weight.

        batch_invariant: every product is computed by kernels that give a row the same bits whatever its company. Raises
        ValueError where there are none: off a GPU, on one with too little shared memory, or for a weight that they do not take.
        """
        if self.weight is None:
            return
        self._kernels, self._fuses = kernels_for(self.weight), can_fuse(self.weight)
        if batch_invariant:
            self._kernels = [(_ANY_ROWS, invariant_kernel(self.weight))]
            self._batch_invariant = True
        if not can_pack(self.weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACK_ROWS)
        self._pairs_single_row = _single_row_differs(self.in_features, self.out_features)
        self.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N]."""
        if self._packed is None:
            assert self.weight is not None
            for rows, kernel in self._kernels:
                if 0 < x.shape[0] <= rows:
                    return kernel(x, self.weight, self.bias)
            return torch.nn.functional.linear(x, self.weight, self.bias)
        if self._pairs_single_row and x.shape[0] == 1:
            return _packed_linear(x.repeat(2, 1), self._packed, self.bias)[:1]
        return _packed_linear(x, self._packed, self.bias)

    def fused_weight(self, num_rows: int, *, gated: bool = False) -> Tensor | None:
        """The weight [N, K], where a kernel of thin_linear.py that takes over the op behind the product of so many rows gains;
        else None. gated: whether that op is the gated activation."""
        if not self._fuses or self.bias is not None or self.weight is None:
            return None
        if self._batch_invariant:
            return self.weight if num_rows else None
        size = self.weight.numel() * self.weight.element_size()
        least = 2 if size <= _ONE_ROW_BYTES else 1
        most = _ALONE_ROWS if gated and size < _LARGE_BYTES else _FUSED_ROWS
        return self.weight if least <= num_rows <= most else None


def kernels_for(weight: Tensor) -> list[tuple[int, Product]]:
    """Our kernels for a product with this weight [N, K], and up to how many rows; beyond, and where there are none, torch's."""
    if weight.device.type != "cuda":
        return []
    from fairlane.kernels.skinny_linear import skinny_linear  # Triton is imported only where there is a GPU for it
    from fairlane.kernels.thin_linear import takes, thin_linear

    size = weight.numel() * weight.element_size()
    found: list[tuple[int, Product]] = []
    if weight.element_size() == 2 and weight.shape[1] % 8 == 0 and size <= _ONE_ROW_BYTES:
        found.append((1, skinny_linear))
    if takes(weight) and weight.shape[0] >= _MIN_OUTPUTS:
        found.append((_ALONE_ROWS, thin_linear))
    return found


def can_fuse(weight: Tensor) -> bool:
    """Whether thin_linear.py's fused forms take this weight [N, K]."""
    if weight.device.type != "cuda":
        return False
    from fairlane.kernels.thin_linear import takes

    return takes(weight)


def invariant_kernel(weight: Tensor) -> Product:
    """One kernel for any number of rows. Raises ValueError."""
    if weight.device.type != "cuda":
        raise ValueError("batch-invariant products need a GPU")
    from fairlane.kernels.thin_linear import has_room, takes, thin_linear

    if not has_room(weight.device):
        raise ValueError(
            "batch-invariant products need a GPU with 228 KiB of shared memory to an SM (compute capability 9 or 10)"
        )
    if not takes(weight):
        raise ValueError(f"batch-invariant products take 16-bit weights with rows of a multiple of 8, not {_described(weight)}")
    return thin_linear


def _described(weight: Tensor) -> str:
    return f"{list(weight.shape)} of {str(weight.dtype).removeprefix('torch.')}"


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
