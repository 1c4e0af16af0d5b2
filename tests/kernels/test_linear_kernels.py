"""Which products our kernels take over on which GPU, decided from what torch says of it; no kernel runs here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import interpreted  # noqa: F401  (before any op: it selects the interpreter)
from fairlane.kernels import thin_linear as thin
from fairlane.worker.linear import invariant_kernel, kernels_for

# Compute capabilities.
ROOMY = {"H100": (9, 0), "B200": (10, 0)}
TIGHT = {"A100": (8, 0), "L4": (8, 9), "RTX 5090": (12, 0)}


def weight_on(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> Any:
    """A bfloat16 weight [6144, 4096] on a GPU of that compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    thin.has_room.cache_clear()
    values = torch.empty(6144, 4096, dtype=torch.bfloat16, device="meta")
    names = {name: getattr(values, name) for name in ("shape", "dtype", "stride", "numel", "element_size")}
    return SimpleNamespace(device=torch.device("cuda"), data_ptr=lambda: 0, **names)


@pytest.fixture(autouse=True)
def forget_devices() -> Any:
    yield
    thin.has_room.cache_clear()


@pytest.mark.parametrize("gpu", ROOMY)
def test_a_gpu_whose_shared_memory_holds_the_tiles_runs_our_kernels(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weight_on(monkeypatch, ROOMY[gpu])
    assert [rows for rows, _ in kernels_for(weight)] == [1, 64] and invariant_kernel(weight) is thin.thin_linear


@pytest.mark.parametrize("gpu", TIGHT)
def test_a_gpu_whose_shared_memory_is_too_small_leaves_batches_to_torch(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [rows for rows, _ in kernels_for(weight_on(monkeypatch, TIGHT[gpu]))] == [1]


@pytest.mark.parametrize("gpu", TIGHT)
def test_batch_invariance_on_such_a_gpu_is_refused(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="228 KiB of shared memory"):
        invariant_kernel(weight_on(monkeypatch, TIGHT[gpu]))
