"""What all policies here share: bands of waiting trees (and one below them for those that missed their deadline), ageing,
minimum shares, running caps, and the rank that follows from them. A policy says which band a tier is in and how a step is shaped
(fcfs.py, vip.py, fair.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from fairlane.scheduler.cost import Cost, Ledger, Rate, TokensCost
from fairlane.scheduler.policies.base import BatchView, Rank, StepPlan
from fairlane.scheduler.policies.caps import RunningCaps, gate_places
from fairlane.scheduler.policies.deadlines import Deadlines
from fairlane.scheduler.policies.gap import PreemptGap
from fairlane.scheduler.policies.min_shares import MinShares
from fairlane.scheduler.policies.node import SteadyCost, named
from fairlane.scheduler.policies.wait_tree import WaitTree
from fairlane.scheduler.request import Payer, RequestId, Sequence
from fairlane.scheduler.tenancy import PolicySnapshot, WithinTier

# Leaves, and waiting sequences of them, that are compared by what is cached of them.
MOST_LINES, MOST_RIVALS = 8, 64


class Stay(NamedTuple):
    """One stay in the queue: bands risen by patience so far; the ticket tells it from other stays of the same sequence."""

    sequence: Sequence
    risen: int
    ticket: int


class BandPolicy:
    """Waiting rank (band after ageing, then the band's own order); running rank (own band, then the same). Whoever is owed by
    a minimum share ranks before all bands.

    by_tier: the tree begins with the tier. minimums: `min` is kept.
    lease_tokens: how many tokens beyond those it had at admission one that patience or a minimum share let go before a higher
    band's may compute before it can be evicted for priority again.
    """

    name = "bands"
    ages = True

    def __init__(
        self,
        snapshot: PolicySnapshot,
        band: Mapping[str, int],
        within: WithinTier,
        *,
        by_tier: bool = True,
        minimums: bool = True,
        lease_tokens: int = 256,
    ) -> None:
        shares = {node.path: node for node in snapshot.nodes}
        self._deadlines = Deadlines(snapshot.within_tenant, snapshot.tiers)
        if self._deadlines.active:
            band = {name: number + 1 for name, number in band.items()}
        self._tiers = {tier.name: tier for tier in snapshot.tiers}
        self._band = band
        self._by_tier = by_tier
        self._top_band = max(band.values())
        self._caps = RunningCaps(shares)
        self._steady = SteadyCost()
        self._trees = [
            WaitTree(
                within, self._tiers, shares, self._caps, by_tier=by_tier, predicts=snapshot.predict_output, steady=self._steady
            )
            for _ in range(self._top_band + 1)
        ]
        if self._deadlines.active:  # below all bands: by arrival, who could not start in time
            self._trees[0] = WaitTree(WithinTier.FCFS, self._tiers, shares, self._caps, by_tier=by_tier)
        self._ranked = self._trees[1:] if self._deadlines.active else self._trees
        self._lowest_priority = min(tier.priority for tier in snapshot.tiers)
        self._lease_tokens = lease_tokens
        self._cost = snapshot.cost
        self._fair = within is WithinTier.FAIR
        self._stays: dict[RequestId, Stay] = {}
        self._promotions: list[tuple[float, int, RequestId]] = []
        self._tickets = 0
        self._gap = PreemptGap(snapshot.preempt_gap_ms)
        self._window_ms = snapshot.locality_window_ms if self._fair else 0.0
        self._prices: Cost = TokensCost()
        self._min = MinShares(tuple(self._tiers.values()), snapshot.nodes) if minimums else MinShares((), ())
        self._backlog_changed = False  # since the windows were last told of it
        self.ranks_change = self._fair or bool(self._min.guarantees) or self._deadlines.active
        self.leads_evict = self._fair and self._gap.is_set
        self.predicts = self._fair and snapshot.predict_output

    # -- time ----------------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        self._min.advance(now_s)
        self._relegate(now_s)
        self._deadlines.sort_places(self._tree)
        while self._promotions and self._promotions[0][0] <= now_s:
            due_s, ticket, request_id = heappop(self._promotions)
            stay = self._stays.get(request_id)
            if stay is not None and stay.ticket == ticket:
                self._tree(stay.sequence, stay.risen).remove(stay.sequence)
                self._enter(stay.sequence, stay.risen + 1, due_s)

    def _relegate(self, now_s: float) -> None:
        for sequence, since_s in self._deadlines.missed(now_s, self._stays.keys()):
            self._tree(sequence, self._stays[sequence.request_id].risen).remove(sequence)
            sequence.relegated = True
            self._enter(sequence, self._lowest(sequence), since_s)

    def _lowest(self, sequence: Sequence) -> int:
        """How far it has risen before any patience: below all bands, if it was relegated."""
        return -self._band[sequence.request.tier] if sequence.relegated else 0

    def next_change_s(self) -> float:
        return min(self._promotions[0][0] if self._promotions else inf, self._deadlines.next_miss_s())

    def _enter(self, sequence: Sequence, risen: int, since_s: float) -> None:
        tier = self._tiers[sequence.request.tier]
        self._tickets += 1
        self._stays[sequence.request_id] = Stay(sequence, risen, self._tickets)
        self._tree(sequence, risen).push(sequence)
        self._backlog_changed = True
        if self.ages and tier.patience_s is not None and self._band[tier.name] + risen < self._top_band:
            heappush(self._promotions, (since_s + tier.patience_s, self._tickets, sequence.request_id))
            self._sweep_promotions()

    def _sweep_promotions(self) -> None:
        """Drops the entries of those that wait no more, once they are the majority."""
        if len(self._promotions) > 64 and len(self._promotions) > 2 * len(self._stays):
            stays = self._stays
            self._promotions = [entry for entry in self._promotions if entry[2] in stays and stays[entry[2]].ticket == entry[1]]
            heapify(self._promotions)

    def _tree(self, sequence: Sequence, risen: int = 0) -> WaitTree:
        return self._trees[self._band[sequence.request.tier] + risen]

    # -- the step's shape ----------------------------------------------------------------------------------------------

    def plan(self, view: BatchView) -> StepPlan:
        """No shaping but for deadlines."""
        self._prices = view.prices
        if self._min.guarantees:
            passing = bool(view.prefilling) or self._min.has_unserved
            self._set_backlogged(view.prefilling)
            self._backlog_changed = passing
        return StepPlan(token_budget=self._deadlines.step_tokens(view))

    def skip_step(self, now_s: float) -> None:
        """Nobody prefills, and nobody was left out, else this would be another kind of step."""
        if self._min.guarantees:
            self._min.advance(now_s)
            if self._backlog_changed:
                self._backlog_changed = False
                self._set_backlogged({})

    def _set_backlogged(self, prefilling: Mapping[str, int]) -> None:
        self._min.set_backlogged(
            guarantee
            for guarantee in self._min.guarantees
            if (guarantee.tier is not None and prefilling.get(guarantee.tier))
            or any(tree.num_queued(names) for tree in self._trees for names in guarantee.places(self._tiers))
        )

    def on_unserved(self, sequence: Sequence) -> None:
        """It had something to compute and this step left it out."""
        self._min.unserved(sequence.payer)

    # -- order ---------------------------------------------------------------------------------------------------------

    def rank(self, sequence: Sequence) -> Rank:
        stay = self._stays.get(sequence.request_id)
        if self._min.owed and self._min.is_owed(sequence.payer):
            return (-self._top_band - 1, sequence.place if stay is None else self._place_in_line(stay))
        band = self._band[sequence.request.tier]
        if stay is None:  # running: its own band, whatever let it in
            return (0, sequence.place) if sequence.relegated else (-band, *self._trees[band].rank(sequence, waiting=False))
        return (-band - stay.risen, *self._trees[band + stay.risen].rank(sequence, waiting=True))

    def _place_in_line(self, stay: Stay) -> int:
        return self._tree(stay.sequence, stay.risen).place_of(stay.sequence)

    def priority(self, sequence: Sequence) -> int:
        return self._lowest_priority if sequence.relegated else self._tiers[sequence.request.tier].priority

    def is_owed(self, sequence: Sequence) -> bool:
        return self._min.is_owed(sequence.payer)

    def may_preempt(self, candidate: Sequence, victim: Sequence) -> bool:
        if victim.num_computed_tokens < victim.lease_until_tokens:
            return False
        own, other = self._band_of(candidate), self._band[victim.request.tier]
        if own != other:
            return own > other
        if not self.leads_evict:
            return False
        lead = self._tree(victim).gap(candidate, victim)
        # Whoever evicts pays for the recompute: more than the lead, and it would be the one that is ahead.
        return self._gap.is_exceeded(lead) and lead > self._prices.chunk(0, victim.num_computed_tokens)

    def could_preempt(self, tier: str, others: Iterable[str]) -> bool:
        own = self._band[tier]
        return self.leads_evict or any(own > self._band[other] for other in others)

    def may_take(self, grower: Sequence, victim: Sequence) -> bool:
        return self._band_of(victim) <= self._band_of(grower)

    def _band_of(self, sequence: Sequence) -> int:
        return 0 if sequence.relegated else self._band[sequence.request.tier]

    def victim_key(self, sequence: Sequence) -> Rank:
        band = self._band_of(sequence)
        return (band, *(-v for v in self._tree(sequence).lead(sequence))) if self._fair else (band,)

    # -- the waiting queue ---------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence, since_s: float) -> None:
        self._deadlines.stamp(sequence, since_s)
        self._enter(sequence, self._lowest(sequence), since_s)

    def peek(self) -> Sequence | None:
        owed = self._peek_owed() if self._min.owed else None
        if owed is not None:
            return owed
        for tree in reversed(self._trees):
            head = tree.peek()
            if head is not None:
                return head
        return None

    def _peek_owed(self) -> Sequence | None:
        owed = (g for g in self._min.owed if g.tier is not None or not self._caps.keeps_out("/".join(g.names)))
        places = [(tree, names) for g in owed for names in g.places(self._tiers) for tree in self._trees]
        heads = [(tree.place_of(head), head) for tree, names in places if (head := tree.peek(names)) is not None]
        return min(heads, key=lambda found: found[0])[1] if heads else None

    def rivals(self, head: Sequence) -> list[Sequence]:
        """Within the locality window of fair shares; none for a head that goes by age, by a minimum share, or too late."""
        if not self._window_ms or self._stays[head.request_id].risen or self._min.is_owed(head.payer):
            return []
        lines = self._tree(head).lines_within(self._window_ms * self._gap.cost_per_ms, MOST_LINES)
        return [one for line in lines for one in line.first(MOST_RIVALS // len(lines))]

    def peek_below(self, path: str) -> Sequence | None:
        if self._caps.bars(path):
            return None
        names = tuple(path.split("/"))
        places = [(name, *names) for name in self._tiers] if self._by_tier else [names]
        heads = [head for tree in self._trees for place in places if (head := tree.peek(place)) is not None]
        return min(heads, key=self.rank, default=None)

    def hold(self, path: str) -> None:
        self._caps.hold(path)

    def let_go(self, path: str) -> None:
        self._caps.let_go(path)

    def shut(self, gate: str) -> None:
        self._caps.shut(gate)

    def reopen(self, gate: str) -> None:
        for names in gate_places(gate, self._tiers if self._by_tier else None):
            for tree in self._ranked:
                tree.lift(names)
        self._caps.reopen(gate)

    def pop(self, sequence: Sequence) -> None:
        stay = self._stays[sequence.request_id]
        self._tree(sequence, stay.risen).take_place(sequence)
        self.adopt(sequence)  # first, so that its counters are not forgotten in between
        self.remove(sequence)

    def skip(self, sequence: Sequence) -> None:
        self._tree(sequence, self._stays[sequence.request_id].risen).skip(sequence)

    def close(self, sequence: Sequence) -> None:
        """Who could not overtake this head must not: its band and those below, in every tree they have risen to. Before a
        relegated one all others were asked already."""
        band = self._top_band if sequence.relegated else self._band[sequence.request.tier]
        closed = frozenset(name for name, own in self._band.items() if own <= band)
        for tree in self._trees:
            tree.close(closed)

    def remove(self, sequence: Sequence) -> None:
        self._tree(sequence, self._stays.pop(sequence.request_id).risen).remove(sequence)
        self._backlog_changed = True
        self._sweep_promotions()

    def end_step(self) -> None:
        for tree in self._trees:
            tree.restore()

    def num_waiting(self) -> int:
        return len(self._stays)

    def position(self, sequence: Sequence) -> int:
        return self._num_above(sequence) + self._trees[self._band_of(sequence)].position(sequence)

    def _num_above(self, sequence: Sequence) -> int:
        """Waiting sequences in the bands above its own, whoever rose there included."""
        return sum(tree.num_queued() for tree in self._trees[self._band_of(sequence) + 1 :])

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def on_admit(self, sequence: Sequence) -> None:
        """A lease, where patience or a minimum share let it go before somebody of a higher band who waits."""
        risen = self._stays[sequence.request_id].risen
        by_right = risen > self._lowest(sequence) or self._min.is_owed(sequence.payer)
        if by_right and self._num_above(sequence) > (risen > 0):  # it may be among them itself
            sequence.lease_until_tokens = sequence.num_tokens + self._lease_tokens

    def adopt(self, sequence: Sequence) -> None:
        sequence.relegated = sequence.relegated and self._deadlines.active
        self._caps.add(sequence.request.tenant)
        tree = self._tree(sequence)
        tree.adopt(sequence)
        self._deadlines.runs(sequence, tree.leaf_key(sequence.payer))

    def on_release(self, sequence: Sequence) -> None:
        tree = self._tree(sequence)
        tree.release(sequence)
        self._caps.remove(sequence.request.tenant)
        self._deadlines.runs_no_more(sequence, tree.leaf_key(sequence.payer))

    def on_charge(self, payer: Payer, cost: int, ledger: Ledger = Ledger.WORK) -> None:
        band = self._band.get(payer.tier)
        if band is not None:  # else a tier that is gone: nobody is left to be compared with
            self._trees[band].charge(payer, cost, ledger)
        if cost > 0:  # a refund does not give the worker's time back
            self._min.charge(payer, cost)

    def on_recompute(self, payer: Payer, cost: int) -> None:
        band = self._band.get(payer.tier)
        if band is not None:
            self._trees[band].unexpect(payer, cost)

    def on_decoding(self, payer: Payer, change: int, tokens: int) -> None:
        band = self._band.get(payer.tier)
        if band is not None:
            self._trees[band].decode(payer, change, tokens)
        self._min.decode(payer, change, tokens)

    def on_steady_step(self, rate: Rate, ledger: Ledger) -> None:
        if self._fair:
            self._steady.charge(rate, ledger)
        self._min.steady_step(rate)

    def on_step_time(self, cost: int, num_tokens: int, elapsed_s: float) -> None:
        self._gap.observe(cost, elapsed_s)
        self._deadlines.observe(num_tokens, elapsed_s)

    def take_over(self, previous: BandPolicy) -> None:
        """Starts with another policy's counters and windows; before anything is pushed or adopted. Not if they are in other
        units."""
        self._deadlines.take_over(previous._deadlines)
        if self._cost is not previous._cost:
            return
        self._min.take_over(previous._min)
        self._gap.take_over(previous._gap)
        if not (self._fair and previous._fair):
            return
        counters: dict[tuple[str, ...], float] = {}
        waiting: set[tuple[str, ...]] = set()
        for name, band in previous._band.items():  # where it is charged, wherever its requests have risen to
            counters |= {names: v for names, v in previous._trees[band].counters().items() if names[0] == name}
            waiting |= {names for names, node in named(previous._trees[band].root) if node.queued and names[0] == name}
        for name, band in self._band.items():
            if self._beside(name) != previous._beside(name):
                waiting.discard((name,))  # tiers of different bands were never compared: what one got more is nobody's claim
            self._trees[band].take_over({names: v for names, v in counters.items() if names[0] == name}, waiting)

    def _beside(self, tier: str) -> set[str]:
        """The tiers of its band."""
        return {name for name, band in self._band.items() if band == self._band.get(tier)}
