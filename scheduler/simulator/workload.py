"""What arrives: requests with their lengths, as a trace or a builder gives them, and who they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request of a workload. Times are seconds from the start.

    node: "organisation/tenant" or below. output_tokens: what it will generate; nobody is told but the executor. max_tokens: what
    it asked for at most; None: exactly that many. prefix: ids of its leading blocks of prefix_block tokens; equal ids at equal
    places after equal ones are equal text. cancel_after_s: when its client gives up, after arrival. max_wait_s, deadline_s: as of
    the scheduler's Request, the deadline from arrival on. cache_domain: whom its blocks count for; empty: its node.
    """

    arrival_s: float
    node: str
    tier: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    prefix: tuple[int, ...] = ()
    cancel_after_s: float | None = None
    max_wait_s: float | None = None
    deadline_s: float | None = None
    cache_domain: str = ""

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"{self.prompt_tokens} prompt and {self.output_tokens} output tokens: at least 1 of each is needed")
        if not self.arrival_s >= 0:
            raise ValueError(f"arrival at {self.arrival_s} s: at least 0 is needed")


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. weights: of nodes, where the workload is about weights. tiers: their names, most important
    first. duration_s: how long it is meant to be watched; prefix_block: tokens that one id of a prefix stands for."""

    name: str
    requests: tuple[SimRequest, ...]
    tiers: tuple[str, ...]
    duration_s: float
    weights: Mapping[str, float] = field(default_factory=dict)
    prefix_block: int = 512

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node that sends, by first arrival."""
        return tuple(dict.fromkeys(request.node for request in self.requests))

    @property
    def has_prefixes(self) -> bool:
        return any(request.prefix for request in self.requests)

    def first(self, duration_s: float) -> Workload:
        """Only what arrives before duration_s, watched for that long."""
        kept = tuple(request for request in self.requests if request.arrival_s < duration_s)
        return replace(self, requests=kept, duration_s=duration_s)


def in_order(requests: list[SimRequest]) -> tuple[SimRequest, ...]:
    """By arrival; those of one moment in the order given."""
    return tuple(sorted(requests, key=lambda request: request.arrival_s))
