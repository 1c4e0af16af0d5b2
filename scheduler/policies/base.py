"""The Policy protocol: who goes first, who may evict whom, and how a step is shaped. The scheduler owns blocks, slots and
invariants and asks; a policy owns the waiting queue and answers. Every call is O(log n) in the number waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fairlane.scheduler.cost import Cost, Ledger, Rate, TokensCost
from fairlane.scheduler.request import Payer, Sequence

Rank = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BatchView:
    """What a policy may know of the batch when it plans a step.

    running: sequences that hold KV, by tier name, without those whose `ceil` binds; prefilling: those of them with more than one
    token to compute. prices: what work is charged. num_steps: that the engine has scheduled before.
    """

    token_budget: int
    running: Mapping[str, int]
    prefilling: Mapping[str, int]
    prices: Cost = field(default_factory=TokensCost)
    num_steps: int = 0

    @classmethod
    def of(
        cls, sequences: Iterable[Sequence], running: Mapping[str, int], token_budget: int, prices: Cost, num_steps: int
    ) -> BatchView:
        """sequences: all that run and may have more than one token to compute."""
        prefilling = Counter(one.request.tier for one in sequences if one.num_pending_tokens > 1)
        return cls(token_budget, running, prefilling, prices, num_steps)


@dataclass(slots=True)
class StepPlan:
    """How one step is shaped.

    protected_priority: tiers below it obey the next two; None: no shaping.
    lower_prefill_cap: most prefill tokens of lower tiers in this step, together, less what protected prefills take; None: no cap.
    pause_lower: lower tiers' decodes skip a step in which a protected prefill chunk was placed.
    """

    token_budget: int
    protected_priority: int | None = None
    lower_prefill_cap: int | None = None
    pause_lower: bool = False


class Policy(Protocol):
    """Order, preemption rights and step shape. `rank` is a total order, fixed within a step; smaller goes first."""

    name: str
    # Whether the rank of a running sequence may differ from step to step.
    ranks_change: bool
    # Whether may_preempt() may come to be true for two sequences by what is charged alone.
    leads_evict: bool
    # Whether it goes by Sequence.expected_charge; it is not worked out for others.
    predicts: bool

    def begin_step(self, now_s: float) -> None:
        """Time-driven changes (ageing, windows) happen here and nowhere else in a step."""

    def next_change_s(self) -> float:
        """When begin_step() will next change the order of waiting sequences, if nothing else happens; inf for never."""

    def plan(self, view: BatchView) -> StepPlan: ...

    def rank(self, sequence: Sequence) -> Rank:
        """Of a waiting or running sequence. peek() agrees with it."""

    def priority(self, sequence: Sequence) -> int:
        """Of the sequence's tier; what StepPlan.protected_priority is compared with."""

    def is_owed(self, sequence: Sequence) -> bool:
        """Whether a minimum share is owed to it in this step: it ranks first and is not made to pause."""

    def push(self, sequence: Sequence, since_s: float) -> None:
        """A sequence waits since since_s: new, or evicted (it keeps its place)."""

    def peek(self) -> Sequence | None:
        """The best waiting sequence not skipped in this step."""

    def rivals(self, head: Sequence) -> list[Sequence]:
        """A few other waiting sequences that may take the turn of what peek() returned, if more of their prompts is cached.
        Policies of entry points are not asked."""

    def peek_below(self, path: str) -> Sequence | None:
        """The best waiting sequence of a node of the ownership tree and all below it, whoever else goes before it; None if a cap
        or a `ceil` keeps them from running. Nodes held back above `path` do not matter."""

    def hold(self, path: str) -> None:
        """Until let_go(), neither peek() nor rivals() gives anybody of this node or below it."""

    def let_go(self, path: str) -> None:
        """Undoes hold(); nothing to undo is fine."""

    def shut(self, gate: str) -> None:
        """The `ceil` of a tier (`tier_gate` of its name) or node (its path) binds: until reopen(), neither peek(), rivals() nor
        peek_below() gives anybody of it. None of them is shut already."""

    def reopen(self, gate: str) -> None:
        """Undoes shut()."""

    def pop(self, sequence: Sequence) -> None:
        """Removes what peek() or peek_below() returned, or a rival."""

    def skip(self, sequence: Sequence) -> None:
        """Sets what peek() or peek_below() returned, or a rival, aside until end_step(): none of them gives it again."""

    def close(self, sequence: Sequence) -> None:
        """Until end_step(), peek() gives nobody who has no right to overtake this waiting head."""

    def remove(self, sequence: Sequence) -> None:
        """Removes a waiting sequence (cancelled)."""

    def end_step(self) -> None:
        """Puts the skipped ones back."""

    def num_waiting(self) -> int: ...

    def position(self, sequence: Sequence) -> int:
        """Waiting sequences that rank before this waiting one; an estimate that ignores later promotions."""

    def may_preempt(self, candidate: Sequence, victim: Sequence) -> bool:
        """Whether a waiting candidate may take a running victim's blocks. A strict partial order, so nothing ping-pongs."""

    def could_preempt(self, tier: str, others: Iterable[str]) -> bool:
        """Whether may_preempt() could ever be true for a candidate of this tier and a running sequence of the others."""

    def may_take(self, grower: Sequence, victim: Sequence) -> bool:
        """Whether a running sequence that must grow may take the blocks of a running one that ranks after it. The grower, or one
        that waits, may also take those of one whose `ceil` binds, wherever that ranks."""

    def victim_key(self, sequence: Sequence) -> Rank:
        """Running sequences with the smallest key are evicted first; ties go by recompute cost per block freed."""

    def on_admit(self, sequence: Sequence) -> None:
        """About to be popped and placed."""

    def on_unserved(self, sequence: Sequence) -> None:
        """Running, with something to compute, and left out of this step."""

    def adopt(self, sequence: Sequence) -> None:
        """It runs already: this policy takes over from another."""

    def on_release(self, sequence: Sequence) -> None:
        """A running sequence gave its blocks back: ended or evicted."""

    def on_step_time(self, cost: int, num_tokens: int, elapsed_s: float) -> None:
        """A step of this cost and so many tokens took so long."""

    def on_charge(self, payer: Payer, cost: int, ledger: Ledger = Ledger.WORK) -> None:
        """Work placed in this step, or KV cache held since the one before, in cost units. Negative: a refund, of work that was
        lost by a fault of ours."""

    def on_recompute(self, payer: Payer, cost: int) -> None:
        """The next charge is for somebody else's tokens, computed again because the payer took their blocks."""

    def on_decoding(self, payer: Payer, change: int, tokens: int) -> None:
        """So many more sequences of the payer (fewer, if negative), with so many tokens more between them, are charged by
        on_steady_step()."""

    def on_steady_step(self, rate: Rate, ledger: Ledger) -> None:
        """Every sequence named to on_decoding() is charged by its tokens as they were named."""

    def skip_step(self, now_s: float) -> None:
        """Instead of begin_step(), plan() and end_step(), where a step is only what on_steady_step() tells of: everybody who
        runs decodes, and nobody is asked for."""
