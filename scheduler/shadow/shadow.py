"""A policy that is tried on live traffic: told of every arrival, end and charge, and asked after each step what it would have
done in it. It lives in the world that the policy in force makes: who really runs and waits is given, and each step is compared
on its own. So a count says how often the two would have parted ways, not what the other way would have led to; that is the
simulator's to say.

The first exception or answer that cannot be right ends it, and nothing else; so does taking more than MAX_PART of the engine's
time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fairlane.scheduler.policies.base import BatchView, Policy, StepPlan
from fairlane.scheduler.policies.fcfs import FCFSPolicy
from fairlane.scheduler.policies.guard import GuardedPolicy
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.shadow.differences import Difference, Kind, Row
from fairlane.scheduler.shadow.facts import World
from fairlane.scheduler.shadow.judge import LAST_STEPS, Judge
from fairlane.scheduler.shadow.state import ShadowState
from fairlane.scheduler.tenancy import PolicySnapshot

if TYPE_CHECKING:
    from fairlane.scheduler.step_pass import StepPass

log = logging.getLogger(__name__)

# The most of the engine's thread that it may take, over WINDOW_S. A single call may be slow through no fault of its own.
MAX_PART = 0.25
WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """One moment of a shadow. fault: what ended it; empty while it runs. spent_s: of the engine's thread, over `over_s`
    seconds. steps: that it has seen; different_steps: those in which it would have done anything differently."""

    sha256: str
    fault: str
    over_s: float
    spent_s: float
    steps: int
    different_steps: int
    admissions: int
    evictions: int
    totals: list[tuple[Kind, str, int]]
    rows: list[Row]
    named: list[Difference]


class Shadow:
    """timer: seconds, for what it costs."""

    def __init__(
        self,
        policy: Policy,
        snapshot: PolicySnapshot,
        world: World,
        now_s: float,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.fault = ""
        self.snapshot = snapshot
        self.state = ShadowState(policy, snapshot)
        self._judge = Judge(self.state, world)
        self._guard = policy if isinstance(policy, GuardedPolicy) else None
        self._since_s = now_s
        self._world = world
        self._timer = timer
        self._spent_s = 0.0
        self._window_s = timer()  # when the window began, and what had been spent then
        self._spent_before_s = 0.0

    def tell(self, what: Callable[..., Any], *arguments: Any) -> None:
        """Calls what(*arguments), unless the shadow has ended; it ends if that fails."""
        if self.fault:
            return
        started_s = self._timer()
        try:
            what(*arguments)
        except Exception as error:
            log.error("the shadow policy failed in %s", what.__name__, exc_info=error)
            self.end(f"{what.__name__} raised {type(error).__name__}: {error}")
        now_s = self._timer()
        self._spent_s += now_s - started_s
        if now_s - self._window_s >= WINDOW_S:
            self._check_part(now_s)
        if self._guard is not None and self._guard.fault:
            self.end(self._guard.fault)

    def begin(self) -> None:
        """It knows all that run and wait, and is asked from now on."""
        self._window_s, self._spent_before_s = self._timer(), self._spent_s

    def _check_part(self, now_s: float) -> None:
        """Once a window."""
        part = (self._spent_s - self._spent_before_s) / (now_s - self._window_s)
        self._window_s, self._spent_before_s = now_s, self._spent_s
        if part > MAX_PART:
            self.end(f"it took {part:.0%} of the engine's time, more than {MAX_PART:.0%}")

    def end(self, fault: str) -> None:
        """Switched off, loudly; what it has counted stays. Ending it again changes nothing."""
        if self.fault:
            return
        self.fault = fault
        log.error("the shadow policy is switched off: %s; live requests are not concerned", fault)
        counts, steps = self._judge.counts, self.state.num_steps
        self.state = ShadowState(FCFSPolicy(self.snapshot), self.snapshot)  # an empty one: the requests it knew may end
        self.state.num_steps = steps
        self._judge = Judge(self.state, self._world)
        self._judge.counts = counts

    def evicted(self, gainer: Sequence, victim: Sequence) -> None:
        """For rank, and before anything about the victim has changed."""
        self.tell(self._judge.eviction, gainer, victim)

    # -- steps; each to be told ----------------------------------------------------------------------------------------

    def begin_step(self, now_s: float) -> None:
        self.state.keep_ceilings(now_s)
        self.state.begin_step(now_s)
        self._judge.begin_step()

    def planned(self, plan: StepPlan, view: BatchView) -> None:
        """plan: what the policy in force made of the same view."""
        self._judge.in_force = plan
        self.state.make_plan(view)

    def closed(self, sequence: Sequence) -> None:
        """The policy in force lets nobody overtake this head in this step."""
        self._judge.closed.add(sequence.request_id)

    def looked(self) -> None:
        """The policy in force is about to name its head, which stays the head whatever is charged until something happens to
        it."""
        self._judge.look()

    def admitted(self, sequence: Sequence) -> None:
        """The policy in force lets it in: it has its blocks, and was not charged yet."""
        self._judge.admission(self.state.admit(sequence), self._world.allocated(sequence))

    def reopened(self) -> None:
        """Within a step: the policy in force asks those again whom it set aside."""
        if self.state.in_step:
            self._judge.reopen()

    def end_step(self, step: StepPass) -> None:
        """After the last was placed."""
        self._judge.end_step(self._world.facts(step))
        self.state.end_step()

    def skip_step(self, now_s: float) -> None:
        """All decode; it is asked now and then what it would do about those who wait, and always while it would let some
        pause."""
        self.state.keep_ceilings(now_s)
        is_asked = not (self.state.num_steps + 1) % LAST_STEPS and self.state.num_waiting
        if not is_asked and not self.state.ceilings.shut:
            self.state.skip_step(now_s)
            return
        view, facts = self._world.steady()
        self.begin_step(now_s)
        self.state.make_plan(view)
        self._judge.end_step(facts)
        self.state.end_step()

    # -- reports -------------------------------------------------------------------------------------------------------

    def report(self, now_s: float) -> ShadowReport:
        counts = self._judge.counts
        return ShadowReport(
            sha256=self.snapshot.sha256,
            fault=self.fault,
            over_s=now_s - self._since_s,
            spent_s=self._spent_s,
            steps=self.state.num_steps,
            different_steps=counts.steps,
            admissions=counts.admissions,
            evictions=counts.evictions,
            totals=counts.totals(),
            rows=counts.rows(),
            named=counts.named(),
        )
