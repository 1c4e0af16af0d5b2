"""The shipped files: their values are the program's defaults, every key is shown, and every key is explained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fairlane.config.overrides import override
from fairlane.config.strict import load_file, load_located
from fairlane.errors import ConfigError
from fairlane.gateway.config import GatewayConfig
from fairlane.worker.config import Device, WorkerConfig

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = [("gateway.yaml", GatewayConfig), ("worker.yaml", WorkerConfig)]


@pytest.mark.parametrize(("name", "schema"), SHIPPED)
def test_the_shipped_values_are_the_defaults(name: str, schema: type[Any]) -> None:
    assert load_file(CONFIGS / name, schema) == schema()


@pytest.mark.parametrize(("name", "schema"), SHIPPED)
def test_every_key_is_shown(name: str, schema: type[Any]) -> None:
    shown = {path[0] for path in load_located((CONFIGS / name).read_bytes(), name, schema).marks if path}
    assert shown == {field.name for field in dataclasses.fields(schema)}


def test_the_settings_for_a_gpu_are_read_and_run_one_step_ahead() -> None:
    config = load_file(CONFIGS / "worker-gpu.yaml", WorkerConfig)
    assert (config.device, config.pipeline_depth) == (Device.CUDA, 1)


@pytest.mark.parametrize("name", ["gateway.yaml", "worker.yaml", "worker-gpu.yaml"])
def test_every_block_of_keys_begins_with_a_comment(name: str) -> None:
    blocks = (CONFIGS / name).read_text().strip().split("\n\n")
    assert [block for block in blocks if not block.startswith("#")] == []


def test_flags_obey_the_files_rules_and_name_themselves() -> None:
    with pytest.raises(ConfigError) as caught:
        override(GatewayConfig(), {"port": "70000", "host": None, "admin_port": "x"})
    assert caught.value.findings == (
        '--port (or FAIRLANE_PORT): "70000" is out of bounds: a whole number from 0 to 65535 is allowed',
        '--admin-port (or FAIRLANE_ADMIN_PORT): "x" is a text: a whole number from 0 to 65535 is allowed',
    )


def test_flags_beat_the_file() -> None:
    changed = override(WorkerConfig(), {"device": "cuda", "num_blocks": "99", "model": "007"})
    assert (changed.device, changed.num_blocks, changed.model, changed.block_size) == (Device.CUDA, 99, "007", 16)
