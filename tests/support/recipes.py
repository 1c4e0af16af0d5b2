"""The recipes of the documentation, to be run as they stand there: files (a YAML block whose first line names it), commands (a
line that begins with $ in a console block) and what they print (the lines below, `…` for what is left out)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class File:
    name: str
    text: str


@dataclass(frozen=True)
class Command:
    line: str
    printed: tuple[str, ...]


def section(page: str, title: str) -> str:
    """From a heading to the next of its level or above. ValueError where there is none of that title."""
    level, lines, in_block = 0, list[str](), False
    for line in (ROOT / page).read_text().splitlines(keepends=True):
        in_block ^= line.startswith("```")
        heading = None if in_block else re.match(r"(#+) (.*)\n", line)  # in a block it is a comment
        if level and heading is not None and len(heading[1]) <= level:
            break
        if level:
            lines.append(line)
        elif heading is not None and heading[2] == title:
            level = len(heading[1])
    if not lines:
        raise ValueError(f"{page} has no section {title!r}")
    return "".join(lines)


def parts(text: str) -> Iterator[File | Command]:
    """Files and commands in the order of the page."""
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if language == "yaml":
            name = re.match(r"# (\S+\.yaml)\n", block)
            if name is None:
                raise ValueError(f"a YAML block does not begin with its file's name: {block[:60]!r}")
            yield File(name[1], block)
        elif language == "console":
            for entry in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                line, *printed = entry.splitlines()
                yield Command(line, tuple(printed))


def masked(line: str) -> str:
    """Without what may differ: figures (and whether one has changed at all), hashes, ids, how a table is drawn."""
    line = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b", "H", line)
    line = re.sub(r"[┃│┏┳┓┡╇┩├┼┤└┴┘┌┬┐━─]", " ", line)
    line = re.sub(r"[-+]?\d[\d.,:]*%?|(?<= )=(?= |$)", "0", line)
    return " ".join(line.split())


def missing(command: Command, output: str) -> list[str]:
    """Lines that the page shows and the output has not, or not in this order."""
    found, lost = iter([masked(line) for line in output.splitlines()]), []
    for line in filter(lambda line: line.strip() not in ("", "…"), command.printed):
        if not any(masked(line) == other for other in found):
            lost.append(line)
            found = iter([masked(line) for line in output.splitlines()])
    return lost


class Shell:
    """Runs commands in a folder, with this checkout's `fairlane` and `python`, and a state of its own."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        shims = folder / ".bin"
        shims.mkdir()
        for name, command in {"fairlane": "-m fairlane", "python": ""}.items():
            (shims / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
            (shims / name).chmod(0o755)
        for name in ("configs", "examples"):
            (folder / name).symlink_to(ROOT / name)
        self.environment = {**os.environ, "PATH": f"{shims}:{os.environ['PATH']}", **environment}

    def run(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def start(self, line: str) -> subprocess.Popen[str]:
        """A line that ends in `&`."""
        return subprocess.Popen(["bash", "-c", f"exec {line.rstrip(' &')}"], cwd=self.folder, env=self.environment, text=True)

    def write(self, file: File) -> None:
        (self.folder / file.name).write_text(file.text)
