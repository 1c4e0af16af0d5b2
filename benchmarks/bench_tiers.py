"""VIPs against a crowd on the real CPU worker, by wall clock: KV cache for about four requests, forty submitted by three
tiers, VIPs spread over the time that FCFS needs for all of them. The same arrivals under FCFS and under VIP.

    python benchmarks/bench_tiers.py [--json FILE]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import console, print_checks, print_rows, write_json

from fairlane.bench.results import Check
from fairlane.clock import MonotonicClock
from fairlane.embedded import resolve
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import Request, RequestId, SamplingParams
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.tenancy import PolicySnapshot, Shaping, Tier, TiersPolicy
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executor import LocalExecutor

TIERS = (
    Tier("gold", 100, shaping=Shaping.BALANCED),
    Tier("standard", 50, min_share=0.1, patience_s=60),
    Tier("batch", 10, min_share=0.05, patience_s=600),
)
NUM_BLOCKS = 1 + 22  # of 16 tokens; a request holds 64 prompt + about 28 output tokens: 5 to 6 blocks
REQUIRED_RATIO = 0.25


def crowd(start_s: float) -> list[Request]:
    return [_request(n, "standard" if n % 6 == 0 else "batch", start_s + n * 0.005, 24 + n % 9) for n in range(1, 35)]


def vips(start_s: float, makespan_s: float) -> list[Request]:
    return [_request(100 + i, "gold", start_s + makespan_s * (i + 1) / 7, 16) for i in range(6)]


def _request(number: int, tier: str, arrival_s: float, max_tokens: int) -> Request:
    rng = random.Random(number)
    prompt = tuple(rng.randrange(100, 40_000) for _ in range(64))
    greedy = SamplingParams(temperature=0.0)
    return Request(
        RequestId(number), f"org/{tier}", tier, prompt, max_tokens, greedy, arrival_s=arrival_s, cache_domain=f"org/{tier}"
    )


def run(policy: TiersPolicy, makespan_s: float) -> tuple[EngineDriver, list[Request], float]:
    """One run on a fresh worker; a makespan of 0 means: the crowd alone."""
    clock = MonotonicClock()
    executor = LocalExecutor(WorkerConfig(model=str(resolve("smollm2")), num_blocks=NUM_BLOCKS), clock)
    try:
        limits = SchedulerLimits(max_num_seqs=16, max_model_len=executor.info.max_model_len)
        driver = EngineDriver(executor, clock, PolicySnapshot(1, "", policy, TIERS), limits)
        start_s = clock.now()
        asked = crowd(start_s) + (vips(start_s, makespan_s) if makespan_s else [])
        driver.add_at_arrival(asked)
        driver.run_until_idle(10_000_000)
        return driver, asked, clock.now() - start_s
    finally:
        executor.close()


def ttfts_s(driver: EngineDriver, asked: Sequence[Request], tier: str) -> list[float]:
    return sorted((driver.transcripts[r.request_id].first_token_s or 0.0) - r.arrival_s for r in asked if r.tier == tier)


def rows_of(policy: TiersPolicy, driver: EngineDriver, asked: Sequence[Request], elapsed_s: float) -> list[dict[str, Any]]:
    rows = []
    for tier in TIERS:
        times = ttfts_s(driver, asked, tier.name)
        ended = [driver.transcripts[r.request_id].ended for r in asked if r.tier == tier.name]
        rows.append(
            {
                "policy": policy.value,
                "tier": tier.name,
                "requests": len(times),
                "TTFT mean s": sum(times) / len(times),
                "TTFT p50 s": times[len(times) // 2],
                "TTFT max s": times[-1],
                "evictions": sum(e.preemptions for e in ended if e),
                "tokens/s (all tiers)": sum(len(t.token_ids) for t in driver.transcripts.values()) / elapsed_s,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    mean_s, tokens = {}, {}
    with console.status("the crowd alone, first come, first served") as status:
        _, _, makespan_s = run(TiersPolicy.FCFS, 0.0)
        for policy in TiersPolicy:
            status.update(f"forty requests under {policy.value}")
            driver, asked, elapsed_s = run(policy, makespan_s)
            rows += rows_of(policy, driver, asked, elapsed_s)
            times = ttfts_s(driver, asked, "gold")
            mean_s[policy] = sum(times) / len(times)
            tokens[policy] = {number: transcript.token_ids for number, transcript in driver.transcripts.items()}
    ratio = mean_s[TiersPolicy.VIP] / mean_s[TiersPolicy.FCFS]
    same = sum(tokens[TiersPolicy.VIP][n] == ids for n, ids in tokens[TiersPolicy.FCFS].items())
    checks = [
        Check("VIP-TTFT", "VIP mean TTFT, VIP policy / FCFS", ratio, f"<= {REQUIRED_RATIO}", "x", ratio <= REQUIRED_RATIO),
        Check("TOKENS", "requests with the same tokens under both", same, "= 40", "requests", same == 40),
    ]
    print_rows(f"forty requests, KV for about four; the crowd alone takes {makespan_s:.1f} s under FCFS", rows)
    print_checks(checks)
    write_json(arguments.json, checks, rows)


if __name__ == "__main__":
    main()
