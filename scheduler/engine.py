"""The engine loop: one thread that takes commands from an inbox, runs the scheduler one or more steps ahead of the results,
and puts what happened into an outbox. Whoever owns the thread decides how the boxes reach a network.

    depth 0   schedule 1 · run 1 · update 1 · schedule 2 · ...           the readable specification
    depth 1   schedule 1 · launch 1 · schedule 2 · launch 2 · update 1 · schedule 3 · ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Protocol

from fairlane.clock import Clock
from fairlane.scheduler.ceilings import Ceilings
from fairlane.scheduler.events import DecodedTokens, Delta, EndReason
from fairlane.scheduler.executor import Executor, StepError
from fairlane.scheduler.explain import Explanation, explain
from fairlane.scheduler.kv_quotas import QuotaError, make_quotas
from fairlane.scheduler.output import ScheduleOutput
from fairlane.scheduler.policies import PolicyUnavailable, make_policy
from fairlane.scheduler.request import Request, RequestId
from fairlane.scheduler.scheduler import Scheduler
from fairlane.scheduler.shadow.attach import ShadowRefused, start_shadow, stop_shadow
from fairlane.scheduler.shadow.shadow import Shadow
from fairlane.scheduler.shadow.tee import without_shadow
from fairlane.scheduler.stalls import next_announcement_s
from fairlane.scheduler.stats import SchedulerStats
from fairlane.scheduler.tenancy import NO_POLICY, PolicySnapshot

STATS_INTERVAL_S = 0.1
# While everybody who could go on rests for a ceil: how soon what is overdue is looked at again.
_RECHECK_S = 1e-3


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request; `arrival_s` and `deadline_s` are already of the engine's clock."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request; one that is gone already is ignored."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class ApplyPolicy:
    """Swap the policy before the next step, then call `applied` with a refusal text, empty when it is in force."""

    snapshot: PolicySnapshot
    applied: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ShadowPolicy:
    """Try a policy beside the one in force, from the next step on, in place of an earlier shadow; None: no shadow any more.
    Then call `applied` as for ApplyPolicy."""

    snapshot: PolicySnapshot | None
    applied: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Explain:
    """Say why a request waits, before the next step: `answer` gets None for one that is gone."""

    request_id: RequestId
    answer: Callable[[Explanation | None], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop after this step."""


Command = Add | Abort | ApplyPolicy | ShadowPolicy | Explain | Stop


class Inbox(Protocol):
    def drain(self, timeout_s: float | None) -> Iterable[Command]:
        """What has arrived; waits up to timeout_s (None: for ever, 0: not at all) for the first."""


class Outbox(Protocol):
    def put(self, step_id: int, deltas: list[Delta], decoded: list[DecodedTokens]) -> None:
        """Takes over the lists; called at most twice a step, from the engine's thread. What `decoded` tells came first."""


class Engine:
    """Owns the scheduler and the executor for one thread.

    `stats` and `step_started_s` (when the oldest unfinished step began; None while idle) may be read from any thread.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        inbox: Inbox,
        outbox: Outbox,
        depth: int = 0,
        stats_interval_s: float = STATS_INTERVAL_S,
    ) -> None:
        """stats_interval_s: how often `stats` are counted anew while there is work."""
        if depth not in (0, 1, 2):
            raise ValueError(f"pipeline depth must be 0, 1 or 2, not {depth}")
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._inbox = inbox
        self._outbox = outbox
        self._depth = depth
        self._stats_interval_s = stats_interval_s
        self._in_flight: deque[tuple[int, Any]] = deque()
        self._timers: list[tuple[float, RequestId]] = []
        self._snapshot: PolicySnapshot | None = None
        self._shadowed: PolicySnapshot | None = None  # as it was asked for
        self._tier_names: frozenset[str] = frozenset()
        self._running = True
        self.stats: SchedulerStats = scheduler.stats()
        self.step_started_s: float | None = None
        self._found_nothing = False  # the last turn
        self._published_s = clock.now()

    def run(self) -> None:
        """Loops until Stop. An exception that escapes is a bug; the process must not outlive it."""
        while self._running:
            self.turn()

    def turn(self, *, wait: bool = True) -> bool:
        """One round: commands, deadlines, at most one launch, at most one result. False when there was nothing to do."""
        for command in self._inbox.drain(self._timeout_s() if wait else 0.0):
            self._obey(command)
        self._expire()
        launched = self._launch_next() if len(self._in_flight) <= self._depth else False
        self._emit()
        finished = False
        if self._in_flight and (len(self._in_flight) > self._depth or not launched):
            self._finish_oldest()
            self._emit()
            finished = True
        self._found_nothing = not launched and not finished
        self._publish()
        return launched or finished

    def wakes_at_s(self) -> float | None:
        """When there is something to do again, after a turn that found nothing because of a ceil, if no command comes before.
        None: it was nothing of that kind."""
        if not self._found_nothing or self._in_flight or not self._scheduler.num_unfinished:
            return None
        opens_s = self._scheduler.ceilings.opens_at_s()
        if opens_s == inf:
            return None
        told_s = next_announcement_s(self._scheduler.running)
        due_s = min(self._scheduler.policy.next_change_s(), told_s, self._timers[0][0] if self._timers else inf)
        return min(opens_s, max(due_s, self._clock.now()) + _RECHECK_S)

    def _timeout_s(self) -> float | None:
        """How long to wait for a command; None: for ever."""
        if not self._in_flight and not self._scheduler.num_unfinished:
            return None
        wakes_s = self.wakes_at_s()
        return 0.0 if wakes_s is None else max(0.0, wakes_s - self._clock.now())

    def _publish(self) -> None:
        """Refreshes `stats`; while busy only now and then, because counting every table costs time in every step."""
        now_s = self._clock.now()
        rests = self._found_nothing and self.wakes_at_s() is not None  # and may for long
        if not self._scheduler.num_unfinished or rests or now_s - self._published_s >= self._stats_interval_s:
            self.stats = self._scheduler.stats()
            self._published_s = now_s

    def _obey(self, command: Command) -> None:
        match command:
            case Add(request):
                self._add(request)
            case Abort(request_id):
                self._scheduler.abort(request_id)
            case ApplyPolicy(snapshot, applied):
                applied(self._apply(snapshot))
            case ShadowPolicy(snapshot, applied):
                refusal = self._shadow(snapshot)
                self.stats = self._scheduler.stats()  # before the answer, so that nobody takes old counts for the new shadow's
                applied(refusal)
            case Explain(request_id, answer):
                answer(explain(self._scheduler, self._snapshot or NO_POLICY, request_id, self._clock.now()))
            case Stop():
                self._running = False

    def _add(self, request: Request) -> None:
        if request.tier not in self._tier_names:
            self._scheduler.refuse(request, "TIER_UNKNOWN", f"the policy in force has no tier {request.tier!r}")
            return
        self._scheduler.add(request)
        for due_s in (request.deadline_s, _queue_deadline_s(request)):
            if due_s is not None:
                heappush(self._timers, (due_s, request.request_id))

    def _apply(self, snapshot: PolicySnapshot) -> str:
        current = self._snapshot
        if current is not None and snapshot.generation < current.generation:
            return f"generation {snapshot.generation} is older than {current.generation}"
        if current is not None and (snapshot.generation, snapshot.sha256) == (current.generation, current.sha256):
            return ""  # a gateway that reconnected
        tier_names = frozenset(tier.name for tier in snapshot.tiers)
        orphaned = self._scheduler.live_tiers() - tier_names
        if current is not None and orphaned:  # a tier that was removed lives on for the work it admitted
            kept = tuple(tier for tier in current.tiers if tier.name in orphaned)
            snapshot = replace(snapshot, tiers=(*snapshot.tiers, *kept))
        blocks, limits = self._scheduler.blocks, self._scheduler.limits
        try:
            quotas = make_quotas(snapshot, blocks.num_usable_blocks, blocks.block_size, limits.watermark_blocks)
            policy = make_policy(snapshot, without_shadow(self._scheduler.policy))
        except (PolicyUnavailable, QuotaError) as error:
            return str(error)
        shadow = self._scheduler.shadow
        stop_shadow(self._scheduler)
        ceilings = Ceilings(snapshot.tiers, snapshot.nodes)
        self._scheduler.apply_policy(policy, snapshot.generation, snapshot.cost, quotas, ceilings)
        self._tier_names = tier_names
        self._snapshot = snapshot
        if shadow is not None:
            self._compare_anew(shadow)
        return ""

    def _shadow(self, shadow: PolicySnapshot | None) -> str:
        running = self._scheduler.shadow
        if running is not None and not running.fault and shadow == self._shadowed:
            return ""  # a gateway that reconnected
        if shadow is None:
            self._shadowed = None
            stop_shadow(self._scheduler)
            return ""
        return self._start_shadow(shadow)

    def _start_shadow(self, shadow: PolicySnapshot) -> str:
        in_force = NO_POLICY if self._snapshot is None else self._snapshot
        names = {tier.name for tier in shadow.tiers}
        missing = tuple(tier for tier in in_force.tiers if tier.name not in names)  # live requests have them
        blocks, limits = self._scheduler.blocks, self._scheduler.limits
        try:  # its quotas are not looked at, but a policy that could not be put in force is not worth trying
            make_quotas(shadow, blocks.num_usable_blocks, blocks.block_size, limits.watermark_blocks)
            start_shadow(self._scheduler, replace(shadow, tiers=(*shadow.tiers, *missing)), self._clock.now())
        except (PolicyUnavailable, QuotaError, ShadowRefused) as error:
            return str(error)
        self._shadowed = shadow
        return ""

    def _compare_anew(self, shadow: Shadow) -> None:
        """Another policy is in force: what was counted against the one before is over."""
        refusal = shadow.fault or self._start_shadow(self._shadowed or shadow.snapshot)
        if refusal:
            shadow.end(refusal)
            self._scheduler.shadow = shadow  # told of nothing any more, but there to say why

    def _expire(self) -> None:
        now_s = self._clock.now()
        if len(self._timers) > 64 and len(self._timers) > 4 * self._scheduler.num_unfinished:  # most have ended
            self._timers = [timer for timer in self._timers if self._scheduler.request(timer[1]) is not None]
            heapify(self._timers)
        while self._timers and self._timers[0][0] <= now_s:
            _, request_id = heappop(self._timers)
            request = self._scheduler.request(request_id)
            if request is None:
                continue
            if request.deadline_s is not None and request.deadline_s <= now_s:
                self._end(request_id, "DEADLINE_EXCEEDED", "the request's deadline passed")
            elif not self._scheduler.has_started(request_id):
                self._end(request_id, "QUEUE_TIMEOUT", f"it waited longer than its max_wait of {request.max_wait_s:g} s")

    def _end(self, request_id: RequestId, reason: str, message: str) -> None:
        self._scheduler.abort(request_id, EndReason.FAILED, (reason, message))

    def _launch_next(self) -> bool:
        if self.step_started_s is None and self._scheduler.num_unfinished:
            self.step_started_s = self._clock.now()
        output = self._scheduler.schedule()
        if output is None:
            if not self._in_flight:
                self.step_started_s = None
            return False
        self._launch(output)
        return True

    def _launch(self, output: ScheduleOutput) -> None:
        try:
            handle = self._executor.launch(output)
        except StepError as error:
            while self._in_flight:  # results must be taken in launch order
                self._finish_oldest()
            self._scheduler.fail_step(output.step_id, str(error))
            self.step_started_s = None
            return
        self._in_flight.append((output.step_id, handle))

    def _finish_oldest(self) -> None:
        step_id, handle = self._in_flight.popleft()
        try:
            result = self._executor.result(handle)
        except StepError as error:
            self._scheduler.fail_step(step_id, str(error))
        else:
            self._scheduler.update(result)
        self.step_started_s = self._clock.now() if self._in_flight else None

    def _emit(self) -> None:
        decoded, deltas = self._scheduler.take_decoded(), self._scheduler.take_deltas()
        if decoded or deltas:
            self._outbox.put(self._scheduler.step_id, deltas, decoded)


def _queue_deadline_s(request: Request) -> float | None:
    return None if request.max_wait_s is None else request.arrival_s + request.max_wait_s
