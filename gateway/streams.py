"""One request's inbox between the worker's steps and the client's reading speed. Decides whether a delta makes sense, what
may be sent together, and when a reader has stalled for too long; what deltas mean to the client is generation.py's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from fairlane.clock import Clock
from fairlane.errors import FairlaneError
from fairlane.protos.fairlane.v1 import worker_pb2 as pb


class DeltaInbox:
    """Deltas in (from the worker client, never blocking), deltas out (to one reader).

    Its size is bounded by the request's max_tokens; holding more than `max_deltas` for `slow_consumer_s` ends it earlier.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        vocab_size: int,
        max_deltas: int,
        slow_consumer_s: float,
        clock: Clock,
        on_started: Callable[[], None] = lambda: None,
        on_queued: Callable[[float], None] = lambda estimated_s: None,
    ) -> None:
        """on_started: told when the request's first step runs, however slowly its client reads. on_queued: told how long it is
        thought to wait."""
        self._on_started = on_started
        self._on_queued = on_queued
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._max_deltas = max_deltas
        self._slow_consumer_s = slow_consumer_s
        self._clock = clock
        self._deltas: deque[pb.Delta] = deque()
        self._num_tokens = 0
        self._started = False
        self._overfull_since_s: float | None = None
        self._error: FairlaneError | None = None
        self._something = asyncio.Event()
        self._urgent = asyncio.Event()
        self.ended = False

    def offer(self, delta: pb.Delta) -> str | None:
        """Takes the next delta; answers in words how it breaks the worker protocol, or None. After a failure, nothing."""
        if self._error is not None:
            return None
        violation = self._violation(delta)
        if violation is not None:
            return violation
        self._started = self._started or delta.HasField("started")
        self._num_tokens += len(delta.token_ids)
        self.ended = delta.HasField("ended")
        if delta.HasField("estimated_wait_s"):
            self._on_queued(delta.estimated_wait_s)
        if delta.HasField("started"):
            self._on_started()
        self._deltas.append(delta)
        self._something.set()
        if not _only_tokens(delta):
            self._urgent.set()
        self._watch_reader()
        return None

    def fail(self, error: FairlaneError) -> None:
        """Nothing more will come. What has come is still handed out, then `error` is raised; the first failure stays."""
        if self._error is None:
            self._error = error
            self._something.set()
            self._urgent.set()

    async def wait(self) -> None:
        """Returns once there is something to take."""
        await self._something.wait()

    async def wait_urgent(self, timeout_s: float) -> None:
        """Returns when something has come that is not worth delaying for company, at the latest after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._urgent.wait()
        except TimeoutError:
            return

    def take(self) -> list[pb.Delta]:
        """Everything that has come, oldest first, possibly nothing. Raises the failure once all that came before is out."""
        if not self._deltas and self._error is not None:
            raise self._error
        taken = list(self._deltas)
        self._deltas.clear()
        self._overfull_since_s = None
        if self._error is None:
            self._something.clear()
            self._urgent.clear()
        return taken

    def _violation(self, delta: pb.Delta) -> str | None:
        if self.ended:
            if self._deltas:
                self._deltas.pop()  # the end that was none; what came before it is still handed out
            return "a delta after the end of the request"
        if delta.HasField("started") and self._started:
            return "a second start"
        if delta.token_ids and not (self._started or delta.HasField("started")):
            return "tokens before the start"
        if self._num_tokens + len(delta.token_ids) > self._max_tokens:
            return f"more than max_tokens={self._max_tokens} tokens"
        if delta.token_ids and max(delta.token_ids) >= self._vocab_size:
            return f"token id {max(delta.token_ids)} outside the vocabulary of {self._vocab_size}"
        return None

    def _watch_reader(self) -> None:
        if len(self._deltas) <= self._max_deltas:
            return
        now_s = self._clock.now()
        if self._overfull_since_s is None:
            self._overfull_since_s = now_s
        elif now_s - self._overfull_since_s > self._slow_consumer_s:
            self._deltas.clear()  # nobody is going to read them
            self.fail(slow_consumer(self._slow_consumer_s))


def slow_consumer(seconds: float) -> FairlaneError:
    return FairlaneError("SLOW_CONSUMER", f"the client did not read its stream for {seconds:g} s")


def _only_tokens(delta: pb.Delta) -> bool:
    return not (
        delta.HasField("queue_position")
        or delta.HasField("started")
        or delta.HasField("resumed_after_s")
        or delta.HasField("preempted")
        or delta.HasField("ended")
    )
