"""Keeps so many requests of one tenant in flight for a while, to see what a policy does to the others; then says how long first
tokens took. Exit code 1 if no request got one.

python examples/flood.py crawler/nightly --at-once 40 --seconds 60     # with the demo keys of a server on this machine
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import median

import grpc

from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1.inference_pb2_grpc import InferenceStub

WORDS = ["river", "stone", "light", "cold", "bird", "rain", "seven", "grey", "slowly", "home", "late", "winter", "song", "deep"]
STATE = Path(os.environ.get("FAIRLANE_STATE_DIR") or "~/.local/state/fairlane").expanduser()


async def ask(stub: InferenceStub, key: str, words: int, tokens: int, waits: list[float]) -> None:
    """One request of half as much to one and a half times as much; one that is refused or fails is an endless wait."""
    prompt = " ".join(random.choices(WORDS, k=random.randint(words // 2, words * 3 // 2)))  # noqa: S311 nothing secret
    request = pb.GenerateRequest(prompt=prompt, sampling=pb.SamplingParams(temperature=0))
    request.stopping.max_tokens = random.randint(tokens // 2, tokens * 3 // 2)  # noqa: S311
    request.stopping.ignore_eos = True
    begin_s, first_s = time.monotonic(), float("inf")
    try:
        async for event in stub.Generate(request, metadata=[("authorization", f"Bearer {key}")]):
            if event.HasField("tokens"):
                first_s = min(first_s, time.monotonic() - begin_s)
    except grpc.aio.AioRpcError as error:
        print(error.code().name, error.details())
        await asyncio.sleep(1)
    waits.append(first_s)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tenant")
    for name, value in {"--at-once": 1, "--seconds": 30, "--words": 120, "--tokens": 48}.items():
        parser.add_argument(name, type=int, default=value)
    where = os.environ.get("FAIRLANE_TARGET", "127.0.0.1:50051")
    parser.add_argument("--target", default=where, metavar="HOST:PORT", help="default: FAIRLANE_TARGET, else 127.0.0.1:50051")
    asked = parser.parse_args()
    key = os.environ.get("FAIRLANE_API_KEY") or json.loads((STATE / "demo-keys.json").read_text())["tenants"][asked.tenant]
    until_s, waits = time.monotonic() + asked.seconds, list[float]()

    async def keep_asking(stub: InferenceStub) -> None:
        while time.monotonic() < until_s:
            await ask(stub, key, asked.words, asked.tokens, waits)

    async with grpc.aio.insecure_channel(asked.target) as channel:
        await asyncio.gather(*(keep_asking(InferenceStub(channel)) for _ in range(asked.at_once)))
    served = [wait for wait in waits if wait < float("inf")]
    refused = f", {len(waits) - len(served)} more refused or failed" if len(served) < len(waits) else ""
    took = f"first token after {median(served):.2f} s (median)" if served else "none got a token"
    print(f"{asked.tenant}: {len(served)} requests, {took}{refused}")
    return 0 if served else 1


sys.exit(asyncio.run(main()))
