import datetime

from fairlane.protos.fairlane.v1 import explain_pb2 as _explain_pb2
from fairlane.protos.fairlane.v1 import shadow_pb2 as _shadow_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("ready", "epoch", "step_id", "running", "waiting", "blocks_total", "blocks_used", "blocks_cached", "block_utilization_ratio", "fragmentation_rate", "preemptions", "policy_generation", "pid", "swaps_out", "swaps_in", "host_blocks_used", "host_blocks_total")
    READY_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_UTILIZATION_RATIO_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_RATE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    POLICY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SWAPS_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAPS_IN_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    ready: bool
    epoch: int
    step_id: int
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    block_utilization_ratio: float
    fragmentation_rate: float
    preemptions: int
    policy_generation: int
    pid: int
    swaps_out: int
    swaps_in: int
    host_blocks_used: int
    host_blocks_total: int
    def __init__(self, ready: bool = ..., epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., block_utilization_ratio: _Optional[float] = ..., fragmentation_rate: _Optional[float] = ..., preemptions: _Optional[int] = ..., policy_generation: _Optional[int] = ..., pid: _Optional[int] = ..., swaps_out: _Optional[int] = ..., swaps_in: _Optional[int] = ..., host_blocks_used: _Optional[int] = ..., host_blocks_total: _Optional[int] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "in_flight", "waiting")
    NODE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    node: str
    in_flight: int
    waiting: int
    def __init__(self, node: _Optional[str] = ..., in_flight: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class PolicyStatus(_message.Message):
    __slots__ = ("generation", "sha256", "path", "applied_at", "error", "load_failures", "reloads", "warnings")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    APPLIED_AT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOAD_FAILURES_FIELD_NUMBER: _ClassVar[int]
    RELOADS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    sha256: str
    path: str
    applied_at: _timestamp_pb2.Timestamp
    error: _containers.RepeatedScalarFieldContainer[str]
    load_failures: int
    reloads: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generation: _Optional[int] = ..., sha256: _Optional[str] = ..., path: _Optional[str] = ..., applied_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., error: _Optional[_Iterable[str]] = ..., load_failures: _Optional[int] = ..., reloads: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("model", "draining", "in_flight", "nodes", "tiers", "worker", "policy", "overrides", "shadow")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    model: str
    draining: bool
    in_flight: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    tiers: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    worker: WorkerStatus
    policy: PolicyStatus
    overrides: _containers.RepeatedCompositeFieldContainer[Override]
    shadow: ShadowStatus
    def __init__(self, model: _Optional[str] = ..., draining: bool = ..., in_flight: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., worker: _Optional[_Union[WorkerStatus, _Mapping]] = ..., policy: _Optional[_Union[PolicyStatus, _Mapping]] = ..., overrides: _Optional[_Iterable[_Union[Override, _Mapping]]] = ..., shadow: _Optional[_Union[ShadowStatus, _Mapping]] = ...) -> None: ...

class GetPolicyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPolicyResponse(_message.Message):
    __slots__ = ("text", "sha256", "generation", "path")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    text: str
    sha256: str
    generation: int
    path: str
    def __init__(self, text: _Optional[str] = ..., sha256: _Optional[str] = ..., generation: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class CheckPolicyRequest(_message.Message):
    __slots__ = ("text", "name")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    text: str
    name: str
    def __init__(self, text: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class PolicyFinding(_message.Message):
    __slots__ = ("location", "message", "error")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    location: str
    message: str
    error: bool
    def __init__(self, location: _Optional[str] = ..., message: _Optional[str] = ..., error: bool = ...) -> None: ...

class CheckPolicyResponse(_message.Message):
    __slots__ = ("ok", "findings")
    OK_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    findings: _containers.RepeatedCompositeFieldContainer[PolicyFinding]
    def __init__(self, ok: bool = ..., findings: _Optional[_Iterable[_Union[PolicyFinding, _Mapping]]] = ...) -> None: ...

class PlanPolicyRequest(_message.Message):
    __slots__ = ("text", "name")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    text: str
    name: str
    def __init__(self, text: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class PolicyChange(_message.Message):
    __slots__ = ("kind", "what", "name", "key", "before", "after", "before_from", "after_from", "moved_from", "enforced", "tenants", "members")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[PolicyChange.Kind]
        KIND_ADDED: _ClassVar[PolicyChange.Kind]
        KIND_REMOVED: _ClassVar[PolicyChange.Kind]
        KIND_CHANGED: _ClassVar[PolicyChange.Kind]
        KIND_MOVED: _ClassVar[PolicyChange.Kind]
    KIND_UNSPECIFIED: PolicyChange.Kind
    KIND_ADDED: PolicyChange.Kind
    KIND_REMOVED: PolicyChange.Kind
    KIND_CHANGED: PolicyChange.Kind
    KIND_MOVED: PolicyChange.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FROM_FIELD_NUMBER: _ClassVar[int]
    AFTER_FROM_FIELD_NUMBER: _ClassVar[int]
    MOVED_FROM_FIELD_NUMBER: _ClassVar[int]
    ENFORCED_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    kind: PolicyChange.Kind
    what: str
    name: str
    key: str
    before: str
    after: str
    before_from: str
    after_from: str
    moved_from: str
    enforced: bool
    tenants: int
    members: int
    def __init__(self, kind: _Optional[_Union[PolicyChange.Kind, str]] = ..., what: _Optional[str] = ..., name: _Optional[str] = ..., key: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., before_from: _Optional[str] = ..., after_from: _Optional[str] = ..., moved_from: _Optional[str] = ..., enforced: bool = ..., tenants: _Optional[int] = ..., members: _Optional[int] = ...) -> None: ...

class PolicyNote(_message.Message):
    __slots__ = ("subject", "message", "risk", "in_flight", "waiting")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RISK_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    subject: str
    message: str
    risk: bool
    in_flight: int
    waiting: int
    def __init__(self, subject: _Optional[str] = ..., message: _Optional[str] = ..., risk: bool = ..., in_flight: _Optional[int] = ..., waiting: _Optional[int] = ...) -> None: ...

class PlanPolicyResponse(_message.Message):
    __slots__ = ("ok", "findings", "changes", "notes", "old_sha256", "new_sha256", "generation")
    OK_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    OLD_SHA256_FIELD_NUMBER: _ClassVar[int]
    NEW_SHA256_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ok: bool
    findings: _containers.RepeatedCompositeFieldContainer[PolicyFinding]
    changes: _containers.RepeatedCompositeFieldContainer[PolicyChange]
    notes: _containers.RepeatedCompositeFieldContainer[PolicyNote]
    old_sha256: str
    new_sha256: str
    generation: int
    def __init__(self, ok: bool = ..., findings: _Optional[_Iterable[_Union[PolicyFinding, _Mapping]]] = ..., changes: _Optional[_Iterable[_Union[PolicyChange, _Mapping]]] = ..., notes: _Optional[_Iterable[_Union[PolicyNote, _Mapping]]] = ..., old_sha256: _Optional[str] = ..., new_sha256: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class ApplyPolicyRequest(_message.Message):
    __slots__ = ("text", "expected_sha256")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SHA256_FIELD_NUMBER: _ClassVar[int]
    text: str
    expected_sha256: str
    def __init__(self, text: _Optional[str] = ..., expected_sha256: _Optional[str] = ...) -> None: ...

class ApplyPolicyResponse(_message.Message):
    __slots__ = ("generation", "sha256", "findings", "unchanged")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    UNCHANGED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    sha256: str
    findings: _containers.RepeatedCompositeFieldContainer[PolicyFinding]
    unchanged: bool
    def __init__(self, generation: _Optional[int] = ..., sha256: _Optional[str] = ..., findings: _Optional[_Iterable[_Union[PolicyFinding, _Mapping]]] = ..., unchanged: bool = ...) -> None: ...

class ShadowPolicyRequest(_message.Message):
    __slots__ = ("text", "name")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    text: str
    name: str
    def __init__(self, text: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ShadowPolicyResponse(_message.Message):
    __slots__ = ("sha256", "generation", "findings")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    generation: int
    findings: _containers.RepeatedCompositeFieldContainer[PolicyFinding]
    def __init__(self, sha256: _Optional[str] = ..., generation: _Optional[int] = ..., findings: _Optional[_Iterable[_Union[PolicyFinding, _Mapping]]] = ...) -> None: ...

class GetShadowRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopShadowRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShadowStatus(_message.Message):
    __slots__ = ("running", "name", "sha256", "since", "dropped", "report")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    running: bool
    name: str
    sha256: str
    since: _timestamp_pb2.Timestamp
    dropped: str
    report: _shadow_pb2.ShadowReport
    def __init__(self, running: bool = ..., name: _Optional[str] = ..., sha256: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., dropped: _Optional[str] = ..., report: _Optional[_Union[_shadow_pb2.ShadowReport, _Mapping]] = ...) -> None: ...

class ListPolicyHistoryRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PolicyHistoryEntry(_message.Message):
    __slots__ = ("generation", "sha256", "applied_at", "origin", "in_force")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    APPLIED_AT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    IN_FORCE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    sha256: str
    applied_at: _timestamp_pb2.Timestamp
    origin: str
    in_force: bool
    def __init__(self, generation: _Optional[int] = ..., sha256: _Optional[str] = ..., applied_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., origin: _Optional[str] = ..., in_force: bool = ...) -> None: ...

class ListPolicyHistoryResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[PolicyHistoryEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[PolicyHistoryEntry, _Mapping]]] = ...) -> None: ...

class RollbackPolicyRequest(_message.Message):
    __slots__ = ("generation", "expected_sha256")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SHA256_FIELD_NUMBER: _ClassVar[int]
    generation: int
    expected_sha256: str
    def __init__(self, generation: _Optional[int] = ..., expected_sha256: _Optional[str] = ...) -> None: ...

class Override(_message.Message):
    __slots__ = ("kind", "name", "since", "until", "by")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Override.Kind]
        KIND_SUSPEND_NODE: _ClassVar[Override.Kind]
        KIND_PAUSE_TIER: _ClassVar[Override.Kind]
        KIND_REVOKE_KEY: _ClassVar[Override.Kind]
    KIND_UNSPECIFIED: Override.Kind
    KIND_SUSPEND_NODE: Override.Kind
    KIND_PAUSE_TIER: Override.Kind
    KIND_REVOKE_KEY: Override.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    kind: Override.Kind
    name: str
    since: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    by: str
    def __init__(self, kind: _Optional[_Union[Override.Kind, str]] = ..., name: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., by: _Optional[str] = ...) -> None: ...

class ListOverridesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListOverridesResponse(_message.Message):
    __slots__ = ("overrides",)
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    overrides: _containers.RepeatedCompositeFieldContainer[Override]
    def __init__(self, overrides: _Optional[_Iterable[_Union[Override, _Mapping]]] = ...) -> None: ...

class OverrideResponse(_message.Message):
    __slots__ = ("override", "aborted", "persisted")
    OVERRIDE_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    PERSISTED_FIELD_NUMBER: _ClassVar[int]
    override: Override
    aborted: int
    persisted: bool
    def __init__(self, override: _Optional[_Union[Override, _Mapping]] = ..., aborted: _Optional[int] = ..., persisted: bool = ...) -> None: ...

class LiftResponse(_message.Message):
    __slots__ = ("lifted", "persisted")
    LIFTED_FIELD_NUMBER: _ClassVar[int]
    PERSISTED_FIELD_NUMBER: _ClassVar[int]
    lifted: bool
    persisted: bool
    def __init__(self, lifted: bool = ..., persisted: bool = ...) -> None: ...

class SuspendNodeRequest(_message.Message):
    __slots__ = ("node", "abort", "duration")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    node: str
    abort: bool
    duration: _duration_pb2.Duration
    def __init__(self, node: _Optional[str] = ..., abort: bool = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ResumeNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class PauseTierRequest(_message.Message):
    __slots__ = ("tier", "duration")
    TIER_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    tier: str
    duration: _duration_pb2.Duration
    def __init__(self, tier: _Optional[str] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ResumeTierRequest(_message.Message):
    __slots__ = ("tier",)
    TIER_FIELD_NUMBER: _ClassVar[int]
    tier: str
    def __init__(self, tier: _Optional[str] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("key", "abort", "duration")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    key: str
    abort: bool
    duration: _duration_pb2.Duration
    def __init__(self, key: _Optional[str] = ..., abort: bool = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RestoreKeyRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class ListRequestsRequest(_message.Message):
    __slots__ = ("node", "tier", "limit")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    node: str
    tier: str
    limit: int
    def __init__(self, node: _Optional[str] = ..., tier: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class RequestInfo(_message.Message):
    __slots__ = ("node", "request_id", "tier", "key_id", "started", "age_s", "policy_generation")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    node: str
    request_id: str
    tier: str
    key_id: str
    started: bool
    age_s: float
    policy_generation: int
    def __init__(self, node: _Optional[str] = ..., request_id: _Optional[str] = ..., tier: _Optional[str] = ..., key_id: _Optional[str] = ..., started: bool = ..., age_s: _Optional[float] = ..., policy_generation: _Optional[int] = ...) -> None: ...

class ListRequestsResponse(_message.Message):
    __slots__ = ("requests", "total")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[RequestInfo]
    total: int
    def __init__(self, requests: _Optional[_Iterable[_Union[RequestInfo, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("node", "request_id")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    node: str
    request_id: str
    def __init__(self, node: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class CancelRequestRequest(_message.Message):
    __slots__ = ("node", "request_id")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    node: str
    request_id: str
    def __init__(self, node: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class CancelRequestResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
