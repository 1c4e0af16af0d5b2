"""One simulated worker: the real Engine with its scheduler and blocks, over an executor that only takes time. It is the engine's
inbox and outbox."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from typing import Protocol

from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.engine import ApplyPolicy, Command, Engine
from fairlane.scheduler.events import DecodedTokens, Delta
from fairlane.scheduler.kv_quotas import QuotaError, make_quotas
from fairlane.scheduler.policies import PolicyUnavailable, make_policy
from fairlane.scheduler.request import RequestId
from fairlane.scheduler.scheduler import Scheduler
from fairlane.scheduler.simulator.clock import EventClock
from fairlane.scheduler.simulator.executor import TimedExecutor
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.tenancy import NO_POLICY, PolicySnapshot

# How long a worker with work that it may not do now (say, a cap binds) sleeps before it looks again.
RECHECK_S = 1e-3


class Observer(Protocol):
    def told(self, worker: int, time_s: float, delta: Delta) -> None:
        """What the engine says about a request, when it says it."""

    def decoded(self, worker: int, time_s: float, request_ids: Iterable[RequestId]) -> None:
        """These got a token each; told again only once others are among them."""


class SimWorker:
    """stalled_s: time in which requests were here and no step ran."""

    def __init__(
        self,
        index: int,
        shape: WorkerShape,
        snapshot: PolicySnapshot,
        executor: TimedExecutor,
        clock: EventClock,
        observer: Observer,
        *,
        prefix_caching: bool,
    ) -> None:
        self.index = index
        self.clock = clock
        self.executor = executor
        self.blocks = BlockManager(
            shape.num_blocks + 1, shape.block_size, enable_prefix_caching=prefix_caching, num_host_blocks=shape.num_host_blocks
        )
        self.scheduler = Scheduler(shape.limits(), self.blocks, make_policy(NO_POLICY), clock)
        # Nobody reads its stats.
        self.engine = Engine(self.scheduler, executor, clock, self, self, shape.depth, stats_interval_s=inf)
        self.stalled_s = 0.0
        self._observer = observer
        self._column: list[RequestId] = []
        self._inbox: deque[tuple[float, Command]] = deque([(0.0, ApplyPolicy(snapshot, _must_apply))])

    def deliver(self, time_s: float, command: Command) -> None:
        """Puts a command where the engine finds it from time_s on. In order of time."""
        self._inbox.append((time_s, command))

    def turn(self) -> float | None:
        """One round of the engine at its clock's time. Returns when the next one is due; None: when something is delivered."""
        busy = self.engine.turn(wait=False)
        now_s = self.clock.now()
        if busy or (self._inbox and self._inbox[0][0] <= now_s):
            return now_s
        next_s = self._inbox[0][0] if self._inbox else None
        if not self.scheduler.num_unfinished:
            return next_s
        wakes_s = self.engine.wakes_at_s()  # when a ceil lets go
        recheck_s = now_s + RECHECK_S if wakes_s is None else wakes_s
        recheck_s = recheck_s if next_s is None else min(next_s, recheck_s)
        self.stalled_s += recheck_s - now_s
        return recheck_s

    # -- the engine's boxes --------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None) -> Iterable[Command]:
        now_s, inbox = self.clock.now(), self._inbox
        commands: list[Command] = []
        while inbox and inbox[0][0] <= now_s:
            commands.append(inbox.popleft()[1])
        return commands

    def put(self, step_id: int, deltas: list[Delta], decoded: list[DecodedTokens]) -> None:
        """A request's last token comes in a delta. So does its first, unless a single token of its prompt was left for the last
        step: then it comes in the first column that the request is in; the columns after that tell nothing that is not known."""
        now_s = self.clock.now()
        for column in decoded:
            if column.request_ids is not self._column:  # another list, once somebody comes or goes
                self._column = column.request_ids
                self._observer.decoded(self.index, now_s, column.request_ids)
        for delta in deltas:
            self._observer.told(self.index, now_s, delta)


def refusal(snapshot: PolicySnapshot, shape: WorkerShape) -> str:
    """Why a worker of this shape would not put the policy in force; empty if it would."""
    try:
        make_quotas(snapshot, shape.num_blocks, shape.block_size, shape.limits().watermark_blocks)
        make_policy(snapshot)
    except (PolicyUnavailable, QuotaError) as error:
        return str(error)
    return ""


def _must_apply(refusal: str) -> None:
    if refusal:
        raise RuntimeError(refusal)
