"""Between protobuf and the engine's types, both ways. Everything a gateway sends is checked here once more, because a worker
may not trust that every gateway is of its own version."""

from __future__ import annotations

from typing import TypeVar

from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.events import Delta
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.request import CacheMode, Request, RequestId, SamplingParams
from fairlane.scheduler.tenancy import (
    CostName,
    GroupShare,
    KVAmount,
    NodeShare,
    PolicySnapshot,
    Shaping,
    ShapingRule,
    Tier,
    TiersPolicy,
    WithinTenant,
    WithinTier,
)

_LONGEST_S = 366 * 86400.0
_LEAST_CEIL = 1e-6


class ProtocolError(ValueError):
    """A message that no gateway of this version sends."""


def request_from_add(add: pb.Add, request_id: RequestId, now_s: float, vocab_size: int) -> Request:
    """The Request an Add asks for, under the engine's own id. Raises ProtocolError."""
    ids = (*add.prompt_token_ids, *add.output_token_ids)
    if ids and max(ids) >= vocab_size:
        raise ProtocolError(f"token id {max(ids)} is outside the vocabulary of {vocab_size}")
    if any(token >= vocab_size for token in add.sampling.logit_bias):
        raise ProtocolError("logit_bias names a token outside the vocabulary")
    for name in ("timeout_s", "max_wait_s"):
        if add.HasField(name):
            _in_range(name, getattr(add, name), 0, _LONGEST_S)
    return Request(
        request_id=request_id,
        tenant=add.tenant,
        tier=add.tier,
        prompt_token_ids=tuple(add.prompt_token_ids),
        output_token_ids=tuple(add.output_token_ids),
        max_tokens=add.max_tokens,
        sampling=sampling_from_wire(add.sampling),
        stop_token_ids=frozenset(add.stop_token_ids),
        order=add.order,
        cache_domain=add.cache_domain,
        cache_mode=_enum(CacheMode, add.cache_mode),
        arrival_s=now_s,
        deadline_s=now_s + add.timeout_s if add.HasField("timeout_s") else None,
        max_wait_s=add.max_wait_s if add.HasField("max_wait_s") else None,
    )


def sampling_from_wire(wire: pb.WorkerSampling) -> SamplingParams:
    """Raises ProtocolError for values outside the public API's bounds."""
    _in_range("temperature", wire.temperature, 0, 2)
    _in_range("top_p", wire.top_p, 0, 1)
    _in_range("min_p", wire.min_p, 0, 1)
    _in_range("presence_penalty", wire.presence_penalty, -2, 2)
    _in_range("frequency_penalty", wire.frequency_penalty, -2, 2)
    _in_range("repetition_penalty", wire.repetition_penalty, 0, 2)
    if wire.repetition_penalty == 0 or wire.top_p == 0:
        raise ProtocolError("repetition_penalty and top_p must be more than 0")
    for bias in wire.logit_bias.values():
        _in_range("logit_bias", bias, -100, 100)
    return SamplingParams(
        temperature=wire.temperature,
        top_k=wire.top_k,
        top_p=wire.top_p,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
        logit_bias=dict(wire.logit_bias),
        seed=wire.seed,
    )


def snapshot_from_wire(wire: pb.PolicySnapshot) -> PolicySnapshot:
    """Raises ProtocolError for a policy, tier or shaping this worker does not know."""
    names = [tier.name for tier in wire.tiers]
    if not names or len(set(names)) != len(names):
        raise ProtocolError("a policy needs tiers with distinct names")
    return PolicySnapshot(
        generation=wire.generation,
        sha256=wire.sha256,
        tiers_policy=_enum(TiersPolicy, wire.tiers_policy),
        tiers=tuple(_tier_from_wire(tier) for tier in wire.tiers),
        within_tier=_enum(WithinTier, wire.within_tier or WithinTier.FCFS.value),
        nodes=tuple(_node_from_wire(node) for node in wire.nodes),
        preempt_gap_ms=_in_range("preempt_gap_ms", wire.preempt_gap_ms, 0, 1e9) if wire.HasField("preempt_gap_ms") else None,
        cost=_enum(CostName, wire.cost or CostName.TOKENS.value),
        within_tenant=_enum(WithinTenant, wire.within_tenant or WithinTenant.FCFS.value),
        plugin=wire.plugin,
        predict_output=wire.predict_output,
        groups=tuple(GroupShare(group.name, _amount(group.kv_guarantee), _amount(group.kv_limit)) for group in wire.groups),
        locality_window_ms=_in_range("locality_window_ms", wire.locality_window_ms, 0, 1e9),
    )


def _tier_from_wire(tier: pb.TierSpec) -> Tier:
    return Tier(
        name=tier.name,
        priority=tier.priority,
        weight=_weight(tier.weight),
        min_share=_in_range("min_share", tier.min_share, 0, 1),
        patience_s=_in_range("patience_s", tier.patience_s, 0, _LONGEST_S) if tier.HasField("patience_s") else None,
        shaping=_rule(tier.shaping_rule) if tier.HasField("shaping_rule") else _enum(Shaping, tier.shaping),
        ttft_target_s=_in_range("ttft_target_s", tier.ttft_target_s, 0, _LONGEST_S) if tier.HasField("ttft_target_s") else None,
        tpot_target_s=_in_range("tpot_target_s", tier.tpot_target_s, 0, _LONGEST_S) if tier.HasField("tpot_target_s") else None,
        ceil=_in_range("ceil", tier.ceil, _LEAST_CEIL, 1) if tier.HasField("ceil") else None,
    )


def _rule(wire: pb.ShapingSpec) -> ShapingRule:
    max_step_s = _in_range("max_step_s", wire.max_step_s, 0, _LONGEST_S) if wire.HasField("max_step_s") else None
    return ShapingRule(_in_range("prefill_share", wire.prefill_share, 0, 1), wire.pause_decodes, max_step_s)


def _node_from_wire(node: pb.NodeSpec) -> NodeShare:
    return NodeShare(
        path=node.path,
        weight=_weight(node.weight),
        min_share=_in_range("min_share", node.min_share, 0, 1),
        max_running=node.max_running if node.HasField("max_running") else None,
        member_weight=_weight(node.member_weight),
        member_max_running=node.member_max_running if node.HasField("member_max_running") else None,
        kv_guarantee=_amount(node.kv_guarantee),
        kv_limit=_amount(node.kv_limit),
        member_kv_limit=_amount(node.member_kv_limit),
        shared_domain=node.shared_domain,
        ceil=_in_range("ceil", node.ceil, _LEAST_CEIL, 1) if node.HasField("ceil") else None,
    )


def _amount(wire: pb.KVAmount) -> KVAmount | None:
    match wire.WhichOneof("amount"):
        case "share":
            return KVAmount(share=_in_range("KV share", wire.share, 0, 1))
        case "tokens":
            return KVAmount(tokens=wire.tokens)
        case _:
            return None


def _weight(weight: float) -> float:
    """0, proto3's absent, is 1."""
    return 1.0 if weight == 0 else _in_range("weight", weight, 1e-6, 1e6)


def _in_range(name: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:  # false for NaN, too
        raise ProtocolError(f"{name} {value} is outside [{low}, {high}]")
    return value


_E = TypeVar("_E", CacheMode, TiersPolicy, Shaping, WithinTier, CostName, WithinTenant)


def _enum(kind: type[_E], value: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        raise ProtocolError(f"{value!r} is no {kind.__name__}") from None


def delta_to_wire(delta: Delta, request_id: int) -> pb.Delta:
    """A delta under the id its gateway gave the request."""
    wire = pb.Delta(request_id=request_id, token_ids=delta.token_ids)
    if delta.queue_position is not None:
        wire.queue_position = delta.queue_position
    if delta.estimated_wait_s is not None:
        wire.estimated_wait_s = delta.estimated_wait_s
    if delta.started is not None:
        wire.started.cached_tokens = delta.started.cached_tokens
        wire.started.queue_s = delta.started.queue_s
    if delta.resumed_after_s is not None:
        wire.resumed_after_s = delta.resumed_after_s
    if delta.preempted is not None:
        wire.preempted.kind, wire.preempted.reason = (part.value for part in delta.preempted)
    if delta.ended is not None:
        _ended_to_wire(delta, wire.ended)
    return wire


def _ended_to_wire(delta: Delta, wire: pb.EndedDelta) -> None:
    ended = delta.ended
    if ended is None:
        return
    wire.reason = ended.reason.value
    if ended.stop_token_id is not None:
        wire.stop_token_id = ended.stop_token_id
    wire.error_reason, wire.error_message = ended.error_reason, ended.error_message
    wire.preemptions, wire.recomputed_tokens = ended.preemptions, ended.recomputed_tokens
    wire.queue_s = ended.queue_s


def welcome(info: ExecutorInfo, worker_id: str, epoch: int, pid: int) -> pb.Welcome:
    return pb.Welcome(
        worker_id=worker_id,
        epoch=epoch,
        model=info.model,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        block_size=info.block_size,
        num_blocks=info.num_blocks - 1,
        eos_token_ids=info.eos_token_ids,
        pid=pid,
        num_host_blocks=info.num_host_blocks,
    )
