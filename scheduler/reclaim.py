"""What a step owes to KV guarantees and limits, before it places anybody: whoever is above a limit that was lowered gives
blocks back; sequences that decode within a guarantee get the block they need; and waiting ones that are covered by a guarantee,
and would not get in by rank because blocks are short, get in. The blocks come from those who have more than they were
guaranteed, whatever their tier and whatever else protects them, most over first; what that costs them is charged to them.

    covered    the account stays within its guarantee with what is asked for borrowers  running sequences of accounts above
    their guarantees; by the sum of all guarantees, which is at most the pool, there
               are always enough of them
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairlane.blockmgr.accounts import Account
from fairlane.blockmgr.manager import PrefixHit
from fairlane.scheduler.events import PreemptionReason
from fairlane.scheduler.hits import lookup
from fairlane.scheduler.kv_quotas import KVQuotas, Losses
from fairlane.scheduler.placement import Placement
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.victims import Order, victim_order

if TYPE_CHECKING:
    from fairlane.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class StepHooks:
    """What the pass does for it. unplaced: running sequences that may still be evicted, in rank order, without the lane's.
    free_blocks: without what the lane needs. fits: as for anybody who waits. let_in: with the hit, to be
    placed by rank; whether it is swapped in."""

    unplaced: Callable[[], list[Sequence]]
    dissolve_lane: Callable[[], None]
    free_blocks: Callable[[], int]
    fits: Callable[[Sequence, PrefixHit | None], bool]
    evict: Callable[[list[Sequence], PreemptionReason, Sequence], None]
    let_in: Callable[[Sequence, PrefixHit | None], bool]


class Reclaim:
    """Use once, for one step. kept: sequences that got blocks here and must keep them in this step. brought: those of them that
    are swapped in. is_settled: False, if the next step may find more to do. was_pressed: claims were looked at as those of whom
    blocks had been kept."""

    def __init__(self, scheduler: Scheduler, quotas: KVQuotas, placement: Placement, hooks: StepHooks) -> None:
        self.kept: set[Sequence] = set()
        self.brought: list[Sequence] = []
        self._lets_in = self._passed_any = False
        self._orders: dict[Sequence, Order] = {}
        self._left: dict[Account, int] = {}  # with somebody who is covered and stays: blocks that one of them needs at most
        self._left_to_rank = 0  # blocks for those who fit
        self.is_settled = True
        self.was_pressed = quotas.is_pressed
        self._scheduler = scheduler
        self._policy = scheduler.policy
        self._blocks = scheduler.blocks
        self._quotas = quotas
        self._accounts = quotas.accounts
        self._placement = placement
        self._hooks = hooks

    def run(self) -> bool:
        """Whether anybody was let in, who is to be placed by rank."""
        self._quotas.let_go(self._policy)
        if self._accounts.lowered:
            self._relieve()
        if self._accounts.guarantees:
            self.grow_covered()
            self._serve_claims()
        return self._lets_in

    def done(self, is_pressed: bool) -> None:
        """The pass asks nothing of it any more but settles(), and goes without the garbage collector. is_pressed: for the
        next."""
        self._quotas.is_pressed = is_pressed
        del self._hooks

    # -- a limit that was lowered ----------------------------------------------------------------------------------------------

    def _relieve(self) -> None:
        """Takes from each account what it has above its limit."""
        lowered, self._accounts.lowered = self._accounts.lowered, []
        for account in lowered:
            if account.room >= 0:
                continue
            self._hooks.dissolve_lane()
            inside = [one for one in self._hooks.unplaced() if account in self._lineage(one)]
            held: dict[int, int] = {}
            over, victims = -account.room, []
            for victim in sorted(inside, key=self._victim_order()):
                if over > 0:
                    victims.append(victim)
                    over -= self._blocks.freed_with(victim.request_id, held)
            for victim in victims:
                self._hooks.evict([victim], PreemptionReason.KV_LIMIT, victim)

    # -- running sequences -----------------------------------------------------------------------------------------------------

    def grow_covered(self) -> None:
        """Whoever decodes within a guarantee gets its block now, so that those who rank before it cannot take it."""
        running = self._hooks.unplaced()
        most = len(running) * len(self._blocks.groups)
        if self._hooks.free_blocks() >= most and not self._quotas.limits_bind_claims:
            return
        for sequence in running:
            is_evicted = sequence.slot is None  # meanwhile, for one before it
            if is_evicted or sequence in self.kept or sequence.num_pending_tokens != 1 or not sequence.is_due:
                continue
            if self._scheduler.ceilings.rests(sequence):  # it needs none yet
                continue
            total = sequence.num_computed_tokens + 1
            needed = self._blocks.num_new_blocks(sequence.request_id, total, sequence.num_computed_tokens)
            account = self._quotas.covers(sequence, needed) if needed else None
            if account is not None and self._make_room(sequence, account, needed):
                self._placement.grow(sequence, self._blocks.grow(sequence.request_id, total, sequence.num_computed_tokens))
                self.kept.add(sequence)

    def yielding(self, grower: Sequence, blocks: int) -> list[Sequence] | None:
        """Victims for a running sequence that must grow and may evict nobody else: others that stand still like it, because they
        need more than any guarantee covers. Somebody has to give way; None: nobody stands still, or they do not suffice."""
        placed = set(self._placement.sequences)
        stuck = [
            one
            for one in self._scheduler.running
            if one not in placed and one not in self.kept and one is not grower and self._policy.may_take(grower, one)
            if self._is_stuck(one) and not self._scheduler.ceilings.rests(one)
        ]
        missing = blocks - self._blocks.num_free_blocks
        losses = Losses(self._quotas, grower, blocks, guarantees_hold=False)
        return self._scheduler.pick_victims(stuck, missing, 0, self._policy, self._blocks, self._scheduler.swaps.cost_s, losses)

    def _is_stuck(self, sequence: Sequence) -> bool:
        if sequence.num_pending_tokens != 1 or not sequence.is_due:
            return False
        total = sequence.num_computed_tokens + 1
        needed = self._blocks.num_new_blocks(sequence.request_id, total, sequence.num_computed_tokens)
        return needed > 0 and self._is_short(sequence, needed) and self._quotas.covers(sequence, needed) is None

    # -- waiting sequences -----------------------------------------------------------------------------------------------------

    def _serve_claims(self) -> None:
        quotas, claimants = self._quotas, self._accounts.claimants
        quotas.alarm = 0
        if not quotas.is_pressed and not quotas.limits_bind_claims:
            enough = self._accounts.claimed + self._scheduler.room.most(len(self._scheduler.running))
            if self._hooks.free_blocks() >= enough:
                quotas.alarm = enough if claimants else 0
                return
        for account in list(claimants):
            if not self._needs_only_a_slot(account):
                self._serve(account)
        if self._passed_any:  # they go on in the walk
            self._policy.end_step()

    def _needs_only_a_slot(self, account: Account) -> bool:
        """Whether nobody whom this account covers lacks a block, and none gets in before somebody leaves."""
        if self._scheduler.running.has_free_slot or self._quotas.limits_bind_claims:
            return False
        enough = account.enough or account.claim
        if enough <= self._hooks.free_blocks():
            self._leave_to_rank(enough)
            return True
        return False

    def _serve(self, account: Account) -> None:
        """Lets in those who wait for blocks of the account, if a guarantee covers them and they would not get in by themselves.
        Those it does not cover are passed over like in the walk: a few of them, and none of them too often."""
        limits, passed, num_left = self._scheduler.limits, list[Sequence](), 0
        self._quotas.let_go_around(account, self._policy)
        while account in self._accounts.claimants and len(passed) + num_left < limits.lookahead:
            head = self._quotas.head(account, self._policy)
            if head is None:
                if not self._scheduler.running.has_free_slot:
                    account.enough = self._left.get(account, 0)
                break
            hit = lookup(head, self._blocks)
            needed = self._blocks.num_blocks_to_allocate(head.num_tokens, hit)
            covering = self._quotas.covers(head, needed)
            if covering is not None and self._claim(head, hit, needed, covering):
                for overtaken in passed:
                    overtaken.num_skips += 1
                continue
            self._policy.skip(head)
            self._passed_any = True
            if covering is not None:
                num_left += 1
                for one in self._lineage(head):
                    self._left[one] = max(needed, self._left.get(one, 0))
                continue
            passed.append(head)
            if head.num_skips >= limits.max_skips:
                break
        if passed and account not in self._left:
            self._accounts.disclaim(account)

    def _claim(self, head: Sequence, hit: PrefixHit | None, needed: int, covering: Account) -> bool:
        """Lets the head in, or leaves it for a later step or its turn in this one."""
        if head.steps_in_flight:  # evicted with a step still out
            self.is_settled = False
            return False
        if not self._is_short(head, needed) and self._is_left_to_rank(head, hit, needed):
            return False
        if not self._make_room(head, covering, needed, slots=1):
            self.is_settled = False
            return False
        if self._hooks.let_in(head, lookup(head, self._blocks)):
            self.brought.append(head)
        self.kept.add(head)
        self._lets_in = True
        return True

    def _is_left_to_rank(self, head: Sequence, hit: PrefixHit | None, needed: int) -> bool:
        """Whether a head for which there are blocks, beside others of its kind, gets in when it is its turn: as long as they are
        there."""
        if not self._scheduler.running.has_free_slot:  # a slot alone is the policy's to give
            self._leave_to_rank(needed)
            return True
        left = self._left_to_rank + needed
        kept = self._scheduler.room.kept_from(head.request.tier, self._policy, len(self._scheduler.running))
        fits = left + kept <= self._hooks.free_blocks() and self._hooks.fits(head, hit)
        if self._quotas.is_pressed or not fits:
            return False
        self._left_to_rank = left
        self._leave_to_rank(left + kept)
        return True

    def _leave_to_rank(self, blocks: int) -> None:
        """Until fewer blocks are free. Limits are not watched from step to step: where they may be in the way, every step
        looks."""
        self._quotas.alarm = max(self._quotas.alarm, blocks)
        if self._quotas.limits_bind_claims:
            self.is_settled = False

    def settles(self, passed_over_any: bool) -> bool:
        """Whether nobody comes to claim a guarantee, as long as nothing is given back, who was not looked at. passed_over_any:
        for want of blocks."""
        missed = passed_over_any and not self.was_pressed and bool(self._accounts.claimants)
        return self.is_settled and not missed

    # -- whose blocks they are -------------------------------------------------------------------------------------------------

    def _make_room(self, gainer: Sequence, covering: Account, blocks: int, slots: int = 0) -> bool:
        """Sees to it that so many blocks are free, for the pool and by every limit above the covering account. False, and nobody
        is evicted, if those who may be do not suffice."""
        if not self._is_short(gainer, blocks):
            return not slots or self._scheduler.running.has_free_slot
        self._hooks.dissolve_lane()
        missing = blocks - self._hooks.free_blocks()
        losses = Losses(self._quotas, gainer, blocks)
        slots_missing = 0 if not slots or self._scheduler.running.has_free_slot else 1
        victims = self._borrowers(gainer, covering, missing, slots_missing, losses)
        if victims is None:
            return False
        self._hooks.evict(victims, PreemptionReason.KV_GUARANTEE, gainer)
        return True

    def _is_short(self, gainer: Sequence, blocks: int) -> bool:
        return blocks > self._hooks.free_blocks() or blocks > self._quotas.room(gainer)

    def _borrowers(
        self, gainer: Sequence, covering: Account, missing: int, slots_missing: int, losses: Losses
    ) -> list[Sequence] | None:
        """As few as will do, of accounts above their guarantee and outside the covering one, the one most above it first."""
        left = [
            (self._order(one), one)
            for one in self._hooks.unplaced()
            if one is not gainer and covering not in self._lineage(one) and one not in self.kept
        ]
        victims: list[Sequence] = []
        held: dict[int, int] = {}
        while missing > 0 or not losses.suffice or len(victims) < slots_missing:
            useful = [
                entry for entry in left if losses.allows(entry[1]) and (missing > 0 or losses.suffice or losses.helps(entry[1]))
            ]
            if not useful:
                return None
            chosen = min(useful, key=lambda entry: (not losses.helps(entry[1]), self._surplus(entry[1], losses), entry[0]))
            left.remove(chosen)
            victims.append(chosen[1])
            freed = self._blocks.freed_with(chosen[1].request_id, held)
            losses.take(chosen[1], freed)
            missing -= freed
        return victims

    def _order(self, victim: Sequence) -> Order:
        """Asked once a step."""
        found = self._orders.get(victim)
        if found is None:
            found = self._orders[victim] = self._victim_order()(victim)
        return found

    def _victim_order(self) -> Callable[[Sequence], Order]:
        return victim_order(self._policy, self._blocks, self._scheduler.swaps.cost_s)

    def _surplus(self, victim: Sequence, losses: Losses) -> tuple[int, ...]:
        """The largest first. A node that nothing was promised to, and that has no account, is over by all it has."""
        found = losses.surplus(victim) or (self._blocks.used_by(victim.request.cache_domain),)
        return tuple(-surplus for surplus in found)

    def _lineage(self, sequence: Sequence) -> tuple[Account, ...]:
        return self._accounts.lineage(sequence.request.cache_domain)
