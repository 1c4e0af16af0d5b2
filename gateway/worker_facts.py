"""What a worker says about itself when it is connected, and the arithmetic that follows from it: whether a request can ever
fit, and how many tokens it may have. Whether it fits now is the scheduler's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fairlane.errors import FairlaneError
from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.tenancy import KVAmount


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker's Welcome. num_blocks: blocks a request may use; num_host_blocks: in host memory, for those swapped out; epoch
    grows with each start of the worker process."""

    worker_id: str
    epoch: int
    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: frozenset[int]
    pid: int
    num_host_blocks: int = 0

    @staticmethod
    def of(welcome: pb.Welcome) -> WorkerFacts:
        """The facts of a Welcome. Raises ValueError for one that no worker could mean."""
        sizes = (welcome.vocab_size, welcome.max_model_len, welcome.block_size, welcome.num_blocks)
        if min(sizes) < 1 or not welcome.model:
            raise ValueError("the worker's Welcome names no model, or a size below 1")
        return WorkerFacts(
            welcome.worker_id,
            welcome.epoch,
            welcome.model,
            welcome.vocab_size,
            welcome.max_model_len,
            welcome.block_size,
            welcome.num_blocks,
            frozenset(welcome.eos_token_ids),
            welcome.pid,
            welcome.num_host_blocks,
        )


def resolve_max_tokens(
    prompt_tokens: int, asked: int | None, tier_limit: int | None, facts: WorkerFacts, kv_limits: Sequence[KVAmount] = ()
) -> int:
    """Output tokens this request may have: what was asked, or what fits the context, the tier, the whole KV cache and the KV
    limits of its owners.

    Raises CONTEXT_LENGTH_EXCEEDED or KV_CAPACITY_EXCEEDED for a request that could never finish here, so that it is
    refused instead of waiting for ever.
    """
    room = facts.max_model_len - prompt_tokens
    if room < (asked or 1):
        raise context_length_exceeded(prompt_tokens, asked, facts.max_model_len)
    blocks = min((limit.blocks(facts.num_blocks, facts.block_size) for limit in kv_limits), default=facts.num_blocks)
    capacity = min(blocks, facts.num_blocks) * facts.block_size
    if prompt_tokens + (asked or 1) > capacity:
        raise FairlaneError(
            "KV_CAPACITY_EXCEEDED",
            f"{prompt_tokens} prompt tokens and {asked or 1} output tokens need more than the {capacity // facts.block_size} "
            f"KV-cache blocks {'this deployment has' if blocks >= facts.num_blocks else 'that the kv_limit allows'}",
            metadata={"prompt_tokens": str(prompt_tokens), "max_tokens": str(asked or 1), "limit": str(capacity)},
        )
    if asked is not None:
        return asked
    fitting = min(room, capacity - prompt_tokens)
    return fitting if tier_limit is None else min(tier_limit, fitting)


def context_length_exceeded(prompt_tokens: int, asked: int | None, limit: int) -> FairlaneError:
    """Prompt and output together are more than the model's context."""
    more = "" if asked is None else f" plus max_tokens {asked}"
    least = "at least " if prompt_tokens == limit + 1 else ""  # a very long text is counted no further than that
    return FairlaneError(
        "CONTEXT_LENGTH_EXCEEDED",
        f"{least}{prompt_tokens} prompt tokens{more} do not fit the model's context of {limit} tokens",
        metadata={"prompt_tokens": str(prompt_tokens), "max_tokens": str(asked or 1), "limit": str(limit)},
    )
