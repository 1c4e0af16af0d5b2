"""Tells a worker that is alive from one that is not, and one that has nothing to do from one that is stuck. Decides by what
the worker says (transport keepalive cannot see a hung interpreter); acting on the verdict is the worker client's business."""

from __future__ import annotations

from fairlane.protos.fairlane.v1 import worker_pb2 as pb


class Liveness:
    """Call `heard` for each message of the worker and `verdict` about every `interval_s`; times are the clock's seconds."""

    __slots__ = ("_advanced_s", "_busy", "_checked_s", "_heard_s", "_interval_s", "_step_id", "_step_running_s", "_timeout_s")

    def __init__(self, now_s: float, timeout_s: float, interval_s: float) -> None:
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._checked_s = now_s
        self._heard_s = now_s
        self._advanced_s = now_s
        self._step_id = -1
        self._step_running_s = 0.0
        self._busy = False

    def heard(self, message: pb.FromWorker, now_s: float) -> None:
        """Any message proves the process lives; only a new step id (or having nothing to do) proves progress."""
        self._heard_s = now_s
        which = message.WhichOneof("message")
        if which == "pong":
            pong = message.pong
            self._busy = pong.running + pong.waiting > 0
            self._step_running_s = pong.step_running_s
            self._advance(pong.step_id, now_s)
        elif which == "deltas":
            self._step_running_s = 0.0
            self._advance(message.deltas.step_id, now_s)

    def verdict(self, now_s: float) -> str | None:
        """Why the worker is lost, or None."""
        late_s = now_s - self._checked_s - self._interval_s
        self._checked_s = now_s
        if late_s > self._interval_s:
            # We ourselves stood still (suspended, starved): the worker's messages may be waiting unread. Not its fault.
            self._heard_s += late_s
            self._advanced_s += late_s
        if now_s - self._heard_s > self._timeout_s:
            return f"silent for {now_s - self._heard_s:.1f} s"
        if self._step_running_s > self._timeout_s:
            return f"one step has been running for {self._step_running_s:.1f} s"
        if self._busy and now_s - self._advanced_s > self._timeout_s:
            return f"has work but no new step for {now_s - self._advanced_s:.1f} s"
        return None

    def _advance(self, step_id: int, now_s: float) -> None:
        if step_id != self._step_id or not self._busy:
            self._advanced_s = now_s
        self._step_id = step_id
