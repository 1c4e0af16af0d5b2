from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShadowKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHADOW_KIND_UNSPECIFIED: _ClassVar[ShadowKind]
    SHADOW_KIND_INSTEAD: _ClassVar[ShadowKind]
    SHADOW_KIND_SOONER: _ClassVar[ShadowKind]
    SHADOW_KIND_LATER: _ClassVar[ShadowKind]
    SHADOW_KIND_EVICTS: _ClassVar[ShadowKind]
    SHADOW_KIND_SPARES: _ClassVar[ShadowKind]
    SHADOW_KIND_PAUSES: _ClassVar[ShadowKind]
    SHADOW_KIND_RUNS: _ClassVar[ShadowKind]
    SHADOW_KIND_CUTS: _ClassVar[ShadowKind]
SHADOW_KIND_UNSPECIFIED: ShadowKind
SHADOW_KIND_INSTEAD: ShadowKind
SHADOW_KIND_SOONER: ShadowKind
SHADOW_KIND_LATER: ShadowKind
SHADOW_KIND_EVICTS: ShadowKind
SHADOW_KIND_SPARES: ShadowKind
SHADOW_KIND_PAUSES: ShadowKind
SHADOW_KIND_RUNS: ShadowKind
SHADOW_KIND_CUTS: ShadowKind

class ShadowReport(_message.Message):
    __slots__ = ("sha256", "fault", "over_s", "spent_s", "steps", "different_steps", "admissions", "evictions", "rows", "largest", "totals")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    OVER_S_FIELD_NUMBER: _ClassVar[int]
    SPENT_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DIFFERENT_STEPS_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    fault: str
    over_s: float
    spent_s: float
    steps: int
    different_steps: int
    admissions: int
    evictions: int
    rows: _containers.RepeatedCompositeFieldContainer[ShadowRow]
    largest: _containers.RepeatedCompositeFieldContainer[ShadowDifference]
    totals: _containers.RepeatedCompositeFieldContainer[ShadowTotal]
    def __init__(self, sha256: _Optional[str] = ..., fault: _Optional[str] = ..., over_s: _Optional[float] = ..., spent_s: _Optional[float] = ..., steps: _Optional[int] = ..., different_steps: _Optional[int] = ..., admissions: _Optional[int] = ..., evictions: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[ShadowRow, _Mapping]]] = ..., largest: _Optional[_Iterable[_Union[ShadowDifference, _Mapping]]] = ..., totals: _Optional[_Iterable[_Union[ShadowTotal, _Mapping]]] = ...) -> None: ...

class ShadowRow(_message.Message):
    __slots__ = ("tier", "node", "steps", "instead", "sooner", "displaced", "later", "evicting", "evicted", "spared", "not_evicting", "paused", "not_paused", "cut_tokens")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_FIELD_NUMBER: _ClassVar[int]
    SOONER_FIELD_NUMBER: _ClassVar[int]
    DISPLACED_FIELD_NUMBER: _ClassVar[int]
    LATER_FIELD_NUMBER: _ClassVar[int]
    EVICTING_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    SPARED_FIELD_NUMBER: _ClassVar[int]
    NOT_EVICTING_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    NOT_PAUSED_FIELD_NUMBER: _ClassVar[int]
    CUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tier: str
    node: str
    steps: int
    instead: int
    sooner: int
    displaced: int
    later: int
    evicting: int
    evicted: int
    spared: int
    not_evicting: int
    paused: int
    not_paused: int
    cut_tokens: int
    def __init__(self, tier: _Optional[str] = ..., node: _Optional[str] = ..., steps: _Optional[int] = ..., instead: _Optional[int] = ..., sooner: _Optional[int] = ..., displaced: _Optional[int] = ..., later: _Optional[int] = ..., evicting: _Optional[int] = ..., evicted: _Optional[int] = ..., spared: _Optional[int] = ..., not_evicting: _Optional[int] = ..., paused: _Optional[int] = ..., not_paused: _Optional[int] = ..., cut_tokens: _Optional[int] = ...) -> None: ...

class ShadowDifference(_message.Message):
    __slots__ = ("kind", "whom_tier", "whom_node", "other_tier", "other_node", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WHOM_TIER_FIELD_NUMBER: _ClassVar[int]
    WHOM_NODE_FIELD_NUMBER: _ClassVar[int]
    OTHER_TIER_FIELD_NUMBER: _ClassVar[int]
    OTHER_NODE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: ShadowKind
    whom_tier: str
    whom_node: str
    other_tier: str
    other_node: str
    count: int
    def __init__(self, kind: _Optional[_Union[ShadowKind, str]] = ..., whom_tier: _Optional[str] = ..., whom_node: _Optional[str] = ..., other_tier: _Optional[str] = ..., other_node: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class ShadowTotal(_message.Message):
    __slots__ = ("kind", "tier", "count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: ShadowKind
    tier: str
    count: int
    def __init__(self, kind: _Optional[_Union[ShadowKind, str]] = ..., tier: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...
