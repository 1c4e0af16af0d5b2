"""Which model a benchmark is about: the shapes that ship as a config.json and are run with random weights, and how large a model
of some shape is. Loading one is the worker's business."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from fairlane.worker.models.config import ModelConfig


def shipped_models() -> dict[str, Path]:
    """The config.json of every shape that ships, by name."""
    folder = Path(str(files("fairlane.configs").joinpath("models")))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def model_config_file(name: str) -> Path:
    """The config.json that is meant: a shipped name, with or without its punctuation (llama-3.1-8b, llama31-8b), a file or a
    folder. Raises ValueError that lists the shipped names."""
    shipped = shipped_models()
    for known, path in shipped.items():
        if _plain(known) == _plain(name):
            return path
    given = Path(name).expanduser()
    given = given / "config.json" if given.is_dir() else given
    if given.is_file():
        return given
    raise ValueError(f'there is no model config "{name}": give a config.json, or one of {", ".join(shipped)}')


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def num_parameters(model: ModelConfig) -> int:
    """Of the matrices, without biases and norms, which are few; a tied embedding counts once."""
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    mlp = 3 * model.hidden_size * model.intermediate_size
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    return model.num_layers * (attention + mlp) + tables
