"""F3 on the real CPU worker: weights 1:2:3:4 under FAIR, four tenants, always backlogged, requests of 64 prompt and 64 output
tokens. Measured is service (1 a prompt token, 2 an output token) divided by weight over the middle 80 % of the run.

    python benchmarks/bench_shares.py [--requests 400] [--json FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from report import console, print_checks, print_rows, write_json
from rich.progress import Progress

from fairlane.bench.results import Check
from fairlane.clock import MonotonicClock
from fairlane.embedded import resolve
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import Request, RequestId, SamplingParams
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.tenancy import NodeShare, PolicySnapshot, Tier, TiersPolicy
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executor import LocalExecutor

WEIGHTS = {"org/w1": 1, "org/w2": 2, "org/w3": 3, "org/w4": 4}
PROMPT, OUTPUT = 64, 64
REQUIRED = 0.05


def requests(count: int) -> list[Request]:
    """By weight, so that all stay backlogged to the end."""
    greedy = SamplingParams(temperature=0.0)
    asked: list[Request] = []
    for tenant, weight in WEIGHTS.items():
        for _ in range(count * weight // sum(WEIGHTS.values())):
            number = len(asked) + 1
            prompt = tuple(100 + (number * 7919 + 31 * i) % 40_000 for i in range(PROMPT))
            asked.append(Request(RequestId(number), tenant, "standard", prompt, OUTPUT, greedy, cache_domain=tenant))
    return asked


def service(driver: EngineDriver, asked: list[Request]) -> dict[str, float]:
    """Cost units so far by tenant: prompts once placed, output tokens as they come."""
    total = dict.fromkeys(WEIGHTS, 0.0)
    for one in asked:
        transcript = driver.transcripts[one.request_id]
        started = any(delta.started for delta in transcript.deltas)
        total[one.tenant] += PROMPT * started + 2 * len(transcript.token_ids)
    return total


def run(count: int) -> tuple[dict[str, float], int]:
    """Service by tenant between 10 % and 90 % of all of it, and the requests run."""
    clock = MonotonicClock()
    executor = LocalExecutor(WorkerConfig(model=str(resolve("smollm2")), num_blocks=400), clock)
    nodes = tuple(NodeShare(path, weight) for path, weight in WEIGHTS.items())
    snapshot = PolicySnapshot(1, "", TiersPolicy.FAIR, (Tier("standard", 50),), nodes=nodes)
    limits = SchedulerLimits(max_num_seqs=20, max_num_resident=20, max_model_len=executor.info.max_model_len)
    driver = EngineDriver(executor, clock, snapshot, limits)
    asked = requests(count)
    for one in asked:
        driver.add(one)
    whole = len(asked) * (PROMPT + 2 * OUTPUT)
    at_start: dict[str, float] | None = None
    try:
        with Progress(console=console) as progress:
            bar = progress.add_task("serving", total=0.9 * whole)
            while True:
                driver.turn()
                now = service(driver, asked)
                done = sum(now.values())
                progress.update(bar, completed=done)
                if at_start is None and done >= 0.1 * whole:
                    at_start = now
                if at_start is not None and done >= 0.9 * whole:
                    return {tenant: now[tenant] - at_start[tenant] for tenant in WEIGHTS}, len(asked)
    finally:
        executor.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400, help="how many in all (default 400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    arguments = parser.parse_args()
    served, count = run(arguments.requests)
    shares = {tenant: served[tenant] / weight for tenant, weight in WEIGHTS.items()}
    mean = sum(shares.values()) / len(shares)
    rows = [
        {"tenant": t, "weight": w, "service": served[t], "service/weight": shares[t], "off the mean": shares[t] / mean - 1}
        for t, w in WEIGHTS.items()
    ]
    spread = max(shares.values()) / min(shares.values()) - 1
    jain = sum(shares.values()) ** 2 / (len(shares) * sum(share * share for share in shares.values()))
    print_rows(f"{count} requests of {PROMPT}/{OUTPUT} tokens, FAIR, middle 80 %", rows)
    checks = [
        Check("F3", "largest W/w over smallest, less 1", spread, f"<= {REQUIRED}", "", spread <= REQUIRED),
        Check("F3-JAIN", "Jain index of W/w", jain, ">= 0.999", "", jain >= 0.999),
    ]
    print_checks(checks)
    write_json(arguments.json, checks, rows)


if __name__ == "__main__":
    main()
