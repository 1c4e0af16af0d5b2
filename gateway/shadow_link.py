"""The policy that is tried at the worker beside the one in force (scheduler/shadow): asks for it, asks again in every session, so
that it outlives a lost connection, and keeps what the worker says of it. One that fails is not tried again by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from fairlane.gateway.snapshot_message import snapshot_message
from fairlane.protos.fairlane.v1 import shadow_pb2
from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.tenancy import PolicySnapshot

logger = logging.getLogger("fairlane.gateway.shadow")

# A worker that is started anew this often while a policy is tried may have died of it.
MAX_RESTARTS = 1


class ShadowFailed(Exception):
    """The worker did not do what was asked; what was before goes on. The text says why."""


@dataclass(frozen=True, slots=True)
class Trial:
    """name: of the policy's text, for people. since_s: since the epoch."""

    name: str
    snapshot: PolicySnapshot
    since_s: float


class ShadowLink:
    """One worker's. All methods belong to the event loop's thread.

    trial: what is to be tried, kept after it was dropped. dropped: why it is not tried any more; empty: nothing went wrong.
    running: whether the worker tries a policy, whoever asked for it. report: its latest counts; None before the first.
    """

    def __init__(self, send: Callable[[pb.ToWorker], None], nonce: Callable[[], int], timeout_s: float) -> None:
        """send: puts a message on the session's stream. nonce: of the last ping that was sent."""
        self.trial: Trial | None = None
        self.dropped = ""
        self.running = False
        self.report: shadow_pb2.ShadowReport | None = None
        self._send = send
        self._nonce = nonce
        self._timeout_s = timeout_s
        self._wanted: PolicySnapshot | None = None
        self._has_asked = False  # once it has, it says in every session what it wants
        self._epoch: int | None = None  # of the latest session
        self._is_connected = False
        self._restarts = 0
        self._number = 0
        self._is_settled = True  # the last message was answered
        self._fence = 0  # heartbeats up to this nonce may tell of what was before
        self._answer: asyncio.Future[str | None] | None = None  # the refusal, "" if done, None if lost
        self._asking = asyncio.Lock()

    async def start(self, trial: Trial) -> None:
        """Returns once the worker tries the policy. Raises ShadowFailed."""
        async with self._asking:
            before = self._wanted
            await self._ask(trial.snapshot)
            if self._wanted != before:  # else it goes on counting
                self.report = None
            self.trial, self.dropped, self._restarts = trial, "", 0

    async def stop(self) -> None:
        """Returns once nothing is tried any more; while no worker is connected, the next session sees to it. Raises
        ShadowFailed."""
        async with self._asking:
            await self._ask(None)
            self.trial, self.dropped = None, ""

    async def _ask(self, wanted: PolicySnapshot | None) -> None:
        before, self._wanted, self._has_asked = self._wanted, wanted, True
        if not self._is_connected:
            if wanted is None:
                return
            self._wanted = before
            raise ShadowFailed("no worker is connected")
        self._answer = asyncio.get_running_loop().create_future()
        self._say()
        try:
            async with asyncio.timeout(self._timeout_s):
                refusal = await self._answer
        except TimeoutError:
            refusal = None
        finally:
            self._answer = None
        if refusal == "":
            self.running = wanted is not None
            return
        self._wanted = before
        if refusal is not None:
            raise ShadowFailed(refusal)
        if self._is_connected:  # it may have done it, or may do so yet
            self._say()
        raise ShadowFailed(f"no answer within {self._timeout_s:g} s")

    def _say(self) -> None:
        self._number += 1
        self._is_settled = False
        snapshot = None if self._wanted is None else snapshot_message(self._wanted)
        self._send(pb.ToWorker(shadow=pb.Shadow(number=self._number, snapshot=snapshot)))

    # -- what the worker client tells -------------------------------------------------------------------------------------

    def connected(self, epoch: int) -> None:
        """A session begins, with a worker process of this epoch that has been sent the policy in force."""
        is_new, self._epoch = self._epoch is not None and epoch > self._epoch, epoch
        self._is_connected = True
        if is_new and self._wanted is not None:
            self._restarts += 1
            if self._restarts > MAX_RESTARTS:
                self._drop(f"the worker was started anew {self._restarts} times while it was tried, perhaps because of it")
        if self._has_asked:
            self._say()

    def lost(self) -> None:
        """The session is over."""
        self._is_connected = self.running = False
        self._is_settled, self._fence = True, 0
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def applied(self, answer: pb.ShadowApplied) -> None:
        if answer.number != self._number:
            return  # to something that was said before
        self._is_settled, self._fence = True, self._nonce()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(answer.refusal)
        elif answer.refusal:
            self._drop(answer.refusal)
        else:
            self.running = self._wanted is not None

    def heard(self, pong: pb.Pong) -> None:
        if not self._is_settled or pong.nonce <= self._fence:
            return
        self.running = pong.HasField("shadow") and not pong.shadow.fault
        if pong.HasField("shadow"):
            self.report = pong.shadow
        if self._wanted is not None and not self.running:
            self._drop(pong.shadow.fault or "it was ended at the worker by somebody else")

    def _drop(self, why: str) -> None:
        logger.error("the shadow policy is not tried any more: %s; the policy in force and its requests are not concerned", why)
        self._wanted, self.running, self.dropped = None, False, why
