"""Files of the state folder that only this user may read (mode 0600), replaced whole or not at all. What is in them is decided
by who writes them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from fairlane.errors import ConfigError

_MAX_BYTES = 8 << 20


def read_private(path: Path) -> str:
    """The text of a private file. Raises ConfigError if others may read it, OSError if it cannot be read."""
    with path.open(encoding="utf-8") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ConfigError([f"{path}: can be read by other users (mode {mode:04o}): chmod 600 {path}"])
        return file.read(_MAX_BYTES)


def write_private(path: Path, text: str) -> None:
    """Replaces the file atomically; it is on disk when this returns. Raises OSError, and the old file stays."""
    name = write_beside(path, text.encode(), 0o600)
    try:
        name.replace(path)
    except OSError:
        name.unlink(missing_ok=True)
        raise


def write_beside(path: Path, content: bytes, mode: int) -> Path:
    """A temporary file in the same folder, synced to disk, ready to be renamed over `path`. Raises OSError, leaving nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
