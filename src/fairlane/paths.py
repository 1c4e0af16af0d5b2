"""Where files live on this machine, by the XDG base directory specification. Decides folders only; who writes into one
creates it with `private_dir`, because state holds keys and sockets that no other user may open."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

APP = "fairlane"


def _base(variable: str, fallback: Path) -> Path:
    # The specification says a relative value is to be ignored.
    value = Path(os.environ.get(variable, ""))
    return (value if value.is_absolute() else fallback) / APP


def config_dir() -> Path:
    """Where a user's own gateway.yaml, worker.yaml and tenants.yaml are looked for."""
    return _base("XDG_CONFIG_HOME", Path.home() / ".config")


def cache_dir() -> Path:
    """What can be made or fetched again: pulled models."""
    return _base("XDG_CACHE_HOME", Path.home() / ".cache")


def models_dir() -> Path:
    """Pulled models, one folder each."""
    return cache_dir() / "models"


def state_dir() -> Path:
    """What must survive a restart: the key pepper and the demo keys."""
    return _base("XDG_STATE_HOME", Path.home() / ".local" / "state")


def runtime_dir() -> Path:
    """Sockets of running processes; without XDG_RUNTIME_DIR a folder of this user in the temporary directory."""
    return _base("XDG_RUNTIME_DIR", Path(tempfile.gettempdir()) / f"{APP}-{os.getuid()}")


def private_dir(path: Path) -> Path:
    """Creates `path` (and its parents) with mode 0700 and returns it.

    Raises PermissionError if it exists and belongs to another user, or is open to others and cannot be closed to them.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.stat()
    if info.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to user id {info.st_uid}, not to you; choose another folder")
    if stat.S_IMODE(info.st_mode) & 0o077:
        path.chmod(0o700)
    return path
