"""The one validator behind every front door: a GenerateRequest becomes an `Ask`, or every violation is reported at once.
Bounds are those the proto's comments promise; what needs token counts or blocks is checked later (worker_facts.py)."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairlane.errors import FairlaneError, FieldViolation, InvalidRequest
from fairlane.gateway.auth import Identity, owner
from fairlane.gateway.policy.model import Policy
from fairlane.gateway.tokenizer import ChatMessage
from fairlane.gateway.worker_facts import WorkerFacts, context_length_exceeded
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.scheduler.request import CacheMode, SamplingParams

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedScalarFieldContainer

ROLES = ("system", "user", "assistant")
# Iterating is our cost, so counts are capped before anything is looked at. A message takes at least a token.
MAX_MESSAGES = 8192
MAX_STOPS = 4
MAX_STOP_BYTES = 64
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 128
MAX_PARTITION_BYTES = 64
MAX_MAX_TOKENS = 10_000_000
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{8,128}")
# Dividing logits by less overflows; below it the draw is greedy to any precision that float32 has.
GREEDY_BELOW = 1e-5

_CACHE_MODES: Mapping[int, CacheMode] = {
    pb.CacheOptions.MODE_UNSPECIFIED: CacheMode.READ_WRITE,
    pb.CacheOptions.MODE_READ_ONLY: CacheMode.READ_ONLY,
    pb.CacheOptions.MODE_NONE: CacheMode.NONE,
}

Prompt = str | tuple[ChatMessage, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request whose every field is in bounds. Exactly one of `prompt` and `token_ids` is set.

    seed is None in `sampling_seed` when the caller left it to us; request_id "" likewise.
    """

    tier: str
    prompt: Prompt | None
    token_ids: tuple[int, ...] | None
    sampling: SamplingParams
    sampling_seed: int | None
    max_tokens: int | None
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    order: int
    cache_mode: CacheMode
    cache_partition: str
    request_id: str
    return_token_ids: bool
    lifecycle_events: bool


class _Violations:
    """Collects violations; their common reason becomes the error's, different ones INVALID_REQUEST."""

    def __init__(self) -> None:
        self._found: list[tuple[str, FieldViolation]] = []

    def add(self, field: str, description: str, reason: str = "INVALID_REQUEST") -> None:
        self._found.append((reason, FieldViolation(field, description)))

    def in_range(self, field: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
        # isfinite first: NaN compares false with everything.
        if math.isfinite(value) and (low < value if low_open else low <= value) and value <= high:
            return
        self.add(field, f"must be a number in {'(' if low_open else '['}{low:g}, {high:g}]")

    def raise_if_any(self) -> None:
        if self._found:
            reasons = {reason for reason, _ in self._found}
            raise InvalidRequest(
                [violation for _, violation in self._found], reasons.pop() if len(reasons) == 1 else "INVALID_REQUEST"
            )


def check_model(name: str, facts: WorkerFacts, policy: Policy, node: str) -> None:
    """MODEL_NOT_FOUND unless `name` is empty, the served model or one of its aliases, and the node may use that model; one text
    for every other case."""
    known = not name or name == facts.model or policy.aliases.get(name) == facts.model
    if not known or not may_use(facts.model, policy, node):
        raise FairlaneError("MODEL_NOT_FOUND", "there is no such model, or this tenant may not use it")


def may_use(model: str, policy: Policy, node: str) -> bool:
    """Whether the policy lets the node use the model of that name."""
    allowed = policy.nodes[owner(node)].models
    return allowed is None or model in allowed


def validate(request: pb.GenerateRequest, identity: Identity, policy: Policy, max_prompt: int, facts: WorkerFacts) -> Ask:
    """The request as an `Ask`. Raises InvalidRequest with all violations, TIER_NOT_ALLOWED, or CONTEXT_LENGTH_EXCEEDED for
    more token ids than the model takes at all."""
    if not identity.tiers:
        text = f"{identity.node} sends no requests of its own: name one of its tenants in fairlane-tenant"
        raise FairlaneError("TIER_NOT_ALLOWED", text)
    bad = _Violations()
    tier = _tier(bad, request.tier, identity, policy)
    limit = policy.effective(identity.node, tier).max_output_tokens if tier in policy.tiers else None
    prompt, token_ids = _input(bad, request, max_prompt, facts)
    ask = Ask(
        tier=tier,
        prompt=prompt,
        token_ids=token_ids,
        sampling=_sampling(bad, request.sampling, facts.vocab_size),
        sampling_seed=request.sampling.seed if request.sampling.HasField("seed") else None,
        max_tokens=_max_tokens(bad, request.stopping, limit, facts),
        stop=_stop(bad, request.stopping.stop),
        stop_token_ids=_stop_token_ids(bad, request.stopping.stop_token_ids, facts.vocab_size),
        ignore_eos=request.stopping.ignore_eos,
        order=_order(bad, request.order),
        cache_mode=_cache_mode(bad, request.cache.mode),
        cache_partition=_partition(bad, request.cache.partition),
        request_id=_request_id(bad, request.request_id),
        return_token_ids=request.response.return_token_ids,
        lifecycle_events=request.response.lifecycle_events,
    )
    bad.raise_if_any()
    if tier not in identity.tiers:
        raise FairlaneError("TIER_NOT_ALLOWED", f"this tenant may not use tier {tier!r}", metadata={"tier": tier})
    return ask


def validate_prompt(request: pb.CountTokensRequest, max_prompt: int) -> Prompt:
    """The text to count. Raises InvalidRequest with all violations."""
    bad = _Violations()
    prompt: Prompt = ""
    if request.WhichOneof("input") == "messages":
        prompt = _messages(bad, request.messages, max_prompt)
    elif request.WhichOneof("input") == "prompt":
        prompt = _text(bad, request.prompt, max_prompt)
    else:
        bad.add("input", "one of prompt, messages is required")
    bad.raise_if_any()
    return prompt


def _tier(bad: _Violations, name: str, identity: Identity, policy: Policy) -> str:
    if not name:
        return identity.tiers[0]
    if name not in policy.tiers:
        bad.add("tier", "there is no such tier", "TIER_UNKNOWN")
    return name


def _input(
    bad: _Violations, request: pb.GenerateRequest, max_prompt: int, facts: WorkerFacts
) -> tuple[Prompt | None, tuple[int, ...] | None]:
    which = request.WhichOneof("input")
    if which == "prompt":
        return _text(bad, request.prompt, max_prompt), None
    if which == "messages":
        return _messages(bad, request.messages, max_prompt), None
    if which == "token_ids":
        return None, _token_ids(bad, request.token_ids.ids, facts)
    bad.add("input", "one of prompt, messages, token_ids is required")
    return None, None


def _text(bad: _Violations, text: str, max_prompt: int) -> str:
    if not text:
        bad.add("prompt", "must not be empty")
    _check_bytes(bad, "prompt", len(text.encode()), max_prompt)
    return text


def _check_bytes(bad: _Violations, field: str, size: int, max_prompt: int) -> None:
    # Before tokenizing: the cost of tokenizing is what the cap protects.
    if size > max_prompt:
        bad.add(field, f"{size} bytes, at most {max_prompt} are allowed", "PROMPT_TOO_LARGE")


def _messages(bad: _Violations, given: pb.Messages, max_prompt: int) -> tuple[ChatMessage, ...]:
    count = len(given.messages)
    if not 1 <= count <= MAX_MESSAGES:
        bad.add("messages", f"must have 1 to {MAX_MESSAGES} messages")
        return ()
    messages = tuple(ChatMessage(m.role, m.content) for m in given.messages)
    wrong = [index for index, message in enumerate(messages) if message.role not in ROLES]
    if wrong:
        bad.add(f"messages[{wrong[0]}].role", f"must be one of {', '.join(ROLES)}{_and_more(wrong)}")
    _check_bytes(bad, "messages", sum(len(m.content.encode()) for m in messages), max_prompt)
    return messages


def _token_ids(bad: _Violations, ids: RepeatedScalarFieldContainer[int], facts: WorkerFacts) -> tuple[int, ...]:
    if not ids:
        bad.add("token_ids", "must not be empty")
        return ()
    if len(ids) >= facts.max_model_len:
        raise context_length_exceeded(len(ids), None, facts.max_model_len)
    given = tuple(ids)
    _check_vocabulary(bad, "token_ids.ids", given, facts.vocab_size)
    return given


def _check_vocabulary(bad: _Violations, field: str, ids: Collection[int], vocab_size: int) -> None:
    if not ids or max(ids) < vocab_size:
        return
    wrong = [index for index, token_id in enumerate(ids) if token_id >= vocab_size]
    bad.add(f"{field}[{wrong[0]}]", f"must be below the vocabulary size {vocab_size}{_and_more(wrong)}")


def _and_more(wrong: list[int]) -> str:
    return "" if len(wrong) == 1 else f" (and {len(wrong) - 1} more)"


def _sampling(bad: _Violations, given: pb.SamplingParams, vocab_size: int) -> SamplingParams:
    temperature = given.temperature if given.HasField("temperature") else 1.0
    top_p = given.top_p if given.HasField("top_p") else 1.0
    repetition = given.repetition_penalty if given.HasField("repetition_penalty") else 1.0
    bad.in_range("sampling.temperature", temperature, 0, 2)
    bad.in_range("sampling.top_p", top_p, 0, 1, low_open=True)
    bad.in_range("sampling.min_p", given.min_p, 0, 1)
    bad.in_range("sampling.presence_penalty", given.presence_penalty, -2, 2)
    bad.in_range("sampling.frequency_penalty", given.frequency_penalty, -2, 2)
    bad.in_range("sampling.repetition_penalty", repetition, 0, 2, low_open=True)
    if given.top_k < -1:
        bad.add("sampling.top_k", "must be -1 or 0 (all) or positive")
    return SamplingParams(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=given.top_k if 0 < given.top_k < vocab_size else 0,
        top_p=top_p,
        min_p=given.min_p,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=repetition,
        logit_bias=_logit_bias(bad, given, vocab_size),
    )


def _logit_bias(bad: _Violations, given: pb.SamplingParams, vocab_size: int) -> Mapping[int, float]:
    if len(given.logit_bias) > MAX_LOGIT_BIAS:
        bad.add("sampling.logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        return {}
    bias = dict(given.logit_bias)
    unknown = sorted(token_id for token_id in bias if token_id >= vocab_size)
    if unknown:
        bad.add(f"sampling.logit_bias[{unknown[0]}]", f"must be below the vocabulary size {vocab_size}{_and_more(unknown)}")
    wild = sorted(token_id for token_id, value in bias.items() if not (math.isfinite(value) and -100 <= value <= 100))
    if wild:
        bad.add(f"sampling.logit_bias[{wild[0]}]", f"must be a number in [-100, 100]{_and_more(wild)}")
    return bias


def _max_tokens(bad: _Violations, given: pb.StoppingParams, limit: int | None, facts: WorkerFacts) -> int | None:
    if not given.HasField("max_tokens"):
        return None
    high = min(MAX_MAX_TOKENS, facts.max_model_len, limit or MAX_MAX_TOKENS)
    if not 1 <= given.max_tokens <= high:
        bad.add("stopping.max_tokens", f"must be in [1, {high}]")
    return given.max_tokens


def _stop(bad: _Violations, stops: Collection[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS:
        bad.add("stopping.stop", f"at most {MAX_STOPS} strings")
        return ()
    for index, stop in enumerate(stops):
        if not 1 <= len(stop.encode()) <= MAX_STOP_BYTES:
            bad.add(f"stopping.stop[{index}]", f"must have 1 to {MAX_STOP_BYTES} bytes")
    return tuple(stops)


def _stop_token_ids(bad: _Violations, ids: Collection[int], vocab_size: int) -> frozenset[int]:
    if len(ids) > MAX_STOP_TOKEN_IDS:
        bad.add("stopping.stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        return frozenset()
    _check_vocabulary(bad, "stopping.stop_token_ids", ids, vocab_size)
    return frozenset(ids)


def _order(bad: _Violations, order: int) -> int:
    if not -100 <= order <= 100:
        bad.add("order", "must be in [-100, 100]")
    return order


def _cache_mode(bad: _Violations, mode: int) -> CacheMode:
    if mode not in _CACHE_MODES:
        bad.add("cache.mode", "there is no such mode")
    return _CACHE_MODES.get(mode, CacheMode.READ_WRITE)


def _partition(bad: _Violations, partition: str) -> str:
    if len(partition.encode()) > MAX_PARTITION_BYTES:
        bad.add("cache.partition", f"at most {MAX_PARTITION_BYTES} bytes")
    return partition


def _request_id(bad: _Violations, request_id: str) -> str:
    if request_id and not REQUEST_ID.fullmatch(request_id):
        bad.add("request_id", "must be 8 to 128 characters out of A-Z a-z 0-9 . _ : -")
    return request_id
