"""A workload's request on its way into the engine: numbered, with token ids that say which prefixes are equal, and whose it is
under the policy at hand."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, repeat

from fairlane.scheduler.request import CacheMode, Request, RequestId, SamplingParams
from fairlane.scheduler.simulator.meter import Account
from fairlane.scheduler.simulator.shape import END_OF_TEXT
from fairlane.scheduler.simulator.workload import SimRequest, Workload

_STOPS = frozenset({END_OF_TEXT})


@dataclass(frozen=True, slots=True)
class Planned:
    """prefix: as asked, numbered anew from 0 within the workload: recorded ids are hashes, too large for token ids.
    is_cached: its blocks are kept: without a prefix nobody shares them, but an evicted request finds its own again.

    stops: it ends with an end-of-text token, before its max_tokens.
    """

    number: int
    account: Account
    asked: SimRequest
    prefix: tuple[int, ...]
    prefix_block: int
    is_cached: bool

    @property
    def prompt_tokens(self) -> int:
        return self.asked.prompt_tokens

    @property
    def output_tokens(self) -> int:
        return self.asked.output_tokens

    @property
    def stops(self) -> bool:
        return self.asked.max_tokens is not None and self.asked.max_tokens > self.asked.output_tokens

    def request(self) -> Request:
        """What the engine gets. What is not cached needs no hashing."""
        asked = self.asked
        deadline_s = None if asked.deadline_s is None else asked.arrival_s + asked.deadline_s
        return Request(
            RequestId(self.number),
            self.account.node,
            self.account.tier,
            _prompt(self.prefix, asked.prompt_tokens, self.prefix_block, self.number)
            if self.is_cached
            else _blank(asked.prompt_tokens),
            asked.max_tokens or asked.output_tokens,
            SamplingParams(seed=self.number),
            stop_token_ids=_STOPS if self.stops else frozenset(),
            cache_domain=asked.cache_domain or f"tenant:{self.account.node}",
            cache_mode=CacheMode.READ_WRITE if self.is_cached else CacheMode.NONE,
            arrival_s=asked.arrival_s,
            deadline_s=deadline_s,
            max_wait_s=asked.max_wait_s,
        )


def plan(workload: Workload, *, is_cached: bool) -> list[Planned]:
    """Its requests, numbered in order of arrival. is_cached: the worker keeps blocks for their prefixes."""
    ids: dict[int, int] = {}
    return [
        Planned(
            number,
            Account(asked.node, asked.tier),
            asked,
            tuple(ids.setdefault(block, len(ids)) for block in asked.prefix),
            workload.prefix_block,
            is_cached,
        )
        for number, asked in enumerate(workload.requests)
    ]


@lru_cache(maxsize=4096)
def _blank(length: int) -> tuple[int, ...]:
    """Nobody looks at these: one object for all prompts of a length."""
    return (1,) * length


def _prompt(prefix: tuple[int, ...], length: int, block: int, number: int) -> tuple[int, ...]:
    """Even ids for what others may share, an odd one of its own for the rest."""
    ids = list(islice(chain.from_iterable(repeat(2 * identity, block) for identity in prefix), length))
    return (*ids, *((2 * number + 1,) * (length - len(ids))))
