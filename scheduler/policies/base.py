"""The Policy protocol: who goes first, who may evict whom, and how a step is shaped. The scheduler owns blocks, slots and
invariants and asks; a policy owns the waiting queue and answers. Every call is O(log n) in the number waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fairlane.scheduler.request import Sequence

Rank = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchView:
    """What a policy may know of the batch when it plans a step.

    running: sequences that hold KV, by tier name; prefilling: those of them with more than one token to compute.
    """

    token_budget: int
    running: Mapping[str, int]
    prefilling: Mapping[str, int]


@dataclass(slots=True)
class StepPlan:
    """How one step is shaped.

    protected_priority: tiers below it obey the next two; None: no shaping.
    lower_prefill_cap: most prefill tokens of lower tiers in this step, together, less what protected prefills take; None: no cap.
    pause_lower: lower tiers' decodes skip a step in which a protected prefill chunk was placed.
    reserved: tier -> prefill tokens that no other tier's prefill may take in this step.
    """

    token_budget: int
    protected_priority: int | None = None
    lower_prefill_cap: int | None = None
    pause_lower: bool = False
    reserved: dict[str, int] = field(default_factory=dict)


class Policy(Protocol):
    """Order, preemption rights and step shape. `rank` is a total order, fixed within a step; smaller goes first."""

    name: str

    def begin_step(self, now_s: float) -> None:
        """Time-driven changes (ageing, windows) happen here and nowhere else in a step."""

    def plan(self, view: BatchView) -> StepPlan: ...

    def rank(self, sequence: Sequence) -> Rank:
        """Of a waiting or running sequence. peek() agrees with it."""

    def priority(self, sequence: Sequence) -> int:
        """Of the sequence's tier; what StepPlan.protected_priority is compared with."""

    def push(self, sequence: Sequence, now_s: float) -> None:
        """A sequence starts to wait: new, or evicted (it keeps its arrival)."""

    def peek(self) -> Sequence | None:
        """The best waiting sequence not skipped in this step."""

    def pop(self, sequence: Sequence) -> None:
        """Removes what peek() returned."""

    def skip(self, sequence: Sequence) -> None:
        """Sets what peek() returned aside until end_step()."""

    def remove(self, sequence: Sequence) -> None:
        """Removes a waiting sequence (cancelled)."""

    def end_step(self) -> None:
        """Puts the skipped ones back."""

    def num_waiting(self) -> int: ...

    def position(self, sequence: Sequence) -> int:
        """Waiting sequences that rank before this waiting one; an estimate that ignores later promotions."""

    def may_preempt(self, candidate: Sequence, victim: Sequence) -> bool:
        """Whether a waiting candidate may take a running victim's blocks. A strict partial order, so nothing ping-pongs."""

    def victim_key(self, sequence: Sequence) -> Rank:
        """Running sequences with the smallest key are evicted first; ties go by recompute cost per block freed."""

    def on_admit(self, sequence: Sequence, now_s: float) -> None: ...

    def on_charge(self, sequence: Sequence, cost: int) -> None:
        """Work placed in this step, in cost units."""
