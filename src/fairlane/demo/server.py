"""The demo's own server: `fairlane serve` on free ports, with a state folder and a policy file that are its alone, and nothing
of it left afterwards. A policy is changed by rewriting the file, as people do it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fairlane.clock import Clock
from fairlane.demo.figures import fetch
from fairlane.demo.scenario import MAX_NUM_SEQS, NUM_BLOCKS
from fairlane.supervisor import MAX_SOCKET_PATH, SOCKET_NAME

READY_TIMEOUT_S = 180.0
_RELOAD_TIMEOUT_S = 4.0
_STOP_TIMEOUT_S = 15.0
_LAST_LINES = 25
# What leaves room for the worker's socket below it; from a longer temporary folder the server uses the user's usual one.
_MAX_RUNTIME_DIR = MAX_SOCKET_PATH - len("/fairlane/serve-4194304/") - len(SOCKET_NAME)
_BANNER = re.compile(r"^\s+(inference|metrics)\s+(?:http://)?([^\s/]+)")


class ServerFailed(Exception):
    """The server did not come up; the text is what it said."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server is reached. metrics: HOST:PORT, or empty."""

    target: str
    metrics: str
    keys: Mapping[str, str]


def is_in_force(path: Path, sha256: str) -> bool:
    """Whether the file is the policy whose hash begins with these hex digits."""
    try:
        return bool(sha256) and hashlib.sha256(path.read_bytes()).hexdigest().startswith(sha256)
    except OSError:  # an editor is replacing it
        return False


class DemoServer:
    """Its folder lives from here to `close`. `place` is known once a policy is in force."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._temporary = tempfile.TemporaryDirectory(prefix="fairlane-demo-")
        self.folder = Path(self._temporary.name)
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._found: dict[str, str] = {}
        self._ready = asyncio.Event()
        self._lines: list[str] = []

    async def close(self) -> None:
        """Ends the server and removes the folder."""
        try:
            await self._stop()
        finally:
            self._temporary.cleanup()

    @property
    def policy_path(self) -> Path:
        return self.folder / "tenants.yaml"

    @property
    def place(self) -> Place:
        keys = json.loads((self.folder / "state" / "demo-keys.json").read_text())["tenants"]
        return Place(self._found["inference"], self._found.get("metrics", ""), keys)

    async def put_in_force(self, text: str) -> None:
        """Writes the policy and returns once a server runs by it: the running one if it follows the file, else a new one."""
        beside = self.policy_path.with_suffix(".new")
        beside.write_text(text, encoding="utf-8")
        beside.replace(self.policy_path)
        if self._process is not None and await self._follows():
            return
        await self._stop()
        await self._start()

    async def _follows(self) -> bool:
        deadline_s = self._clock.now() + _RELOAD_TIMEOUT_S
        while self._clock.now() < deadline_s:
            figures = await fetch(self._found.get("metrics", ""))
            if figures is not None and is_in_force(self.policy_path, figures.sha256):
                return True
            await asyncio.sleep(0.1)
        return False

    async def _start(self) -> None:
        self._found, self._lines, self._ready = {}, [], asyncio.Event()
        self._process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=self._environment(),
            start_new_session=True,  # Ctrl-C is for the demo, which then stops it in order
        )
        self._reader = asyncio.create_task(self._read(self._process))
        ready, ended = asyncio.create_task(self._ready.wait()), asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait((ready, ended), timeout=READY_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            ended.cancel()
        if not self._ready.is_set():
            raise ServerFailed("\n".join(self._lines[-_LAST_LINES:]) or "the server said nothing")

    def _command(self) -> list[str]:
        files = ["--policy", str(self.policy_path), "--state-dir", str(self.folder / "state")]
        size = ["--num-blocks", str(NUM_BLOCKS), "--max-num-seqs", str(MAX_NUM_SEQS)]
        return [sys.executable, "-m", "fairlane", "serve", "--port", "0", *files, *size]

    def _environment(self) -> dict[str, str]:
        """Ours without settings for other servers: neither variables nor the user's files may change the demo."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FAIRLANE_")}
        own = {"XDG_CONFIG_HOME": str(self.folder / "no-config"), "PYTHONUNBUFFERED": "1"}
        if len(os.fsencode(self.folder)) <= _MAX_RUNTIME_DIR:
            own["XDG_RUNTIME_DIR"] = str(self.folder)
        return kept | own

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            self._lines = [*self._lines[-200:], line]
            if match := _BANNER.match(line):
                self._found[match[1]] = match[2]
            if line == "Ready.":
                self._ready.set()

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()  # its worker ends with it: it holds the other end of a pipe
            await process.wait()
        finally:
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.gather(self._reader, return_exceptions=True)
