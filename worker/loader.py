"""Weights into a model: safetensors (one file or shards with an index, memory-mapped) or seeded random ones (`dummy`). It
decides which folders are refused and says by name which tensors do not fit; nothing in a folder is ever executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fairlane.worker.config import LoadFormat
from fairlane.worker.errors import ModelLoadError

_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_DTYPES = {"F16", "BF16", "F32"}
_SHOWN = 5


class Loadable(Protocol):
    """A model as the loader sees it."""

    def tensors(self) -> dict[str, Tensor]: ...

    def finish_loading(self, *, batch_invariant: bool = False) -> None: ...


def load_weights(
    model: Loadable,
    folder: Path,
    load_format: LoadFormat,
    *,
    seed: int,
    std: float,
    tied: bool,
    batch_invariant: bool = False,
) -> None:
    """Fills the model and finishes it. tied: a checkpoint's lm_head.weight is the embedding again, and skipped.

    Raises ModelLoadError: no safetensors, a damaged file, a tensor missing, unexpected or of the wrong shape or type, or one that
    batch-invariant kernels do not take.
    """
    if load_format is LoadFormat.DUMMY:
        _fill_random(model, seed, std)
    else:
        _copy_files(model, weight_files(folder), tied)
    try:
        model.finish_loading(batch_invariant=batch_invariant)
    except ValueError as error:
        raise ModelLoadError(f"batch_invariant: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files, those of the index if there is one. Raises ModelLoadError."""
    index = folder / _INDEX
    if index.exists():
        return _indexed_files(folder, index)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ModelLoadError(
            f"{folder} has weights only in {', '.join(pickled[:_SHOWN])}: such files can run code when they are read and "
            "are never opened; convert them to safetensors"
        )
    raise ModelLoadError(f"{folder} has no *.safetensors file; add the weights, or set load_format: dummy for random ones")


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not a readable safetensors index: {error!r}") from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelLoadError(f"{index}: {name!r} is not the plain name of a safetensors file in this folder")
        if not (folder / name).exists():
            raise ModelLoadError(f"{index} names {name}, which is missing; fetch it, or remove the index if it is stale")
    return [folder / name for name in names]


def _copy_files(model: Loadable, files: list[Path], tied: bool) -> None:
    from safetensors import SafetensorError, safe_open

    wanted = model.tensors()
    missing, extra = set(wanted), []
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    if name in wanted:
                        _copy_tensor(file, name, wanted[name], path)
                        missing.discard(name)
                    elif not _ignorable(name, tied):
                        extra.append(name)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is damaged or not a safetensors file: {error}") from error
    if missing or extra:
        raise ModelLoadError(f"the weights do not fit config.json: {_listed('missing', missing)}{_listed('unexpected', extra)}")


def _copy_tensor(file: Any, name: str, target: Tensor, path: Path) -> None:
    view = file.get_slice(name)
    shape, dtype = tuple(view.get_shape()), view.get_dtype()
    if shape != tuple(target.shape):
        raise ModelLoadError(f"{path}: {name} has shape {list(shape)}, config.json implies {list(target.shape)}")
    if dtype not in _DTYPES:
        raise ModelLoadError(f"{path}: {name} has type {dtype}; only {', '.join(sorted(_DTYPES))} can be loaded")
    target.copy_(file.get_tensor(name))


def _ignorable(name: str, tied: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _listed(label: str, names: Any) -> str:
    if not names:
        return ""
    ordered = sorted(names)
    rest = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"{label}: {', '.join(ordered[:_SHOWN])}{rest}. "


def _fill_random(model: Loadable, seed: int, std: float) -> None:
    """Matrices normal(0, std), norms one, biases zero; the same for a seed on one kind of device. They are drawn where they
    will be: on a CPU, eight billion of them take minutes."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, target in model.tensors().items():
        generator = generators.setdefault(target.device, torch.Generator(target.device).manual_seed(seed))
        if name.endswith(".bias"):
            target.zero_()
        elif target.dim() == 1:
            target.fill_(1.0)
        else:
            target.copy_(torch.randn(target.shape, generator=generator, device=target.device).mul_(std))
