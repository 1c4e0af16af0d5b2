"""`fairlane serve`: from flags and files to a checked plan; running it is cli/run.py's. Everything that can be found wrong is
found here, before a port is bound or a process started."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fairlane.cli.exits import USAGE, needs, stop

if TYPE_CHECKING:
    from fairlane.cli.run import Plan
    from fairlane.gateway.policy.model import Policy
    from fairlane.gateway.policy_source import PolicySource

T = TypeVar("T")
Flags = Mapping[str, str | None]


def _flag(variable: str, metavar: str, text: str) -> Any:
    # Values stay texts here: they are judged by the same rules as the files', which name the flag, the value and the bounds.
    return typer.Option(envvar=f"FAIRLANE_{variable}", metavar=metavar, help=text)


def serve(
    host: Annotated[str | None, _flag("HOST", "ADDRESS", "Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[str | None, _flag("PORT", "NUMBER", "Port; 0: any free one. Default: 50051.")] = None,
    admin_port: Annotated[str | None, _flag("ADMIN_PORT", "NUMBER", "Admin port. Default: port + 1.")] = None,
    metrics_port: Annotated[str | None, _flag("METRICS_PORT", "NUMBER", "Metrics port. Default: admin port + 1.")] = None,
    policy: Annotated[Path | None, _flag("POLICY", "FILE", "Tenants and tiers (tenants.yaml).")] = None,
    config: Annotated[Path | None, _flag("CONFIG", "FILE", "Gateway settings (gateway.yaml).")] = None,
    worker_config: Annotated[Path | None, _flag("WORKER_CONFIG", "FILE", "Worker settings (worker.yaml).")] = None,
    model: Annotated[str | None, _flag("MODEL", "NAME|DIR", "Embedded model, or a Hugging Face folder.")] = None,
    load_format: Annotated[str | None, _flag("LOAD_FORMAT", "FORMAT", "safetensors, or dummy for random weights.")] = None,
    device: Annotated[str | None, _flag("DEVICE", "cpu|cuda", "cpu or cuda. Default: cpu.")] = None,
    num_blocks: Annotated[str | None, _flag("NUM_BLOCKS", "N", "KV blocks, instead of worker.yaml's kv_cache.")] = None,
    max_num_seqs: Annotated[str | None, _flag("MAX_NUM_SEQS", "N", "The most sequences in one step.")] = None,
    state_dir: Annotated[Path | None, _flag("STATE_DIR", "DIR", "Where the pepper and the demo keys are kept.")] = None,
    ready_timeout: Annotated[float, typer.Option(min=1, help="Seconds the worker has to load the model.")] = 600.0,
) -> None:
    """Serve a model: one gateway and one worker process, which is restarted when it dies.

    Without flags: SmolLM2-135M-Instruct on this machine's CPU, the tenants of the shipped policy, and demo keys for them.
    Files are looked for in ~/.config/fairlane (gateway.yaml, worker.yaml, tenants.yaml) when no flag names them; a flag
    beats a variable, which beats a file.

    SIGTERM and Ctrl-C drain: health turns NOT_SERVING, running requests finish (drain_grace); a second one ends at once.

    Exit codes: 0 stopped, 1 a port is in use or the worker never became ready, 2 a bad flag, file or model.

    Examples:

    fairlane serve

    fairlane serve --port 8001 --policy tenants.yaml --model ~/models/Qwen3-0.6B
    """
    with needs("all"):
        from fairlane.cli import run

        if importlib.util.find_spec("torch") is None:  # not imported: only the worker process pays for it
            raise ModuleNotFoundError("no torch", name="torch")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s", stream=sys.stderr)
    # It tells of every event in the policy's folder; a log that is kept in that folder would tell of itself for ever.
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    worker = {
        "model": model,
        "load_format": load_format,
        "device": device,
        "num_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
    }
    gateway = {"host": host, "port": port, "admin_port": admin_port, "metrics_port": metrics_port}
    plan = _plan(_Files(config, worker_config, policy), gateway, worker, state_dir, ready_timeout)
    raise typer.Exit(asyncio.run(run.run(plan)))


@dataclass(frozen=True, slots=True)
class _Files:
    """The files named by flags; None: the user's own one if there is one, else the defaults."""

    gateway: Path | None
    worker: Path | None
    policy: Path | None


def _plan(files: _Files, gateway_flags: Flags, worker_flags: Flags, state_dir: Path | None, ready_timeout_s: float) -> Plan:
    """Checks everything and ends the command with all that is wrong."""
    from fairlane.cli.run import Plan
    from fairlane.config.overrides import override
    from fairlane.embedded import is_pulled
    from fairlane.embedded import resolve as model_folder
    from fairlane.gateway.config import GatewayConfig
    from fairlane.gateway.keys import DemoKeys
    from fairlane.gateway.policy.loader import load_policy_file
    from fairlane.paths import state_dir as default_state_dir
    from fairlane.worker.config import WorkerConfig

    problems: list[str] = []
    gateway = _collect(problems, lambda: override(_settings(files.gateway, "gateway.yaml", GatewayConfig), gateway_flags))
    worker = _collect(problems, lambda: override(_settings(files.worker, "worker.yaml", WorkerConfig), worker_flags))
    state_dir = state_dir or default_state_dir()
    source = _policy_source(files.policy, state_dir)
    policy = _collect(problems, lambda: load_policy_file(source.path))
    folder = _collect(problems, partial(model_folder, worker.model)) if worker else None
    if gateway is None or worker is None or policy is None or folder is None:
        stop(USAGE, "cannot start:\n" + "\n".join(problems))
    for warning in policy.warnings:
        logging.getLogger("fairlane.policy").warning("%s", warning)
    if gateway.port == 65535 and gateway.admin_port is None:
        stop(USAGE, "cannot start:\n--port: 65535 leaves no port + 1 for the admin API: give --admin-port too")
    admin = gateway.port + 1 if gateway.admin_port is None else gateway.admin_port
    if gateway.metrics and gateway.metrics_port is None and admin == 65535:
        stop(USAGE, "cannot start:\nno port + 1 is left for the metrics after an admin port of 65535: give --metrics-port too")
    demo = _collect(problems, partial(DemoKeys.load_or_create, policy, state_dir))
    if demo is None:
        stop(USAGE, "cannot start:\n" + "\n".join(problems))
    # An embedded model keeps its name, which it is served under; a folder is found from any working directory.
    if not is_pulled(worker.model):
        worker = dataclasses.replace(worker, model=str(folder.resolve()))
    policy = policy.with_principals(demo.principals())
    return Plan(gateway, worker, policy, source, demo, state_dir, folder, ready_timeout_s)


def _collect(problems: list[str], work: Callable[[], T]) -> T | None:
    from fairlane.embedded import EmbeddedModelError
    from fairlane.errors import ConfigError

    try:
        return work()
    except (ConfigError, EmbeddedModelError, OSError) as error:
        problems.append(str(error))
        return None


def _settings(named: Path | None, name: str, schema: type[T]) -> T:
    from fairlane.config.strict import load_file
    from fairlane.paths import config_dir

    own = config_dir() / name
    if named is None and not own.exists():
        return schema()
    return load_file(named or own, schema)


def _policy_source(named: Path | None, state_dir: Path) -> PolicySource:
    """The file named, or the user's own, or the one shipped with Fairlane, which nobody should change in place. Tenants that it
    gains while we run get demo keys as those of the start do."""
    from importlib.resources import files

    from fairlane.gateway.keys import DemoKeys
    from fairlane.gateway.policy_source import PolicySource
    from fairlane.paths import config_dir

    def with_demo_keys(policy: Policy) -> Policy:
        return policy.with_principals(DemoKeys.load_or_create(policy, state_dir).principals())

    own = config_dir() / "tenants.yaml"
    if named is not None or own.exists():
        return PolicySource(named or own, complete=with_demo_keys)
    return PolicySource(Path(str(files("fairlane.configs").joinpath("tenants.yaml"))), read_only=True, complete=with_demo_keys)
