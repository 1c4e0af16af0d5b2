"""V1 and V2 on the real CPU worker with SmolLM2: VIPs that ask for about a fifth of it, and a crowd of longer requests that
would take everything, under FCFS and under VIP with each shaping; and the VIPs alone. What must hold here are the trends: the
stricter the shaping, the sooner a VIP has its first token and the faster its others come, and the fewer tokens all get together.

    python benchmarks/bench_shaping.py [--seconds 70] [--json FILE]

They take turns of two seconds, each with a worker of its own (5 GB in all), so that a machine that is slower for a minute is it
for all of them; and time is what the one thread computes (work_clock.py), so that others on the machine disturb little.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from report import console, print_checks, print_rows, write_json
from rich.progress import track
from work_clock import SliceClock

from fairlane.bench.results import Check
from fairlane.embedded import resolve
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import Request, RequestId, SamplingParams
from fairlane.scheduler.simulator.report import percentile
from fairlane.scheduler.tenancy import PolicySnapshot, Shaping, Tier, TiersPolicy
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executor import LocalExecutor
from fairlane.worker.executors import limits_of

VIP, CROWD = "vip", "best_effort"
STRICTEST_FIRST = (Shaping.STRICT, Shaping.BALANCED, Shaping.GENTLE)
# The first requests of the crowd fill the worker; VIPs come from then on.
WARM_UP_S = 4.0
# How far neighbours may be in the wrong order: about what two runs of the same differ by.
TIME_SLACK, RATE_SLACK = 0.15, 0.03
FCFS_RATIO = 0.25
SLICE_S = 2.0


class Sender(NamedTuple):
    """A tier's requests: about every gap_s, from begin_s on, with about so many tokens."""

    tier: str
    gap_s: float
    begin_s: float
    prompt: int
    output: int


# A fifth of what the worker can do, and far more than it can.
VIPS = Sender(VIP, 0.6, WARM_UP_S, 48, 8)
BEST_EFFORT = Sender(CROWD, 0.33, 0.0, 400, 48)


@dataclass(frozen=True, slots=True)
class Asked:
    seconds: float
    senders: Sequence[Sender]

    def requests(self, start_s: float) -> list[Request]:
        found: list[Request] = []
        for sender in self.senders:
            rng, at_s = random.Random(sender.tier), sender.begin_s
            while (at_s := at_s + rng.uniform(0.5, 1.5) * sender.gap_s) < self.seconds:
                prompt = tuple(rng.randrange(100, 40_000) for _ in range(round(sender.prompt * rng.uniform(0.75, 1.25))))
                number, node = RequestId(len(found)), f"{sender.tier}/t{len(found) % 4}"
                greedy = SamplingParams(temperature=0.0)
                found.append(
                    Request(number, node, sender.tier, prompt, sender.output, greedy, arrival_s=start_s + at_s, cache_domain=node)
                )
        return found


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds to the first token of every VIP (of one that has none yet: how long it has waited), seconds per token after it, and
    prompt and output tokens of everybody, each counted once, a second."""

    ttft_s: Sequence[float]
    tpot_s: Sequence[float]
    rate: float


class Case:
    """One of the runs compared, with a worker and a clock of its own."""

    def __init__(self, config: WorkerConfig, shaping: Shaping | None, asked: Asked) -> None:
        """shaping: None for first come, first served."""
        tiers = (Tier(VIP, 100, shaping=shaping or Shaping.OFF), Tier(CROWD, 10))
        policy = TiersPolicy.FCFS if shaping is None else TiersPolicy.VIP
        self._clock = SliceClock()
        self._executor = LocalExecutor(config, self._clock)
        limits = limits_of(config, self._executor.info.max_model_len)
        self._driver = EngineDriver(self._executor, self._clock, PolicySnapshot(1, "", policy, tiers), limits)
        self._start_s, self._seconds = self._clock.now(), asked.seconds
        self._requests = asked.requests(self._start_s)
        self._driver.add_at_arrival(self._requests)

    def serve(self, until_s: float) -> None:
        """From where it is on, until so many seconds after its start."""
        end_s = self._start_s + until_s
        with self._clock.counting():
            while (now_s := self._clock.now()) < end_s:
                if self._driver.turn() or self._driver.scheduler.num_unfinished:
                    continue
                next_s = min((one.arrival_s for one in self._requests if one.arrival_s > now_s), default=end_s)
                self._clock.advance(max(0.0, min(next_s, end_s) - self._clock.now()))

    def outcome(self) -> Outcome:
        """Whatever is unfinished now."""
        return _outcome(self._driver, self._requests, self._start_s + self._seconds, self._seconds)

    def close(self) -> None:
        self._executor.close()


def serve_all(config: WorkerConfig, cases: Mapping[str, tuple[Shaping | None, Asked]], seconds: float) -> dict[str, Outcome]:
    with ExitStack() as stack:
        running = {name: stack.enter_context(closing(Case(config, *case))) for name, case in cases.items()}
        slices = range(1, math.ceil(seconds / SLICE_S) + 1)
        for number in track(slices, "serving", console=console):
            # Every second time the other way round, so that none is always first.
            for one in list(running.values())[:: 1 if number % 2 else -1]:
                one.serve(min(seconds, number * SLICE_S))
        return {name: one.outcome() for name, one in running.items()}


def _outcome(driver: EngineDriver, requests: Sequence[Request], end_s: float, seconds: float) -> Outcome:
    ttft_s, tpot_s, tokens = [], [], 0
    for request in requests:
        found = driver.transcripts[request.request_id]
        first_s, count = found.first_token_s, len(found.token_ids)
        tokens += count + (len(request.prompt_token_ids) if count else 0)
        if request.tier == VIP:
            ttft_s.append((end_s if first_s is None else first_s) - request.arrival_s)
            if first_s is not None and found.ended_s is not None:
                tpot_s.append((found.ended_s - first_s) / (count - 1))
    return Outcome(ttft_s, tpot_s, tokens / seconds)


def row_of(name: str, found: Outcome, alone: Outcome, fcfs: Outcome) -> dict[str, Any]:
    ttft = percentile(found.ttft_s, 0.99)
    tpot = percentile(found.tpot_s, 0.99) if found.tpot_s else math.nan  # under FCFS none may have come to its end
    return {
        "policy": name, "VIPs": len(found.ttft_s), "TTFT p50 s": percentile(found.ttft_s, 0.5), "TTFT p99 s": ttft,
        "/ alone": ttft / percentile(alone.ttft_s, 0.99), "/ fcfs": ttft / percentile(fcfs.ttft_s, 0.99),
        "TPOT p99 ms": 1e3 * tpot, "TPOT / alone": tpot / percentile(alone.tpot_s, 0.99), "tokens/s": found.rate,
        "rate / fcfs": found.rate / fcfs.rate,
    }  # fmt: skip


def checks_of(rows: Mapping[Shaping | None, Mapping[str, Any]]) -> list[Check]:
    def trend(check_id: str, what: str, figure: str, slack: float) -> Check:
        line = [rows[shaping][figure] for shaping in STRICTEST_FIRST]
        worst = max(stricter / laxer for stricter, laxer in pairwise(line)) - 1
        return Check(check_id, f"{what}: stricter over laxer, less 1, worst neighbours", worst, f"<= {slack}", "", worst <= slack)

    ratios = [row["/ fcfs"] for row in rows.values()]
    return [
        Check(
            "V1-FCFS", "VIP TTFT p99 / under FCFS, worst shaping", max(ratios), f"<= {FCFS_RATIO}", "x", max(ratios) <= FCFS_RATIO
        ),
        trend("V1-TREND", "VIP TTFT p99", "TTFT p99 s", TIME_SLACK),
        trend("V1-RATE-TREND", "tokens/s of all", "tokens/s", RATE_SLACK),
        trend("V2-TREND", "VIP TPOT p99", "TPOT p99 ms", TIME_SLACK),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=70.0, help="of each run (default 70)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    given = parser.parse_args()
    config = WorkerConfig(model=str(resolve("smollm2")), threads=1, max_num_seqs=16)
    crowd, alone = Asked(given.seconds, (VIPS, BEST_EFFORT)), Asked(given.seconds, (VIPS,))
    shapings = (*STRICTEST_FIRST, Shaping.OFF)
    cases = {"alone": (Shaping.OFF, alone), "fcfs": (None, crowd)} | {one.value: (one, crowd) for one in shapings}
    found = serve_all(config, cases, given.seconds)
    rows = {name: row_of(name, one, found["alone"], found["fcfs"]) for name, one in found.items()}
    print_rows(f"VIPs and a crowd, {given.seconds:g} s each; off: priority alone", list(rows.values()))
    checks = checks_of({shaping: rows[shaping.value] for shaping in STRICTEST_FIRST})
    print_checks(checks)
    write_json(given.json, checks, list(rows.values()))


if __name__ == "__main__":
    main()
