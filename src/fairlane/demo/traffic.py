"""Sends the scenario's requests to a server as its tenants would, and writes down on the board what each stream tells. What is
asked is the scenario's; nothing here judges or draws."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import grpc.aio

from fairlane.clock import Clock
from fairlane.demo.board import Ask, Board, Lane, Stage
from fairlane.demo.scenario import Load, Pattern, prompt
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1 import inference_pb2_grpc

# A refused flood must not turn into a storm of refusals.
_AFTER_ERROR_S = 0.5
_REQUEST_TIMEOUT_S = 600.0


class Traffic:
    """All tenants of one phase. keys: API key by tenant. numbers: goes on over phases, so that no prompt comes twice."""

    def __init__(self, target: str, keys: Mapping[str, str], clock: Clock, numbers: Iterator[int] | None = None) -> None:
        self._target = target
        self._keys = keys
        self._clock = clock
        self._numbers = itertools.count() if numbers is None else numbers

    async def run(self, board: Board, start_s: float, seconds: float) -> None:
        """Keeps the tenants asking for `seconds` from `start_s` on the clock, then ends every stream and returns."""
        async with grpc.aio.insecure_channel(self._target) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            vocab_size = await self._vocab_size(stub)
            tenants = [asyncio.create_task(_Tenant(self, stub, lane, vocab_size, start_s).run(seconds)) for lane in board.lanes]
            try:
                await asyncio.sleep(start_s + seconds - self._clock.now())
            finally:
                for task in tenants:
                    task.cancel()
                await asyncio.gather(*tenants, return_exceptions=True)

    async def speed(self, load: Load, streams: int) -> float:
        """Tokens a second of an otherwise idle server with so many streams at once, prompts included in the time."""
        async with grpc.aio.insecure_channel(self._target) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            lane, start_s = Lane(load), self._clock.now()
            tenant = _Tenant(self, stub, lane, await self._vocab_size(stub), start_s)
            await asyncio.gather(*(tenant.one() for _ in range(streams)))
            return sum(tokens for _, tokens in lane.tokens) / max(self._clock.now() - start_s, 1e-3)

    async def _vocab_size(self, stub: Any) -> int:
        key = next(iter(self._keys.values()))
        answer = await stub.ListModels(pb.ListModelsRequest(), metadata=_metadata(key), timeout=10)
        return int(answer.models[0].vocab_size)

    def next_number(self) -> int:
        return next(self._numbers)

    def key(self, tenant: str) -> str:
        return self._keys[tenant]

    def now(self) -> float:
        return self._clock.now()


class _Tenant:
    def __init__(self, traffic: Traffic, stub: Any, lane: Lane, vocab_size: int, start_s: float) -> None:
        self._traffic = traffic
        self._stub = stub
        self._lane = lane
        self._vocab_size = vocab_size
        self._start_s = start_s

    async def run(self, seconds: float) -> None:
        """Until cancelled. A TaskGroup, so that cancelling it ends its streams too."""
        load = self._lane.load
        async with asyncio.TaskGroup() as requests:
            for at_s in load.arrivals(seconds):
                await asyncio.sleep(max(0.0, at_s - self._now()))
                requests.create_task(self._forever() if load.pattern is Pattern.FLOOD else self.one())

    async def _forever(self) -> None:
        while True:
            if not await self.one():
                await asyncio.sleep(_AFTER_ERROR_S)

    async def one(self) -> bool:
        """Sends one request and follows it; whether it was served to its end."""
        load = self._lane.load
        ask = Ask(self._now())
        self._lane.asks.append(ask)
        request = new_request(load, prompt(load, self._traffic.next_number(), self._vocab_size))
        call = self._stub.Generate(request, metadata=_metadata(self._traffic.key(load.tenant)), timeout=_REQUEST_TIMEOUT_S)
        try:
            async for event in call:
                note(self._lane, ask, event, self._now())
            return True
        except grpc.aio.AioRpcError:
            self._lane.errors += 1
            ask.stage = Stage.OVER
            return False
        finally:
            call.cancel()

    def _now(self) -> float:
        return self._traffic.now() - self._start_s


def new_request(load: Load, ids: list[int]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids),
        tier=load.tier,
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=load.output_tokens, ignore_eos=True),
        response=pb.ResponseOptions(lifecycle_events=True),
    )


def note(lane: Lane, ask: Ask, event: pb.GenerateEvent, now_s: float) -> None:
    """What one event of a request's stream says."""
    which = event.WhichOneof("event")
    if which == "queued":
        ask.stage = Stage.WAITING
    elif which in ("started", "resumed"):
        ask.stage = Stage.RUNNING
    elif which == "tokens":
        if ask.first_s is None:
            ask.first_s = now_s
        ask.tokens += event.tokens.num_tokens
        lane.tokens.append((now_s, event.tokens.num_tokens))
    elif which == "preempted" and event.preempted.kind != pb.PREEMPTION_KIND_PAUSED:
        lane.preemptions += 1
        lane.last_preempted_s = now_s
        ask.stage = Stage.WAITING
    elif which == "finished":
        ask.stage = Stage.OVER


def _metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)
