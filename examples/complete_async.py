"""Sends many requests at once with grpc.aio and reads each whole answer; a refusal prints its reason.

FAIRLANE_API_KEY=... python examples/complete_async.py
"""

import asyncio
import os

import grpc

from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1.inference_pb2_grpc import InferenceStub

KEY = ("authorization", f"Bearer {os.environ['FAIRLANE_API_KEY']}")


async def ask(stub: InferenceStub, city: str) -> None:
    request = pb.GenerateRequest(prompt=f"The river that flows through {city} is", sampling=pb.SamplingParams(temperature=0))
    request.stopping.max_tokens = 16
    try:
        print(city, "->", (await stub.Complete(request, metadata=[KEY], timeout=60)).text)
    except grpc.aio.AioRpcError as error:
        print(city, "->", error.code().name, error.details())


async def main() -> None:
    async with grpc.aio.insecure_channel(os.environ.get("FAIRLANE_TARGET", "127.0.0.1:50051")) as channel:
        await asyncio.gather(*(ask(InferenceStub(channel), city) for city in ("Paris", "London", "Vienna", "Rome")))


asyncio.run(main())
