"""What stands between the engine and a policy that others wrote: every answer is checked, and at the first that cannot be right
FCFS takes over, in the same step and with everybody who waits or runs. A request is never lost to a policy's mistake."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import isnan
from types import MappingProxyType
from typing import Any

from fairlane.scheduler.cost import Ledger, Rate
from fairlane.scheduler.policies.base import BatchView, Policy, Rank, StepPlan
from fairlane.scheduler.policies.caps import prefixes
from fairlane.scheduler.policies.fcfs import FCFSPolicy
from fairlane.scheduler.request import Payer, RequestId, Sequence
from fairlane.scheduler.tenancy import PolicySnapshot

log = logging.getLogger(__name__)

# A hook that takes longer holds up every stream of the worker.
SLOW_S = 1.0

# What of a sequence is the engine's alone; a policy that changes it has what it changed undone.
_ENGINES_OWN = (
    "request",
    "payer",
    "token_ids",
    "status",
    "slot",
    "num_computed_tokens",
    "num_retired_tokens",
    "num_in_flight",
    "steps_in_flight",
    "arrival_index",
)

Check = Callable[[Any], bool]


class GuardedPolicy:
    """`fault`: what the policy did wrong; empty while it is in charge. timer: seconds, for SLOW_S."""

    ranks_change = True  # whatever the policy says: ranks are asked for in every step
    leads_evict = True  # and so is who may evict
    predicts = True  # it may look at what is expected

    def __init__(self, policy: Policy, snapshot: PolicySnapshot, *, timer: Callable[[], float] = time.perf_counter) -> None:
        self.fault = ""
        self._policy = policy
        self._snapshot = snapshot
        self._timer = timer
        self._waiting: dict[RequestId, tuple[Sequence, float]] = {}
        self._running: dict[RequestId, Sequence] = {}
        self._set_aside: set[Sequence] = set()
        self._held: set[str] = set()
        self._shut: set[str] = set()
        self.name = str(policy.name)

    # -- time and shape ------------------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        self._set_aside.clear()
        self._tell("begin_step", now_s)

    def next_change_s(self) -> float:
        return float(self._ask("next_change_s", _is_number))

    def plan(self, view: BatchView) -> StepPlan:
        running, prefilling = MappingProxyType(dict(view.running)), MappingProxyType(dict(view.prefilling))
        shown = replace(view, running=running, prefilling=prefilling)
        plan: StepPlan = self._ask("plan", lambda plan: _is_plan(plan, view), shown)
        return plan

    def skip_step(self, now_s: float) -> None:
        self._tell("skip_step", now_s)

    def end_step(self) -> None:
        self._tell("end_step")
        self._set_aside.clear()

    # -- order ---------------------------------------------------------------------------------------------------------

    def rank(self, sequence: Sequence) -> Rank:
        rank: Rank = self._ask("rank", _is_rank, sequence)
        return rank

    def priority(self, sequence: Sequence) -> int:
        return int(self._ask("priority", _is_number, sequence))

    def is_owed(self, sequence: Sequence) -> bool:
        return bool(self._ask("is_owed", _is_bool, sequence))

    def may_preempt(self, candidate: Sequence, victim: Sequence) -> bool:
        return bool(self._ask("may_preempt", _is_bool, candidate, victim))

    def could_preempt(self, tier: str, others: Iterable[str]) -> bool:
        return bool(self._ask("could_preempt", _is_bool, tier, tuple(others)))

    def may_take(self, grower: Sequence, victim: Sequence) -> bool:
        return bool(self._ask("may_take", _is_bool, grower, victim))

    def victim_key(self, sequence: Sequence) -> Rank:
        key: Rank = self._ask("victim_key", _is_rank, sequence)
        return key

    # -- the waiting queue ---------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence, since_s: float) -> None:
        self._tell("push", sequence, since_s)
        self._waiting[sequence.request_id] = (sequence, since_s)

    def peek(self) -> Sequence | None:
        head: Sequence | None = self._ask("peek", self._may_be_head)
        return head

    def peek_below(self, path: str) -> Sequence | None:
        def is_right(answer: Any) -> bool:
            return answer is None or (self._may_be_head(answer) and path in prefixes(answer.request.tenant))

        head: Sequence | None = self._ask("peek_below", is_right, path)
        return head

    def hold(self, path: str) -> None:
        self._held.add(path)
        self._tell("hold", path)

    def let_go(self, path: str) -> None:
        self._held.discard(path)
        self._tell("let_go", path)

    def shut(self, gate: str) -> None:
        self._shut.add(gate)
        self._tell("shut", gate)

    def reopen(self, gate: str) -> None:
        self._shut.discard(gate)
        self._tell("reopen", gate)

    def _may_be_head(self, head: Any) -> bool:
        if head is None:  # nobody, though all wait and nothing runs or was passed over: they would wait for ever
            return not self._waiting or bool(self._running or self._set_aside or self._held or self._shut)
        known = self._waiting.get(head.request_id) if isinstance(head, Sequence) else None
        return known is not None and known[0] is head and head not in self._set_aside

    def rivals(self, head: Sequence) -> list[Sequence]:
        return []  # somebody else's policy says with peek() who is next

    def pop(self, sequence: Sequence) -> None:
        self._tell("pop", sequence)
        del self._waiting[sequence.request_id]
        self._running[sequence.request_id] = sequence

    def skip(self, sequence: Sequence) -> None:
        self._tell("skip", sequence)
        self._set_aside.add(sequence)

    def close(self, sequence: Sequence) -> None:
        self._tell("close", sequence)
        self._set_aside.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        self._tell("remove", sequence)
        del self._waiting[sequence.request_id]

    def num_waiting(self) -> int:
        return int(self._ask("num_waiting", lambda count: count == len(self._waiting)))

    def position(self, sequence: Sequence) -> int:
        return int(self._ask("position", lambda place: _is_number(place) and 0 <= place < float("inf"), sequence))

    # -- bookkeeping ---------------------------------------------------------------------------------------------------

    def on_admit(self, sequence: Sequence) -> None:
        self._tell("on_admit", sequence)

    def on_unserved(self, sequence: Sequence) -> None:
        self._tell("on_unserved", sequence)

    def adopt(self, sequence: Sequence) -> None:
        self._tell("adopt", sequence)
        self._running[sequence.request_id] = sequence

    def on_release(self, sequence: Sequence) -> None:
        self._tell("on_release", sequence)
        del self._running[sequence.request_id]

    def on_step_time(self, cost: int, num_tokens: int, elapsed_s: float) -> None:
        self._tell("on_step_time", cost, num_tokens, elapsed_s)

    def on_charge(self, payer: Payer, cost: int, ledger: Ledger = Ledger.WORK) -> None:
        self._tell("on_charge", payer, cost, ledger)

    def on_recompute(self, payer: Payer, cost: int) -> None:
        self._tell("on_recompute", payer, cost)

    def on_decoding(self, payer: Payer, change: int, tokens: int) -> None:
        self._tell("on_decoding", payer, change, tokens)

    def on_steady_step(self, rate: Rate, ledger: Ledger) -> None:
        self._tell("on_steady_step", rate, ledger)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _tell(self, hook: str, *arguments: Any) -> None:
        self._ask(hook, lambda answer: True, *arguments)

    def _ask(self, hook: str, is_right: Check, *arguments: Any) -> Any:
        if not self.fault:
            before = [_own(argument) for argument in arguments if isinstance(argument, Sequence)]
            started_s = self._timer()
            try:
                answer = getattr(self._policy, hook)(*arguments)
                fault = "" if is_right(answer) else f"{hook} answered {answer!r:.200}"
            except Exception as error:
                answer, fault = None, f"{hook} raised {type(error).__name__}: {error}"
                log.error("policy %s failed in %s", self.name, hook, exc_info=error)
            if self._timer() - started_s > SLOW_S:
                fault = fault or f"{hook} took longer than {SLOW_S:g} s"
            restored = [_restore(*state) for state in before]  # all of them
            if any(restored):
                fault = fault or f"{hook} changed a sequence"
            if not fault:
                return answer
            self._replace(fault)
        return getattr(self._policy, hook)(*arguments)

    def _replace(self, fault: str) -> None:
        """FCFS takes over with everybody as they stood before the call that failed."""
        log.error("policy %s is replaced by fcfs until another is applied: %s", self.name, fault)
        self.fault = fault
        self._policy = FCFSPolicy(self._snapshot)
        self.name = self._policy.name
        for sequence, since_s in sorted(self._waiting.values(), key=lambda entry: entry[0].place):
            self._policy.push(sequence, since_s)
        for sequence in self._running.values():
            self._policy.adopt(sequence)
        for path in self._held:
            self._policy.hold(path)
        for gate in self._shut:
            self._policy.shut(gate)


def _own(sequence: Sequence) -> tuple[Sequence, tuple[Any, ...]]:
    return sequence, tuple(getattr(sequence, name) for name in _ENGINES_OWN)


def _restore(sequence: Sequence, values: tuple[Any, ...]) -> bool:
    """Whether anything had been changed."""
    changed = [(name, value) for name, value in zip(_ENGINES_OWN, values, strict=True) if getattr(sequence, name) is not value]
    for name, value in changed:
        setattr(sequence, name, value)
    return bool(changed)


def _is_number(answer: Any) -> bool:
    return isinstance(answer, int | float) and not isnan(answer)


def _is_bool(answer: Any) -> bool:
    return isinstance(answer, bool)


def _is_rank(answer: Any) -> bool:
    return isinstance(answer, tuple) and bool(answer) and all(_is_number(part) for part in answer)


def _is_plan(answer: Any, view: BatchView) -> bool:
    if not isinstance(answer, StepPlan) or not isinstance(answer.token_budget, int):
        return False
    cap, protected = answer.lower_prefill_cap, answer.protected_priority
    return (
        0 < answer.token_budget <= view.token_budget
        and (cap is None or (isinstance(cap, int) and cap >= 0))
        and (protected is None or isinstance(protected, int))
    )
