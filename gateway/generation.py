"""Turns one request's deltas into the events of its stream: contiguous `seq`, coalesced tokens, stop strings, usage and
timing, one `finished` at the end or an error. Who may run and how tokens are made is decided elsewhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from fairlane.clock import Clock
from fairlane.errors import REASONS, Code, FairlaneError
from fairlane.gateway.admission import retry_after_s
from fairlane.gateway.output_text import OutputText
from fairlane.gateway.streams import DeltaInbox
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2

# Bounds one message: about 16 bytes of text a token, far below a client's 4 MiB.
MAX_TOKENS_PER_EVENT = 4096

Write = Callable[[pb.GenerateEvent], Awaitable[None]]

_KINDS: Mapping[str, pb.PreemptionKind] = {
    "paused": pb.PREEMPTION_KIND_PAUSED,
    "recomputed": pb.PREEMPTION_KIND_RECOMPUTED,
    "swapped": pb.PREEMPTION_KIND_SWAPPED,
}
_REASONS: Mapping[str, pb.PreemptionReason] = {
    "higher_rank": pb.PREEMPTION_REASON_HIGHER_RANK,
    "kv_capacity": pb.PREEMPTION_REASON_KV_CAPACITY,
    "kv_guarantee": pb.PREEMPTION_REASON_KV_GUARANTEE,
    "kv_limit": pb.PREEMPTION_REASON_KV_LIMIT,
    "ceil": pb.PREEMPTION_REASON_CEIL,
}


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """What the events of a stream say about its request. arrival_s: when the gateway got it, on its clock."""

    request_id: str
    model: str
    tier: str
    prompt_tokens: int
    arrival_s: float
    coalesce_s: float
    return_token_ids: bool = False
    lifecycle_events: bool = False


class Generation:
    """Runs once. Whoever runs it releases the request at the worker afterwards, whatever happened."""

    def __init__(self, facts: StreamFacts, inbox: DeltaInbox, text: OutputText, write: Write, clock: Clock) -> None:
        self._facts = facts
        self._inbox = inbox
        self._output = text
        self._write = write
        self._clock = clock
        self._seq = 0
        self._usage = pb.Usage(prompt_tokens=facts.prompt_tokens)
        self._timing = pb.Timing()
        self._pending = pb.Tokens()
        self._pieces: list[str] = []
        self._sent_s: float | None = None  # when tokens were last sent
        self.finish_reason = pb.FINISH_REASON_UNSPECIFIED  # known once it has run
        self._announced = False  # a `preempted` that no `resumed` has followed yet

    async def run(self) -> None:
        """Writes every event up to `finished`. Raises FairlaneError for any other end; what was written stays valid."""
        while True:
            for delta in await self._next():
                if await self._handle(delta):
                    return
            await self._flush()

    async def _next(self) -> list[worker_pb2.Delta]:
        """The next deltas: at once if the stream has been quiet, else after the rest of the coalescing interval."""
        await self._inbox.wait()
        if self._sent_s is not None:
            delay_s = self._sent_s + self._facts.coalesce_s - self._clock.now()
            if delay_s > 0:
                await self._inbox.wait_urgent(delay_s)
        return self._inbox.take()

    async def _handle(self, delta: worker_pb2.Delta) -> bool:
        """Whether the stream is finished with this delta."""
        if delta.HasField("queue_position"):
            queued = pb.Queued(request_id=self._facts.request_id, position=delta.queue_position, tier=self._facts.tier)
            if delta.HasField("estimated_wait_s"):
                queued.estimated_wait_s = delta.estimated_wait_s
            await self._emit(pb.GenerateEvent(queued=queued))
        if delta.HasField("started"):
            await self._started(delta.started)
        if delta.HasField("resumed_after_s"):
            await self._resumed(delta.resumed_after_s)
        for token_id in delta.token_ids:
            if await self._token(token_id):
                return True
        if delta.HasField("preempted"):
            await self._preempted(delta.preempted)
        if delta.HasField("ended"):
            await self._ended(delta.ended)
        return delta.HasField("ended")

    async def _started(self, started: worker_pb2.StartedDelta) -> None:
        self._usage.cached_tokens = started.cached_tokens
        self._timing.queue_ms = started.queue_s * 1000
        event = pb.Started(prompt_tokens=self._usage.prompt_tokens, cached_tokens=started.cached_tokens)
        await self._emit(pb.GenerateEvent(started=event))

    async def _token(self, token_id: int) -> bool:
        """Whether this token completed a stop string, which finishes the stream."""
        self._usage.completion_tokens += 1
        self._pending.num_tokens += 1
        if self._facts.return_token_ids:
            self._pending.token_ids.append(token_id)
        result = self._output.push(token_id)
        self._pieces.append(result.text)
        if result.matched is not None:
            await self._finish(pb.OutputFinished(finish_reason=pb.FINISH_REASON_STOP, stop_string=result.matched))
            return True
        if self._pending.num_tokens >= MAX_TOKENS_PER_EVENT:
            await self._flush()
        return False

    async def _preempted(self, preempted: worker_pb2.PreemptedDelta) -> None:
        """The worker reports lost blocks at once and a pause once it is long enough to be felt.

        Counted here as well as at the end, because a stop string ends the stream without the worker's own figures.
        """
        if preempted.kind in ("recomputed", "swapped"):
            self._usage.preemptions += 1
        if not self._facts.lifecycle_events:
            return
        self._announced = True
        kind = _KINDS.get(preempted.kind, pb.PREEMPTION_KIND_UNSPECIFIED)
        reason = _REASONS.get(preempted.reason, pb.PREEMPTION_REASON_UNSPECIFIED)
        await self._emit(pb.GenerateEvent(preempted=pb.Preempted(kind=kind, reason=reason)))

    async def _resumed(self, after_s: float) -> None:
        if self._announced:
            self._announced = False
            await self._emit(pb.GenerateEvent(resumed=pb.Resumed(stalled_ms=after_s * 1000)))

    async def _ended(self, ended: worker_pb2.EndedDelta) -> None:
        self._usage.preemptions = ended.preemptions
        self._usage.recomputed_tokens = ended.recomputed_tokens
        finished = pb.OutputFinished()
        if ended.reason == "stop":
            finished.finish_reason = pb.FINISH_REASON_STOP
            if ended.HasField("stop_token_id"):
                finished.stop_token_id = ended.stop_token_id
        elif ended.reason == "length":
            finished.finish_reason = pb.FINISH_REASON_LENGTH
        else:
            await self._flush()
            raise _failure(ended)
        rest = self._output.finish()
        self._pieces.append(rest.text)
        if rest.matched is not None:
            finished = pb.OutputFinished(finish_reason=pb.FINISH_REASON_STOP, stop_string=rest.matched)
        await self._finish(finished)

    async def _finish(self, output: pb.OutputFinished) -> None:
        self.finish_reason = output.finish_reason
        await self._emit(pb.GenerateEvent(output_finished=output))
        self._usage.total_tokens = self._usage.prompt_tokens + self._usage.completion_tokens
        self._timing.total_ms = self._elapsed_ms()
        facts = self._facts
        await self._emit(
            pb.GenerateEvent(
                finished=pb.Finished(
                    usage=self._usage, timing=self._timing, request_id=facts.request_id, model=facts.model, tier=facts.tier
                )
            )
        )

    async def _flush(self) -> None:
        """Sends the tokens gathered so far as one event."""
        text = "".join(self._pieces)
        if not self._pending.num_tokens and not text:
            return
        if self._sent_s is None:
            self._timing.time_to_first_token_ms = self._elapsed_ms()
        self._sent_s = self._clock.now()
        tokens, self._pending, self._pieces = self._pending, pb.Tokens(), []
        tokens.text = text
        await self._send(pb.GenerateEvent(tokens=tokens))

    async def _emit(self, event: pb.GenerateEvent) -> None:
        """Any event but tokens; the tokens before it go first."""
        await self._flush()
        await self._send(event)

    async def _send(self, event: pb.GenerateEvent) -> None:
        event.seq = self._seq
        self._seq += 1
        await self._write(event)

    def _elapsed_ms(self) -> float:
        return (self._clock.now() - self._facts.arrival_s) * 1000


def _failure(ended: worker_pb2.EndedDelta) -> FairlaneError:
    """The error of a request that the worker gave up."""
    if ended.reason == "aborted":
        return FairlaneError("WORKER_LOST", "the worker gave the request up", retry_after_s=retry_after_s())
    if ended.reason != "failed" or ended.error_reason not in REASONS:
        return FairlaneError("WORKER_PROTOCOL", "the worker's answer made no sense")
    again = REASONS[ended.error_reason] is Code.UNAVAILABLE or ended.error_reason == "QUEUE_TIMEOUT"
    return FairlaneError(ended.error_reason, ended.error_message, retry_after_s=retry_after_s() if again else None)
