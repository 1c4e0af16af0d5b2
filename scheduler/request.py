"""What was asked (Request, SamplingParams: frozen) and one token stream of it (Sequence: the scheduler's mutable record).

There is no prefill or decode phase: a sequence has `num_computed_tokens` and catches up with `num_tokens`. That one rule
covers chunked prefill, prefix-cache hits and recompute after preemption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, NewType, cast

if TYPE_CHECKING:
    from fairlane.blockmgr.hashing import HashChain

RequestId = NewType("RequestId", int)
Slot = NewType("Slot", int)


class CacheMode(Enum):
    """How a request uses its cache domain."""

    READ_WRITE = "read_write"
    READ_ONLY = "read_only"
    NONE = "none"

    @property
    def reads(self) -> bool:
        return self is not CacheMode.NONE

    @property
    def writes(self) -> bool:
        return self is CacheMode.READ_WRITE


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is picked from the logits; already validated. Order: logit bias, repetition / presence / frequency
    penalty, temperature, top_k, top_p, min_p, then one Gumbel-max draw keyed by (seed, sibling, position).

    temperature 0 is greedy. top_k 0 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the engine takes it. Times are of the engine's clock, in seconds.

    output_token_ids: tokens another worker already delivered; generation goes on after them.
    stop_token_ids: every id that ends the output, the model's end-of-sequence ids included unless ignored.
    max_tokens counts output tokens, those in output_token_ids too.
    max_wait_s: from arrival to the first step it is placed in.
    """

    request_id: RequestId
    tenant: str
    tier: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: frozenset[int] = frozenset()
    output_token_ids: tuple[int, ...] = ()
    order: int = 0
    cache_domain: str = ""
    cache_mode: CacheMode = CacheMode.READ_WRITE
    arrival_s: float = 0.0
    deadline_s: float | None = None
    max_wait_s: float | None = None


class Payer(NamedTuple):
    """Whose account a piece of work goes on."""

    tier: str
    tenant: str


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One token stream and how far it has come.

        token_ids          |<------- prompt ------->|<-- output -->|
        num_tokens         known on the host
        num_in_flight      sampled by launched steps, not yet known here (pipeline depth 1, 2)
        num_computed_tokens  tokens whose KV exists once every launched step has run

    A step may compute up to `num_tokens + num_in_flight - num_computed_tokens` tokens; a step that reaches the end samples
    one. `num_retired_tokens` is the part of num_computed_tokens whose steps have retired; only those may be hashed. While the
    sequence is in the DecodeLane (lane.py), its tokens and counts are kept there and written back when somebody needs them.
    """

    __slots__ = (
        "arrival_index",
        "chain",
        "charged",
        "due_s",
        "evicted_by",
        "expected_charge",
        "latest_start_s",
        "lease_until_tokens",
        "num_cached_tokens",
        "num_chunks",
        "num_computed_tokens",
        "num_evictions",
        "num_in_flight",
        "num_passed",
        "num_preemptions",
        "num_recomputed_tokens",
        "num_retired_tokens",
        "num_skips",
        "payer",
        "place",
        "queue_s",
        "queued_at_s",
        "recompute_until",
        "relegated",
        "request",
        "request_id",
        "slot",
        "stall_announced",
        "stalled_since_s",
        "started",
        "status",
        "steady_until",
        "steps_in_flight",
        "token_ids",
    )

    def __init__(self, request: Request, arrival_index: int, chain: HashChain) -> None:
        self.request = request
        self.request_id = request.request_id
        self.payer = Payer(request.tier, request.tenant)
        self.arrival_index = arrival_index  # total order of arrival at this engine
        self.place = arrival_index  # in the common line; `order` exchanges places within a tenant
        self.chain = chain
        # The request's own tuple until it runs and tokens are added: most of those that wait are looked at by nobody.
        known = request.prompt_token_ids + request.output_token_ids
        self.token_ids = cast("list[int]", known)
        self.status = SequenceStatus.WAITING
        self.slot: Slot | None = None
        self.num_computed_tokens = 0
        self.num_retired_tokens = 0
        self.num_in_flight = 0
        self.steps_in_flight = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_skips = 0
        self.num_passed = 0  # by others for whose prompts more was cached, since it came to wait for its turn
        self.num_chunks = 0  # placed since its last admission; an eviction before the first would be pure waste
        self.num_evictions = 0  # for rank; num_preemptions counts those for lack of blocks too
        self.recompute_until = 0  # tokens it had computed when it was evicted; up to there it costs evicted_by
        self.evicted_by: Payer | None = None
        self.charged = [0, 0]  # to its own payer, by cost.Ledger; while it is in the DecodeLane, in arrears
        self.expected_charge = 0  # what charged[WORK] is guessed to be in the end (prediction.py)
        self.lease_until_tokens = 0  # safe from priority eviction until num_computed_tokens gets there
        self.queued_at_s = request.arrival_s  # of its last entry into the waiting queue
        self.due_s = 0.0  # when its next token should be there with DEADLINE; inf: any time; 0 without
        self.latest_start_s = 0.0  # of the first step with DEADLINE, while it waits; 0 without
        self.relegated = False  # it could not start in time: best effort from then on
        self.queue_s = 0.0  # arrival to first placement
        self.started = False
        self.stalled_since_s: float | None = None  # paused or evicted since
        self.stall_announced = False
        self.steady_until = 0  # while in the DecodeLane: the number of its last placement there; its counts are in arrears

    @property
    def held_slot(self) -> Slot:
        """Its slot. ValueError for one that does not run."""
        if self.slot is None:
            raise ValueError(f"{self!r} has no slot")
        return self.slot

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """Tokens it could compute now: the rest of its prompt or recompute, or the one decode token."""
        return len(self.token_ids) + self.num_in_flight - self.num_computed_tokens

    @property
    def is_due(self) -> bool:
        """Whether it has anything to compute: not when its last tokens are in flight already."""
        if self.num_computed_tokens < len(self.token_ids) - 1 or not self.num_in_flight:
            return self.num_pending_tokens > 0
        return self.num_output_tokens + self.num_in_flight < self.request.max_tokens

    def __repr__(self) -> str:  # no token content: reprs end up in logs
        return (
            f"Sequence(id={self.request_id}, tier={self.request.tier}, {self.status.value}, "
            f"computed={self.num_computed_tokens}/{self.num_tokens}+{self.num_in_flight})"
        )
