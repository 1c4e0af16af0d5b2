"""Where the policy comes from: one file, how it is read, whether its text may be replaced from here, and which keys join it that
it does not hold. Blocking file work only; when to read and what to do with the result is reload.py's."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fairlane.errors import FairlaneError
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.private_files import write_beside

_READ_ONLY_ERRORS = {errno.EACCES, errno.EPERM, errno.EROFS}


def _as_it_is(policy: Policy) -> Policy:
    return policy


@dataclass(frozen=True, slots=True)
class Reading:
    """The file at one moment. sha256: of its bytes, in hex."""

    sha256: str
    world_writable: bool


@dataclass(frozen=True, slots=True)
class PolicySource:
    """The policy file. read_only: its text is never replaced from here, as that of the policy shipped with Fairlane.

    complete: adds what the file does not hold, such as demo keys; may block, may raise ConfigError or OSError.
    """

    path: Path
    read_only: bool = False
    complete: Callable[[Policy], Policy] = _as_it_is

    def look(self) -> Reading:
        """The file as it is now. Raises UnreadableFile."""
        from fairlane.config.source import read_file  # pulls in the YAML loader

        text = read_file(self.path)
        try:
            mode = stat.S_IMODE(self.path.stat().st_mode)
        except OSError:  # gone since; the next look will say so
            mode = 0
        return Reading(hashlib.sha256(text).hexdigest(), bool(mode & stat.S_IWOTH))

    def load(self) -> Policy:
        """The policy in the file. Raises ConfigError with every finding."""
        from fairlane.gateway.policy.loader import load_policy_file  # pulls in the YAML loader

        return self.complete(load_policy_file(self.path))

    def parse(self, text: bytes) -> Policy:
        """The policy that the file would be with this text. Raises ConfigError with every finding."""
        from fairlane.gateway.policy.loader import load_policy_text

        return self.complete(load_policy_text(text, str(self.path)))

    def stage(self, text: bytes) -> Staged:
        """Writes the text beside the file, so that nothing but a rename is left to do. Raises POLICY_READ_ONLY where the file
        may not or cannot be replaced; then nothing is left behind."""
        if self.read_only:
            raise _read_only(self.path, "is the policy shipped with Fairlane: serve a file of your own with --policy")
        target = self.path.resolve()  # a link stays a link
        try:
            old = target.stat()
            mode = stat.S_IMODE(old.st_mode)
            if not mode & 0o222:  # meant so, even for root, whom it would not stop
                raise _read_only(self.path, "has no write permission")
            temporary = write_beside(target, text, mode)
            with contextlib.suppress(OSError):  # only root may give files away; others own the old one already, or cannot
                os.chown(temporary, old.st_uid, old.st_gid)
            return Staged(target, temporary)
        except OSError as error:
            raise _unwritable(self.path, error) from None


@dataclass(frozen=True, slots=True)
class Staged:
    """A new text on disk beside the file. Exactly one of commit and discard ends it."""

    target: Path
    temporary: Path

    def commit(self) -> None:
        """Raises POLICY_READ_ONLY, and the old file stays."""
        try:
            self.temporary.replace(self.target)
        except OSError as error:
            self.discard()
            raise _unwritable(self.target, error) from None

    def discard(self) -> None:
        self.temporary.unlink(missing_ok=True)


def _read_only(path: Path, why: str) -> FairlaneError:
    return FairlaneError("POLICY_READ_ONLY", f"{path} {why}", metadata={"path": str(path)})


def _unwritable(path: Path, error: OSError) -> FairlaneError:
    if error.errno in _READ_ONLY_ERRORS:
        return _read_only(path, f"cannot be replaced here ({error.strerror}): change it where it comes from")
    return _read_only(path, f"cannot be replaced: {error.strerror}")
