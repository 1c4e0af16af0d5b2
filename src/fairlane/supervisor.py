"""Keeps one worker process running: starts it, forwards what it says, starts it again with a growing delay when it dies, and
ends it with us. Whether a live worker still makes progress is the gateway's to judge; it calls `restart` if not.

The worker holds the read end of a pipe as its standard input and ends when that closes, so it does not outlive us even if we
are killed. It is in a session of its own, so that Ctrl-C reaches it only through an orderly stop, after the drain.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fairlane.clock import Clock
from fairlane.paths import private_dir

log = logging.getLogger("fairlane.supervisor")
worker_log = logging.getLogger("worker")

# The worker's own word that a restart cannot help: its configuration or its model is unusable.
EXIT_UNUSABLE = 2
SOCKET_NAME = "worker.sock"
# sun_path holds 108 bytes, with its end.
MAX_SOCKET_PATH = 107
_LAST_LINES = 20
_MAX_LINE = 8192
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|PEPPER", re.IGNORECASE)
# A URL with a password or a token in it, as variables for proxies, package indexes and databases have it.
_URL_WITH_SECRET = re.compile(r"\w://[^/?#\s]*@")

Command = Callable[[str, int], Sequence[str]]


class WorkerUnusable(Exception):
    """The worker exited because it can never work as configured; the text is what it said."""


def worker_command(config_json: str) -> Command:
    """The command line of a real worker for a socket and an epoch."""

    def command(socket: str, epoch: int) -> Sequence[str]:
        arguments = ["--socket", socket, "--epoch", str(epoch), "--config-json", config_json]
        return [sys.executable, "-m", "fairlane.worker", *arguments]

    return command


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Our environment without what is named like a secret or has one in a URL: a model's code has no business with those."""
    kept = {name: value for name, value in environment.items() if not _SECRET.search(name) and not _URL_WITH_SECRET.search(value)}
    return kept | {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


class Backoff:
    """How long to wait before the next start: doubling from `first_s` to `most_s`, afresh once a process has lived
    `reset_after_s`."""

    def __init__(self, clock: Clock, first_s: float = 0.2, most_s: float = 5.0, reset_after_s: float = 60.0) -> None:
        self._clock = clock
        self._first_s = first_s
        self._most_s = most_s
        self._reset_after_s = reset_after_s
        self._next_s = first_s
        self._started_s = clock.now()

    def started(self) -> None:
        self._started_s = self._clock.now()

    def delay_s(self) -> float:
        """Called when the process has ended."""
        if self._clock.now() - self._started_s >= self._reset_after_s:
            self._next_s = self._first_s
        delay = self._next_s
        self._next_s = min(delay * 2, self._most_s)
        return delay


@dataclass(frozen=True, slots=True)
class _Running:
    """A started process and our ends of its pipes: `lifeline` is its standard input, `output` what it says."""

    process: asyncio.subprocess.Process
    lifeline: int
    output: int


class Supervisor:
    """One worker process at a time. All methods are for the event loop's thread."""

    def __init__(self, command: Command, folder: Path, backoff: Backoff, environment: Mapping[str, str] | None = None) -> None:
        """`folder` is created with mode 0700, holds the socket, and is removed at stop.

        Raises ValueError if its path is too long for a socket.
        """
        self._command = command
        self._folder = folder
        self._backoff = backoff
        self._environment = worker_environment(os.environ if environment is None else environment)
        self._socket = folder / SOCKET_NAME
        if len(os.fsencode(self._socket)) > MAX_SOCKET_PATH:
            raise ValueError(f"{self._socket} is too long for a socket (at most {MAX_SOCKET_PATH} bytes): set XDG_RUNTIME_DIR")
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._unusable: asyncio.Future[WorkerUnusable] | None = None
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._grace_s = 5.0
        self.epoch = 0

    @property
    def address(self) -> str:
        """Where gateways connect, as gRPC writes it."""
        return f"unix:{self._socket}"

    @property
    def pid(self) -> int | None:
        """The running worker's process id; None between two."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def start(self) -> None:
        """Starts the first worker and keeps one running from now on. Raises OSError if none can be started at all."""
        private_dir(self._folder)
        self._unusable = asyncio.get_running_loop().create_future()
        running = await self._spawn()
        self._task = asyncio.create_task(self._watch(running), name="supervisor")

    async def unusable(self) -> WorkerUnusable:
        """Returns, with the reason, once the worker has said that it can never work; waits for ever otherwise."""
        if self._unusable is None:
            raise RuntimeError("the supervisor was not started")
        return await asyncio.shield(self._unusable)

    def restart(self, reason: str) -> None:
        """Kills the running worker, which is alive but of no use; a new one follows."""
        if self.pid is not None and self._process is not None:
            log.warning("killing worker %d: %s", self.pid, reason)
            _signal_group(self.pid, signal.SIGKILL)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Ends the worker: SIGTERM, then SIGKILL after the grace. May be called at any time, and again."""
        self._grace_s = grace_s
        self._stopping.set()
        if self._task is not None:
            await self._task
        shutil.rmtree(self._folder, ignore_errors=True)

    def abandon(self) -> None:
        """Kills the worker and removes the socket, now: for a process that is about to exit."""
        self._stopping.set()
        self.restart("ending at once")
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _spawn(self) -> _Running:
        self._socket.unlink(missing_ok=True)
        self.epoch += 1
        their_input, lifeline = os.pipe()
        output, their_output = os.pipe()
        try:
            # Pipes of our own: asyncio's would make wait() hang for as long as a grandchild holds them open.
            self._process = await asyncio.create_subprocess_exec(
                *self._command(self.address, self.epoch),
                stdin=their_input,
                stdout=their_output,
                stderr=their_output,
                env=self._environment,
                start_new_session=True,
            )
        except BaseException:
            os.close(lifeline)
            os.close(output)
            raise
        finally:
            os.close(their_input)
            os.close(their_output)
        self._backoff.started()
        log.info("worker %d started, epoch %d", self._process.pid, self.epoch)
        return _Running(self._process, lifeline, output)

    async def _watch(self, running: _Running) -> None:
        while True:
            code = await self._until_end(running)
            if self._stopping.is_set():
                return
            if code == EXIT_UNUSABLE:
                self._give_up()
                return
            delay_s = self._backoff.delay_s()
            log.error("worker ended (%s); the next one starts in %.1f s", _ending(code), delay_s)
            if await self._stops_within(delay_s):
                return
            try:
                running = await self._spawn()
            except OSError as error:
                self._lines.append(f"the worker cannot be started: {error}")
                self._give_up()
                return

    async def _until_end(self, running: _Running) -> int:
        """Waits until the process has ended, or makes it end once we are stopping. Leaves nothing of it behind."""
        process = running.process
        forward = asyncio.create_task(self._forward(running.output))
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await self._terminate(process, ended)
            # What it said last is the reason; a grandchild that keeps the pipe open must not hold us up.
            await asyncio.wait((forward,), timeout=1.0)
            return await ended
        finally:
            _signal_group(process.pid, signal.SIGKILL)
            os.close(running.lifeline)
            for task in (forward, ended, stopping):
                task.cancel()
            await asyncio.gather(forward, ended, stopping, return_exceptions=True)

    async def _terminate(self, process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait((ended,), timeout=self._grace_s)
        if not ended.done():
            log.warning("worker %d did not stop within %g s: killed", process.pid, self._grace_s)
            _signal_group(process.pid, signal.SIGKILL)

    async def _forward(self, output: int) -> None:
        """Copies the worker's lines to our log until it closes them. A line of any length cannot stop this."""
        stream = asyncio.StreamReader()
        pipe = os.fdopen(output, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
        rest = b""
        try:
            while chunk := await stream.read(65536):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._say(line)
                if len(rest) > _MAX_LINE:
                    self._say(rest)
                    rest = b""
            self._say(rest)
        finally:
            transport.close()

    def _say(self, line: bytes) -> None:
        text = line[:_MAX_LINE].decode("utf-8", "replace").rstrip()
        if text:
            self._lines.append(text)
            worker_log.info("%s", text)

    def _give_up(self) -> None:
        if self._unusable is not None and not self._unusable.done():
            self._unusable.set_result(WorkerUnusable("\n".join(self._lines) or "the worker gave no reason"))

    async def _stops_within(self, delay_s: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), delay_s)
        except TimeoutError:
            return False
        return True


def _ending(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _signal_group(pid: int, number: signal.Signals) -> None:
    """Signals the worker and whatever it started: it leads a process group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
