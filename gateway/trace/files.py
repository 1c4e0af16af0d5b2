"""The recording on disk: numbered files of JSON lines that only this user may read, the oldest removed so that all together stay
below a size. What is in a line is record.py's and recorder.py's."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from fairlane.paths import private_dir

FOLDER = "trace"
# A file's part of the size: the oldest go when there is no room for another, so at least 7/8 of the size are kept.
FILES = 8
# However small they are: a process that is started again and again begins a file each time.
MOST_FILES = 1000
_NAME = re.compile(r"(\d{8,})\.jsonl")
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

Open = Callable[[Path, int, int], int]


def recorded_files(folder: Path) -> list[Path]:
    """Oldest first. Raises OSError if there is a folder that cannot be read."""
    if not folder.exists():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def recorded_lines(folder: Path) -> Iterator[tuple[Path, int, str]]:
    """Every line with its file and number, oldest first. A file that rotates away meanwhile is skipped. Raises OSError."""
    for path in recorded_files(folder):
        try:
            file = path.open(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            continue
        with file:
            for number, line in enumerate(file, 1):
                yield path, number, line


class TraceFiles:
    """One writer's files. All methods block. A process begins a file of its own, so that two never write to one."""

    def __init__(self, state_dir: Path, max_bytes: int, open_file: Open = os.open) -> None:
        """Raises OSError if others could read what is recorded there."""
        self._folder = private_dir(state_dir / FOLDER)
        self._max_bytes = max_bytes
        self._open_file = open_file
        self._handle: int | None = None
        self._size = 0

    def append(self, line: str) -> None:
        """Writes the whole line or nothing. Raises OSError; the next call tries anew, in a new file."""
        content = line.encode() + b"\n"
        if self._handle is None or self._size + len(content) > self._max_bytes // FILES:
            self._begin()
        assert self._handle is not None
        try:
            written = os.write(self._handle, content)
            if written < len(content):
                raise OSError(f"{written} of {len(content)} bytes were written")
        except OSError:
            self._take_back()
            raise
        self._size += len(content)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _begin(self) -> None:
        self.close()
        files = recorded_files(self._folder)
        number = int(files[-1].stem) + 1 if files else 1
        sizes = [path.stat().st_size for path in files]
        room = self._max_bytes - self._max_bytes // FILES
        while files and (sum(sizes) > room or len(files) >= MOST_FILES):
            files.pop(0).unlink(missing_ok=True)
            sizes.pop(0)
        self._handle = self._open_file(self._folder / f"{number:08d}.jsonl", _FLAGS, 0o600)
        self._size = 0

    def _take_back(self) -> None:
        """Half a line is removed where that is possible; where it is not, readers skip it."""
        try:
            if self._handle is not None:
                os.ftruncate(self._handle, self._size)
        except OSError:
            pass
        finally:
            self.close()
