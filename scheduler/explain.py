"""Why one request waits, worked out when somebody asks, between two steps: nothing is kept for it but the decision log, so steps
cost what they always did. The answer names nodes; who may see which is for the gateway to say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

from fairlane.scheduler.ceilings import Binding
from fairlane.scheduler.decisions import Eviction
from fairlane.scheduler.hits import lookup
from fairlane.scheduler.policies.base import Rank
from fairlane.scheduler.policies.caps import prefixes
from fairlane.scheduler.request import Payer, RequestId, Sequence, SequenceStatus
from fairlane.scheduler.stats import AccountStats, account_stats
from fairlane.scheduler.tenancy import NodeShare, PolicySnapshot
from fairlane.scheduler.victims import evictable_for

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler

# The engine stands still meanwhile: some milliseconds for so many.
MAX_LOOKED_AT = 1024


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"


class Reason(Enum):
    """What holds a waiting request up. STEP: nothing but that the next steps have yet to place it. LOCALITY: others took its
    turn, because more of their prompts was cached."""

    CAP = "cap"
    RANK = "rank"
    SLOTS = "slots"
    BLOCKS = "blocks"
    STEP = "step"
    KV_LIMIT = "kv_limit"
    LOCALITY = "locality"
    CEIL = "ceil"


@dataclass(frozen=True, slots=True)
class Party:
    """Requests of one payer; evictable: of running ones, those whose blocks the explained request may take."""

    payer: Payer
    requests: int
    evictable: int = 0


@dataclass(frozen=True, slots=True)
class BindingCap:
    """A max_running that is reached."""

    node: str
    limit: int
    running: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """rank: 1 is next, 0 while it runs. ahead: waiting requests that go before it, without those held up by a cap or ceil that
    does not hold it up, too. blocks_missing: to start beside those that run. evictions: with their age in seconds. is_partial:
    only the oldest MAX_LOOKED_AT requests were counted. kv_accounts: those with a quota that its blocks count for, its own
    first; full_account: the one whose limit leaves too little for it; empty: none. ceilings: those that keep it, its tier's
    first; estimated_start_s is no sooner than they let go."""

    state: State
    waited_s: float
    reasons: tuple[Reason, ...]
    rank: int
    ahead: tuple[Party, ...]
    holders: tuple[Party, ...]
    caps: tuple[BindingCap, ...]
    blocks_needed: int
    blocks_free: int
    blocks_missing: int
    is_owed: bool
    estimated_start_s: float | None
    preemptions: int
    evictions: tuple[tuple[float, Eviction], ...]
    computed_tokens: int
    tokens: int
    is_partial: bool
    kv_accounts: tuple[AccountStats, ...] = ()
    full_account: str = ""
    ceilings: tuple[Binding, ...] = ()


def explain(scheduler: Scheduler, snapshot: PolicySnapshot, request_id: RequestId, now_s: float) -> Explanation | None:
    """None for a request that is not, or no longer, here. For the engine's thread, between two steps."""
    sequence = scheduler.sequence(request_id)
    if sequence is None:
        return None
    scheduler.lane.settle()
    others = [other for other in islice(scheduler.sequences(), MAX_LOOKED_AT) if other is not sequence]
    caps = _Caps(scheduler, snapshot, now_s)
    waits = sequence.status is SequenceStatus.WAITING
    ahead = _ahead(scheduler, sequence, others, caps) if waits else ()
    holders = _holders(scheduler, sequence, others)
    binding = caps.binding(sequence.request.tenant) if waits else ()
    ceilings = scheduler.ceilings.binding(sequence.payer, now_s)
    needed, missing = _blocks(scheduler, sequence) if waits else (0, 0)
    full = _full_account(scheduler, sequence, needed) if waits else ""
    rank = 1 + sum(party.requests for party in ahead) if waits else 0
    own = sum(party.requests for party in ahead if party.payer == sequence.payer)
    is_paused = not waits and sequence.stalled_since_s is not None
    evictions = scheduler.decisions.evictions_of(request_id)
    estimate_s = None
    if waits:  # with a cap, how often others get in says nothing
        estimate_s = scheduler.waits.wait_s(sequence.payer, own, None if binding else rank - 1, now_s)
    if ceilings and estimate_s is not None:
        estimate_s = max(estimate_s, *(ceil.for_s for ceil in ceilings))
    return Explanation(
        state=State.WAITING if waits else State.PAUSED if is_paused else State.RUNNING,
        waited_s=now_s - sequence.queued_at_s if waits else 0.0,
        reasons=_reasons(scheduler, sequence, binding, ahead, missing, full, ceilings) if waits else (),
        rank=rank,
        ahead=ahead,
        holders=holders,
        caps=binding,
        blocks_needed=needed,
        blocks_free=scheduler.blocks.num_free_blocks,
        blocks_missing=missing,
        is_owed=scheduler.policy.is_owed(sequence),
        estimated_start_s=estimate_s,
        preemptions=sequence.num_preemptions,
        evictions=tuple((now_s - eviction.at_s, eviction) for eviction in evictions),
        computed_tokens=sequence.num_computed_tokens,
        tokens=sequence.num_tokens,
        is_partial=scheduler.num_unfinished > MAX_LOOKED_AT,
        kv_accounts=_kv_accounts(scheduler, sequence),
        full_account=full,
        ceilings=ceilings if waits or is_paused else (),
    )


def _reasons(
    scheduler: Scheduler,
    sequence: Sequence,
    caps: tuple[BindingCap, ...],
    ahead: tuple[Party, ...],
    blocks_missing: int,
    full_account: str,
    ceilings: tuple[Binding, ...],
) -> tuple[Reason, ...]:
    found = {
        Reason.CAP: bool(caps),
        Reason.CEIL: bool(ceilings),
        Reason.RANK: bool(ahead),
        Reason.SLOTS: not scheduler.running.has_free_slot,
        Reason.BLOCKS: blocks_missing > 0 and not full_account,
        Reason.KV_LIMIT: bool(full_account),
        Reason.LOCALITY: sequence.num_passed > 0,
    }
    return tuple(reason for reason, holds in found.items() if holds) or (Reason.STEP,)


def _ahead(scheduler: Scheduler, sequence: Sequence, others: list[Sequence], caps: _Caps) -> tuple[Party, ...]:
    own, mine = _order(scheduler, sequence), caps.that_hold_up(sequence)
    before = Counter(
        other.payer
        for other in others
        if other.status is SequenceStatus.WAITING and caps.that_hold_up(other) <= mine and _order(scheduler, other) < own
    )
    return tuple(Party(payer, count) for payer, count in before.most_common())


def _order(scheduler: Scheduler, sequence: Sequence) -> tuple[Rank, int, int]:
    """A policy ranks a line by its head; inside it, `order` and arrival decide."""
    return (scheduler.policy.rank(sequence), -sequence.request.order, sequence.arrival_index)


def _holders(scheduler: Scheduler, sequence: Sequence, others: list[Sequence]) -> tuple[Party, ...]:
    holders = [other for other in others if other.status is SequenceStatus.RUNNING]
    waits = sequence.status is SequenceStatus.WAITING
    running = Counter(other.payer for other in holders)
    evictable = Counter(other.payer for other in evictable_for(scheduler, sequence, holders, holders) if waits)
    return tuple(Party(payer, count, evictable[payer]) for payer, count in running.most_common())


def _blocks(scheduler: Scheduler, sequence: Sequence) -> tuple[int, int]:
    """Needed for all its tokens, and missing in the pool, with what is kept free, or by a limit."""
    blocks = scheduler.blocks
    hit = lookup(sequence, blocks)
    needed = blocks.num_blocks_to_allocate(sequence.num_tokens, hit)
    kept = scheduler.room.kept_from(sequence.request.tier, scheduler.policy, len(scheduler.running))
    missing = [needed + kept - blocks.num_free_blocks]
    if scheduler.census.quotas is not None:
        missing += [needed - account.room for account in scheduler.census.quotas.lineage(sequence)]
    return needed, max(0, *missing)


def _full_account(scheduler: Scheduler, sequence: Sequence, needed: int) -> str:
    quotas = scheduler.census.quotas
    full = None if quotas is None else quotas.full_for(sequence, needed)
    return "" if full is None else full.name


def _kv_accounts(scheduler: Scheduler, sequence: Sequence) -> tuple[AccountStats, ...]:
    quotas = scheduler.census.quotas
    return () if quotas is None else tuple(account_stats(account) for account in quotas.lineage(sequence))


class _Caps:
    """Which max_running are reached, by node, and who is held up by that or by a ceil."""

    def __init__(self, scheduler: Scheduler, snapshot: PolicySnapshot, now_s: float) -> None:
        self._ceilings = scheduler.ceilings
        self._now_s = now_s
        self._shares: dict[str, NodeShare] = {share.path: share for share in snapshot.nodes}
        self._running: Counter[str] = Counter()
        for path, count in scheduler.census.running_by_node.copy().items():
            for prefix in prefixes(path):
                self._running[prefix] += count
        self._known: dict[str, tuple[BindingCap, ...]] = {}
        self._holding_up: dict[Payer, frozenset[str]] = {}

    def binding(self, tenant: str) -> tuple[BindingCap, ...]:
        """Of the node and those above it."""
        found = self._known.get(tenant)
        if found is None:
            limits = [(path, limit) for path in prefixes(tenant) if (limit := self._limit(path)) is not None]
            found = tuple(BindingCap(path, limit, self._running[path]) for path, limit in limits if self._running[path] >= limit)
            self._known[tenant] = found
        return found

    def that_hold_up(self, sequence: Sequence) -> frozenset[str]:
        """Nodes whose cap binds it, and gates whose ceil does."""
        known = self._holding_up.get(sequence.payer)
        if known is None:
            caps = (f"cap {cap.node}" for cap in self.binding(sequence.request.tenant))
            known = frozenset([*caps, *(ceil.gate for ceil in self._ceilings.binding(sequence.payer, self._now_s))])
            self._holding_up[sequence.payer] = known
        return known

    def _limit(self, path: str) -> int | None:
        share = self._shares.get(path)
        if share is not None:
            return share.max_running
        above = self._shares.get(path.rpartition("/")[0])
        return None if above is None else above.member_max_running
