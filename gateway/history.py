"""The last policies that were in force, on disk, so that an operator can see what changed and go back. Also the deployment's
memory of its generation: a gateway that starts again on a living worker must not count from 1."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from fairlane.errors import ConfigError
from fairlane.gateway.private_files import read_private, write_private
from fairlane.paths import private_dir

logger = logging.getLogger("fairlane.gateway.history")

FOLDER = "policies"
KEEP = 20
_NAME = re.compile(r"(\d{8,})\.json")


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy that was in force. applied_s: seconds since the epoch. origin: start, file, apply, or rollback to N."""

    generation: int
    sha256: str
    applied_s: float
    origin: str
    text: str


class PolicyHistory:
    """Files of `state_dir`/policies, one per generation (0600). All methods block; they are called off the event loop.

    state_dir None keeps nothing: generations then start at 1 with every process.
    """

    def __init__(self, state_dir: Path | None, keep: int = KEEP, wall: Callable[[], float] = time.time) -> None:
        self._folder = None if state_dir is None else state_dir / FOLDER
        self._keep = keep
        self._wall = wall

    def last_generation(self) -> int:
        """Of the newest entry, damaged or not; 0 if there is none."""
        return max(self._files(), default=0)

    def record(self, generation: int, sha256: str, text: str, origin: str) -> None:
        """Remembers a policy that has been put in force, and forgets the oldest beyond `keep`. A restart with the same file
        replaces the newest entry, so that restarts do not push real changes out. A full disk is logged, not raised: the
        policy is in force."""
        if self._folder is None:
            return
        entry = Entry(generation, sha256, self._wall(), origin, text)
        try:
            private_dir(self._folder)
            files = self._files()
            newest = self._read(files[max(files)]) if files else None
            write_private(self._folder / f"{generation:08d}.json", json.dumps(asdict(entry)) + "\n")
            old = sorted(files)[: max(0, len(files) + 1 - self._keep)]
            if newest is not None and newest.sha256 == sha256 and newest.generation != generation:
                old = [newest.generation]
            for number in old:
                files[number].unlink(missing_ok=True)
        except OSError as error:
            logger.error("policy generation %d is in force but not in the history: %s", generation, error)

    def entries(self) -> list[Entry]:
        """Newest first. Damaged files are skipped with a warning."""
        files = self._files()
        read = (self._read(files[number]) for number in sorted(files, reverse=True))
        return [entry for entry in read if entry is not None]

    def get(self, generation: int) -> Entry | None:
        path = self._files().get(generation)
        return None if path is None else self._read(path)

    def _files(self) -> dict[int, Path]:
        if self._folder is None or not self._folder.is_dir():
            return {}
        found = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        return {int(match[1]): path for match, path in found if match is not None}

    @staticmethod
    def _read(path: Path) -> Entry | None:
        try:
            content = json.loads(read_private(path))
            entry = Entry(**content)
        except (ValueError, TypeError, OSError, ConfigError) as error:
            logger.warning("%s: skipped, it cannot be used: %s", path, error)
            return None
        return entry if isinstance(entry.generation, int) and isinstance(entry.text, str) else None
