"""The supervisor with real processes: a small script stands for the worker and tells through files what happened to it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from fairlane.clock import FakeClock, MonotonicClock
from fairlane.supervisor import MAX_SOCKET_PATH, Backoff, Supervisor, worker_command, worker_environment

# Writes <epoch>.up once it runs, and ends as its mode says. Its standard input ending ends it, as it does the real worker.
SCRIPT = r"""
import os, pathlib, signal, subprocess, sys
folder, mode, socket, epoch = sys.argv[1:]
folder = pathlib.Path(folder)
if mode == "unusable":
    print("loading", flush=True)
    print("config.json: no such architecture", file=sys.stderr, flush=True)
    sys.exit(2)
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "parent":  # a child that outlives it and keeps its output open
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    (folder / "child").write_text(str(child.pid))
if mode == "chatty":
    print("x" * 300_000)
    print("done", flush=True)
(folder / "environment").write_text("\n".join(sorted(os.environ)))
(folder / f"{epoch}.up.tmp").write_text(f"{os.getpid()} {os.getsid(0)} {socket}")
os.rename(folder / f"{epoch}.up.tmp", folder / f"{epoch}.up")
if mode == "short" and epoch == "1":
    sys.exit(0)
while os.read(0, 1):
    pass
(folder / f"{epoch}.lifeline-ended").touch()
"""


class World:
    """A supervisor over the script, and what the script left behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.supervisors: list[Supervisor] = []

    async def start(self, mode: str) -> Supervisor:
        script = self.folder / "worker.py"
        script.write_text(SCRIPT)

        def command(socket: str, epoch: int) -> Sequence[str]:
            return [sys.executable, str(script), str(self.folder), mode, socket, str(epoch)]

        supervisor = Supervisor(command, self.folder / "run", Backoff(MonotonicClock(), first_s=0.0))
        self.supervisors.append(supervisor)
        await supervisor.start()
        return supervisor

    async def up(self, epoch: int) -> tuple[int, int, str]:
        """Process id, session id and socket of the worker with that epoch, once it runs."""
        pid, session, socket = (await self.file(f"{epoch}.up")).split()
        return int(pid), int(session), socket

    async def file(self, name: str) -> str:
        while not (self.folder / name).exists():
            await asyncio.sleep(0.01)
        return (self.folder / name).read_text()


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    try:
        yield world
    finally:
        for supervisor in world.supervisors:
            await supervisor.stop(grace_s=0.1)


async def gone(pid: int) -> bool:
    """Waits until the process has ended (a zombie that init has not collected yet has, too)."""
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        await asyncio.sleep(0.01)


async def test_a_killed_worker_is_replaced_with_the_next_epoch(world: World) -> None:
    supervisor = await world.start("normal")
    first, _, _ = await world.up(1)
    os.kill(first, signal.SIGKILL)
    second, _, _ = await world.up(2)
    assert (second != first, supervisor.epoch, supervisor.pid) == (True, 2, second)


async def test_a_worker_that_ends_by_itself_is_replaced(world: World) -> None:
    await world.start("short")
    assert (await world.up(2))[0] > 0


async def test_restart_replaces_a_living_worker(world: World) -> None:
    supervisor = await world.start("normal")
    first, _, _ = await world.up(1)
    supervisor.restart("no progress")
    assert (await world.up(2))[0] != first


async def test_exit_code_2_ends_the_attempts_with_the_workers_own_words(world: World) -> None:
    supervisor = await world.start("unusable")
    reason = await supervisor.unusable()
    assert (str(reason), supervisor.epoch) == ("loading\nconfig.json: no such architecture", 1)


async def test_stop_ends_the_worker_and_removes_its_folder(world: World) -> None:
    supervisor = await world.start("normal")
    pid, _, _ = await world.up(1)
    await supervisor.stop()
    assert (await gone(pid), supervisor.pid, (world.folder / "run").exists()) == (True, None, False)


async def test_a_worker_that_ignores_sigterm_is_killed(world: World) -> None:
    supervisor = await world.start("stubborn")
    pid, _, _ = await world.up(1)
    await supervisor.stop(grace_s=0.05)
    assert await gone(pid)


async def test_a_grandchild_that_keeps_the_output_open_neither_delays_the_restart_nor_survives(world: World) -> None:
    await world.start("parent")
    pid, _, _ = await world.up(1)
    child = int(await world.file("child"))
    os.kill(pid, signal.SIGKILL)
    await world.up(2)
    assert await gone(child)


async def test_the_worker_does_not_outlive_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(SCRIPT)
    parent = """
import asyncio, pathlib, sys
from fairlane.clock import MonotonicClock
from fairlane.supervisor import Backoff, Supervisor
folder = pathlib.Path(sys.argv[1])
async def main():
    command = lambda socket, epoch: [sys.executable, str(folder / "worker.py"), str(folder), "normal", socket, str(epoch)]
    await Supervisor(command, folder / "run", Backoff(MonotonicClock())).start()
    await asyncio.Event().wait()
asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    process = await asyncio.create_subprocess_exec(sys.executable, "-P", "-c", parent, str(tmp_path), env=environment)
    pid, _, _ = await World(tmp_path).up(1)
    process.kill()
    await process.wait()
    assert (await gone(pid), await World(tmp_path).file("1.lifeline-ended")) == (True, "")


async def test_the_socket_lies_in_a_private_folder_and_the_worker_in_a_session_of_its_own(world: World) -> None:
    supervisor = await world.start("normal")
    pid, session, socket = await world.up(1)
    mode = (world.folder / "run").stat().st_mode & 0o777
    assert (session, socket, mode) == (pid, supervisor.address, 0o700)


async def test_the_workers_lines_are_forwarded_whatever_their_length(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "worker")
    supervisor = await world.start("chatty")
    await world.up(1)
    await supervisor.stop()
    lines = [record.message for record in caplog.records if record.name == "worker"]
    assert (lines[-1], max(map(len, lines))) == ("done", 8192)


async def test_the_worker_gets_no_secret_from_the_environment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_API_KEY", "fl_x")
    monkeypatch.setenv("FAIRLANE_TEST_PLAIN", "1")
    await world.start("normal")
    names = (await world.file("environment")).split("\n")
    assert ("FAIRLANE_API_KEY" in names, "FAIRLANE_TEST_PLAIN" in names, "PYTHONSAFEPATH" in names) == (False, True, True)


async def test_stopping_before_the_first_start_and_twice_is_harmless(tmp_path: Path) -> None:
    supervisor = Supervisor(worker_command("{}"), tmp_path / "run", Backoff(FakeClock()))
    await supervisor.stop()
    await supervisor.stop()
    assert supervisor.pid is None


async def test_a_command_that_cannot_be_started_says_so_and_leaves_no_descriptor(tmp_path: Path) -> None:
    supervisor = Supervisor(lambda socket, epoch: ["/no/such/program"], tmp_path / "run", Backoff(FakeClock()))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No such file"):
        await supervisor.start()
    await supervisor.stop()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_path_too_long_for_a_socket_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too long for a socket"):
        Supervisor(worker_command("{}"), tmp_path / ("x" * MAX_SOCKET_PATH), Backoff(FakeClock()))


def test_names_of_secrets_are_recognized() -> None:
    environment = {"PATH": "/bin", "HF_TOKEN": "x", "aws_secret_access_key": "x", "DB_PASSWORD": "x", "HOME": "/root"}
    assert set(worker_environment(environment)) == {"PATH", "HOME", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"}


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("https://user:hunter2@proxy.example:3128", False),
        ("redis://:hunter2@cache", False),
        ("https://ghp_abc@example.org/simple", False),
        ("--index-url https://u:p@host/simple", False),
        ("https://example.org/simple", True),
        ("https://example.org/@scope/package", True),
        ("me@example.org", True),
        ("/usr/bin:/home/x@y/bin", True),
    ],
)
def test_urls_with_a_password_are_secrets_whatever_their_name(value: str, kept: bool) -> None:
    assert ("SOMETHING" in worker_environment({"SOMETHING": value})) is kept


def test_the_delay_doubles_to_its_limit_and_begins_anew_after_a_minute_of_health() -> None:
    clock = FakeClock()
    backoff = Backoff(clock)
    delays = []
    for lived_s in (0, 1, 59.9, 1, 1, 1, 1, 60, 0):
        backoff.started()
        clock.advance(lived_s)
        delays.append(backoff.delay_s())
    assert delays == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 0.2, 0.4]


def test_the_workers_command_line_carries_no_shell_and_no_secret() -> None:
    assert worker_command('{"model": "x"}')("unix:/run/w.sock", 3) == [
        *(sys.executable, "-m", "fairlane.worker", "--socket", "unix:/run/w.sock"),
        *("--epoch", "3", "--config-json", '{"model": "x"}'),
    ]
