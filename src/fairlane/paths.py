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
    """Sockets of running processes; without XDG_RUNTIME_DIR one folder of this user in the temporary directory.

    One, because `private_dir` can vouch for that: in a folder below one that somebody else made, he can replace everything.
    """
    if Path(os.environ.get("XDG_RUNTIME_DIR", "")).is_absolute():
        return _base("XDG_RUNTIME_DIR", Path())
    return Path(tempfile.gettempdir()) / f"{APP}-{os.getuid()}"


def private_dir(path: Path) -> Path:
    """Returns `path`, which only this user may open: created with mode 0700, as are its parents if they are missing.

    Never changes what exists. Raises PermissionError if that is open to others or belongs to somebody else, and
    NotADirectoryError for anything but a real folder: where others may write, a link is theirs to lay.
    """
    for missing in reversed([folder for folder in path.parents if not folder.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        raise NotADirectoryError(f"{path} is a link: give the folder itself")
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    if info.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to user id {info.st_uid}, not to you: choose another folder")
    mode = stat.S_IMODE(info.st_mode)
    if mode & 0o077:
        raise PermissionError(f"{path} is open to other users (mode {mode:04o}): choose another folder, or chmod 700 {path}")
    return path
