from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Party(_message.Message):
    __slots__ = ("tier", "node", "requests", "evictable")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    node: str
    requests: int
    evictable: int
    def __init__(self, tier: _Optional[str] = ..., node: _Optional[str] = ..., requests: _Optional[int] = ..., evictable: _Optional[int] = ...) -> None: ...

class BindingCap(_message.Message):
    __slots__ = ("node", "limit", "running")
    NODE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    node: str
    limit: int
    running: int
    def __init__(self, node: _Optional[str] = ..., limit: _Optional[int] = ..., running: _Optional[int] = ...) -> None: ...

class BindingCeil(_message.Message):
    __slots__ = ("node", "tier", "share", "opens_in_s")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    OPENS_IN_S_FIELD_NUMBER: _ClassVar[int]
    node: str
    tier: str
    share: float
    opens_in_s: float
    def __init__(self, node: _Optional[str] = ..., tier: _Optional[str] = ..., share: _Optional[float] = ..., opens_in_s: _Optional[float] = ...) -> None: ...

class KVAccount(_message.Message):
    __slots__ = ("node", "used", "guarantee", "limit", "is_full")
    NODE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    GUARANTEE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    IS_FULL_FIELD_NUMBER: _ClassVar[int]
    node: str
    used: int
    guarantee: int
    limit: int
    is_full: bool
    def __init__(self, node: _Optional[str] = ..., used: _Optional[int] = ..., guarantee: _Optional[int] = ..., limit: _Optional[int] = ..., is_full: bool = ...) -> None: ...

class EvictionRecord(_message.Message):
    __slots__ = ("ago_s", "kind", "reason", "by_tier", "by_node")
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    BY_TIER_FIELD_NUMBER: _ClassVar[int]
    BY_NODE_FIELD_NUMBER: _ClassVar[int]
    ago_s: float
    kind: str
    reason: str
    by_tier: str
    by_node: str
    def __init__(self, ago_s: _Optional[float] = ..., kind: _Optional[str] = ..., reason: _Optional[str] = ..., by_tier: _Optional[str] = ..., by_node: _Optional[str] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("state", "tier", "waited_s", "reasons", "rank", "ahead", "holders", "caps", "blocks_needed", "blocks_free", "blocks_missing", "is_owed", "estimated_start_s", "preemptions", "evictions", "computed_tokens", "tokens", "is_partial", "kv_accounts", "ceilings")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[Explanation.State]
        STATE_ARRIVED: _ClassVar[Explanation.State]
        STATE_WAITING: _ClassVar[Explanation.State]
        STATE_RUNNING: _ClassVar[Explanation.State]
        STATE_PAUSED: _ClassVar[Explanation.State]
    STATE_UNSPECIFIED: Explanation.State
    STATE_ARRIVED: Explanation.State
    STATE_WAITING: Explanation.State
    STATE_RUNNING: Explanation.State
    STATE_PAUSED: Explanation.State
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Explanation.Reason]
        REASON_CAP: _ClassVar[Explanation.Reason]
        REASON_RANK: _ClassVar[Explanation.Reason]
        REASON_SLOTS: _ClassVar[Explanation.Reason]
        REASON_BLOCKS: _ClassVar[Explanation.Reason]
        REASON_STEP: _ClassVar[Explanation.Reason]
        REASON_KV_LIMIT: _ClassVar[Explanation.Reason]
        REASON_LOCALITY: _ClassVar[Explanation.Reason]
        REASON_CEIL: _ClassVar[Explanation.Reason]
    REASON_UNSPECIFIED: Explanation.Reason
    REASON_CAP: Explanation.Reason
    REASON_RANK: Explanation.Reason
    REASON_SLOTS: Explanation.Reason
    REASON_BLOCKS: Explanation.Reason
    REASON_STEP: Explanation.Reason
    REASON_KV_LIMIT: Explanation.Reason
    REASON_LOCALITY: Explanation.Reason
    REASON_CEIL: Explanation.Reason
    STATE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    CAPS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MISSING_FIELD_NUMBER: _ClassVar[int]
    IS_OWED_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_START_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    IS_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    KV_ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    CEILINGS_FIELD_NUMBER: _ClassVar[int]
    state: Explanation.State
    tier: str
    waited_s: float
    reasons: _containers.RepeatedScalarFieldContainer[Explanation.Reason]
    rank: int
    ahead: _containers.RepeatedCompositeFieldContainer[Party]
    holders: _containers.RepeatedCompositeFieldContainer[Party]
    caps: _containers.RepeatedCompositeFieldContainer[BindingCap]
    blocks_needed: int
    blocks_free: int
    blocks_missing: int
    is_owed: bool
    estimated_start_s: float
    preemptions: int
    evictions: _containers.RepeatedCompositeFieldContainer[EvictionRecord]
    computed_tokens: int
    tokens: int
    is_partial: bool
    kv_accounts: _containers.RepeatedCompositeFieldContainer[KVAccount]
    ceilings: _containers.RepeatedCompositeFieldContainer[BindingCeil]
    def __init__(self, state: _Optional[_Union[Explanation.State, str]] = ..., tier: _Optional[str] = ..., waited_s: _Optional[float] = ..., reasons: _Optional[_Iterable[_Union[Explanation.Reason, str]]] = ..., rank: _Optional[int] = ..., ahead: _Optional[_Iterable[_Union[Party, _Mapping]]] = ..., holders: _Optional[_Iterable[_Union[Party, _Mapping]]] = ..., caps: _Optional[_Iterable[_Union[BindingCap, _Mapping]]] = ..., blocks_needed: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_missing: _Optional[int] = ..., is_owed: bool = ..., estimated_start_s: _Optional[float] = ..., preemptions: _Optional[int] = ..., evictions: _Optional[_Iterable[_Union[EvictionRecord, _Mapping]]] = ..., computed_tokens: _Optional[int] = ..., tokens: _Optional[int] = ..., is_partial: bool = ..., kv_accounts: _Optional[_Iterable[_Union[KVAccount, _Mapping]]] = ..., ceilings: _Optional[_Iterable[_Union[BindingCeil, _Mapping]]] = ...) -> None: ...
