"""Follows the policy file: notices that it changed, waits until it is at rest, and has it applied if it can be used; if not, the
policy in force stays and the log, the counters and GetStatus say why. Also the one way to replace the file from here.

The *directory* is watched: a watch on the file itself goes deaf when an editor or Kubernetes replaces it by a rename. A slow poll
covers what no watch sees (network file systems, a link into another folder, a directory made anew).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

from fairlane.errors import ConfigError, FairlaneError, FieldViolation, InvalidRequest
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.policy_source import PolicySource
from fairlane.gateway.worker_client import PolicyRefused

logger = logging.getLogger("fairlane.gateway.policy")

_BEGINS_SHA256 = re.compile("[0-9a-f]{8,64}")  # fewer digits could be another file's by chance

Apply = Callable[[Policy, str], Awaitable[int]]

# Events closer together than this are told together. The watcher's thread outlives the end of watching by a second at most.
_STEP_MS = 20


@dataclass(frozen=True, slots=True)
class Timing:
    """How patient the reloader is, in seconds.

    settle: a file that stayed the same for this long is at rest. patience: how long a file that cannot be used may still be a
    write in progress. limit: after this long it is judged although it still changes. poll: the slow poll.
    """

    settle_s: float = 0.1
    patience_s: float = 0.5
    limit_s: float = 1.0
    poll_s: float = 1.0


@dataclass(slots=True)
class ReloadCounters:
    """Since the gateway started."""

    reloads: int = 0
    failures: int = 0


class Replaced(NamedTuple):
    """What `PolicyReloader.replace` came to. generation None: the text was in force already, under the generation it had."""

    generation: int | None
    policy: Policy


class PolicyReloader:
    """One policy file. `apply(policy, origin)` puts a policy in force and answers its generation, or raises PolicyRefused."""

    def __init__(
        self,
        source: PolicySource,
        in_force: Callable[[], Policy],
        apply: Apply,
        timing: Timing | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        """on_failure: told of each file that could not be used."""
        self._source = source
        self._in_force = in_force
        self._apply = apply
        self._timing = timing or Timing()
        self._changed = asyncio.Event()
        self._busy = asyncio.Lock()
        self._on_failure = on_failure
        self._rejected: str | None = None  # what was last judged unusable
        self._reported: tuple[str, ...] = ()  # so that it is reported once
        self._world_writable = False
        self._tasks: list[asyncio.Task[None]] = []
        self._replacing: set[asyncio.Task[Replaced]] = set()
        self.counters = ReloadCounters()
        self.error: tuple[str, ...] = ()
        """Why the file as it is now is not in force; empty when it is."""

    def start(self) -> None:
        self._tasks = [asyncio.create_task(part, name="policy-reload") for part in (self._follow(), self._watch(), self._poll())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._replacing, return_exceptions=True)

    def nudge(self) -> None:
        """Look at the file now, and report it again if it still cannot be used (SIGHUP)."""
        self._rejected, self._reported = None, ()
        self._changed.set()

    async def replace(self, text: bytes, expected_sha256: str, origin: str) -> Replaced:
        """Puts a text in force and into the file, both or neither; where it is both already, nothing is done.

        Raises POLICY_INVALID with every finding, INVALID_REQUEST for what is no hash and does not begin one, POLICY_CONFLICT if
        the file is not the one that was expected, POLICY_READ_ONLY, or POLICY_REFUSED by the worker. A caller that goes away does
        not stop it half-way.
        """
        task = asyncio.create_task(self._replace(text, expected_sha256, origin), name="policy-replace")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)
        return await asyncio.shield(task)

    async def _replace(self, text: bytes, expected_sha256: str, origin: str) -> Replaced:
        async with self._busy:
            try:
                policy = await asyncio.to_thread(self._source.parse, text)
            except ConfigError as error:
                raise policy_invalid(error) from None
            if expected_sha256:
                await self._expect(expected_sha256)
            if policy.sha256 == self._in_force().sha256 == await self._key():
                return Replaced(None, policy)
            staged = await asyncio.to_thread(self._source.stage, text)
            before = self._in_force()
            try:
                generation = await self._apply(policy, origin)
            except PolicyRefused as error:
                await asyncio.to_thread(staged.discard)
                raise FairlaneError("POLICY_REFUSED", f"the worker did not apply it: {error}") from None
            except BaseException:
                staged.discard()
                raise
            try:
                await asyncio.to_thread(staged.commit)
            except FairlaneError:
                await self._apply(before, "undo")
                raise
            self._accepted()
            return Replaced(generation, policy)

    async def _expect(self, sha256: str) -> None:
        """sha256: all of it, or how it begins."""
        if not _BEGINS_SHA256.fullmatch(sha256.lower()):
            asked = "must be a SHA-256, or its first 8 hexadecimal digits and more"
            raise InvalidRequest([FieldViolation("expected_sha256", asked)])
        try:
            found = (await asyncio.to_thread(self._source.look)).sha256
        except ConfigError:
            found = "that of no readable file"
        if not found.startswith(sha256.lower()):
            raise FairlaneError(
                "POLICY_CONFLICT",
                f"the policy file has changed meanwhile: its sha256 is {found}",
                metadata={"expected": sha256, "found": found},
            )

    async def _watch(self) -> None:
        """Wakes `_follow` at every event in the directory; whatever goes wrong with the watch, the poll goes on."""
        from watchfiles import awatch

        while True:
            try:
                watching = awatch(self._source.path.parent, watch_filter=None, recursive=False, step=_STEP_MS, rust_timeout=1000)
                async for _ in watching:
                    self._changed.set()
            except (OSError, RuntimeError) as error:
                logger.debug("the policy's folder cannot be watched just now: %s", error)
            await asyncio.sleep(self._timing.poll_s)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._timing.poll_s)
            self._changed.set()

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                async with self._busy:
                    await self._look()
            except Exception:
                # A bug of ours must not end the following for good.
                logger.exception("the policy file could not be followed")

    async def _look(self) -> None:
        """Judges the file once it is at rest."""
        seen, rested_s, waited_s = await self._key(), 0.0, 0.0
        if seen in (self._in_force().sha256, self._rejected):
            return self._accepted() if seen != self._rejected else None
        problem: ConfigError | None = None
        while waited_s < self._timing.limit_s:
            await asyncio.sleep(self._timing.settle_s)
            waited_s += self._timing.settle_s
            now = await self._key()
            if now != seen:
                seen, rested_s, problem = now, 0.0, None
                continue
            rested_s += self._timing.settle_s
            problem = problem or await self._try()
            if problem is None:
                return None
            if rested_s >= self._timing.patience_s:
                break
        problem = problem or await self._try()
        if problem is not None:
            self._report(problem.findings)
            self._rejected = seen
        return None

    async def _key(self) -> str:
        """The file's hash, or why it has none."""
        try:
            reading = await asyncio.to_thread(self._source.look)
        except ConfigError as error:
            return str(error)
        if reading.world_writable and not self._world_writable:
            logger.warning("%s: is writable by every user of this machine: chmod o-w", self._source.path)
        self._world_writable = reading.world_writable
        return reading.sha256

    async def _try(self) -> ConfigError | None:
        """Applies the file as it is now, or says why it cannot be used."""
        try:
            policy = await asyncio.to_thread(self._source.load)
        except ConfigError as error:
            return error
        except OSError as error:
            return ConfigError([f"{self._source.path}: {error}"])
        if policy.sha256 != self._in_force().sha256:
            try:
                await self._apply(policy, "file")
            except PolicyRefused as error:
                # Not the file's fault for certain, so it is tried again at the next poll.
                self._report((f"{self._source.path}: the worker did not apply it: {error}",))
                return None
            self.counters.reloads += 1
        self._accepted()
        return None

    def _accepted(self) -> None:
        if self.error:
            logger.info("%s: can be used again", self._source.path)
        self._rejected, self._reported, self.error = None, (), ()

    def _report(self, findings: tuple[str, ...]) -> None:
        self.error = findings
        if self._reported == findings:
            return
        self._reported = findings
        self.counters.failures += 1
        self._on_failure()
        text = "\n  ".join(findings)
        logger.error(
            "the new policy file cannot be used, the one in force stays (sha256 %s):\n  %s", self._in_force().sha256, text
        )


def policy_invalid(error: ConfigError) -> InvalidRequest:
    """What is answered to whoever sent such a policy: every finding."""
    return InvalidRequest([violation(finding) for finding in error.findings], "POLICY_INVALID")


def violation(finding: str) -> FieldViolation:
    """`file:line:col: path: what` with the place as the field."""
    place, _, message = finding.partition(": ")
    return FieldViolation(place, message or finding)
