"""The event loop: requests arrive at a router, workers take turns, whoever is earliest goes next. Everything is decided by the
workload, the policy and the shape; there is no chance in here."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from fairlane.scheduler.engine import Abort, Add
from fairlane.scheduler.events import Delta, PreemptionKind, PreemptionReason
from fairlane.scheduler.request import RequestId
from fairlane.scheduler.simulator.clock import EventClock
from fairlane.scheduler.simulator.event_log import EventLog
from fairlane.scheduler.simulator.executor import TimedExecutor
from fairlane.scheduler.simulator.meter import Account, Counts, Meter
from fairlane.scheduler.simulator.outcome import Outcome
from fairlane.scheduler.simulator.plan import plan
from fairlane.scheduler.simulator.router import LeastOutstanding
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.worker import SimWorker
from fairlane.scheduler.simulator.workload import Workload
from fairlane.scheduler.tenancy import PolicySnapshot

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Sample:
    """At time_s: service and worker time so far by account, those waiting and running, and used KV blocks, over all workers, in
    all and by cache domain."""

    time_s: float
    service: dict[Account, int]
    waiting: int
    running: int
    blocks_used: int
    blocks_by_domain: Mapping[str, int]
    seconds: Mapping[Account, float]


@dataclass(slots=True)
class SimResult:
    """One run. duration_s: how long it was watched; digest: of its event log; policy_fault: why fcfs took the place of a plugin,
    empty if it did not."""

    workload: Workload
    duration_s: float
    num_workers: int
    num_blocks: int
    outcomes: list[Outcome]
    counts: dict[Account, Counts]
    samples: list[Sample]
    digest: str
    num_steps: int
    busy_s: float
    longest_step_s: float
    stalled_s: float
    preemptions: int
    recomputed_tokens: int
    swaps_out: int
    policy_fault: str


@contextmanager
def _no_collector() -> Iterator[None]:
    """A run keeps very many objects, and its requests make no cycles: looking for some takes up to a third of its time. Once it
    is over they are as good as old: counted as young, they would be looked through all together at once."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # else what somebody has frozen would thaw
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class Simulation:
    """One workload under one policy. Use once."""

    def __init__(
        self,
        workload: Workload,
        snapshot: PolicySnapshot,
        shape: WorkerShape | None = None,
        *,
        num_workers: int = 1,
        sample_s: float = 1.0,
        check: bool = False,
    ) -> None:
        """sample_s: how often service is written down; 0: after every turn of a worker. check: verify all invariants of the
        scheduler and the blocks after every turn, which is slow."""
        self.workload = workload
        self.meter = Meter()
        self.log = EventLog()
        shape = shape or WorkerShape()
        self._shape = shape
        self._sample_s = sample_s
        self._check = check
        is_cached = workload.has_prefixes or shape.prefix_caching
        self._planned = plan(workload, is_cached=is_cached)
        self.outcomes = [Outcome(planned) for planned in self._planned]
        self._router = LeastOutstanding(num_workers)
        self.workers: list[SimWorker] = []
        for index in range(num_workers):
            clock = EventClock()
            executor = TimedExecutor(index, shape, self._planned, clock, self.meter, self.log)
            worker = SimWorker(index, shape, snapshot, executor, clock, self, prefix_caching=is_cached)
            self.workers.append(worker)
        self._due: list[tuple[float, int]] = []
        self._is_due = [False] * num_workers
        self._cancels: list[tuple[float, int]] = []
        self.samples: list[Sample] = []

    def run(self, duration_s: float | None = None, progress: Progress | None = None) -> SimResult:
        """Until duration_s (default: the workload's), or everything has ended. progress is told the time now and then."""
        with _no_collector():
            return self._run(self.workload.duration_s if duration_s is None else duration_s, progress)

    def _run(self, end_s: float, progress: Progress | None) -> SimResult:
        next_number, next_sample_s = 0, self._sample_s if self._sample_s > 0 else inf
        requests = self.workload.requests
        while True:
            arrival_s = requests[next_number].arrival_s if next_number < len(requests) else inf
            cancel_s = self._cancels[0][0] if self._cancels else inf
            due_s = self._due[0][0] if self._due else inf
            now_s = min(arrival_s, cancel_s, due_s)
            while next_sample_s <= min(now_s, end_s) and now_s < inf:
                self._sample(next_sample_s)
                next_sample_s += self._sample_s
                if progress is not None:
                    progress(next_sample_s)
            if now_s >= end_s:  # as well when nothing is left
                break
            if arrival_s <= min(cancel_s, due_s):
                self._arrive(next_number)
                next_number += 1
            elif cancel_s <= due_s:
                self._cancel()
            else:
                self._turn(*heappop(self._due))
        return self._result(end_s)

    def told(self, worker: int, time_s: float, delta: Delta) -> None:
        """Observer of the workers."""
        self.log.delta(worker, time_s, delta)
        outcome = self.outcomes[delta.request_id]
        time_s += self._shape.network_s
        if delta.estimated_wait_s is not None:
            outcome.estimated_wait_s = delta.estimated_wait_s
        if delta.started is not None:
            outcome.queue_s = delta.started.queue_s
            outcome.cached_tokens = delta.started.cached_tokens
            self.meter.of(outcome.planned.account).cached += delta.started.cached_tokens
        if delta.token_ids and outcome.first_token_s is None:
            outcome.first_token_s = time_s
        if delta.preempted is not None and delta.preempted[0] is not PreemptionKind.PAUSED:
            outcome.preemptions += 1
            outcome.evictions += delta.preempted[1] is PreemptionReason.HIGHER_RANK
        if delta.ended is not None:
            outcome.ended, outcome.ended_s = delta.ended, time_s
            self._router.ended(worker, time_s)

    def decoded(self, worker: int, time_s: float, request_ids: Iterable[RequestId]) -> None:
        """Observer of the workers."""
        for request_id in request_ids:
            outcome = self.outcomes[request_id]
            if outcome.first_token_s is None:
                outcome.first_token_s = time_s + self._shape.network_s

    def _arrive(self, number: int) -> None:
        planned = self._planned[number]
        arrival_s = planned.asked.arrival_s
        index = self._router.pick(arrival_s)
        self.outcomes[number].worker = index
        self.log.arrival(index, arrival_s, number)
        self._deliver(index, arrival_s + self._shape.network_s, Add(planned.request()))
        if planned.asked.cancel_after_s is not None:
            heappush(self._cancels, (arrival_s + planned.asked.cancel_after_s, number))

    def _cancel(self) -> None:
        cancel_s, number = heappop(self._cancels)
        outcome = self.outcomes[number]
        if outcome.ended is None:
            self._deliver(outcome.worker, cancel_s + self._shape.network_s, Abort(RequestId(number)))

    def _deliver(self, index: int, time_s: float, command: Add | Abort) -> None:
        worker = self.workers[index]
        worker.deliver(time_s, command)
        if not self._is_due[index]:
            self._wake(index, max(time_s, worker.clock.now()))

    def _wake(self, index: int, time_s: float) -> None:
        self._is_due[index] = True
        heappush(self._due, (time_s, index))

    def _turn(self, due_s: float, index: int) -> None:
        worker = self.workers[index]
        worker.clock.move_to(due_s)
        next_s = worker.turn()
        if self._check:
            worker.scheduler.check_integrity()
        self._is_due[index] = False
        if next_s is not None:
            self._wake(index, next_s)
        if self._sample_s == 0:
            self._sample(worker.clock.now())

    def _sample(self, time_s: float) -> None:
        for worker in self.workers:
            worker.executor.settle()
        waiting = sum(worker.scheduler.policy.num_waiting() for worker in self.workers)
        running = sum(len(worker.scheduler.running) for worker in self.workers)
        blocks = Counter[str]()
        for worker in self.workers:
            blocks.update(worker.blocks.domains())
        service, seconds = self.meter.service(), self.meter.seconds()
        self.samples.append(Sample(time_s, service, waiting, running, blocks.total(), blocks, seconds))

    def _result(self, end_s: float) -> SimResult:
        if self._sample_s > 0:
            self._sample(end_s)
        schedulers = [worker.scheduler for worker in self.workers]
        return SimResult(
            workload=self.workload,
            duration_s=end_s,
            num_workers=len(self.workers),
            num_blocks=self._shape.num_blocks,
            outcomes=self.outcomes,
            counts=self.meter.counts,
            samples=self.samples,
            digest=self.log.hexdigest(),
            num_steps=sum(worker.executor.num_steps for worker in self.workers),
            busy_s=sum(worker.executor.busy_s for worker in self.workers),
            longest_step_s=max(worker.executor.longest_step_s for worker in self.workers),
            stalled_s=sum(worker.stalled_s for worker in self.workers),
            preemptions=sum(scheduler.num_preemptions for scheduler in schedulers),
            recomputed_tokens=sum(scheduler.num_recomputed_tokens for scheduler in schedulers),
            swaps_out=sum(scheduler.swaps.num_out for scheduler in schedulers),
            policy_fault=next((fault for scheduler in schedulers if (fault := scheduler.stats().policy_fault)), ""),
        )
