"""How a command ends badly: one line on standard error that says what to do, and an exit code that scripts can rely on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

FAILED = 1
USAGE = 2
DIFFERENT = 3
INTERRUPTED = 130


def stop(code: int, message: str) -> NoReturn:
    """Prints the message and ends the command."""
    print(f"fairlane: {message}", file=sys.stderr)
    raise typer.Exit(code)


def utf8(value: str, what: str) -> str:
    """A text from the command line or the terminal as it is; ends the command if its bytes were not UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        stop(USAGE, f"{what} is not UTF-8 text")
    return value


def must_be_writable(option: str, file: Path | None) -> None:
    """Ends the command if the file that an option names cannot be written: before the work, which may take minutes."""
    if file is None:
        return
    folder = file.resolve().parent
    if not folder.is_dir():
        stop(USAGE, f"{option}: there is no folder {folder}")
    if file.is_dir():
        stop(USAGE, f"{option}: {file} is a folder: a file is needed")
    if not os.access(file if file.exists() else folder, os.W_OK):
        stop(USAGE, f"{option}: {file} cannot be written")


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Around imports that only an extra installs: their absence becomes one line, not a traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "fairlane":
            raise  # a fault of ours
        stop(USAGE, f"this command needs {error.name}: pip install 'fairlane[{extra}]'")
