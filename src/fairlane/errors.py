"""The one tree of errors that users can meet, and the one table that maps their reasons to gRPC status names.

An error is raised where the fact is known and translated once, at the edge (gateway/interceptors). A reason is stable API:
clients switch on it; the message is for people and may change. No message carries prompt text or a secret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Code(Enum):
    """gRPC status codes Fairlane answers with, by their canonical names."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


# reason -> code. RESOURCE_EXHAUSTED: the caller's own limit; UNAVAILABLE: us, try again; FAILED_PRECONDITION: never here.
REASONS: Mapping[str, Code] = {
    "INVALID_REQUEST": Code.INVALID_ARGUMENT,
    "MALFORMED_REQUEST": Code.INVALID_ARGUMENT,
    "PROMPT_TOO_LARGE": Code.INVALID_ARGUMENT,
    "POLICY_INVALID": Code.INVALID_ARGUMENT,
    "CONTEXT_LENGTH_EXCEEDED": Code.INVALID_ARGUMENT,
    "TIER_UNKNOWN": Code.INVALID_ARGUMENT,
    "UNAUTHENTICATED": Code.UNAUTHENTICATED,
    "TIER_NOT_ALLOWED": Code.PERMISSION_DENIED,
    "TENANT_MISMATCH": Code.PERMISSION_DENIED,
    "SUSPENDED": Code.PERMISSION_DENIED,
    "MODEL_NOT_FOUND": Code.NOT_FOUND,
    "REQUEST_NOT_FOUND": Code.NOT_FOUND,
    "NODE_NOT_FOUND": Code.NOT_FOUND,
    "KEY_NOT_FOUND": Code.NOT_FOUND,
    "GENERATION_NOT_FOUND": Code.NOT_FOUND,
    "REQUEST_ID_IN_USE": Code.ALREADY_EXISTS,
    "KV_CAPACITY_EXCEEDED": Code.FAILED_PRECONDITION,
    "NO_TOKENIZER": Code.FAILED_PRECONDITION,
    "NO_CHAT_TEMPLATE": Code.FAILED_PRECONDITION,
    "POLICY_READ_ONLY": Code.FAILED_PRECONDITION,
    "POLICY_CONFLICT": Code.FAILED_PRECONDITION,
    "POLICY_REFUSED": Code.FAILED_PRECONDITION,
    "MAX_IN_FLIGHT": Code.RESOURCE_EXHAUSTED,
    "MAX_MEMBERS": Code.RESOURCE_EXHAUSTED,
    "QUEUE_FULL": Code.RESOURCE_EXHAUSTED,
    "QUEUE_TIMEOUT": Code.RESOURCE_EXHAUSTED,
    "SLOW_CONSUMER": Code.RESOURCE_EXHAUSTED,
    "DEADLINE_EXCEEDED": Code.DEADLINE_EXCEEDED,
    "CANCELLED": Code.CANCELLED,
    "NO_READY_WORKER": Code.UNAVAILABLE,
    "WORKER_LOST": Code.UNAVAILABLE,
    "DRAINING": Code.UNAVAILABLE,
    "OVERLOADED": Code.UNAVAILABLE,
    "TIER_PAUSED": Code.UNAVAILABLE,
    "WORKER_PROTOCOL": Code.INTERNAL,
    "STEP_FAILED": Code.INTERNAL,
    "NUMERICAL_ERROR": Code.INTERNAL,
    "INTERNAL": Code.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One bad field: its path in the request (`sampling.top_p`) and what is allowed there."""

    field: str
    description: str


class FairlaneError(Exception):
    """Base of everything a caller may see: a reason out of REASONS, a message, metadata for machines.

    `retry_after_s` None means: do not retry as is.
    """

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        metadata: Mapping[str, str] | None = None,
        violations: Sequence[FieldViolation] = (),
        retry_after_s: float | None = None,
    ) -> None:
        if reason not in REASONS:
            raise KeyError(f"unknown error reason {reason!r}")
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = dict(metadata or {})
        self.violations = tuple(violations)
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> Code:
        return REASONS[self.reason]


class InvalidRequest(FairlaneError):
    """One or more fields are out of bounds; every violation found is listed, so that one round trip is enough."""

    def __init__(self, violations: Sequence[FieldViolation], reason: str = "INVALID_REQUEST") -> None:
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        super().__init__(reason, text, violations=violations)


class ConfigError(Exception):
    """A configuration or policy file is wrong. `findings` holds every one as `file:line:col: path: what is allowed`."""

    def __init__(self, findings: Sequence[str]) -> None:
        super().__init__("\n".join(findings))
        self.findings = tuple(findings)
