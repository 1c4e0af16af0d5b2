"""What is recorded of one request: numbers and names, never what it says. `Tape` follows one request from its arrival to its end;
where the record goes is recorder.py's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fairlane.clock import Clock
from fairlane.errors import FairlaneError
from fairlane.gateway.metrics import Sink
from fairlane.protos.fairlane.v1 import worker_pb2


@dataclass(slots=True)
class Record:
    """One request that reached the worker. at: its arrival, seconds since the epoch; other times are seconds from then on.

    output_tokens: what the worker generated. end: stop, length, or why it did not finish. prompt and domain are there for the
    hashes of its leading blocks (prefix.py) and are not written.
    """

    at: float
    node: str
    tier: str
    model: str
    prompt: Sequence[int]
    domain: str
    max_tokens: int
    max_wait_s: float | None = None
    deadline_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    end_s: float = 0.0
    end: str = ""
    preemptions: int = 0


class Tape:
    """Sees every delta that a request's inbox takes. `on_end` gets the record, once, if the worker was given the request."""

    def __init__(self, arrival_s: float, clock: Clock, wall: Callable[[], float], on_end: Callable[[Record], None]) -> None:
        """arrival_s: on the clock; wall: seconds since the epoch."""
        self._arrival_s = arrival_s
        self._clock = clock
        self._wall = wall
        self._on_end = on_end
        self._record: Record | None = None
        self._inbox: Sink | None = None
        self._max_wait_s: float | None = None
        self._deadline_s: float | None = None

    def bounded(self, max_wait_s: float | None, deadline_s: float | None) -> None:
        """How long it may wait by policy, and may take by its client's deadline; None: nobody says so."""
        self._max_wait_s, self._deadline_s = max_wait_s, deadline_s

    def watch(self, inbox: Sink, add: worker_pb2.Add, model: str) -> Sink:
        """The sink to give to the worker client in place of `inbox`."""
        self._inbox = inbox
        self._record = Record(
            at=self._wall() - self._elapsed_s(),
            node=add.tenant,
            tier=add.tier,
            model=model,
            prompt=add.prompt_token_ids,
            domain="" if add.cache_mode == "none" else add.cache_domain,
            max_tokens=add.max_tokens,
            max_wait_s=self._max_wait_s,
            deadline_s=self._deadline_s,
        )
        return self

    def offer(self, delta: worker_pb2.Delta) -> str | None:
        assert self._inbox is not None and self._record is not None
        violation = self._inbox.offer(delta)
        if violation is None:
            self._note(self._record, delta)
        return violation

    def fail(self, error: FairlaneError) -> None:
        assert self._inbox is not None
        self._inbox.fail(error)

    def end(self, reason: str) -> None:
        """It is over. The first reason stays; before the worker was given the request there is nothing to record."""
        record, self._record = self._record, None
        if record is not None:
            record.end, record.end_s = reason, self._elapsed_s()
            self._on_end(record)

    def _note(self, record: Record, delta: worker_pb2.Delta) -> None:
        if delta.HasField("started"):
            record.cached_tokens, record.queue_s = delta.started.cached_tokens, delta.started.queue_s
        if delta.token_ids:
            if record.ttft_s is None:
                record.ttft_s = self._elapsed_s()
            record.output_tokens += len(delta.token_ids)
        if delta.HasField("ended"):
            record.preemptions = delta.ended.preemptions

    def _elapsed_s(self) -> float:
        return self._clock.now() - self._arrival_s
