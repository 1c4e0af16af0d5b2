from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("ready", "epoch", "step_id", "running", "waiting", "blocks_total", "blocks_used", "blocks_cached", "block_utilization_ratio", "fragmentation_rate", "preemptions", "policy_generation", "pid")
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
    def __init__(self, ready: bool = ..., epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., block_utilization_ratio: _Optional[float] = ..., fragmentation_rate: _Optional[float] = ..., preemptions: _Optional[int] = ..., policy_generation: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "in_flight")
    NODE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    node: str
    in_flight: int
    def __init__(self, node: _Optional[str] = ..., in_flight: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("model", "draining", "in_flight", "nodes", "tiers", "worker")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    model: str
    draining: bool
    in_flight: int
    nodes: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    tiers: _containers.RepeatedCompositeFieldContainer[NodeStatus]
    worker: WorkerStatus
    def __init__(self, model: _Optional[str] = ..., draining: bool = ..., in_flight: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., tiers: _Optional[_Iterable[_Union[NodeStatus, _Mapping]]] = ..., worker: _Optional[_Union[WorkerStatus, _Mapping]] = ...) -> None: ...

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

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
