"""The worker's stream against a real gRPC server on a unix socket, with the fake executor behind it: what a gateway sends and
what it gets back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from engine_worker import serving
from engine_world import VOCAB, expected_tokens, request
from fairlane.protos.fairlane.v1 import explain_pb2, worker_pb2_grpc
from fairlane.protos.fairlane.v1 import worker_pb2 as pb
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.scheduler import Scheduler, SchedulerLimits

POLICY = pb.PolicySnapshot(
    generation=3,
    sha256="ab",
    tiers_policy="vip",
    tiers=[
        pb.TierSpec(name="gold", priority=100, weight=1, shaping="balanced"),
        pb.TierSpec(name="batch", priority=10, weight=1, shaping="off"),
    ],
)


@dataclass
class Stream:
    """A gateway's end of one Connect stream."""

    call: grpc.aio.StreamStreamCall

    async def send(self, **message: object) -> None:
        await self.call.write(pb.ToWorker(**message))

    async def read(self) -> pb.FromWorker:
        return await asyncio.wait_for(self.call.read(), 10)

    async def deltas_until_ended(self, request_id: int) -> list[pb.Delta]:
        deltas: list[pb.Delta] = []
        while not (deltas and deltas[-1].HasField("ended")):
            step = (await self.read()).deltas
            columns = zip(step.decoded.request_ids, step.decoded.token_ids, strict=True)
            deltas += [pb.Delta(request_id=one, token_ids=[token]) for one, token in columns if one == request_id]
            deltas += [d for d in step.deltas if d.request_id == request_id]
        return deltas


@dataclass
class World:
    scheduler: Scheduler
    stub: worker_pb2_grpc.WorkerStub

    async def connect(self) -> Stream:
        stream = Stream(self.stub.Connect())
        await stream.send(hello=pb.Hello(gateway_id="g", protocol_version=1))
        assert (await stream.read()).welcome.vocab_size == VOCAB
        await stream.send(policy=POLICY)
        assert (await stream.read()).policy_applied == pb.PolicyApplied(generation=3)
        return stream


@asynccontextmanager
async def running_worker(tmp_path: Path) -> AsyncIterator[World]:
    info = ExecutorInfo("fake", VOCAB, 1024, 16, 65, (2,))
    address = f"unix:{tmp_path}/w.sock"
    limits = SchedulerLimits(max_model_len=1024)
    async with serving(address, info, limits) as worker, grpc.aio.insecure_channel(address) as channel:
        yield World(worker.scheduler, worker_pb2_grpc.WorkerStub(channel))


def add(request_id: int, tier: str = "batch", max_tokens: int = 8) -> tuple[pb.Add, list[int]]:
    """An Add and the tokens it must bring."""
    asked = request(request_id, tier, max_tokens=max_tokens)
    message = pb.Add(
        request_id=request_id,
        tenant=asked.tenant,
        tier=tier,
        prompt_token_ids=asked.prompt_token_ids,
        max_tokens=max_tokens,
        sampling=pb.WorkerSampling(temperature=0, top_p=1, repetition_penalty=1),
        cache_domain=asked.cache_domain,
        cache_mode="read_write",
        policy_generation=3,
    )
    return message, expected_tokens(asked)


def tokens(deltas: list[pb.Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_a_request_is_queued_started_served_and_ended(tmp_path: Path) -> None:
    async with running_worker(tmp_path) as world:
        stream = await world.connect()
        message, expected = add(5)
        await stream.send(add=message)
        deltas = await stream.deltas_until_ended(5)
        assert deltas[0].queue_position == 0 and deltas[0].HasField("started")
        assert tokens(deltas) == expected
        assert deltas[-1].ended.reason == "length"


async def test_two_gateways_may_use_the_same_request_id(tmp_path: Path) -> None:
    async with running_worker(tmp_path) as world:
        first, second = await world.connect(), await world.connect()
        message, expected = add(5)
        other, other_expected = add(5, max_tokens=3)
        await first.send(add=message)
        await second.send(add=other)
        assert tokens(await first.deltas_until_ended(5)) == expected
        assert tokens(await second.deltas_until_ended(5)) == other_expected


async def test_a_gateway_that_goes_away_leaves_nothing_running(tmp_path: Path) -> None:
    async with running_worker(tmp_path) as world:
        gone, stays = await world.connect(), await world.connect()
        message, _ = add(1, max_tokens=900)
        await gone.send(add=message)
        await gone.read()
        gone.call.cancel()
        message, expected = add(2)
        await stays.send(add=message)
        assert tokens(await stays.deltas_until_ended(2)) == expected
        running = 1
        while running:  # each pong is a round trip to the worker; the engine drops the lost request by its next turn
            await stays.send(ping=pb.Ping(nonce=1))
            running = (await stays.read()).pong.running
        assert world.scheduler.blocks.num_used_blocks == 0


@pytest.mark.parametrize(
    "broken",
    [
        {"prompt_token_ids": [VOCAB]},
        {"cache_mode": "sometimes"},
        {"prompt_token_ids": [1], "output_token_ids": [VOCAB + 1]},
    ],
)
async def test_an_add_no_gateway_should_send_fails_alone(tmp_path: Path, broken: dict[str, object]) -> None:
    async with running_worker(tmp_path) as world:
        stream = await world.connect()
        message, _ = add(1)
        for name in broken:
            message.ClearField(name)  # type: ignore[arg-type]
        message.MergeFrom(pb.Add(**broken))  # type: ignore[arg-type]
        good, expected = add(2)
        await stream.send(add=message)
        assert (await stream.deltas_until_ended(1))[0].ended.error_reason == "WORKER_PROTOCOL"
        await stream.send(add=good)
        assert tokens(await stream.deltas_until_ended(2)) == expected


async def test_a_pong_counts_who_runs_waits_and_holds_blocks(tmp_path: Path) -> None:
    async with running_worker(tmp_path) as world:
        stream = await world.connect()
        pong, number = pb.Pong(), 0
        while not pong.running:  # the fake model is quick: ask again with another request until one is caught running
            number += 1
            message, _ = add(number, max_tokens=900)
            await stream.send(add=message)
            await stream.send(ping=pb.Ping(nonce=number))
            while pong.nonce != number:
                reply = await stream.read()
                pong = reply.pong if reply.HasField("pong") else pong
        assert [c.name for c in pong.running_by_tier] == ["batch"]
        assert [(c.name, c.count) for c in pong.running_by_node] == [("org/batch", pong.running)]
        assert [c.name for c in pong.blocks_by_domain] == ["tenant:org/batch"]
        assert sum(c.count for c in pong.waiting_by_tier) == pong.waiting


async def test_an_unknown_policy_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    async with running_worker(tmp_path) as world:
        stream = await world.connect()
        await stream.send(policy=pb.PolicySnapshot(generation=4, tiers_policy="lottery", tiers=POLICY.tiers))
        assert "lottery" in (await stream.read()).policy_applied.refusal
        message, expected = add(1)
        await stream.send(add=message)
        assert tokens(await stream.deltas_until_ended(1)) == expected


async def test_another_protocol_version_is_told_so(tmp_path: Path) -> None:
    async with running_worker(tmp_path) as world:
        stream = Stream(world.stub.Connect())
        await stream.send(hello=pb.Hello(gateway_id="g", protocol_version=99))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_waiting_request_is_explained_between_two_steps_and_goes_on(tmp_path: Path) -> None:
    # Nobody of the node may run, so that it waits for as long as it takes to ask; then the cap goes.
    capped, free = pb.PolicySnapshot(), pb.PolicySnapshot()
    for policy, generation in ((capped, 4), (free, 5)):
        policy.CopyFrom(POLICY)
        policy.generation = generation
    capped.nodes.add(path="org/batch", weight=1, max_running=0)
    async with running_worker(tmp_path) as world:
        stream = await world.connect()
        await stream.send(policy=capped)
        assert (await stream.read()).policy_applied.generation == 4
        await stream.send(add=add(6)[0])
        await stream.send(explain=pb.Explain(request_id=6))
        await stream.send(explain=pb.Explain(request_id=77))
        explained: dict[int, pb.Explained] = {}
        while len(explained) < 2:
            message = await stream.read()
            if message.HasField("explained"):
                explained[message.explained.request_id] = message.explained
        await stream.send(policy=free)
        deltas = await stream.deltas_until_ended(6)
    found = explained[6].explanation
    assert (found.state, list(found.reasons), [(cap.node, cap.limit, cap.running) for cap in found.caps]) == (
        explain_pb2.Explanation.STATE_WAITING, [explain_pb2.Explanation.REASON_CAP], [("org/batch", 0, 0)],
    )  # fmt: skip
    assert (explained[77].HasField("explanation"), deltas[-1].ended.reason) == (False, "length")
