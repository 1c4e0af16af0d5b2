"""A limit for every test on the device, where pytest-timeout is installed: compiling takes long, but a kernel that hangs must not
hold the machine. Waiting for the device cannot be interrupted, so the whole process ends, with a traceback."""

from __future__ import annotations

import pytest

LIMIT_S = 300


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            item.add_marker(pytest.mark.timeout(LIMIT_S, method="thread"))
