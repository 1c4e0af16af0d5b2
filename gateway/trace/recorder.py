"""The trace recorder: one line per request, made and written in a thread of its own. Requests never wait for it and never fail by
it: what the disk does not take, or not fast enough, is left out and counted."""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fairlane.clock import Clock
from fairlane.gateway.request_end import ending
from fairlane.gateway.trace.files import TraceFiles
from fairlane.gateway.trace.prefix import BLOCK_TOKENS, prefix_ids
from fairlane.gateway.trace.record import Record, Tape

logger = logging.getLogger("fairlane.gateway.trace")

# Each may hold its prompt's token ids until it is written.
QUEUED = 4096
_BATCH = 256
# After an error the disk is left alone for so long.
REST_S = 10.0
_CLOSE_S = 5.0


class TraceRecorder:
    """Follows requests on the event loop, writes on a thread. `on_dropped(number)` is told, in either, of what was left out."""

    def __init__(
        self,
        files: TraceFiles,
        clock: Clock,
        on_dropped: Callable[[int], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._files = files
        self._clock = clock
        self._wall = wall
        self._on_dropped = on_dropped
        self._key = secrets.token_bytes(32)
        self._queue: queue.Queue[Record | None] = queue.Queue(QUEUED)
        self._failed_s: float | None = None  # when the disk last refused
        self._thread = threading.Thread(target=self._run, name="trace", daemon=True)
        self._thread.start()

    @contextmanager
    def follow(self) -> Iterator[Tape]:
        """Around everything that is done for one request."""
        tape = Tape(self._clock.now(), self._clock, self._wall, self._put)
        with ending(tape.end):
            yield tape

    def close(self) -> None:
        """Writes what is queued, for some seconds at most. Blocks."""
        try:
            self._queue.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    def _put(self, record: Record) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._on_dropped(1)

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._queue.get()]
            while len(batch) < _BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            is_open = None not in batch
            self._write([record for record in batch if record is not None])
        self._files.close()

    def _write(self, records: list[Record]) -> None:
        now_s = self._clock.now()
        if self._failed_s is not None and now_s - self._failed_s < REST_S:
            self._on_dropped(len(records))
            return
        for done, record in enumerate(records):
            try:
                self._files.append(line(record, self._key))
            except OSError as error:
                if self._failed_s is None:
                    logger.error("the trace is not recorded for now: %s", error)
                self._failed_s = now_s
                self._on_dropped(len(records) - done)
                return
        if self._failed_s is not None and records:
            logger.info("the trace is recorded again")
            self._failed_s = None


def line(record: Record, key: bytes) -> str:
    """The record as one line of JSON; what is not known is not there. key: of the prefix hashes."""
    values: dict[str, Any] = {
        "at": round(record.at, 6),
        "node": record.node,
        "tier": record.tier,
        "model": record.model,
        "prompt_tokens": len(record.prompt),
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "max_tokens": record.max_tokens,
        "max_wait_s": _rounded(record.max_wait_s),
        "deadline_s": _rounded(record.deadline_s),
        "queue_s": _rounded(record.queue_s),
        "ttft_s": _rounded(record.ttft_s),
        "end_s": _rounded(record.end_s),
        "end": record.end,
        "preemptions": record.preemptions,
    }
    prefix = prefix_ids(record.prompt, record.domain, key)
    if prefix:
        values |= {"prefix_block": BLOCK_TOKENS, "prefix": prefix}
    return json.dumps({name: value for name, value in values.items() if value is not None}, separators=(",", ":"))


def open_recorder(state_dir: Path, max_bytes: int, clock: Clock, on_dropped: Callable[[int], None]) -> TraceRecorder:
    """A recorder that writes below the state folder. Raises OSError if that is open to others."""
    return TraceRecorder(TraceFiles(state_dir, max_bytes), clock, on_dropped)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
