"""`fairlane demo` as it runs in CI: no terminal, a real server, a policy that is changed while it runs, an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "fairlane", "demo", "--seconds", "13"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """The demo's TMPDIR; short, because a socket's path has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="fl") as name:
        yield Path(name)


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONSAFEPATH": "1", "TMPDIR": str(folder)}


def left_over(folder: Path) -> tuple[list[str], list[str]]:
    """Files in the demo's temporary folder, and processes that name it."""
    lines = [path.read_bytes().replace(b"\0", b" ").decode(errors="replace") for path in _command_lines()]
    return os.listdir(folder), [line for line in lines if str(folder) in line]


def _command_lines() -> list[Path]:
    return [path for pid in os.listdir("/proc") if pid.isdecimal() and (path := Path("/proc", pid, "cmdline")).exists()]


def test_two_phases_on_one_server_end_in_a_table_and_a_picture_and_leave_nothing(tmp_path: Path, folder: Path) -> None:
    picture = tmp_path / "demo.png"
    command = [*COMMAND, "--policies", "fcfs,vip", "--picture", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(folder), timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[1/2 fcfs" in done.stdout and "[2/2 vip" in done.stdout
    assert "\x1b" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith(("FCFS   gold", "VIP    gold"))]
    assert len(rows) == 2
    assert rows[0][2] == rows[1][2]  # the same requests under both policies
    assert picture.stat().st_size > 10_000
    assert left_over(folder) == ([], [])


def test_an_interrupt_ends_everything_and_prints_what_there_is(folder: Path) -> None:
    command = [*COMMAND, "--seconds", "600", "--policies", "vip", "--no-picture"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(folder), start_new_session=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("[1/1 vip"):
                break
        os.killpg(process.pid, signal.SIGINT)  # as a terminal's Ctrl-C does
        rest = process.stdout.read()
        assert (process.wait(60), "VIP    gold" in rest) == (130, True)
    finally:
        process.kill()
        process.wait()
    assert left_over(folder) == ([], [])
