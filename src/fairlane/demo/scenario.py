"""Who asks for what, and when: three tenants, one per tier, and the policies they are served under. The same arrivals in every
phase, so that only the policy differs; how requests are sent and measured is traffic.py's and board.py's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum


class Pattern(Enum):
    """FLOOD: `size` requests at all times, the next as soon as one ends. STEADY: one every `every_s`. BURSTS: `size` at once."""

    FLOOD = "flood"
    STEADY = "steady"
    BURSTS = "bursts"


@dataclass(frozen=True, slots=True)
class Load:
    """One tenant's work. weight: of its tier under FAIR."""

    tenant: str
    tier: str
    pattern: Pattern
    size: int
    every_s: float
    prompt_tokens: int
    output_tokens: int
    weight: int

    @property
    def says(self) -> str:
        """What it does, in a few words."""
        return {
            Pattern.FLOOD: f"{self.size} requests at all times",
            Pattern.STEADY: f"one request every {self.every_s:.1f} s",
            Pattern.BURSTS: f"a burst of {self.size} every {self.every_s:.0f} s",
        }[self.pattern]

    def arrivals(self, seconds: float) -> Iterator[float]:
        """Arrival times of a phase of `seconds`, in order. A flood's are the first ones only; the others follow from ends."""
        if self.pattern is Pattern.FLOOD:
            yield from (0.0 for _ in range(self.size))
            return
        at = self.every_s / 2
        while at < seconds:
            yield from (at for _ in range(self.size))
            at += self.every_s


# Made for a machine that does this many tokens a second, eight streams at once: SmolLM2 on two CPU cores. A burst then fills all
# seats and keeps it busy for half its period, standard needs less than its share, and batch would take everything for ever.
TOKENS_PER_S = 120.0
_PACES = (0.25, 3.0)
LOADS: tuple[Load, ...] = (
    Load("northwind/checkout", "gold", Pattern.BURSTS, 8, 8.0, 64, 48, 6),
    Load("northwind/docs-api", "standard", Pattern.STEADY, 1, 1.2, 48, 24, 3),
    Load("chatly/free", "batch", Pattern.FLOOD, 12, 0.0, 64, 48, 1),
)
TIERS = tuple(load.tier for load in LOADS)

# Eight requests of gold fit and nothing else: blocks of 16 tokens, block 0 is never used.
NUM_BLOCKS = 1 + 56
MAX_NUM_SEQS = 8
PHASE_S = 25.0


def pace_of(tokens_per_s: float) -> float:
    """How much slower than the reference a machine is, within reason."""
    low, high = _PACES
    return min(high, max(low, TOKENS_PER_S / max(tokens_per_s, 1e-9)))


def paced(loads: tuple[Load, ...], pace: float) -> tuple[Load, ...]:
    """The same work for a machine that is `pace` times slower: what comes by the clock comes that much less often."""
    return tuple(replace(load, every_s=load.every_s * pace) for load in loads)


class PhasePolicy(Enum):
    """The policies that can be shown, and what to expect of each, in a few words."""

    FCFS = "fcfs"
    VIP = "vip"
    FAIR = "fair"

    @property
    def title(self) -> str:
        return {
            PhasePolicy.FCFS: "FCFS: the flood makes everybody wait",
            PhasePolicy.VIP: "VIP: gold goes first, the others stop for it",
            PhasePolicy.FAIR: "FAIR: everybody keeps moving",
        }[self]


def prompt(load: Load, number: int, vocab_size: int) -> list[int]:
    """Token ids that no other request begins with: a cached prefix would blur the comparison."""
    rng = random.Random(f"{load.tenant} {number}")  # noqa: S311 - text to compute on, no secret
    return [rng.randrange(100, vocab_size) for _ in range(load.prompt_tokens)]


_HEAD = """\
# The policy of this demo. Save a change and the running server follows within a second: try another word after `tiers:`,
# other weights, or a promise like  batch: {priority: 10, weight: 1, min: 30%}.  A mistake is reported and changes nothing.
version: 1
"""


def policy_text(policy: PhasePolicy, loads: tuple[Load, ...] = LOADS) -> str:
    """The policy file of a phase. Priorities count under vip, weights under fair."""
    gap = ", preempt_gap_ms: 100" if policy is PhasePolicy.FAIR else ""
    lines = [f"scheduler: {{tiers: {policy.value}{gap}}}", "tiers:"]
    for rank, load in enumerate(loads):
        shaping = ", shaping: balanced" if rank == 0 else ""
        lines.append(f"  {load.tier}: {{priority: {100 - 40 * rank}, weight: {load.weight}{shaping}}}")
    lines.append("organisations:")
    for organisation in dict.fromkeys(load.tenant.split("/")[0] for load in loads):
        lines += [f"  {organisation}:", "    tenants:"]
        for load in loads:
            owner, name = load.tenant.split("/")
            if owner == organisation:
                lines.append(f"      {name}: {{tiers: [{load.tier}]}}")
    return _HEAD + "\n".join(lines) + "\n"
