"""The engine's inbox and outbox in a worker process. Network threads hand over raw messages; everything that touches the
routing between gateways' ids and engine ids happens on the engine's thread, so it needs no lock."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from fairlane.clock import Clock
from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.engine import Abort, Add, ApplyPolicy, Command, Explain, ShadowPolicy, Stop
from fairlane.scheduler.events import DecodedTokens, Delta
from fairlane.scheduler.explain import Explanation
from fairlane.scheduler.request import RequestId
from fairlane.worker.explain_wire import explanation_to_wire
from fairlane.worker.wire import ProtocolError, delta_to_wire, request_from_add, snapshot_from_wire

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where a connection's outgoing messages go; callable from any thread."""

    def send(self, message: pb.FromWorker) -> None: ...


@dataclass(eq=False, slots=True)
class Connection:
    """One gateway's stream. `requests`: the gateway's id -> the engine's."""

    sink: Sink
    requests: dict[int, RequestId] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Received:
    connection: Connection
    message: pb.ToWorker


@dataclass(frozen=True, slots=True)
class Closed:
    """The stream ended; whatever it asked for is aborted."""

    connection: Connection


Item = Received | Closed | Stop


class WorkerBoxes:
    """Inbox and Outbox of one engine, and the routes between them."""

    def __init__(self, vocab_size: int, clock: Clock) -> None:
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._routes: dict[RequestId, tuple[Connection, int]] = {}
        self._vocab_size = vocab_size
        self._clock = clock
        self._next_id = 1

    # -- any thread ----------------------------------------------------------------------------------------------------

    def put_item(self, item: Item) -> None:
        self._items.put(item)

    # -- engine thread -------------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None) -> Iterable[Command]:
        return list(self._commands(timeout_s))

    def _commands(self, timeout_s: float | None) -> Iterator[Command]:
        try:
            item = self._items.get(timeout_s != 0.0, timeout_s)
            while True:
                yield from self._decode(item)
                item = self._items.get_nowait()
        except Empty:
            return

    def _decode(self, item: Item) -> Iterator[Command]:
        match item:
            case Stop():
                yield item
            case Closed(connection):
                for request_id in list(connection.requests.values()):
                    yield Abort(request_id)
            case Received(connection, message):
                yield from self._decode_message(connection, message)

    def _decode_message(self, connection: Connection, message: pb.ToWorker) -> Iterator[Command]:
        match message.WhichOneof("message"):
            case "add":
                yield from self._decode_add(connection, message.add)
            case "abort":
                request_id = connection.requests.get(message.abort.request_id)
                if request_id is not None:  # a late abort is normal: the end and the cancel crossed
                    yield Abort(request_id)
            case "policy":
                yield from self._decode_policy(connection, message.policy)
            case "shadow":
                yield from self._decode_shadow(connection, message.shadow)
            case "explain":
                yield from self._decode_explain(connection, message.explain)
            case other:
                log.warning("ignored a message of kind %s", other)

    def _decode_add(self, connection: Connection, add: pb.Add) -> Iterator[Command]:
        if add.request_id in connection.requests:
            log.warning("ignored a second Add for request %d", add.request_id)
            return
        request_id = RequestId(self._next_id)
        try:
            request = request_from_add(add, request_id, self._clock.now(), self._vocab_size)
        except ProtocolError as error:
            ended = pb.EndedDelta(reason="failed", error_reason="WORKER_PROTOCOL", error_message=str(error))
            delta = pb.Delta(request_id=add.request_id, ended=ended)
            connection.sink.send(pb.FromWorker(deltas=pb.StepDeltas(deltas=[delta])))
            return
        self._next_id += 1
        connection.requests[add.request_id] = request_id
        self._routes[request_id] = (connection, add.request_id)
        yield Add(request)

    def _decode_explain(self, connection: Connection, asked: pb.Explain) -> Iterator[Command]:
        def answer(found: Explanation | None) -> None:
            explained = pb.Explained(request_id=asked.request_id)
            if found is not None:
                explained.explanation.CopyFrom(explanation_to_wire(found))
            connection.sink.send(pb.FromWorker(explained=explained))

        request_id = connection.requests.get(asked.request_id)
        if request_id is None:
            answer(None)
        else:
            yield Explain(request_id, answer)

    def _decode_policy(self, connection: Connection, policy: pb.PolicySnapshot) -> Iterator[Command]:
        def applied(refusal: str) -> None:
            connection.sink.send(pb.FromWorker(policy_applied=pb.PolicyApplied(generation=policy.generation, refusal=refusal)))

        try:
            snapshot = snapshot_from_wire(policy)
        except ProtocolError as error:
            applied(str(error))
            return
        yield ApplyPolicy(snapshot, applied)

    def _decode_shadow(self, connection: Connection, shadow: pb.Shadow) -> Iterator[Command]:
        def applied(refusal: str) -> None:
            connection.sink.send(pb.FromWorker(shadow_applied=pb.ShadowApplied(number=shadow.number, refusal=refusal)))

        try:
            snapshot = snapshot_from_wire(shadow.snapshot) if shadow.HasField("snapshot") else None
        except ProtocolError as error:
            applied(str(error))
            return
        yield ShadowPolicy(snapshot, applied)

    def put(self, step_id: int, deltas: list[Delta], decoded: list[DecodedTokens]) -> None:
        """One message per gateway that has something in this step."""
        messages: dict[Connection, pb.StepDeltas] = {}
        for column in decoded:
            self._put_column(step_id, column, messages)
        for delta in deltas:
            connection, wire_id = self._routes[delta.request_id]
            message = messages.get(connection)
            if message is None:
                message = messages[connection] = pb.StepDeltas(step_id=step_id)
            message.deltas.append(delta_to_wire(delta, wire_id))
            if delta.ended is not None:
                del self._routes[delta.request_id]
                del connection.requests[wire_id]
        for connection, message in messages.items():
            connection.sink.send(pb.FromWorker(deltas=message))

    def _put_column(self, step_id: int, column: DecodedTokens, messages: dict[Connection, pb.StepDeltas]) -> None:
        wire_ids: dict[Connection, list[int]] = {}
        tokens: dict[Connection, list[int]] = {}
        for request_id, token in zip(column.request_ids, column.token_ids, strict=True):
            connection, wire_id = self._routes[request_id]
            wire_ids.setdefault(connection, []).append(wire_id)
            tokens.setdefault(connection, []).append(token)
        for connection, ids in wire_ids.items():
            message = messages.get(connection)
            if message is None:
                message = messages[connection] = pb.StepDeltas(step_id=step_id)
            message.decoded.request_ids.extend(ids)
            message.decoded.token_ids.extend(tokens[connection])
