"""`ceil`: the most of the worker's time that a tier or node takes, even if the rest idles. Each has a token bucket of worker
time, kept as the moment from which it owes nothing (a GCRA):

    clear = max(clear, start of the step - BURST_S) + its part of the step's time / ceil         when a step returns
    the ceil binds while now < clear                                                             when a step is scheduled

Nothing of a tier or node is placed while its ceil, or that of a node above it, binds: nobody of it is admitted, and what runs
pauses and keeps its blocks. A step's time is split over its members by what they cost, whoever is charged for it. What follows
for any stretch of time, and why, is in docs/scheduling.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from fairlane.scheduler.cost import Cost, Rate, TokensCost
from fairlane.scheduler.lane import DecodeLane
from fairlane.scheduler.policies.caps import prefixes, tier_gate
from fairlane.scheduler.request import Payer, Sequence
from fairlane.scheduler.tenancy import CostName, NodeShare, Tier

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler

# How long a ceil that was not used up is remembered: in any ten seconds at most 4 % more than it, as `min` may be 4 % less.
BURST_S = 0.4


class Bucket:
    """clear_s: from when on nothing is owed. used_s: of the worker's time since the start."""

    __slots__ = ("clear_s", "share", "used_s")

    def __init__(self, share: float) -> None:
        self.share = share
        self.clear_s = -inf
        self.used_s = 0.0

    def take(self, seconds: float, since_s: float) -> None:
        """So much of the worker's time, of a step that began at since_s."""
        self.clear_s = max(self.clear_s, since_s - BURST_S) + seconds / self.share
        self.used_s += seconds


class Binding(NamedTuple):
    """A ceil that binds, of a tier (`tier_gate` of its name) or node, for so many seconds if nothing more is taken."""

    gate: str
    share: float
    for_s: float


class StepParts:
    """What each payer's own sequences make a step do, in cost units. shut: by a shadow's ceilings when it was scheduled, so that
    for the shadow it does not count."""

    __slots__ = ("costs", "shut", "total")

    def __init__(self) -> None:
        self.shut: frozenset[str] = frozenset()
        self.costs: dict[Payer, int] = {}
        self.total = 0

    def add(self, payer: Payer, cost: int) -> None:
        self.costs[payer] = self.costs.get(payer, 0) + cost
        self.total += cost


class Ceilings:
    """Those of one policy. `shut`: the gates of tiers and nodes whose ceil binds in this step."""

    def __init__(self, tiers: Iterable[Tier] = (), nodes: Iterable[NodeShare] = ()) -> None:
        self.buckets = {tier_gate(tier.name): Bucket(tier.ceil) for tier in tiers if tier.ceil is not None}
        self.buckets |= {node.path: Bucket(node.ceil) for node in nodes if node.ceil is not None}
        self.shut: frozenset[str] = frozenset()
        self._gates: dict[Payer, tuple[str, ...]] = {}

    def gates(self, payer: Payer) -> tuple[str, ...]:
        """The tier and nodes with a ceil that the payer's work counts for."""
        found = self._gates.get(payer)
        if found is None:
            if len(self._gates) >= 16_384:  # members come and go
                self._gates.clear()
            names = (tier_gate(payer.tier), *prefixes(payer.tenant))
            found = self._gates[payer] = tuple(name for name in names if name in self.buckets)
        return found

    def rests(self, sequence: Sequence) -> bool:
        """Whether a ceil keeps it from being placed."""
        return bool(self.shut) and not self.shut.isdisjoint(self.gates(sequence.payer))

    def without_resting(self, sequences: list[Sequence], by_tier: Mapping[str, int]) -> tuple[list[Sequence], Mapping[str, int]]:
        """Those of the sequences that may be placed, and the counts, in which all of them are, without the others."""
        if not self.shut:
            return sequences, by_tier
        resting = Counter(sequence.request.tier for sequence in sequences if self.rests(sequence))
        return [sequence for sequence in sequences if not self.rests(sequence)], Counter(by_tier) - resting

    def advance(self, now_s: float) -> tuple[frozenset[str], frozenset[str]]:
        """A step is to be scheduled at now_s. Returns whose ceil begins to bind, and whose ends."""
        before = self.shut
        self.shut = frozenset(gate for gate, bucket in self.buckets.items() if now_s < bucket.clear_s)
        return self.shut - before, before - self.shut

    def take(self, parts: StepParts, elapsed_s: float, now_s: float, *, unless: frozenset[str] = frozenset()) -> None:
        """A step of these parts returned at now_s and took so long; unless: for whom it does not count."""
        if parts.total <= 0:
            return
        used = Counter[str]()
        for payer, cost in parts.costs.items():
            for gate in self.gates(payer):
                used[gate] += cost
        for gate, cost in used.items():
            if gate not in unless:
                self.buckets[gate].take(elapsed_s * cost / parts.total, now_s - elapsed_s)

    def opens_at_s(self) -> float:
        """When the first ceil that binds lets go; inf: none binds."""
        return min((self.buckets[gate].clear_s for gate in self.shut), default=inf)

    def binding(self, payer: Payer, now_s: float) -> tuple[Binding, ...]:
        """Those that keep the payer's work from being placed."""
        buckets = ((gate, self.buckets[gate]) for gate in self.gates(payer))
        return tuple(Binding(gate, one.share, one.clear_s - now_s) for gate, one in buckets if now_s < one.clear_s)

    def take_over(self, previous: Ceilings, now_s: float) -> None:
        """Starts with what another's tiers and nodes owe, in worker time, or have left."""
        for gate, bucket in self.buckets.items():
            known = previous.buckets.get(gate)
            if known is not None:
                owed_s = max(known.clear_s - now_s, -BURST_S) * known.share
                bucket.clear_s = now_s + owed_s / bucket.share
                bucket.used_s = known.used_s


class TimeMeter:
    """Prices what is placed, to split the time of each step. The lane's members are looked through only when they change."""

    def __init__(self, cost: Cost) -> None:
        """cost: as charged; by tokens, where work costs nothing."""
        self._prices: Cost = TokensCost() if cost.name is CostName.KV_TIME else cost
        self._members: list[Sequence] = []
        self._lane: list[list[int]] = []
        self._payers: list[Payer] = []
        self._parts = StepParts()

    def place(self, sequence: Sequence, num_tokens: int, *, is_chunk: bool) -> None:
        """The next num_tokens of a sequence."""
        start = sequence.num_computed_tokens
        cost = self._prices.chunk(start, num_tokens) if is_chunk else self._prices.decode().of(start)
        self._parts.add(sequence.payer, cost)

    def place_lane(self, lane: DecodeLane) -> None:
        """Each of its members one token; before lane.place()."""
        if lane.members is not self._members:
            self._look_through(lane)
        rate: Rate = self._prices.decode()
        for payer, counts in zip(self._payers, self._lane, strict=True):
            self._parts.add(payer, rate.per_sequence * counts[0] + rate.per_token * counts[1])
            counts[1] += counts[0]

    def _look_through(self, lane: DecodeLane) -> None:
        lane.settle()
        found: dict[Payer, list[int]] = {}
        for member in lane.members:
            counts = found.setdefault(member.payer, [0, 0])
            counts[0] += 1
            counts[1] += member.num_computed_tokens
        self._members, self._payers, self._lane = lane.members, list(found), list(found.values())

    def launched(self) -> StepParts:
        """All that was placed since the last step."""
        parts, self._parts = self._parts, StepParts()
        return parts


def keep_ceilings(scheduler: Scheduler, now_s: float) -> None:
    """Before a step: tells the policy whom to keep back, and takes out of the lane who has to pause."""
    ceilings, lane = scheduler.ceilings, scheduler.lane
    begun, ended = ceilings.advance(now_s)
    for gate in begun:
        scheduler.policy.shut(gate)
    for gate in ended:
        scheduler.policy.reopen(gate)
    if begun or ended:
        scheduler.settlement = None
    if ceilings.shut:
        lane.joining = [sequence for sequence in lane.joining if not ceilings.rests(sequence)]
        if begun:
            lane.leave([member for member in lane.members if ceilings.rests(member)], scheduler.policy)


def launched_parts(scheduler: Scheduler, meter: TimeMeter, *, with_lane: bool) -> StepParts:
    """Of the step that is launched, before the lane is placed."""
    if with_lane:
        meter.place_lane(scheduler.lane)
    parts = meter.launched()
    if scheduler.shadow is not None:
        parts.shut = scheduler.shadow.state.ceilings.shut
    return parts


def take_time(scheduler: Scheduler, parts: StepParts, elapsed_s: float, now_s: float) -> None:
    """A step of these parts returned at now_s and took so long."""
    scheduler.ceilings.take(parts, elapsed_s, now_s)
    if scheduler.shadow is not None:
        scheduler.shadow.tell(scheduler.shadow.state.take_time, parts, elapsed_s, now_s)


def set_ceilings(scheduler: Scheduler, ceilings: Ceilings, now_s: float) -> None:
    """In place of those in force, for a policy that was told of none that binds."""
    ceilings.take_over(scheduler.ceilings, now_s)
    scheduler.ceilings = ceilings
    scheduler.meter = None  # its cost may be another
    set_meter(scheduler)


def set_meter(scheduler: Scheduler) -> None:
    """There is one while the policy in force or a shadow has ceilings."""
    shadow = scheduler.shadow
    if not scheduler.ceilings.buckets and (shadow is None or not shadow.state.ceilings.buckets):
        scheduler.meter = None
    elif scheduler.meter is None:
        scheduler.meter = TimeMeter(scheduler.cost)
