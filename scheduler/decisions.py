"""What was decided about requests lately: a bounded memory for those who ask why. Written where something happens to a request
(it is evicted), never in a step in which all just decode."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from fairlane.scheduler.events import PreemptionKind, PreemptionReason
from fairlane.scheduler.request import Payer, RequestId, Sequence

_EVICTIONS = 4096
_TOLD = 16


@dataclass(frozen=True, slots=True)
class Eviction:
    """at_s: of the engine's clock. by: who got the blocks."""

    at_s: float
    request_id: RequestId
    kind: PreemptionKind
    reason: PreemptionReason
    by: Payer


class DecisionLog:
    """The newest evictions."""

    def __init__(self) -> None:
        self._evictions: deque[Eviction] = deque(maxlen=_EVICTIONS)
        self.evictions_by_reason = Counter[PreemptionReason]()  # since the start

    def evicted(self, sequence: Sequence, kind: PreemptionKind, reason: PreemptionReason, now_s: float, by: Payer) -> None:
        self._evictions.append(Eviction(now_s, sequence.request_id, kind, reason, by))
        self.evictions_by_reason[reason] += 1

    def evictions_of(self, request_id: RequestId) -> list[Eviction]:
        """The last few, oldest first."""
        return [eviction for eviction in self._evictions if eviction.request_id == request_id][-_TOLD:]
