"""The flags of commands that run an engine in this process (bench, profile), and how a mistake in them ends the command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane.cli.exits import USAGE, stop

if TYPE_CHECKING:
    from fairlane.bench.loads import Load
    from fairlane.scheduler.executor import Executor
    from fairlane.worker.config import WorkerConfig

Model = Annotated[str | None, typer.Option(metavar="NAME|DIR", help="Embedded model or Hugging Face folder. Default: smollm2.")]
ModelConfig = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="A shape to run with random weights: llama-3.1-8b, llama-2-7b, qwen3-0.6b, qwen3-8b, or a config.json.",
    ),
]
LoadFormat = Annotated[
    str | None, typer.Option("--load", "--load-format", metavar="FORMAT", help="Weights: safetensors, or dummy (random).")
]
DeviceName = Annotated[
    str | None, typer.Option("--device", metavar="cpu|cuda", help="cpu or cuda. Default: a GPU if there is one.")
]
WorkerFile = Annotated[
    Path | None,
    typer.Option("--worker-config", metavar="FILE", help="worker.yaml. Default: settings that suit the device."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of worker.yaml, such as kv_cache=8GiB. As often as you like."),
]


def assignments(given: list[str] | None) -> dict[str, str]:
    """KEY=VALUE by key; ends the command for anything else."""
    pairs = [text.partition("=") for text in given or ()]
    for key, equals, _ in pairs:
        if not (key and equals):
            stop(USAGE, f'--set: "{key}" is not KEY=VALUE')
    return {key: value for key, _, value in pairs}


def checked_settings(
    model: str | None,
    model_config: str | None,
    load_format: str | None,
    device: str | None,
    worker_config: Path | None,
    settings: Mapping[str, str],
    loads: Mapping[str, Load],
) -> WorkerConfig:
    """The worker's settings, known to suit this machine and the loads; ends the command with what is wrong before a weight is
    read."""
    from fairlane.bench.setup import Asked, refuse_what_cannot_run, settings_for
    from fairlane.embedded import EmbeddedModelError
    from fairlane.errors import ConfigError
    from fairlane.worker.errors import ModelLoadError

    try:
        config = settings_for(Asked(model, model_config, load_format, device, worker_config, settings))
        refuse_what_cannot_run(config, loads)
    except (ConfigError, ModelLoadError, EmbeddedModelError, ValueError, OSError) as error:
        stop(USAGE, str(error))
    return config


@contextmanager
def loaded(config: WorkerConfig) -> Iterator[Executor]:
    """A loaded model, with a note while that takes its time; ends the command if it cannot be loaded."""
    from rich.console import Console

    from fairlane.clock import MonotonicClock
    from fairlane.worker.errors import ModelLoadError
    from fairlane.worker.executors import make_executor

    try:
        with Console(stderr=True).status(f"loading {config.model}"):
            executor = make_executor(config, MonotonicClock())
    except (ModelLoadError, ValueError) as error:
        stop(USAGE, str(error))
    try:
        yield executor
    finally:
        executor.close()
