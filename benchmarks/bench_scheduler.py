"""What one scheduler step costs: schedule() + update() at 256 running sequences, with 0 to 100,000 waiting ones over 1, 100 and
1000 tenants, under each policy. The yardstick, timed in the same run, is a bare Python loop over 256 sequence objects that
appends a token, increments a count and compares it with max_tokens: what any scheduler in Python does at the least.

    python benchmarks/bench_scheduler.py [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Check, console, print_checks, print_rows, write_json
from rich.progress import track

from fairlane.clock import FakeClock
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.fake_executor import FakeExecutor
from fairlane.scheduler.output import StepResult
from fairlane.scheduler.request import Request, RequestId
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.tenancy import NodeShare, PolicySnapshot, Shaping, Tier, TiersPolicy, WithinTier

RUNNING = 256
STEPS = 200
BLOCK_SIZE = 16
TIERS = (
    Tier("gold", 100, shaping=Shaping.BALANCED),
    Tier("standard", 50, min_share=0.1, patience_s=60),
    Tier("batch", 10, min_share=0.05, patience_s=600),
)
POLICIES = {
    "fcfs": (TiersPolicy.FCFS, WithinTier.FCFS),
    "vip": (TiersPolicy.VIP, WithinTier.FCFS),
    "vip, fair within": (TiersPolicy.VIP, WithinTier.FAIR),
    "fair": (TiersPolicy.FAIR, WithinTier.FCFS),
}


class BareSequence:
    __slots__ = ("max_tokens", "num_tokens", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_tokens = 0
        self.max_tokens = 1 << 30


def bare_loop_us() -> float:
    """Median microseconds of the bare loop over 256 sequences."""
    sequences = [BareSequence() for _ in range(RUNNING)]
    tokens = list(range(RUNNING))

    def step() -> None:
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.token_ids.append(token)
            sequence.num_tokens += 1
            if sequence.num_tokens >= sequence.max_tokens:
                raise AssertionError

    return median_us(step, 2000)[0]


def median_us(step: Callable[[], None], count: int) -> tuple[float, float]:
    """p50 and p99 of `count` calls."""
    times = []
    for _ in range(count):
        start = time.perf_counter_ns()
        step()
        times.append(time.perf_counter_ns() - start)
    times.sort()
    return times[len(times) // 2] / 1000, times[int(len(times) * 0.99)] / 1000


def request(number: int, tenants: int, max_tokens: int, arrival_s: float) -> Request:
    tier = TIERS[number % 3].name
    tenant = f"org{number % tenants % 20}/t{number % tenants}"
    # Prompts of different lengths, so that block borders are crossed in every step and not by all at once.
    prompt = tuple(range(1, 18 + number % BLOCK_SIZE))
    return Request(RequestId(number), tenant, tier, prompt, max_tokens, arrival_s=arrival_s, cache_domain=tenant)


def world(policy: str, tenants: int) -> EngineDriver:
    tiers_policy, within = POLICIES[policy]
    clock = FakeClock()
    info = ExecutorInfo("fake", 50_000, 8192, BLOCK_SIZE, 60_000, (2,))
    limits = SchedulerLimits(max_num_seqs=RUNNING, max_num_resident=RUNNING, max_num_batched_tokens=2048)
    nodes = tuple(NodeShare(f"org{k % 20}/t{k}", 1 + k % 4) for k in range(tenants))
    snapshot = PolicySnapshot(1, "", tiers_policy, TIERS, within, nodes)
    return EngineDriver(FakeExecutor(info, clock), clock, snapshot, limits)


def measure(policy: str, waiting: int, tenants: int) -> dict[str, Any]:
    """One row: a full batch of long-running sequences, `waiting` more behind them."""
    driver = world(policy, tenants)
    for number in range(RUNNING):
        driver.add(request(number, tenants, 4000, 0.0))
    while len(driver.scheduler.running) < RUNNING or driver.scheduler.policy.num_waiting():
        driver.turn()
    for _ in range(8):
        driver.turn()
    for number in range(RUNNING, RUNNING + waiting):
        driver.add(request(number, tenants, 100, driver.clock.now()))
    driver.turn()
    scheduler, split = driver.scheduler, [0.0, 0.0]

    def step() -> None:
        start = time.perf_counter_ns()
        output = scheduler.schedule()
        middle = time.perf_counter_ns()
        scheduler.update(StepResult(output.step_id, [[7] for _ in output.scheduled]))  # type: ignore[union-attr]
        scheduler.take_deltas()
        split[0] += middle - start
        split[1] += time.perf_counter_ns() - middle

    gc.collect()
    gc.disable()
    try:
        p50, p99 = median_us(step, STEPS)
    finally:
        gc.enable()
    means = [total / STEPS / 1000 for total in split]
    row = {"policy": policy, "waiting": waiting, "tenants": tenants, "p50 us": p50, "p99 us": p99}
    return row | {"schedule mean us": means[0], "update mean us": means[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    parser.add_argument("--quick", action="store_true", help="only what the checks need")
    arguments = parser.parse_args()
    grid = [(p, w, t) for p in POLICIES for w in (0, 1000, 10_000, 100_000) for t in (1, 100, 1000)]
    if arguments.quick:
        grid = [(p, w, 1000) for p in POLICIES for w in (10_000, 100_000)]
    bare_us = bare_loop_us()
    rows = []
    for policy, waiting, tenants in track(grid, "measuring", console=console):
        row = measure(policy, waiting, tenants)
        rows.append(row | {"x bare loop": row["p50 us"] / bare_us})
    print_rows(f"{RUNNING} running; bare loop {bare_us:.1f} us", rows)
    at = {(row["policy"], row["waiting"], row["tenants"]): row["p50 us"] for row in rows}
    ratio = max(at[p, 10_000, 1000] for p in POLICIES) / bare_us
    growth = max(at[p, 100_000, 1000] / at[p, 10_000, 1000] for p in POLICIES)
    checks = [
        Check("T1-10k", "p50 at 10k waiting, 1000 tenants, worst policy / bare loop", ratio, "<= 2", "x", ratio <= 2),
        Check("T1-100k", "p50 at 100k waiting / at 10k, worst policy", growth, "<= 1.5", "x", growth <= 1.5),
    ]
    print_checks(checks)
    write_json(arguments.json, checks, rows)


if __name__ == "__main__":
    main()
