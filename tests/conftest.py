"""What every test gets: a state, runtime and configuration folder of its own, so that no test can touch the user's; one thread
per process for torch, because xdist runs several, or threads that sleep while they wait for each other; and reproducible
hypothesis runs."""

from __future__ import annotations

import os
import shutil
import tempfile

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Also for the servers that tests start, which take a thread per core: beside another test's work, a thread that spins until the
# others are there takes the core that they are waiting for.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
_HISTORIES = int(os.environ.get("HISTORIES", 10_000))  # of the long target: its processes share them
hypothesis.settings.register_profile("long", deadline=None, max_examples=_HISTORIES, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# The cache (XDG_CACHE_HOME) stays: pulled models are in it.
_OWN = ("XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")
_home = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_home] = home = tempfile.mkdtemp(prefix="fl-")
    for name in [name for name in os.environ if name.startswith("FAIRLANE_")]:
        del os.environ[name]
    for name in _OWN:
        os.environ[name] = os.path.join(home, name[4:5].lower())  # short: sockets lie below


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_home], ignore_errors=True)
