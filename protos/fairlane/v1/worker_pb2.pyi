from fairlane.protos.fairlane.v1 import explain_pb2 as _explain_pb2
from fairlane.protos.fairlane.v1 import shadow_pb2 as _shadow_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToWorker(_message.Message):
    __slots__ = ("hello", "policy", "add", "abort", "ping", "explain", "shadow")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    EXPLAIN_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    policy: PolicySnapshot
    add: Add
    abort: Abort
    ping: Ping
    explain: Explain
    shadow: Shadow
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., policy: _Optional[_Union[PolicySnapshot, _Mapping]] = ..., add: _Optional[_Union[Add, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., explain: _Optional[_Union[Explain, _Mapping]] = ..., shadow: _Optional[_Union[Shadow, _Mapping]] = ...) -> None: ...

class FromWorker(_message.Message):
    __slots__ = ("welcome", "policy_applied", "deltas", "pong", "explained", "shadow_applied")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    POLICY_APPLIED_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    EXPLAINED_FIELD_NUMBER: _ClassVar[int]
    SHADOW_APPLIED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    policy_applied: PolicyApplied
    deltas: StepDeltas
    pong: Pong
    explained: Explained
    shadow_applied: ShadowApplied
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., policy_applied: _Optional[_Union[PolicyApplied, _Mapping]] = ..., deltas: _Optional[_Union[StepDeltas, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., explained: _Optional[_Union[Explained, _Mapping]] = ..., shadow_applied: _Optional[_Union[ShadowApplied, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("gateway_id", "protocol_version")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    protocol_version: int
    def __init__(self, gateway_id: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker_id", "epoch", "model", "vocab_size", "max_model_len", "block_size", "num_blocks", "eos_token_ids", "pid", "num_host_blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: int
    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pid: int
    num_host_blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., pid: _Optional[int] = ..., num_host_blocks: _Optional[int] = ...) -> None: ...

class PolicySnapshot(_message.Message):
    __slots__ = ("generation", "sha256", "tiers_policy", "tiers", "within_tier", "preempt_gap_ms", "nodes", "cost", "within_tenant", "plugin", "predict_output", "groups", "locality_window_ms")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    TIERS_POLICY_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_TIER_FIELD_NUMBER: _ClassVar[int]
    PREEMPT_GAP_MS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    WITHIN_TENANT_FIELD_NUMBER: _ClassVar[int]
    PLUGIN_FIELD_NUMBER: _ClassVar[int]
    PREDICT_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LOCALITY_WINDOW_MS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    sha256: str
    tiers_policy: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierSpec]
    within_tier: str
    preempt_gap_ms: float
    nodes: _containers.RepeatedCompositeFieldContainer[NodeSpec]
    cost: str
    within_tenant: str
    plugin: str
    predict_output: bool
    groups: _containers.RepeatedCompositeFieldContainer[GroupSpec]
    locality_window_ms: float
    def __init__(self, generation: _Optional[int] = ..., sha256: _Optional[str] = ..., tiers_policy: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierSpec, _Mapping]]] = ..., within_tier: _Optional[str] = ..., preempt_gap_ms: _Optional[float] = ..., nodes: _Optional[_Iterable[_Union[NodeSpec, _Mapping]]] = ..., cost: _Optional[str] = ..., within_tenant: _Optional[str] = ..., plugin: _Optional[str] = ..., predict_output: bool = ..., groups: _Optional[_Iterable[_Union[GroupSpec, _Mapping]]] = ..., locality_window_ms: _Optional[float] = ...) -> None: ...

class NodeSpec(_message.Message):
    __slots__ = ("path", "weight", "min_share", "max_running", "member_weight", "member_max_running", "kv_guarantee", "kv_limit", "member_kv_limit", "shared_domain", "ceil")
    PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MIN_SHARE_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MEMBER_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MEMBER_MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_GUARANTEE_FIELD_NUMBER: _ClassVar[int]
    KV_LIMIT_FIELD_NUMBER: _ClassVar[int]
    MEMBER_KV_LIMIT_FIELD_NUMBER: _ClassVar[int]
    SHARED_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CEIL_FIELD_NUMBER: _ClassVar[int]
    path: str
    weight: float
    min_share: float
    max_running: int
    member_weight: float
    member_max_running: int
    kv_guarantee: KVAmount
    kv_limit: KVAmount
    member_kv_limit: KVAmount
    shared_domain: str
    ceil: float
    def __init__(self, path: _Optional[str] = ..., weight: _Optional[float] = ..., min_share: _Optional[float] = ..., max_running: _Optional[int] = ..., member_weight: _Optional[float] = ..., member_max_running: _Optional[int] = ..., kv_guarantee: _Optional[_Union[KVAmount, _Mapping]] = ..., kv_limit: _Optional[_Union[KVAmount, _Mapping]] = ..., member_kv_limit: _Optional[_Union[KVAmount, _Mapping]] = ..., shared_domain: _Optional[str] = ..., ceil: _Optional[float] = ...) -> None: ...

class GroupSpec(_message.Message):
    __slots__ = ("name", "kv_guarantee", "kv_limit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KV_GUARANTEE_FIELD_NUMBER: _ClassVar[int]
    KV_LIMIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    kv_guarantee: KVAmount
    kv_limit: KVAmount
    def __init__(self, name: _Optional[str] = ..., kv_guarantee: _Optional[_Union[KVAmount, _Mapping]] = ..., kv_limit: _Optional[_Union[KVAmount, _Mapping]] = ...) -> None: ...

class KVAmount(_message.Message):
    __slots__ = ("share", "tokens")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    share: float
    tokens: int
    def __init__(self, share: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class TierSpec(_message.Message):
    __slots__ = ("name", "priority", "weight", "min_share", "patience_s", "shaping", "ttft_target_s", "tpot_target_s", "shaping_rule", "ceil")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    MIN_SHARE_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    SHAPING_FIELD_NUMBER: _ClassVar[int]
    TTFT_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_TARGET_S_FIELD_NUMBER: _ClassVar[int]
    SHAPING_RULE_FIELD_NUMBER: _ClassVar[int]
    CEIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    priority: int
    weight: float
    min_share: float
    patience_s: float
    shaping: str
    ttft_target_s: float
    tpot_target_s: float
    shaping_rule: ShapingSpec
    ceil: float
    def __init__(self, name: _Optional[str] = ..., priority: _Optional[int] = ..., weight: _Optional[float] = ..., min_share: _Optional[float] = ..., patience_s: _Optional[float] = ..., shaping: _Optional[str] = ..., ttft_target_s: _Optional[float] = ..., tpot_target_s: _Optional[float] = ..., shaping_rule: _Optional[_Union[ShapingSpec, _Mapping]] = ..., ceil: _Optional[float] = ...) -> None: ...

class ShapingSpec(_message.Message):
    __slots__ = ("prefill_share", "pause_decodes", "max_step_s")
    PREFILL_SHARE_FIELD_NUMBER: _ClassVar[int]
    PAUSE_DECODES_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_S_FIELD_NUMBER: _ClassVar[int]
    prefill_share: float
    pause_decodes: bool
    max_step_s: float
    def __init__(self, prefill_share: _Optional[float] = ..., pause_decodes: bool = ..., max_step_s: _Optional[float] = ...) -> None: ...

class PolicyApplied(_message.Message):
    __slots__ = ("generation", "refusal")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    generation: int
    refusal: str
    def __init__(self, generation: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class Shadow(_message.Message):
    __slots__ = ("number", "snapshot")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    number: int
    snapshot: PolicySnapshot
    def __init__(self, number: _Optional[int] = ..., snapshot: _Optional[_Union[PolicySnapshot, _Mapping]] = ...) -> None: ...

class ShadowApplied(_message.Message):
    __slots__ = ("number", "refusal")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    number: int
    refusal: str
    def __init__(self, number: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class Add(_message.Message):
    __slots__ = ("request_id", "tenant", "tier", "order", "prompt_token_ids", "output_token_ids", "max_tokens", "stop_token_ids", "sampling", "cache_domain", "cache_mode", "timeout_s", "policy_generation", "max_wait_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CACHE_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    CACHE_MODE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    POLICY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    tenant: str
    tier: str
    order: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    output_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: WorkerSampling
    cache_domain: str
    cache_mode: str
    timeout_s: float
    policy_generation: int
    max_wait_s: float
    def __init__(self, request_id: _Optional[int] = ..., tenant: _Optional[str] = ..., tier: _Optional[str] = ..., order: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., output_token_ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[WorkerSampling, _Mapping]] = ..., cache_domain: _Optional[str] = ..., cache_mode: _Optional[str] = ..., timeout_s: _Optional[float] = ..., policy_generation: _Optional[int] = ..., max_wait_s: _Optional[float] = ...) -> None: ...

class WorkerSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    def __init__(self, request_id: _Optional[int] = ...) -> None: ...

class Explain(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    def __init__(self, request_id: _Optional[int] = ...) -> None: ...

class Explained(_message.Message):
    __slots__ = ("request_id", "explanation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPLANATION_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    explanation: _explain_pb2.Explanation
    def __init__(self, request_id: _Optional[int] = ..., explanation: _Optional[_Union[_explain_pb2.Explanation, _Mapping]] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce",)
    NONCE_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    def __init__(self, nonce: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce", "step_id", "running", "waiting", "blocks_used", "blocks_cached", "block_utilization_ratio", "fragmentation_rate", "preemptions", "policy_generation", "step_running_s", "running_by_tier", "waiting_by_tier", "blocks_by_domain", "running_by_node", "waiting_by_node", "recomputed_tokens", "swaps_out", "swaps_in", "host_blocks_used", "policy_fault", "kv_accounts", "evictions_by_reason", "shadow", "ceilings")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_UTILIZATION_RATIO_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_RATE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    POLICY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_RUNNING_S_FIELD_NUMBER: _ClassVar[int]
    RUNNING_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    WAITING_BY_TIER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_BY_DOMAIN_FIELD_NUMBER: _ClassVar[int]
    RUNNING_BY_NODE_FIELD_NUMBER: _ClassVar[int]
    WAITING_BY_NODE_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAPS_OUT_FIELD_NUMBER: _ClassVar[int]
    SWAPS_IN_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    POLICY_FAULT_FIELD_NUMBER: _ClassVar[int]
    KV_ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_BY_REASON_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    CEILINGS_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    step_id: int
    running: int
    waiting: int
    blocks_used: int
    blocks_cached: int
    block_utilization_ratio: float
    fragmentation_rate: float
    preemptions: int
    policy_generation: int
    step_running_s: float
    running_by_tier: _containers.RepeatedCompositeFieldContainer[CountSpec]
    waiting_by_tier: _containers.RepeatedCompositeFieldContainer[CountSpec]
    blocks_by_domain: _containers.RepeatedCompositeFieldContainer[CountSpec]
    running_by_node: _containers.RepeatedCompositeFieldContainer[CountSpec]
    waiting_by_node: _containers.RepeatedCompositeFieldContainer[CountSpec]
    recomputed_tokens: int
    swaps_out: int
    swaps_in: int
    host_blocks_used: int
    policy_fault: str
    kv_accounts: _containers.RepeatedCompositeFieldContainer[_explain_pb2.KVAccount]
    evictions_by_reason: _containers.RepeatedCompositeFieldContainer[CountSpec]
    shadow: _shadow_pb2.ShadowReport
    ceilings: _containers.RepeatedCompositeFieldContainer[CeilSpec]
    def __init__(self, nonce: _Optional[int] = ..., step_id: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., block_utilization_ratio: _Optional[float] = ..., fragmentation_rate: _Optional[float] = ..., preemptions: _Optional[int] = ..., policy_generation: _Optional[int] = ..., step_running_s: _Optional[float] = ..., running_by_tier: _Optional[_Iterable[_Union[CountSpec, _Mapping]]] = ..., waiting_by_tier: _Optional[_Iterable[_Union[CountSpec, _Mapping]]] = ..., blocks_by_domain: _Optional[_Iterable[_Union[CountSpec, _Mapping]]] = ..., running_by_node: _Optional[_Iterable[_Union[CountSpec, _Mapping]]] = ..., waiting_by_node: _Optional[_Iterable[_Union[CountSpec, _Mapping]]] = ..., recomputed_tokens: _Optional[int] = ..., swaps_out: _Optional[int] = ..., swaps_in: _Optional[int] = ..., host_blocks_used: _Optional[int] = ..., policy_fault: _Optional[str] = ..., kv_accounts: _Optional[_Iterable[_Union[_explain_pb2.KVAccount, _Mapping]]] = ..., evictions_by_reason: _Optional[_Iterable[_Union[CountSpec, _Mapping]]] = ..., shadow: _Optional[_Union[_shadow_pb2.ShadowReport, _Mapping]] = ..., ceilings: _Optional[_Iterable[_Union[CeilSpec, _Mapping]]] = ...) -> None: ...

class CeilSpec(_message.Message):
    __slots__ = ("node", "tier", "share", "used_s", "binds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    USED_S_FIELD_NUMBER: _ClassVar[int]
    BINDS_FIELD_NUMBER: _ClassVar[int]
    node: str
    tier: str
    share: float
    used_s: float
    binds: bool
    def __init__(self, node: _Optional[str] = ..., tier: _Optional[str] = ..., share: _Optional[float] = ..., used_s: _Optional[float] = ..., binds: bool = ...) -> None: ...

class CountSpec(_message.Message):
    __slots__ = ("name", "count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class StepDeltas(_message.Message):
    __slots__ = ("step_id", "deltas", "decoded")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    DECODED_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    decoded: DecodedTokens
    def __init__(self, step_id: _Optional[int] = ..., deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., decoded: _Optional[_Union[DecodedTokens, _Mapping]] = ...) -> None: ...

class DecodedTokens(_message.Message):
    __slots__ = ("request_ids", "token_ids")
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("request_id", "queue_position", "started", "resumed_after_s", "token_ids", "preempted", "ended", "estimated_wait_s")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_POSITION_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    RESUMED_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ESTIMATED_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    queue_position: int
    started: StartedDelta
    resumed_after_s: float
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    preempted: PreemptedDelta
    ended: EndedDelta
    estimated_wait_s: float
    def __init__(self, request_id: _Optional[int] = ..., queue_position: _Optional[int] = ..., started: _Optional[_Union[StartedDelta, _Mapping]] = ..., resumed_after_s: _Optional[float] = ..., token_ids: _Optional[_Iterable[int]] = ..., preempted: _Optional[_Union[PreemptedDelta, _Mapping]] = ..., ended: _Optional[_Union[EndedDelta, _Mapping]] = ..., estimated_wait_s: _Optional[float] = ...) -> None: ...

class StartedDelta(_message.Message):
    __slots__ = ("cached_tokens", "queue_s")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    queue_s: float
    def __init__(self, cached_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ...) -> None: ...

class PreemptedDelta(_message.Message):
    __slots__ = ("kind", "reason")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    kind: str
    reason: str
    def __init__(self, kind: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EndedDelta(_message.Message):
    __slots__ = ("reason", "stop_token_id", "error_reason", "error_message", "preemptions", "recomputed_tokens", "queue_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    stop_token_id: int
    error_reason: str
    error_message: str
    preemptions: int
    recomputed_tokens: int
    queue_s: float
    def __init__(self, reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., error_reason: _Optional[str] = ..., error_message: _Optional[str] = ..., preemptions: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ...) -> None: ...
