"""What the handlers of the Admin service share: the parts of the gateway they look at and turn, who is asking, and how facts
become messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fairlane.errors import FieldViolation, InvalidRequest
from fairlane.gateway.admission import Admission
from fairlane.gateway.explainer import Explainer
from fairlane.gateway.history import PolicyHistory
from fairlane.gateway.overrides import Overrides
from fairlane.gateway.policy_in_force import PolicyInForce
from fairlane.gateway.reload import PolicyReloader
from fairlane.gateway.worker_client import WorkerClient
from fairlane.protos.fairlane.v1 import admin_pb2 as pb

Context: TypeAlias = grpc.aio.ServicerContext

OPERATOR_METADATA = "fairlane-operator"
MAX_DURATION_S = 366 * 86400.0

_OPERATOR = re.compile(r"[A-Za-z0-9._@-]{1,64}")
# "tenants.yaml:7:5: tiers.gold.weight: what is allowed"
_FINDING = re.compile(r"(?P<location>.+?:\d+:\d+): (?P<message>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class AdminParts:
    """drain: begins a drain and returns at once. reloader: None where the policy does not come from a file."""

    admission: Admission
    worker: WorkerClient
    in_force: PolicyInForce
    overrides: Overrides
    history: PolicyHistory
    reloader: PolicyReloader | None
    explainer: Explainer
    drain: Callable[[], None]


def operator(context: Context) -> str:
    """Who asks, for the audit log: everybody has the one admin key, so the name is what the client claims."""
    names = [value for name, value in context.invocation_metadata() or () if name == OPERATOR_METADATA]
    name = names[0] if len(names) == 1 and isinstance(names[0], str) and _OPERATOR.fullmatch(names[0]) else "admin"
    return f"{name} from {context.peer()}"


def seconds(duration: Duration, *, given: bool) -> float | None:
    """None if it was not given. Raises InvalidRequest for one that is not positive or longer than a year."""
    if not given:
        return None
    value = duration.seconds + duration.nanos / 1e9
    if not 0 < value <= MAX_DURATION_S:
        raise InvalidRequest([FieldViolation("duration", "must be longer than 0 s and at most 366 days")])
    return value


def timestamp(epoch_s: float) -> Timestamp:
    whole = int(epoch_s)
    return Timestamp(seconds=whole, nanos=int((epoch_s - whole) * 1e9))


def finding(text: str, *, error: bool) -> pb.PolicyFinding:
    match = _FINDING.fullmatch(text)
    if match is None:
        return pb.PolicyFinding(message=text, error=error)
    return pb.PolicyFinding(location=match["location"], message=match["message"], error=error)
