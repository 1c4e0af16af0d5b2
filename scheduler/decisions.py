"""What was decided about requests lately: a bounded memory for those who ask why. Written where something happens to a request
(it gets in, it is evicted), never in a step in which all just decode."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from fairlane.scheduler.events import PreemptionKind, PreemptionReason
from fairlane.scheduler.request import Payer, RequestId, Sequence

_EVICTIONS = 4096
_ADMISSIONS = 256
_TOLD = 16
# A rate is that of so long, and known from so many admissions on.
_WINDOW_S = 60.0
_FEWEST = 4


@dataclass(frozen=True, slots=True)
class Eviction:
    """at_s: of the engine's clock. by: who got the blocks."""

    at_s: float
    request_id: RequestId
    kind: PreemptionKind
    reason: PreemptionReason
    by: Payer


class DecisionLog:
    """The newest evictions and admissions."""

    def __init__(self) -> None:
        self._evictions: deque[Eviction] = deque(maxlen=_EVICTIONS)
        self._admissions: deque[float] = deque(maxlen=_ADMISSIONS)
        self.evictions_by_reason = Counter[PreemptionReason]()  # since the start

    def admitted(self, now_s: float) -> None:
        self._admissions.append(now_s)

    def evicted(self, sequence: Sequence, kind: PreemptionKind, reason: PreemptionReason, now_s: float, by: Payer) -> None:
        self._evictions.append(Eviction(now_s, sequence.request_id, kind, reason, by))
        self.evictions_by_reason[reason] += 1

    def evictions_of(self, request_id: RequestId) -> list[Eviction]:
        """The last few, oldest first."""
        return [eviction for eviction in self._evictions if eviction.request_id == request_id][-_TOLD:]

    def admissions_per_s(self, now_s: float) -> float | None:
        """How often a request got in over the last minute; None where too few did to tell."""
        recent = [at_s for at_s in self._admissions if now_s - at_s < _WINDOW_S]
        if len(recent) < _FEWEST or now_s <= recent[0]:
            return None
        return len(recent) / (now_s - recent[0])
