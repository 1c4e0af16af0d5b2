"""What the engine tells about requests: per step one Delta for each of which there is something to tell, and, where that is
one more token and nothing else, one place in a column instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from fairlane.scheduler.request import RequestId


class EndReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"


class PreemptionKind(Enum):
    PAUSED = "paused"
    SWAPPED = "swapped"
    RECOMPUTED = "recomputed"


class PreemptionReason(Enum):
    HIGHER_RANK = "higher_rank"
    KV_CAPACITY = "kv_capacity"
    KV_GUARANTEE = "kv_guarantee"
    KV_LIMIT = "kv_limit"
    CEIL = "ceil"


@dataclass(frozen=True, slots=True)
class Started:
    """First placed in a step, after queue_s of waiting, with cached_tokens of its prompt from the prefix cache."""

    cached_tokens: int
    queue_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The one terminal outcome. error_reason is a key of fairlane.errors.REASONS when reason is FAILED."""

    reason: EndReason
    stop_token_id: int | None = None
    error_reason: str = ""
    error_message: str = ""
    preemptions: int = 0
    recomputed_tokens: int = 0
    queue_s: float = 0.0


@dataclass(slots=True)
class Delta:
    """What happened to one request in one step: queued, started or resumed first, then tokens, then preempted or ended.

    estimated_wait_s: of one that is queued, until its first step; None: not known.
    """

    request_id: RequestId
    queue_position: int | None = None
    estimated_wait_s: float | None = None
    started: Started | None = None
    resumed_after_s: float | None = None
    token_ids: list[int] = field(default_factory=list)
    preempted: tuple[PreemptionKind, PreemptionReason] | None = None
    ended: Ended | None = None


@dataclass(frozen=True, slots=True)
class DecodedTokens:
    """One token each, token_ids[i] for request_ids[i]. Read-only: the lists live on in the scheduler. They come before what the
    same step's Deltas tell."""

    request_ids: list[RequestId]
    token_ids: list[int]

    def as_deltas(self) -> Iterator[Delta]:
        """The same, one by one."""
        for request_id, token in zip(self.request_ids, self.token_ids, strict=True):
            yield Delta(request_id, token_ids=[token])
