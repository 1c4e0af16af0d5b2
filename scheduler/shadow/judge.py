"""Compares one step with what a shadow policy would have done in it: whom it would have let in, whom it would have evicted,
paused or given fewer tokens. What it lets in must fit into what the step had: the tokens, seats, slots and blocks of those
admitted and what was left over. Prefix hits of others are not looked up, so a request counts as larger here than it may be; and
whoever is not admitted leaves what one leaves that evicts nobody, though it might have the right to leave less.

Only what lasts counts as sooner or as an eviction: a request that gets in within LAST_STEPS anyway is no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import cast

from fairlane.scheduler.policies.base import StepPlan
from fairlane.scheduler.request import RequestId, Sequence
from fairlane.scheduler.settlement import RECHECK_STEPS
from fairlane.scheduler.shadow.differences import Differences, Kind
from fairlane.scheduler.shadow.facts import StepFacts, World
from fairlane.scheduler.shadow.state import ShadowState
from fairlane.scheduler.shadow.twin import Twin
from fairlane.scheduler.shaping import may_decode
from fairlane.scheduler.victims import is_immune

# The policy in force may look at what changes by charges alone so many steps late.
LAST_STEPS = RECHECK_STEPS


class Judge:
    """Counts into `counts`. in_force: the plan of the policy in force, None where the step needed none. closed: heads that it let
    nobody overtake."""

    def __init__(self, state: ShadowState, world: World) -> None:
        self.counts = Differences()
        self.in_force: StepPlan | None = None
        self.closed: set[RequestId] = set()
        self._state = state
        self._world = world
        self._picks: list[Twin | None] = []  # the first for those admitted, one each
        self._unsettled: list[Twin] = []  # those picked of whom the policy does not know that they run
        self._blocked: Twin | None = None  # the first whom only an eviction would let in
        self._num_passed = 0
        self._head: Twin | None = None  # at the last look
        self._allocated: dict[RequestId, int] = {}  # of those admitted
        self._needed = 0  # blocks, by those picked

    def begin_step(self) -> None:
        self.in_force = self._blocked = self._head = None
        self.closed.clear()
        self._picks.clear()
        for twin in self._unsettled:
            self._state.caps.remove(twin.request.tenant)
        self._unsettled.clear()
        self._allocated.clear()
        self._num_passed = self._needed = 0

    def look(self) -> None:
        self._head = cast(Twin | None, self._state.policy.peek())

    def admission(self, twin: Twin, num_blocks: int) -> None:
        """The policy in force lets it in. Its blocks are for whom the shadow would have let in by the counters of this moment."""
        self.counts.admissions += 1
        self._allocated[twin.request_id] = num_blocks
        if not self._pick(self._world.slots_left() + len(self._allocated), twin):
            self._picks.append(None)
        self._state.flush_released()  # evicted for this one, which was found before

    def reopen(self) -> None:
        """Whoever was passed over may be asked again; whoever was picked stays picked."""
        self._state.policy.end_step()
        self._blocked = None
        self._num_passed = 0
        self.closed.clear()

    def eviction(self, gainer: Sequence, victim: Sequence) -> None:
        """The policy in force evicts for rank. Asked before the victim's counts change."""
        self.counts.evictions += 1
        if not self._state.policy.may_preempt(self._state.twin(gainer), self._state.twin(victim)):
            self.counts.add(Kind.SPARES, victim.payer, gainer.payer)

    def end_step(self, facts: StepFacts) -> None:
        """All are placed."""
        if self._state.num_waiting or self._picks:
            self._admissions(facts)
        self._pauses(facts)
        self._cuts(facts)
        self.counts.end_step()

    # -- who gets in ---------------------------------------------------------------------------------------------------

    def _admissions(self, facts: StepFacts) -> None:
        limits, admitted = self._world.limits, self._state.admitted
        budget = limits.max_num_batched_tokens if self.in_force is None else self.in_force.token_budget
        tokens_left = budget - facts.num_tokens
        seats_left = limits.max_num_seqs - len(facts.decodes) - len(facts.chunks)
        if tokens_left > 0 and seats_left > 0:
            most = len(self._picks) + min(limits.lookahead, seats_left)
            while len(self._picks) < most and self._pick(self._world.slots_left() + len(admitted) - len(self._picks)):
                pass
        blocked = self._blocked or cast(Twin | None, self._state.policy.peek())  # a victim gives its seat, too
        if blocked is not None and not blocked.steps_in_flight and not self._is_full(blocked):
            self._evicts(blocked, facts)
        picks = self._within_share(facts)
        more = [twin for twin in picks if twin not in admitted]
        fewer = [twin for twin in admitted if twin not in picks]
        for twin, other in zip(more, fewer, strict=False):
            self.counts.add(Kind.INSTEAD, twin.payer, other.payer)
        for twin in fewer[len(more) :]:
            self.counts.add(Kind.LATER, twin.payer)
        for twin in more[len(fewer) :]:
            self._sooner(twin)

    def _pick(self, slots: int, admitted: Twin | None = None) -> bool:
        """Notes whom the shadow lets in next, if anybody. admitted: whom the policy in force lets in now."""
        policy = self._state.policy
        blocks = self._world.blocks_left() + sum(self._allocated.values()) - self._needed
        while (head := self._head or cast(Twin | None, policy.peek())) is not None:
            self._head = None
            if admitted is not None and admitted is not head and admitted in policy.rivals(head):
                head = admitted  # in its locality window; what is cached was looked up by whom it lets in
            need = self._allocated.get(head.request_id)
            if need is None:
                need = self._world.blocks.blocks_for(head.num_tokens)
                fits = need + self._world.kept_from(head) <= blocks and slots > 0
            else:
                fits = need <= blocks and slots > 0
            may_overtake = head.request_id not in self.closed
            if head in self._picks or head.steps_in_flight or self._is_full(head):
                policy.skip(head)
            elif fits and (may_overtake or self._state.plan != self.in_force):
                self._needed += need
                self._picks.append(head)
                if head is admitted:
                    self._state.settle(head)
                else:
                    self._unsettled.append(head)
                    self._state.caps.add(head.request.tenant)
                    policy.skip(head)
                return True
            else:
                if not fits and self._blocked is None:
                    self._blocked = head
                self._num_passed += 1
                if may_overtake and slots > 0 and self._num_passed < self._world.limits.lookahead:
                    policy.skip(head)
                else:
                    policy.close(head)
        return False

    def _within_share(self, facts: StepFacts) -> list[Twin]:
        """Those picked whom the shadow's cap on lower tiers' prompts left a token when their turn came."""
        cap = self._state.plan.lower_prefill_cap
        if cap is None:
            return [twin for twin in self._picks if twin is not None]
        left, left_before = cap, {}
        for sequence, num_tokens in facts.chunks:
            left_before[sequence.request_id] = left
            left -= num_tokens
        turns = [left_before.get(twin.request_id, left) for twin in self._state.admitted]
        turns += [left] * (len(self._picks) - len(turns))
        return [
            twin
            for twin, tokens in zip(self._picks, turns, strict=True)
            if twin is not None and (tokens > 0 or not self._is_lower(twin))
        ]

    def _is_full(self, twin: Twin) -> bool:
        if self._state.capped and self._state.caps.keeps_out(twin.request.tenant):
            return True
        return self._state.ceilings.rests(twin) or self._world.is_over_quota(twin)

    def _is_lower(self, sequence: Sequence) -> bool:
        protected = self._state.plan.protected_priority
        return protected is not None and self._state.policy.priority(sequence) < protected

    def _sooner(self, twin: Twin) -> None:
        if twin.let_in_step < 0:
            twin.let_in_step = self._state.num_steps
        elif not twin.told_sooner and self._state.num_steps - twin.let_in_step >= LAST_STEPS:
            twin.told_sooner = True
            self.counts.add(Kind.SOONER, twin.payer)

    def _evicts(self, twin: Twin, facts: StepFacts) -> None:
        """Walks the running set: for one request a step, only if it was found before, and not soon again for the same one."""
        steps = self._state.num_steps
        is_new = not twin.look_step
        if twin.told_evicts or steps < twin.look_step:
            return
        twin.look_step = steps + LAST_STEPS
        if is_new:
            return
        victims = self._victims(twin, facts)
        blocks = self._world.blocks
        missing = blocks.blocks_for(twin.num_tokens) - self._world.blocks_left()
        needs_any = missing > 0 or self._world.slots_left() <= 0
        if needs_any and victims and sum(blocks.freed_by(victim.request_id) for victim in victims) >= missing:
            twin.told_evicts = True
            self.counts.add(Kind.EVICTS, twin.payer, min(victims, key=self._state.policy.victim_key).payer)

    def _victims(self, twin: Twin, facts: StepFacts) -> list[Twin]:
        policy = self._state.policy
        tiers = {sequence.request.tier for sequence in facts.running}
        if not policy.could_preempt(twin.request.tier, tiers):
            return []
        rank = policy.rank(twin)
        allowed = [
            self._state.twin(sequence)
            for sequence in facts.running
            if not is_immune(sequence) and sequence.request_id not in self._allocated
        ]
        return [other for other in allowed if policy.may_preempt(twin, other) and policy.rank(other) > rank]

    # -- the step's shape ----------------------------------------------------------------------------------------------

    def _pauses(self, facts: StepFacts) -> None:
        pauses = self._state.plan.pause_lower and self._has_protected_chunk(facts)
        rests = self._state.ceilings.rests
        if pauses or self._state.ceilings.shut:
            decodes = (one for one in facts.decodes if one.request_id not in self._allocated)
            self._add_each(Kind.PAUSES, (one for one in decodes if rests(one) or (pauses and self._may_pause(one))))
        paused = (one for one in facts.paused if may_decode(one))  # a ceil stops prompts, too
        self._add_each(Kind.RUNS, (one for one in paused if not (rests(one) or (pauses and self._may_pause(one)))))

    def _add_each(self, kind: Kind, sequences: Iterable[Sequence]) -> None:
        for payer, count in Counter(sequence.payer for sequence in sequences).items():
            self.counts.add(kind, payer, count=count)

    def _has_protected_chunk(self, facts: StepFacts) -> bool:
        protected = self._state.plan.protected_priority
        return protected is not None and any(not self._is_lower(self._state.twin(s)) for s, _ in facts.chunks)

    def _may_pause(self, sequence: Sequence) -> bool:
        twin = self._state.twin(sequence)
        return self._is_lower(twin) and not self._state.policy.is_owed(twin)

    def _cuts(self, facts: StepFacts) -> None:
        plan = self._state.plan
        tokens = plan.token_budget - len(facts.decodes)
        lower: float = inf if plan.lower_prefill_cap is None else plan.lower_prefill_cap
        for sequence, placed in facts.chunks:
            allowed = max(0, int(min(placed, tokens, lower if self._is_lower(self._state.twin(sequence)) else inf)))
            if self._state.ceilings.rests(sequence) and sequence.request_id not in self._allocated:
                allowed = 0
            if allowed < placed:
                self.counts.add(Kind.CUTS, sequence.payer, count=placed - allowed)
            tokens -= allowed
            lower -= allowed
