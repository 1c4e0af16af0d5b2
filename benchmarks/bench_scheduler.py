"""What one scheduler step costs: schedule() + update() at 256 running sequences, with 0 to 100,000 waiting ones over 1, 100 and
1000 tenants, under each policy. The yardstick, timed in turn with it, is a bare Python loop over 256 sequence objects that
appends a token, increments a count and compares it with max_tokens: what a scheduler that tells every sequence does at least.

steady: nobody comes or goes; of the rows that checks are about, the median of three rounds' ratios.
churn: in every step some requests end, as many are admitted and as many arrive (their add() is timed, too): 4, or 1 to 8.
doors: one request arrives, one that waits is cancelled; each is timed alone.
shadow: another policy that listens and is asked, and not obeyed.

    python benchmarks/bench_scheduler.py [--json FILE] [--quick] [--cpu-time]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from report import console, print_checks, print_rows, write_json
from rich.progress import track

from fairlane.bench.results import Check
from fairlane.clock import FakeClock
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.fake_executor import FakeExecutor
from fairlane.scheduler.output import StepResult
from fairlane.scheduler.request import Request, RequestId
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.tenancy import CostName, NodeShare, PolicySnapshot, Shaping, Tier, TiersPolicy, WithinTier

RUNNING = 256
STEPS = 200
ROUNDS = 3  # of the rows that checks are about: other processes on the machine disturb a round, not most of them
PASSES, TURN = 2000, 50  # of the bare loop in all, by parts in turn with TURN steps of the scheduler
ENDING = 4  # per step, under churn
CURVE = (1, 2, 8)  # and these, of some policies
BLOCK_SIZE = 16
STEP_S = 0.01  # of the engine's clock, per step: windows move on, requests age
TIERS = (
    Tier("gold", 100, shaping=Shaping.BALANCED),
    Tier("standard", 50, min_share=0.1, patience_s=60),
    Tier("batch", 10, min_share=0.05, patience_s=600),
)
POLICIES = {
    "fcfs": (TiersPolicy.FCFS, WithinTier.FCFS, CostName.TOKENS),
    "vip": (TiersPolicy.VIP, WithinTier.FCFS, CostName.TOKENS),
    "vip, fair within": (TiersPolicy.VIP, WithinTier.FAIR, CostName.TOKENS),
    "fair": (TiersPolicy.FAIR, WithinTier.FCFS, CostName.TOKENS),
    "fair by roofline": (TiersPolicy.FAIR, WithinTier.FCFS, CostName.ROOFLINE),
    "fair by drf": (TiersPolicy.FAIR, WithinTier.FCFS, CostName.DRF),
}


class Stopwatch:
    now_ns = staticmethod(time.perf_counter_ns)


class BareSequence:
    __slots__ = ("max_tokens", "num_tokens", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_tokens = 0
        self.max_tokens = 1 << 30


class BareLoop:
    """The bare loop over 256 sequences, and how long each pass took, in microseconds."""

    def __init__(self) -> None:
        self._sequences = [BareSequence() for _ in range(RUNNING)]
        self._tokens = list(range(RUNNING))
        self.times: list[float] = []

    def turns(self, count: int) -> None:
        for _ in range(count):
            start = Stopwatch.now_ns()
            self._step()
            self.times.append((Stopwatch.now_ns() - start) / 1000)

    def _step(self) -> None:
        for sequence, token in zip(self._sequences, self._tokens, strict=True):
            sequence.token_ids.append(token)
            sequence.num_tokens += 1
            if sequence.num_tokens >= sequence.max_tokens:
                raise AssertionError


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


def request(number: int, tenants: int, max_tokens: int, arrival_s: float) -> Request:
    tier = TIERS[number % 3].name
    tenant = f"org{number % tenants % 20}/t{number % tenants}"
    # Prompts of different lengths, so that block borders are crossed in every step and not by all at once.
    prompt = tuple(range(1, 18 + number % BLOCK_SIZE))
    return Request(RequestId(number), tenant, tier, prompt, max_tokens, arrival_s=arrival_s, cache_domain=tenant)


# In force, and tried beside it.
SHADOWS = (("vip", "vip"), ("vip", "fair"), ("fair", "vip, fair within"))


def snapshot_of(policy: str, tenants: int) -> PolicySnapshot:
    tiers_policy, within, cost = POLICIES[policy]
    nodes = tuple(NodeShare(f"org{k % 20}/t{k}", 1 + k % 4) for k in range(tenants))
    return PolicySnapshot(1, policy, tiers_policy, TIERS, within, nodes, cost=cost)


def world(policy: str, tenants: int) -> EngineDriver:
    clock = FakeClock()
    info = ExecutorInfo("fake", 50_000, 8192, BLOCK_SIZE, 60_000, (2,))
    limits = SchedulerLimits(max_num_seqs=RUNNING, max_num_resident=RUNNING, max_num_batched_tokens=2048)
    return EngineDriver(FakeExecutor(info, clock), clock, snapshot_of(policy, tenants), limits)


def crowd(policy: str, waiting: int, tenants: int, max_tokens: Callable[[int], int]) -> EngineDriver:
    """A full batch and `waiting` more behind it. max_tokens: of the running one with that number."""
    driver = world(policy, tenants)
    for number in range(RUNNING):
        driver.add(request(number, tenants, max_tokens(number), 0.0))
    while len(driver.scheduler.running) < RUNNING or driver.scheduler.policy.num_waiting():
        driver.turn()
    for number in range(RUNNING, RUNNING + waiting):
        driver.add(request(number, tenants, max_tokens(RUNNING), driver.clock.now()))
    driver.turn()
    return driver


def add_shadow(driver: EngineDriver, shadow: str, tenants: int) -> None:
    if shadow:
        driver.shadow(snapshot_of(shadow, tenants))
        driver.turn()


def check_shadow(driver: EngineDriver) -> None:
    """What it costs counts only while it listens."""
    shadow = driver.scheduler.shadow
    if shadow is not None and shadow.fault:
        raise RuntimeError(f"the shadow ended: {shadow.fault}")


def row_of(load: str, policy: str, shadow: str, waiting: int, tenants: int, ending: int) -> dict[str, Any]:
    """What a row is about."""
    return {"load": load, "policy": policy, "shadow": shadow, "waiting": waiting, "tenants": tenants, "ending": ending}


def steady(policy: str, waiting: int, tenants: int, shadow: str = "") -> dict[str, Any]:
    driver = crowd(policy, waiting, tenants, lambda number: 4000)
    add_shadow(driver, shadow, tenants)
    quiet = 0
    while quiet < 3:  # VIPs among those that wait evict others first
        driver.turn()
        quiet = quiet + 1 if driver.scheduler.settlement is not None else 0
    timed = in_turn(driver, list)
    return row_of("steady", policy, shadow, waiting, tenants, 0) | timed


def churn(policy: str, waiting: int, tenants: int, shadow: str = "", ending: int = ENDING) -> dict[str, Any]:
    life = RUNNING // ending
    driver = crowd(policy, waiting, tenants, lambda number: life + number % life)
    add_shadow(driver, shadow, tenants)
    for _ in range(2 * life):
        driver.turn()
    numbers = itertools.count(RUNNING + waiting)

    def arrivals() -> list[Request]:
        return [request(next(numbers), tenants, life, driver.clock.now()) for _ in range(ending)]

    timed = in_turn(driver, arrivals)
    return row_of("churn", policy, shadow, waiting, tenants, ending) | timed


class Doors:
    """A crowd at whose doors one comes and one goes, timed."""

    def __init__(self, policy: str, waiting: int, tenants: int) -> None:
        self._driver = crowd(policy, waiting, tenants, lambda number: 4000)
        self._tenants = tenants
        self._numbers = itertools.count(RUNNING + waiting)
        self._leaving = Random(0).sample(range(RUNNING, RUNNING + waiting), STEPS)
        self._row = row_of("doors", policy, "", waiting, tenants, 0)
        self._added: list[float] = []
        self._cancelled: list[float] = []

    def turn(self) -> None:
        scheduler = self._driver.scheduler
        arrival = request(next(self._numbers), self._tenants, 4000, self._driver.clock.now())
        leaver = RequestId(self._leaving.pop())
        start = Stopwatch.now_ns()
        scheduler.add(arrival)
        between = Stopwatch.now_ns()
        here = scheduler.abort(leaver)
        self._cancelled.append((Stopwatch.now_ns() - between) / 1000)
        self._added.append((between - start) / 1000)
        scheduler.take_deltas()
        if not here:
            raise RuntimeError(f"request {leaver} was not there")

    def row(self) -> dict[str, Any]:
        return self._row | {"add p50 us": percentile(self._added, 0.5), "cancel p50 us": percentile(self._cancelled, 0.5)}


def doors(policy: str, few: int, many: int, tenants: int) -> list[dict[str, Any]]:
    """Of a small and a large crowd in turn, so that a machine that becomes slower does not make one of them look slow."""
    both = [Doors(policy, waiting, tenants) for waiting in (few, many)]
    for _ in quietly(STEPS):
        for one in both:
            one.turn()
    return [one.row() for one in both]


def quietly(count: int) -> Iterator[int]:
    """range(count) without the garbage collector's pauses."""
    gc.collect()
    gc.disable()
    try:
        yield from range(count)
    finally:
        gc.enable()


def in_turn(driver: EngineDriver, arrivals: Callable[[], list[Request]]) -> dict[str, float]:
    """Steps of the driver and passes of the bare loop in turn, so that a machine that becomes slower slows both."""
    bare, times = BareLoop(), []
    for number in quietly(STEPS):
        if number % TURN == 0:
            bare.turns(PASSES * TURN // STEPS)
        times.append(timed_step(driver, arrivals()))
    check_shadow(driver)
    p50, p99 = (percentile([sum(pair) for pair in times], share) for share in (0.5, 0.99))
    bare_us = percentile(bare.times, 0.5)
    means = [sum(column) / len(times) for column in zip(*times, strict=True)]
    parts = {"schedule mean us": means[0], "update mean us": means[1]}
    return {"p50 us": p50, "p99 us": p99, **parts, "bare us": bare_us, "x bare loop": p50 / bare_us}


def timed_step(driver: EngineDriver, arrivals: list[Request]) -> tuple[float, float]:
    """Microseconds of add() and schedule(), and of update() with what the engine does after it. The executor's part is not
    timed."""
    scheduler = driver.scheduler
    start = Stopwatch.now_ns()
    for arrival in arrivals:
        scheduler.add(arrival)
    output = scheduler.schedule()
    scheduled = Stopwatch.now_ns()
    if output is None:
        raise RuntimeError("nothing to schedule")
    tokens = [[7] if entry.sample else [] for entry in output.scheduled]
    result = StepResult(output.step_id, tokens, [7] * len(output.decode_slots), elapsed_s=STEP_S)
    driver.clock.advance(STEP_S)  # type: ignore[attr-defined]
    executed = Stopwatch.now_ns()
    scheduler.update(result)
    scheduler.take_decoded()
    scheduler.take_deltas()
    return (scheduled - start) / 1000, (Stopwatch.now_ns() - executed) / 1000


def measured(quick: bool) -> list[dict[str, Any]]:
    """quick: only what the checks need."""
    grid: list[tuple[Any, ...]] = [(steady, p, w, 1000) for p in POLICIES for w in (10_000, 100_000)]
    if not quick:
        grid = [(steady, p, w, t) for p in POLICIES for w in (0, 1000, 10_000, 100_000) for t in (1, 100, 1000)]
    grid += [(churn, p, 10_000, 1000) for p in POLICIES]
    if not quick:
        grid += [(churn, p, 10_000, 1000, "", ending) for p in ("fcfs", "vip", "fair") for ending in CURVE]
        grid += [(load, p, 10_000, 1000, shadow) for load in (steady, churn) for p, shadow in SHADOWS]
    again = [row for row in grid if row[0] is steady and row[2] >= 10_000 and row[3] == 1000 and len(row) == 4] * (ROUNDS - 1)
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for measure, *where in track([*grid, *again], "measuring", console=console):
        found.setdefault((measure, *where), []).append(measure(*where))
    rows = [sorted(rounds, key=lambda row: row["x bare loop"])[len(rounds) // 2] for rounds in found.values()]
    for policy in POLICIES:
        rows += doors(policy, 1000, 100_000, 1000)
    return rows


def checks_of(rows: list[dict[str, Any]]) -> list[Check]:
    plain = [row for row in rows if not row["shadow"] and row["ending"] in (0, ENDING)]
    at = {(row["load"], row["policy"], row["waiting"], row["tenants"]): row for row in plain}
    by_tokens = [policy for policy, (_, _, cost) in POLICIES.items() if cost is CostName.TOKENS]

    def growth(load: str, number: str, few: int) -> float:
        return max(float(at[load, p, 100_000, 1000][number] / at[load, p, few, 1000][number]) for p in POLICIES)

    ratio = max(float(at["steady", p, 10_000, 1000]["x bare loop"]) for p in by_tokens)
    churns = max(float(at["churn", p, 10_000, 1000]["x bare loop"]) for p in by_tokens)
    grows = growth("steady", "x bare loop", 10_000)
    arrives, leaves = (growth("doors", f"{number} p50 us", 1000) for number in ("add", "cancel"))
    return [
        Check("T1-10k", "p50 at 10k waiting, 1000 tenants, worst policy by tokens / bare loop", ratio, "<= 2", "x", ratio <= 2),
        Check("T1-churn", f"the same where {ENDING} end, are admitted and arrive in each step", churns, "<= 2", "x", churns <= 2),
        Check("T1-100k", "the same ratio at 100k waiting / at 10k, worst policy", grows, "<= 1.5", "x", grows <= 1.5),
        Check("T2-arrival", "an arrival's p50 at 100k waiting / at 1k, worst policy", arrives, "<= 1.5", "x", arrives <= 1.5),
        Check("T2-cancel", "a cancel's p50 at 100k waiting / at 1k, worst policy", leaves, "<= 1.5", "x", leaves <= 1.5),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    parser.add_argument("--quick", action="store_true", help="only what the checks need")
    parser.add_argument("--cpu-time", action="store_true", help="the thread's, not the wall's: where others use the machine, too")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        Stopwatch.now_ns = staticmethod(time.thread_time_ns)
    rows = measured(arguments.quick)
    steps, others = [row for row in rows if "p50 us" in row], [row for row in rows if "p50 us" not in row]
    print_rows(f"{RUNNING} running", steps)
    print_rows("one that arrives, one that is cancelled", others)
    checks = checks_of(rows)
    print_checks(checks)
    write_json(arguments.json, checks, rows)


if __name__ == "__main__":
    main()
