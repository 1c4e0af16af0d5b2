"""The promise on the real CPU worker, by wall clock: KV for about four requests, forty submitted by three tiers, VIPs spread
over the time FCFS needs for all of them. Under VIP they wait a quarter as long; under both, everyone gets the same tokens."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from serving import Served, serving

# 22 usable blocks of 16 tokens; a request holds 64 prompt + about 28 output tokens: 5 to 6 blocks.
NUM_BLOCKS = 1 + 22
NODES = {"gold": "northwind/checkout", "standard": "northwind/docs-api", "batch": "northwind/docs-api"}


@dataclass(frozen=True)
class Asked:
    """What one client sends, and when."""

    number: int
    tier: str
    arrival_s: float
    max_tokens: int

    def message(self) -> pb.GenerateRequest:
        rng = random.Random(self.number)
        return pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[rng.randrange(100, 40_000) for _ in range(64)]),
            sampling=pb.SamplingParams(temperature=0),
            stopping=pb.StoppingParams(max_tokens=self.max_tokens, ignore_eos=True),
            response=pb.ResponseOptions(return_token_ids=True),
            tier=self.tier,
        )


@dataclass(frozen=True)
class Got:
    token_ids: tuple[int, ...]
    ttft_s: float
    ended_s: float


def forty(makespan_s: float) -> list[Asked]:
    """34 requests at once (28 batch, 6 standard), 6 VIPs over the first six sevenths of the makespan."""
    crowd = [Asked(n, "standard" if n % 6 == 0 else "batch", n * 0.005, 24 + n % 9) for n in range(1, 35)]
    return crowd + [Asked(100 + i, "gold", makespan_s * (i + 1) / 7, 16) for i in range(6)]


def run(server: Served, asked: list[Asked]) -> list[Got]:
    start_s = time.monotonic()
    with server.inference() as stub, ThreadPoolExecutor(len(asked)) as pool:

        def one(ask: Asked) -> Got:
            time.sleep(max(0.0, start_s + ask.arrival_s - time.monotonic()))  # an arrival, not a wait for a result
            sent_s = time.monotonic()
            first_s, ids = None, list[int]()
            for event in stub.Generate(ask.message(), metadata=server.key(NODES[ask.tier]), timeout=120):
                ids += event.tokens.token_ids
                if ids and first_s is None:
                    first_s = time.monotonic()
            return Got(tuple(ids), (first_s or float("inf")) - sent_s, time.monotonic() - start_s)

        return list(pool.map(one, asked))


def test_vips_overtake_on_the_real_worker_and_nobody_loses_a_token(tmp_path: Path) -> None:
    shipped = files("fairlane.configs").joinpath("tenants.yaml").read_text()
    assert "tiers: vip" in shipped
    flags = ("--num-blocks", str(NUM_BLOCKS), "--max-num-seqs", "16", "--policy")
    results: dict[str, list[Got]] = {}
    preemptions: dict[str, int] = {}
    makespan_s = 0.0
    for policy in ("fcfs", "vip"):
        path = tmp_path / f"{policy}.yaml"
        path.write_text(shipped.replace("tiers: vip", f"tiers: {policy}"))
        with serving(tmp_path / policy, *flags, str(path)) as server:
            if not makespan_s:  # how long this machine takes for the crowd alone, first come, first served, by a third of it
                makespan_s = max(got.ended_s for got in run(server, forty(0.0)[:12])) * 34 / 12
            asked = forty(makespan_s)
            results[policy] = run(server, asked)
            status = server.status()
            preemptions[policy] = status.worker.preemptions
            assert (status.in_flight, status.worker.blocks_used) == (0, 0)

    vips = [index for index, ask in enumerate(asked) if ask.tier == "gold"]
    mean_ttft_s = {policy: sum(got[index].ttft_s for index in vips) / len(vips) for policy, got in results.items()}
    print(f"VIP mean TTFT: {mean_ttft_s}, preemptions: {preemptions}, FCFS makespan of the crowd: {makespan_s:.1f} s")
    assert [got.token_ids for got in results["vip"]] == [got.token_ids for got in results["fcfs"]]
    assert [len(got.token_ids) for got in results["vip"]] == [ask.max_tokens for ask in asked]
    assert preemptions["vip"] > 0
    assert mean_ttft_s["vip"] <= 0.25 * mean_ttft_s["fcfs"]
