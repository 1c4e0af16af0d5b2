"""Everything that happened, as one digest: two runs with equal digests did the same things at the same times."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from fairlane.scheduler.events import Delta
from fairlane.scheduler.output import ScheduleOutput

_HEAD = struct.Struct("<BIdQ")  # kind, worker, time, step or request
_ENTRY = struct.Struct("<QQQB")
_STEP, _DECODES, _DELTA, _ARRIVAL = range(4)


class EventLog:
    """SHA-256 over arrivals, steps and what was told of requests, in the order in which they happened."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._decode_slots: dict[int, Sequence[int]] = {}
        self.num_events = 0

    def arrival(self, worker: int, time_s: float, request_id: int) -> None:
        self._write(_HEAD.pack(_ARRIVAL, worker, time_s, request_id))

    def step(self, worker: int, time_s: float, output: ScheduleOutput) -> None:
        """A launch. The column of decodes is written when it is another than before."""
        line = _HEAD.pack(_STEP, worker, time_s, output.step_id)
        for entry in output.scheduled:
            line += _ENTRY.pack(entry.slot, entry.start, entry.num_tokens, entry.sample)
        slots = output.decode_slots
        if slots is not self._decode_slots.get(worker):
            self._decode_slots[worker] = slots
            line += _HEAD.pack(_DECODES, worker, time_s, len(slots)) + struct.pack(f"<{len(slots)}I", *slots)
        self._write(line)

    def delta(self, worker: int, time_s: float, delta: Delta) -> None:
        what = (
            delta.queue_position,
            delta.started is not None,
            len(delta.token_ids),
            None if delta.preempted is None else tuple(part.value for part in delta.preempted),
            None if delta.ended is None else delta.ended.reason.value,
        )
        self._write(_HEAD.pack(_DELTA, worker, time_s, delta.request_id) + repr(what).encode())

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def _write(self, line: bytes) -> None:
        self._digest.update(line)
        self.num_events += 1
