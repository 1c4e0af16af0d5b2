"""Drives an Engine from the calling thread, without queues or a network: for tests, benchmarks and scripts. Requests go in at
once or at a time of the clock; what comes out is kept per request."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain

from fairlane.blockmgr.manager import BlockManager
from fairlane.clock import Clock, FakeClock
from fairlane.scheduler.engine import Abort, Add, ApplyPolicy, Command, Engine, ShadowPolicy
from fairlane.scheduler.events import DecodedTokens, Delta, Ended
from fairlane.scheduler.executor import Executor
from fairlane.scheduler.policies import make_policy
from fairlane.scheduler.request import Request, RequestId
from fairlane.scheduler.scheduler import Scheduler, SchedulerLimits
from fairlane.scheduler.tenancy import NO_POLICY, PolicySnapshot


@dataclass(slots=True)
class Transcript:
    """What one request got. Times are of the engine's clock; ttft_s counts from the request's arrival."""

    token_ids: list[int] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    first_token_s: float | None = None
    ended_s: float | None = None
    ended: Ended | None = None


class EngineDriver:
    """An engine with its scheduler and blocks, stepped by hand. `check` verifies all invariants after every turn."""

    def __init__(
        self,
        executor: Executor,
        clock: Clock,
        snapshot: PolicySnapshot,
        limits: SchedulerLimits,
        *,
        depth: int = 0,
        prefix_caching: bool = True,
        check: bool = False,
    ) -> None:
        info = executor.info
        self.clock = clock
        self.blocks = BlockManager(
            info.num_blocks, info.block_size, enable_prefix_caching=prefix_caching, num_host_blocks=info.num_host_blocks
        )
        self.scheduler = Scheduler(limits, self.blocks, make_policy(NO_POLICY), clock)
        self.engine = Engine(self.scheduler, executor, clock, self, self, depth)
        self.transcripts: dict[RequestId, Transcript] = {}
        self.refusals: list[str] = []
        self._commands: list[Command] = [ApplyPolicy(snapshot, self._applied)]
        self._later: list[tuple[float, int, Command]] = []
        self._check = check

    # -- driving -------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues the request for the next turn."""
        self.transcripts[request.request_id] = Transcript()
        self._commands.append(Add(request))

    def add_at_arrival(self, requests: Iterable[Request]) -> None:
        """Queues each when the clock has reached its arrival_s."""
        for request in requests:
            self.transcripts[request.request_id] = Transcript()
            self.at(request.arrival_s, Add(request))

    def at(self, time_s: float, command: Command) -> None:
        heappush(self._later, (time_s, len(self._later), command))

    def abort(self, request_id: RequestId) -> None:
        self._commands.append(Abort(request_id))

    def apply(self, snapshot: PolicySnapshot, at_s: float | None = None) -> None:
        """Before the next turn, or before the first at that time or later."""
        command = ApplyPolicy(snapshot, self._applied)
        if at_s is None:
            self._commands.append(command)
        else:
            self.at(at_s, command)

    def shadow(self, snapshot: PolicySnapshot | None) -> None:
        self._commands.append(ShadowPolicy(snapshot, self._applied))

    def turn(self) -> bool:
        """One engine round. False when nothing is running, waiting or due."""
        busy = self.engine.turn(wait=False)
        if self._check:
            self.scheduler.check_integrity()
        return busy

    def run_until_idle(self, max_turns: int = 1_000_000) -> None:
        """Turns until every request has ended, waiting for those that are still to arrive.

        RuntimeError when max_turns with unfinished requests were not enough: something starves.
        """
        turns = 0
        while self.turn() or self.scheduler.num_unfinished or self._commands or self._later:
            if self.scheduler.num_unfinished or self._commands:
                turns += 1
                self.rest()
            elif self._later:
                self._wait_until(self._later[0][0])
            if turns > max_turns:
                raise RuntimeError(f"{self.scheduler.num_unfinished} requests unfinished after {max_turns} turns")

    def rest(self) -> None:
        """After a turn: if a ceil keeps the engine from going on, moves on to when it may, or something arrives."""
        wakes_s = self.engine.wakes_at_s()
        if wakes_s is not None and not self._commands:
            self._wait_until(min(wakes_s, self._later[0][0]) if self._later else wakes_s)

    def _wait_until(self, time_s: float) -> None:
        delay_s = max(0.0, time_s - self.clock.now())
        if isinstance(self.clock, FakeClock):
            self.clock.advance(delay_s)
        else:
            time.sleep(delay_s)

    # -- the engine's boxes --------------------------------------------------------------------------------------------

    def drain(self, timeout_s: float | None) -> Iterable[Command]:
        now_s = self.clock.now()
        commands, self._commands = self._commands, []
        while self._later and self._later[0][0] <= now_s:
            commands.append(heappop(self._later)[2])
        return commands

    def put(self, step_id: int, deltas: list[Delta], decoded: list[DecodedTokens]) -> None:
        now_s = self.clock.now()
        for delta in [*chain.from_iterable(column.as_deltas() for column in decoded), *deltas]:
            transcript = self.transcripts[delta.request_id]
            if transcript.ended is not None:
                raise RuntimeError(f"request {delta.request_id} got a delta after its end")
            transcript.deltas.append(delta)
            transcript.token_ids.extend(delta.token_ids)
            if delta.token_ids and transcript.first_token_s is None:
                transcript.first_token_s = now_s
            if delta.ended is not None:
                transcript.ended, transcript.ended_s = delta.ended, now_s

    def _applied(self, refusal: str) -> None:
        if refusal:
            self.refusals.append(refusal)
