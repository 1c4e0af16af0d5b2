"""From "one tenant floods us" to a policy that was tried and is in force, with the documentation alone: every command of the
recipe in docs/policies.md, against a real server; only the floods are shorter. What they print is compared where it does not
depend on the machine's speed."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recipes import Command, File, Shell, missing, parts, section
from serving import free_port

# Measured on this machine, so that only the exit code says something.
MEASURED = (
    "fairlane status",
    "fairlane requests",
    "fairlane trace export",
    "fairlane calibrate",
    "fairlane policy simulate",
    "cat",
)
# A shared machine is hardly ever quiet enough for a good fit, which exit code 1 tells of; the fit is written all the same.
MAY_EXIT_WITH_1 = "fairlane calibrate"


class Walk:
    """Does what the page says, command by command."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.wrong: list[str] = []
        self.server: subprocess.Popen[str] | None = None
        self._floods: list[subprocess.Popen[str]] = []
        self._callers: list[str] = []

    def do(self, command: Command) -> None:
        line = command.line
        if line.startswith("fairlane serve "):
            self.server = self.shell.start(line)
            self._wait_until(lambda: "Ready." in self._read("serve.log"))
        elif line.endswith(" &"):
            shorter = re.sub(r"--seconds (\d+)", lambda found: f"--seconds {int(found[1]) // 3}", line)
            self._floods.append(self.shell.start(shorter))
            self._callers.append(line.split()[2])
        elif line.startswith("sleep "):
            self._wait_until(lambda: all(self._in_flight(node) for node in self._callers))
        elif line == "wait":
            for flood in self._floods:
                flood.wait(300)
            self._callers.clear()
        else:
            self._run(command)

    def _run(self, command: Command) -> None:
        line = re.sub(r"^(fairlane requests explain (\S+) )[0-9a-f]{32}$", lambda m: m[1] + self._waiting_id(m[2]), command.line)
        done = self.shell.run(line)
        if done.returncode > line.startswith(MAY_EXIT_WITH_1):
            self.wrong.append(f"{line}: exit code {done.returncode}: {done.stdout}")
        elif not line.startswith((*MEASURED, "cat ")):
            self.wrong += [f"{line}: does not print {lost!r} but {done.stdout}" for lost in missing(command, done.stdout)]

    def _waiting_id(self, node: str) -> str:
        """Of the newest request of a node that waits, else of its newest."""
        found = sorted(self._in_flight(node), key=lambda request: (bool(request.get("started")), request["age_s"]))
        return str(found[0]["request_id"]) if found else "none"

    def _in_flight(self, node: str) -> list[dict[str, object]]:
        listed = self.shell.run(f"fairlane requests list --node {node} --limit 1000 --json")
        return list(json.loads(listed.stdout).get("requests", [])) if listed.returncode == 0 else []

    def _wait_until(self, is_so) -> None:  # type: ignore[no-untyped-def]
        until_s = time.monotonic() + 120
        while not is_so():
            assert time.monotonic() < until_s, self._read("serve.log")
            time.sleep(0.2)

    def _read(self, name: str) -> str:
        path = self.shell.folder / name
        return path.read_text() if path.exists() else ""

    def stop(self) -> None:
        for process in [*self._floods, self.server]:
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(60)


@pytest.fixture
def walk(tmp_path: Path) -> Iterator[Walk]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="fl") as runtime_dir:  # short: a socket's path has at most 107 bytes
        walk = Walk(
            Shell(
                tmp_path,
                FAIRLANE_PORT=str(port),
                FAIRLANE_TARGET=f"127.0.0.1:{port}",
                FAIRLANE_ADMIN_TARGET=f"127.0.0.1:{port + 1}",
                FAIRLANE_STATE_DIR=str(tmp_path / "state"),
                XDG_RUNTIME_DIR=runtime_dir,
                XDG_CONFIG_HOME=str(tmp_path / "none"),
            )
        )
        try:
            yield walk
        finally:
            walk.stop()


@pytest.mark.timeout(600)
def test_from_one_tenant_floods_us_to_a_policy_that_was_tried(walk: Walk) -> None:
    for part in parts(section("docs/policies.md", "One noisy tenant")):
        if isinstance(part, File):
            walk.shell.write(part)
        else:
            walk.do(part)
    log = (walk.shell.folder / "serve.log").read_text()
    assert (walk.wrong, "watchfiles" in log, "generation 2" in log) == (
        [],
        False,
        True,
    )  # its own log lies in the policy's folder
