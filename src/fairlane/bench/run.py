"""Runs a load, or calls that arrive over time, on a real engine in this process: the engine's own thread is ours, its boxes keep
what goes by and are read only when all is over, so that watching costs a step one list append. It measures; what a run comes to
in figures is figures.py's.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from fairlane.bench.calls import Call, requests
from fairlane.bench.host_times import HostTimes, TimedExecutor
from fairlane.bench.loads import Load
from fairlane.blockmgr.manager import BlockManager
from fairlane.clock import MonotonicClock
from fairlane.scheduler.engine import Abort, Add, ApplyPolicy, Command, Engine
from fairlane.scheduler.events import DecodedTokens, Delta, Ended, EndReason
from fairlane.scheduler.executor import Executor
from fairlane.scheduler.policies import make_policy
from fairlane.scheduler.request import Request, RequestId
from fairlane.scheduler.scheduler import Scheduler
from fairlane.scheduler.tenancy import NO_POLICY, PolicySnapshot, Tier, TiersPolicy
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executors import limits_of

FCFS = PolicySnapshot(1, "", TiersPolicy.FCFS, (Tier("standard", 50),))
MAX_EMPTY_TURNS = 10_000
PROGRESS_S = 0.25
IDLE_S = 0.5e-3  # between looks at the clock while nobody is there


class RunError(Exception):
    """A load did not run to its end as it should: requests failed, gave too few tokens, or starved."""


class OutOfTimeError(RunError):
    """The time allowed was over first; the message says how far the run came."""


@dataclass(slots=True)
class Track:
    """What one request got, in seconds of the engine's clock."""

    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    ended: Ended | None = None
    ended_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """One run of a load, from the moment before the first request was made. steps: when tokens came, and how many."""

    load: Load
    start_s: float
    tracks: list[Track]
    steps: list[tuple[float, int]]
    preemptions: int
    recomputed_tokens: int

    @property
    def all_decoding_s(self) -> tuple[float, float]:
        """From the last first token to the first end of a request: everything is decoding."""
        return max(track.first_s for track in self.tracks), min(track.ended_s for track in self.tracks)


@dataclass(slots=True)
class Served:
    """One run of calls that arrived over time. start_s: when the first could arrive; tracks are in the calls' order;
    steps: when tokens came, and how many."""

    calls: Sequence[Call]
    start_s: float
    tracks: list[Track]
    steps: list[tuple[float, int]]
    preemptions: int
    recomputed_tokens: int


@dataclass(slots=True)
class Boxes:
    """The engine's inbox and outbox. coming: requests in order of arrival, submitted when their time has come."""

    clock: MonotonicClock
    commands: list[Command] = field(default_factory=list)
    coming: deque[Request] = field(default_factory=deque)
    kept: list[tuple[float, list[Delta], list[DecodedTokens]]] = field(default_factory=list)
    num_counted: int = 0
    num_tokens: int = 0

    def drain(self, timeout_s: float | None) -> Iterable[Command]:
        commands, self.commands = self.commands, []
        while self.coming and self.coming[0].arrival_s <= self.clock.now():
            commands.append(Add(self.coming.popleft()))
        return commands

    def put(self, step_id: int, deltas: list[Delta], decoded: list[DecodedTokens]) -> None:
        self.kept.append((self.clock.now(), deltas, decoded))

    def tokens_so_far(self) -> int:
        """Output tokens up to now; looks only at what has come since it was last asked."""
        for _, deltas, decoded in self.kept[self.num_counted :]:
            self.num_tokens += sum(len(column.request_ids) for column in decoded) + sum(len(delta.token_ids) for delta in deltas)
        self.num_counted = len(self.kept)
        return self.num_tokens

    def resolve(self, num_requests: int) -> tuple[list[Track], list[tuple[float, int]]]:
        """Goes through everything that was kept; request ids are 0 .. num_requests - 1."""
        tracks = [Track() for _ in range(num_requests)]
        steps = []
        for now_s, deltas, decoded in self.kept:
            came = 0
            for column in decoded:
                came += len(column.request_ids)
                for request_id in column.request_ids:
                    _note(tracks[request_id], now_s, 1)
            for delta in deltas:
                track = tracks[delta.request_id]
                if delta.token_ids:
                    came += len(delta.token_ids)
                    _note(track, now_s, len(delta.token_ids))
                if delta.ended is not None:
                    track.ended, track.ended_s = delta.ended, now_s
            if came:
                steps.append((now_s, came))
        return tracks, steps


def _note(track: Track, now_s: float, num_tokens: int) -> None:
    if not track.num_tokens:
        track.first_s = now_s
    track.num_tokens += num_tokens
    track.last_s = now_s


class Bench:
    """An executor with a loaded model, for any number of runs. Each has a scheduler and a block table of its own."""

    def __init__(self, executor: Executor, config: WorkerConfig) -> None:
        self.executor = executor
        self.config = config
        self.clock = MonotonicClock()

    def run(
        self,
        load: Load,
        *,
        seed: int = 0,
        snapshot: PolicySnapshot = FCFS,
        tenants: int = 1,
        max_num_seqs: int | None = None,
        deadline_s: float | None = None,
        host: HostTimes | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Outcome:
        """Submits all requests at once and steps the engine until they have ended.

        tenants: requests go round among that many, and a tenant keeps to one of the snapshot's tiers. deadline_s: of
        the monotonic clock; past it the run is broken off. host: gets what the host spends on each turn. progress: told the
        number of output tokens so far, a few times a second.
        Raises OutOfTimeError, RunError.
        """
        calls = _at_once(load, snapshot, tenants)
        served = self.serve(
            calls, seed=seed, snapshot=snapshot, max_num_seqs=max_num_seqs, deadline_s=deadline_s, host=host, progress=progress
        )
        return Outcome(load, served.start_s, served.tracks, served.steps, served.preemptions, served.recomputed_tokens)

    def serve(
        self,
        calls: Sequence[Call],
        *,
        seed: int = 0,
        snapshot: PolicySnapshot = FCFS,
        max_num_seqs: int | None = None,
        deadline_s: float | None = None,
        host: HostTimes | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Served:
        """Submits each call when it arrives, in their order, and steps the engine until all have ended. As run() else."""
        boxes = Boxes(self.clock)
        scheduler = self._scheduler(max_num_seqs)
        executor = self.executor if host is None else TimedExecutor(self.executor, host)
        made = requests(calls, self.executor.info.vocab_size, seed)
        gc.collect()  # a clean heap to start from; collections stay on, as they are in a worker
        with nullcontext() if host is None else host.watching(scheduler, self.executor):
            engine = Engine(scheduler, executor, self.clock, boxes, boxes, self.config.pipeline_depth)
            boxes.commands.append(ApplyPolicy(snapshot, _refuse_refusals))
            engine.turn(wait=False)
            start_s = self.clock.now()
            boxes.coming.extend(replace(request, arrival_s=start_s + request.arrival_s) for request in made)
            in_time = self._turn_until_idle(engine, scheduler, boxes, len(calls), deadline_s, host, progress)
        tracks, steps = boxes.resolve(len(calls))
        if not in_time:
            came, seconds = sum(n for _, n in steps), self.clock.now() - start_s
            ended = sum(track.ended is not None and track.ended.reason is EndReason.LENGTH for track in tracks)
            raise OutOfTimeError(
                f"stopped after {seconds:.1f} s with {ended} requests done, {came / seconds:.0f} output tokens/s"
            )
        _check([call.output for call in calls], tracks)
        return Served(calls, start_s, tracks, steps, scheduler.num_preemptions, scheduler.num_recomputed_tokens)

    def _scheduler(self, max_num_seqs: int | None) -> Scheduler:
        config, info = self.config, self.executor.info
        limits = limits_of(config, info.max_model_len)
        if max_num_seqs is not None:
            num_seqs = min(max_num_seqs, config.max_num_seqs)
            limits = replace(limits, max_num_seqs=num_seqs, max_num_resident=num_seqs)
        caching, num_host_blocks = config.prefix_caching, info.num_host_blocks
        blocks = BlockManager(info.num_blocks, info.block_size, enable_prefix_caching=caching, num_host_blocks=num_host_blocks)
        return Scheduler(limits, blocks, make_policy(NO_POLICY), self.clock)

    def _turn_until_idle(
        self,
        engine: Engine,
        scheduler: Scheduler,
        boxes: Boxes,
        count: int,
        deadline_s: float | None,
        host: HostTimes | None,
        progress: Callable[[int], None] | None,
    ) -> bool:
        """False if the deadline passed; then every request is aborted and no step is in flight any more."""
        in_time, empty, told_s = True, 0, self.clock.now()
        while True:
            busy = engine.turn(wait=False) if host is None else host.turn(engine)
            if not busy and not scheduler.num_unfinished and not boxes.commands:
                if not boxes.coming:
                    return in_time
                time.sleep(IDLE_S)
            empty = 0 if busy or not scheduler.num_unfinished else empty + 1
            if empty > MAX_EMPTY_TURNS:
                raise RunError(f"{scheduler.num_unfinished} requests wait and no step can be made for them")
            if progress is not None and self.clock.now() - told_s > PROGRESS_S:
                told_s = self.clock.now()
                progress(boxes.tokens_so_far())
            if in_time and deadline_s is not None and self.clock.now() > deadline_s:
                in_time = False
                boxes.coming.clear()
                boxes.commands += [Abort(RequestId(number)) for number in range(count)]


def _at_once(load: Load, snapshot: PolicySnapshot, tenants: int) -> list[Call]:
    tiers = [tier.name for tier in snapshot.tiers]
    return [
        Call(f"bench/t{number % tenants:03}", tiers[number % tenants % len(tiers)], 0.0, prompt, output)
        for number, (prompt, output) in enumerate(load.lengths)
    ]


def _check(outputs: Sequence[int], tracks: list[Track]) -> None:
    for number, (track, output) in enumerate(zip(tracks, outputs, strict=True)):
        if track.ended is None or track.ended.reason is not EndReason.LENGTH or track.num_tokens != output:
            said = "has not ended" if track.ended is None else f"{track.ended.reason.value} {track.ended.error_message}".strip()
            raise RunError(f"request {number} gave {track.num_tokens} of {output} tokens: {said}")


def _refuse_refusals(refusal: str) -> None:
    if refusal:
        raise RunError(f"the policy was refused: {refusal}")
