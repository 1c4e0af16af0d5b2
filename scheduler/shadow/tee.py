"""The policy in force, with a shadow listening: every event goes to both, every question to the policy in force alone. It
stands in the scheduler's `policy` only while there is a shadow, so that without one nothing costs anything."""

from __future__ import annotations

from collections.abc import Callable

from fairlane.scheduler.cost import Ledger, Rate
from fairlane.scheduler.policies.base import BatchView, Policy, Rank, StepPlan
from fairlane.scheduler.request import Payer, Sequence
from fairlane.scheduler.shadow.shadow import Shadow


class Tee:
    """A Policy. active: the one that is obeyed."""

    def __init__(self, active: Policy, shadow: Shadow) -> None:
        self.active = active
        self.shadow = shadow
        self.name = active.name
        self.ranks_change = active.ranks_change
        self.leads_evict = active.leads_evict
        self.predicts = active.predicts or shadow.state.policy.predicts
        # Asked often, and of the active one only: its own methods, without a call in between.
        self.next_change_s: Callable[..., float] = active.next_change_s
        self.rank: Callable[..., Rank] = active.rank
        self.priority: Callable[..., int] = active.priority
        self.is_owed: Callable[..., bool] = active.is_owed
        self.skip: Callable[..., None] = active.skip
        self.rivals: Callable[..., list[Sequence]] = active.rivals
        # KV quotas are of the policy in force: whom they hold back, the shadow asks the engine.
        self.peek_below: Callable[..., Sequence | None] = active.peek_below
        self.hold: Callable[..., None] = active.hold
        self.let_go: Callable[..., None] = active.let_go
        self.shut: Callable[..., None] = active.shut
        self.reopen: Callable[..., None] = active.reopen
        self.on_admit: Callable[..., None] = active.on_admit
        self.num_waiting: Callable[..., int] = active.num_waiting
        self.position: Callable[..., int] = active.position
        self.may_preempt: Callable[..., bool] = active.may_preempt
        self.could_preempt: Callable[..., bool] = active.could_preempt
        self.may_take: Callable[..., bool] = active.may_take
        self.victim_key: Callable[..., Rank] = active.victim_key
        self._tell: Callable[..., None] = shadow.tell
        self._state = shadow.state

    # -- steps ---------------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        self.active.begin_step(now_s)
        self._tell(self.shadow.begin_step, now_s)

    def plan(self, view: BatchView) -> StepPlan:
        plan = self.active.plan(view)
        self._tell(self.shadow.planned, plan, view)
        return plan

    def end_step(self) -> None:
        """Within a step, too: those set aside are asked again. That the step is over, the scheduler says."""
        self.active.end_step()
        self._tell(self.shadow.reopened)

    def skip_step(self, now_s: float) -> None:
        self.active.skip_step(now_s)
        self._tell(self.shadow.skip_step, now_s)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence, since_s: float) -> None:
        self.active.push(sequence, since_s)
        self._tell(self._state.push, sequence, since_s)

    def peek(self) -> Sequence | None:
        self._tell(self.shadow.looked)
        return self.active.peek()

    def pop(self, sequence: Sequence) -> None:
        self.active.pop(sequence)
        self._tell(self.shadow.admitted, sequence)

    def close(self, sequence: Sequence) -> None:
        self.active.close(sequence)
        self._tell(self.shadow.closed, sequence)

    def remove(self, sequence: Sequence) -> None:
        self.active.remove(sequence)
        self._tell(self._state.remove, sequence)

    def adopt(self, sequence: Sequence) -> None:
        self.active.adopt(sequence)
        self._tell(self._state.adopt, sequence, sequence.charged)

    def on_release(self, sequence: Sequence) -> None:
        self.active.on_release(sequence)
        self._tell(self._state.release, sequence)

    def on_unserved(self, sequence: Sequence) -> None:
        self.active.on_unserved(sequence)
        self._tell(self._state.unserved, sequence)

    # -- charges -------------------------------------------------------------------------------------------------------

    def on_charge(self, payer: Payer, cost: int, ledger: Ledger = Ledger.WORK) -> None:
        self.active.on_charge(payer, cost, ledger)
        self._tell(self._state.charge, payer, cost, ledger)

    def on_recompute(self, payer: Payer, cost: int) -> None:
        self.active.on_recompute(payer, cost)
        self._tell(self._state.recompute, payer, cost)

    def on_decoding(self, payer: Payer, change: int, tokens: int) -> None:
        self.active.on_decoding(payer, change, tokens)
        self._tell(self._state.decoding, payer, change, tokens)

    def on_steady_step(self, rate: Rate, ledger: Ledger) -> None:
        self.active.on_steady_step(rate, ledger)
        self._tell(self._state.steady_step, rate, ledger)

    def on_step_time(self, cost: int, num_tokens: int, elapsed_s: float) -> None:
        self.active.on_step_time(cost, num_tokens, elapsed_s)
        self._tell(self._state.step_time, cost, num_tokens, elapsed_s)


def without_shadow(policy: Policy) -> Policy:
    """The policy in force, whether or not there is a shadow."""
    return policy.active if isinstance(policy, Tee) else policy
