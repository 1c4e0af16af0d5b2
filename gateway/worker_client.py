"""The gateway's end of the one long-lived stream to a worker: sends requests, aborts, policies and pings, hands deltas to
their streams, and decides when the worker is lost. On loss every open stream hears of it and the client reconnects."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from fairlane.clock import Clock
from fairlane.errors import FairlaneError
from fairlane.gateway.admission import retry_after_s
from fairlane.gateway.liveness import Liveness
from fairlane.gateway.shadow_link import ShadowLink
from fairlane.gateway.snapshot_message import snapshot_message
from fairlane.gateway.worker_facts import WorkerFacts
from fairlane.protos.fairlane.v1 import explain_pb2, worker_pb2_grpc
from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.tenancy import PolicySnapshot

logger = logging.getLogger("fairlane.gateway.worker")

PROTOCOL_VERSION = 1
# A worker that breaks the protocol this often in one session is disconnected: its other answers are not to be trusted.
MAX_VIOLATIONS = 3
_BACKOFF_S = (0.05, 2.0)
_KEEPALIVE_MS = 10_000

Call = Any  # grpc.aio.StreamStreamCall[pb.ToWorker, pb.FromWorker]; grpcio ships no types


class Sink(Protocol):
    """One request's inbox (streams.DeltaInbox)."""

    def offer(self, delta: pb.Delta) -> str | None:
        """Takes a delta; answers how it breaks the protocol, or None."""
        ...

    def fail(self, error: FairlaneError) -> None: ...


class WorkerGone(Exception):
    """Why a session ended. Internal to the client; streams see WORKER_LOST."""


class PolicyRefused(Exception):
    """The worker did not apply a policy snapshot; the old one is still in force. `answered` False: it may have applied it, or
    may do so yet, because no answer came."""

    def __init__(self, why: str, *, answered: bool) -> None:
        super().__init__(why)
        self.answered = answered


@dataclass(slots=True)
class WorkerCounters:
    """Since the gateway started."""

    sessions: int = 0
    lost: int = 0
    restarts: int = 0  # sessions with a newer epoch than any before
    stale_deltas: int = 0
    violations: int = 0


class WorkerClient:
    """One worker. All methods belong to the event loop's thread; none but `close` and `apply_policy` waits."""

    def __init__(
        self,
        address: str,
        *,
        gateway_id: str,
        timeout_s: float,
        ping_interval_s: float,
        clock: Clock,
        on_ready: Callable[[bool], None] = lambda ready: None,
    ) -> None:
        self._address = address
        self._gateway_id = gateway_id
        self._timeout_s = timeout_s
        self._ping_interval_s = ping_interval_s
        self._clock = clock
        self._on_ready = on_ready
        self._snapshot: PolicySnapshot | None = None
        self._applying: asyncio.Future[str | None] | None = None  # the refusal, "" if applied, None if lost
        self._applied_generation = 0
        self._explaining: asyncio.Future[pb.Explained | None] | None = None  # None if lost
        self._sinks: dict[int, Sink] = {}
        self._outbox: asyncio.Queue[pb.ToWorker] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._session_violations = 0
        self._connected = False
        self._ready = asyncio.Event()
        self._facts: WorkerFacts | None = None
        self._pong = pb.Pong()
        self._ponged = asyncio.Condition()
        self._nonce = 0
        self._hung: tuple[int, str] | None = None
        self.shadow = ShadowLink(self._put, lambda: self._nonce, timeout_s)
        self.counters = WorkerCounters()

    @property
    def ready(self) -> bool:
        """Connected, and the policy in force is applied there."""
        return self._ready.is_set()

    @property
    def connected(self) -> bool:
        """Whether there is a session: a process answers, though perhaps without the policy yet."""
        return self._connected

    @property
    def hung(self) -> tuple[int, str] | None:
        """Epoch and symptom of the latest process that was given up as hung: connected, but without progress. Its death would
        have ended the session, so whoever can should replace it. None if there has been none."""
        return self._hung

    @property
    def facts(self) -> WorkerFacts | None:
        """Of the latest Welcome, kept over a loss; None before the first."""
        return self._facts

    @property
    def pong(self) -> pb.Pong:
        """The latest heartbeat of this session; empty before its first, and while there is no session."""
        return self._pong

    async def fresh_pong(self, timeout_s: float = 1.0) -> pb.Pong:
        """A heartbeat asked for now; the latest one if the worker is not connected or takes longer than timeout_s."""
        if not self._connected:
            return self._pong
        self._nonce += 1
        asked = self._nonce
        self._outbox.put_nowait(pb.ToWorker(ping=pb.Ping(nonce=asked)))
        try:
            async with asyncio.timeout(timeout_s), self._ponged:
                await self._ponged.wait_for(lambda: self._pong.nonce >= asked)
        except TimeoutError:
            pass
        return self._pong

    @property
    def policy_generation(self) -> int:
        """The generation the worker has applied; 0 before the first."""
        return self._applied_generation

    def start(self, snapshot: PolicySnapshot) -> None:
        """Begins to connect, and to reconnect for ever; every session starts with the snapshot in force."""
        self._snapshot = snapshot
        self._task = asyncio.create_task(self._run(), name="worker-client")

    async def close(self) -> None:
        """Ends the session; streams still open get WORKER_LOST."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def wait_ready(self) -> None:
        await self._ready.wait()

    def submit(self, add: pb.Add, sink: Sink) -> None:
        """Hands a request to the worker; from now on `sink` hears of it until `release`. Raises NO_READY_WORKER."""
        if not self.ready:
            raise no_ready_worker()
        self._sinks[add.request_id] = sink
        self._outbox.put_nowait(pb.ToWorker(add=add))

    def release(self, request_id: int, *, abort: bool) -> None:
        """The stream is over; `abort` unless the worker has ended the request itself. Unknown ids are fine: the session
        that knew them is gone, and the worker has aborted everything of it."""
        if self._sinks.pop(request_id, None) is not None and abort:
            self._outbox.put_nowait(pb.ToWorker(abort=pb.Abort(request_id=request_id)))

    async def explain(self, request_id: int) -> explain_pb2.Explanation | None:
        """Why a request waits; None if the worker does not have it. One question at a time. Raises TimeoutError."""
        if not self._connected:
            return None
        self._explaining = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(pb.ToWorker(explain=pb.Explain(request_id=request_id)))
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    explained = await self._explaining
                    if explained is None or explained.request_id == request_id:
                        break
                    self._explaining = asyncio.get_running_loop().create_future()  # a late answer to an earlier question
        finally:
            self._explaining = None
        return explained.explanation if explained is not None and explained.HasField("explanation") else None

    async def apply_policy(self, snapshot: PolicySnapshot) -> None:
        """Puts a snapshot in force: returns once the worker has applied it, at once while none is connected (the next
        session begins with it). Raises PolicyRefused, and the old one stays, also when no answer comes in time."""
        if not self._connected:
            self._snapshot = snapshot
            return
        before, self._snapshot = self._snapshot, snapshot
        self._applying = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(pb.ToWorker(policy=snapshot_message(snapshot)))
        try:
            async with asyncio.timeout(self._timeout_s):
                refusal = await self._applying
        except TimeoutError:
            refusal = None
        finally:
            self._applying = None
        if refusal != "":
            self._snapshot = before
            why = f"no answer within {self._timeout_s:g} s" if refusal is None else refusal
            raise PolicyRefused(why, answered=refusal is not None)

    def restate(self, snapshot: PolicySnapshot) -> None:
        """Makes sure that this snapshot is what the worker ends up with, whatever it made of the last one: sends it without
        waiting, and begins later sessions with it."""
        self._snapshot = snapshot
        if self._connected:
            self._outbox.put_nowait(pb.ToWorker(policy=snapshot_message(snapshot)))

    def _put(self, message: pb.ToWorker) -> None:
        """Onto this session's stream."""
        self._outbox.put_nowait(message)

    async def _run(self) -> None:
        low, high = _BACKOFF_S
        backoff = low
        while True:
            sessions = self.counters.sessions
            try:
                await self._session()
            except (WorkerGone, TimeoutError, ValueError) as error:
                logger.warning("worker %s: %s", self._address, error or "no answer in time")
            except grpc.aio.AioRpcError as error:
                logger.log(self._outage_level(), "worker %s: %s", self._address, error.details())
            except Exception:
                # A bug of ours must not end the reconnecting for good.
                logger.exception("worker %s: session failed", self._address)
            finally:
                self._lose()
            backoff = low if self.counters.sessions > sessions else min(high, backoff * 2)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, guards nothing

    def _outage_level(self) -> int:
        """Losing a session is news; not finding a worker that is still starting, again and again, is not."""
        return logging.WARNING if self._connected else logging.DEBUG

    async def _session(self) -> None:
        """From connecting to the end of the stream; returns by raising."""
        self._outbox = asyncio.Queue()  # what an earlier session left unsent must not reach this one
        self._session_violations = 0
        async with grpc.aio.insecure_channel(self._address, options=_channel_options(self._timeout_s)) as channel:
            call: Call = worker_pb2_grpc.WorkerStub(channel).Connect()  # type: ignore[no-untyped-call]
            try:
                await self._greet(call)
                await self._first_of(self._read(call), self._write(call), self._ping())
            finally:
                call.cancel()

    async def _greet(self, call: Call) -> None:
        async with asyncio.timeout(self._timeout_s):
            await call.write(pb.ToWorker(hello=pb.Hello(gateway_id=self._gateway_id, protocol_version=PROTOCOL_VERSION)))
            message = await call.read()
        if message is grpc.aio.EOF or message.WhichOneof("message") != "welcome":
            raise WorkerGone("it did not begin with a Welcome")
        facts = WorkerFacts.of(message.welcome)
        seen = self._facts
        if seen is not None and facts.epoch < seen.epoch:
            raise WorkerGone(f"stale epoch {facts.epoch}, {seen.epoch} has been seen")
        if seen is not None and facts.epoch > seen.epoch:
            self.counters.restarts += 1
        self._facts = facts
        self._liveness = Liveness(self._clock.now(), self._timeout_s, self._ping_interval_s)
        self._connected = True
        self.counters.sessions += 1
        logger.info("worker %s: connected, id %s, epoch %d, model %s", self._address, facts.worker_id, facts.epoch, facts.model)
        assert self._snapshot is not None
        self._outbox.put_nowait(pb.ToWorker(policy=snapshot_message(self._snapshot)))
        self.shadow.connected(facts.epoch)

    @staticmethod
    async def _first_of(*parts: Any) -> None:
        """Runs the parts of a session until one raises, and raises that."""
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Call) -> None:
        while True:
            message: pb.FromWorker = await call.read()
            if message is grpc.aio.EOF:
                await call.code()  # raises nothing; waits for the status so that the channel closes cleanly
                raise WorkerGone("it ended the stream")
            self._liveness.heard(message, self._clock.now())
            which = message.WhichOneof("message")
            if which == "deltas":
                self._deliver(message.deltas)
            elif which == "pong":
                async with self._ponged:
                    self._pong = message.pong
                    self._ponged.notify_all()
                self.shadow.heard(message.pong)
            elif which == "shadow_applied":
                self.shadow.applied(message.shadow_applied)
            elif which == "policy_applied":
                self._policy_applied(message.policy_applied)
            elif which == "explained" and self._explaining is not None and not self._explaining.done():
                self._explaining.set_result(message.explained)

    async def _write(self, call: Call) -> None:
        while True:
            await call.write(await self._outbox.get())

    async def _ping(self) -> None:
        while True:
            self._nonce += 1
            self._outbox.put_nowait(pb.ToWorker(ping=pb.Ping(nonce=self._nonce)))
            await asyncio.sleep(self._ping_interval_s)
            verdict = self._liveness.verdict(self._clock.now())
            if verdict is not None:
                if self._facts is not None:
                    self._hung = (self._facts.epoch, verdict)
                raise WorkerGone(verdict)

    def _deliver(self, step: pb.StepDeltas) -> None:
        decoded = step.decoded
        if len(decoded.request_ids) != len(decoded.token_ids):
            raise WorkerGone(f"{len(decoded.token_ids)} tokens came for {len(decoded.request_ids)} requests")
        for request_id, token in zip(decoded.request_ids, decoded.token_ids, strict=True):
            self._offer(pb.Delta(request_id=request_id, token_ids=[token]))
        for delta in step.deltas:
            self._offer(delta)

    def _offer(self, delta: pb.Delta) -> None:
        sink = self._sinks.get(delta.request_id)
        if sink is None:
            # Aborted meanwhile, or another session's: late news is normal, acting on it would not be.
            self.counters.stale_deltas += 1
            return
        violation = sink.offer(delta)
        if violation is not None:
            self._violated(delta.request_id, sink, violation)

    def _violated(self, request_id: int, sink: Sink, violation: str) -> None:
        logger.error("worker %s: request %d: %s", self._address, request_id, violation)
        sink.fail(FairlaneError("WORKER_PROTOCOL", "the worker's answer made no sense"))
        self.release(request_id, abort=True)
        self.counters.violations += 1
        self._session_violations += 1
        if self._session_violations >= MAX_VIOLATIONS:
            raise WorkerGone(f"{MAX_VIOLATIONS} protocol violations in one session")

    def _policy_applied(self, applied: pb.PolicyApplied) -> None:
        if self._snapshot is None or applied.generation != self._snapshot.generation:
            return  # the answer to a snapshot that has been replaced meanwhile
        if not applied.refusal:
            self._applied_generation = applied.generation
        if self._applying is not None and not self._applying.done():
            self._applying.set_result(applied.refusal)
        elif applied.refusal:
            raise WorkerGone(f"it refused policy generation {applied.generation}: {applied.refusal}")
        if not applied.refusal and not self._ready.is_set():
            self._ready.set()
            self._on_ready(True)

    def _lose(self) -> None:
        """The session is over: nobody may wait for it any longer."""
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(worker_lost())
        if self._applying is not None and not self._applying.done():
            self._applying.set_result(None)
        if self._explaining is not None and not self._explaining.done():
            self._explaining.set_result(None)
        self.shadow.lost()
        self._pong = pb.Pong()  # what a lost worker last said is not so any more
        if self._connected:
            self._connected = False
            self.counters.lost += 1
        if self._ready.is_set():
            self._ready.clear()
            self._on_ready(False)


def no_ready_worker() -> FairlaneError:
    return FairlaneError("NO_READY_WORKER", "no worker is ready to serve this model", retry_after_s=retry_after_s())


def worker_lost() -> FairlaneError:
    return FairlaneError("WORKER_LOST", "the worker serving this request was lost", retry_after_s=retry_after_s())


def _channel_options(timeout_s: float) -> list[tuple[str, int]]:
    # Later than our own verdict, which knows what is wrong: the transport is only to notice what we do not.
    timeout_ms = int(timeout_s * 2000)
    return [
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # grpcio 1.85 closes a dead connection by the ping timeout only; with keepalive_timeout alone it takes a minute.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_receive_message_length", 64 << 20),
        ("grpc.max_send_message_length", 64 << 20),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
