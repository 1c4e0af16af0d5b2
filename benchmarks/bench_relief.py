"""The curves behind three settings of the scheduler, on W9 over several seeds: how many blocks admissions leave free (room.py),
whom an eviction takes (victims.py), and how much `shaping: gentle` caps and pauses (policies/vip.py). Prints and judges nothing.

    python benchmarks/bench_relief.py [--json FILE] [--seeds 5]
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from policy_lifo import evict_last_come, leave_free
from policy_runs import GAP_MS, SHAPE, TIGHT, Numbers, computed, made, run, tokens, vip_tiers
from report import console, print_rows, write_json

from fairlane.scheduler.request import Sequence
from fairlane.scheduler.room import LARGEST_PART, RESERVE
from fairlane.scheduler.scheduler import Scheduler
from fairlane.scheduler.simulator.report import percentile, waits
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import SimResult
from fairlane.scheduler.simulator.workload import Workload
from fairlane.scheduler.tenancy import Shaping, ShapingRule, TiersPolicy

HOST = replace(TIGHT, num_host_blocks=4 * TIGHT.num_blocks)
# Times what is expected, the most as a part of all blocks, and whether there is host memory.
RESERVES = (
    (0.0, LARGEST_PART, TIGHT), (2.0, LARGEST_PART, TIGHT), (RESERVE, LARGEST_PART, TIGHT), (6.0, 1 / 8, TIGHT),
    (RESERVE, LARGEST_PART, HOST),
)  # fmt: skip
# Times what is expected, and whether whoever came last goes.
VICTIMS = ((RESERVE, False), (RESERVE, True), (0.0, False), (0.0, True))
RULES = (
    ShapingRule(1.0), ShapingRule(1.0, rests=True), ShapingRule(2 / 3, rests=True), ShapingRule(0.5, rests=True),
    ShapingRule(0.5),
)  # fmt: skip


def reserves(seed: int) -> list[Numbers]:
    """Tight KV, for each of RESERVES: tokens/s over those of FCFS that leaves the least free, and the part computed again."""
    workload = made("W9", seed, 30.0, TIGHT)
    found, base = [], 0.0
    for times, most, shape in RESERVES:
        leaving = partial(leave_free, times=times, most=most)
        results = {
            "fcfs": run(workload, TiersPolicy.FCFS, shape, prepare=leaving),
            "fair": run(workload, TiersPolicy.FAIR, shape, gap_ms=GAP_MS, prepare=leaving),
        }
        for name, shaping in (("vip", Shaping.OFF), ("balanced", Shaping.BALANCED)):
            results[name] = run(workload, TiersPolicy.VIP, shape, tiers=vip_tiers(shaping), prepare=leaving)
        base = base or tokens(results["fcfs"])
        found.append(
            {name: tokens(result) / base for name, result in results.items()}
            | {f"{name} tax": result.recomputed_tokens / computed(result) for name, result in results.items()}
        )
    return found


class Taken:
    """Counts what evictions take, and what they were to give."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.missing_tokens = self.tokens = 0
        self._block_size, self._pick = scheduler.blocks.block_size, scheduler.pick_victims
        scheduler.pick_victims = self

    def __call__(self, candidates: list[Sequence], blocks_missing: int, *rest: Any, **named: Any) -> list[Sequence] | None:
        victims = self._pick(candidates, blocks_missing, *rest, **named)
        if victims and blocks_missing > 0:
            self.missing_tokens += blocks_missing * self._block_size
            self.tokens += sum(victim.num_computed_tokens for victim in victims)
        return victims


def victims(seed: int) -> list[Numbers]:
    """Tight KV, for each of VICTIMS: the part computed again under `balanced`, tokens/s, and tokens taken for each that was
    missing."""
    workload = made("W9", seed, 30.0, TIGHT)
    return [_taken(workload, times, last_come) for times, last_come in VICTIMS]


def _taken(workload: Workload, times: float, last_come: bool) -> Numbers:
    counts: list[Taken] = []

    def prepare(scheduler: Scheduler) -> None:
        if last_come:
            evict_last_come(scheduler)
        leave_free(scheduler, times)
        counts.append(Taken(scheduler))

    result = run(workload, TiersPolicy.VIP, TIGHT, tiers=vip_tiers(Shaping.BALANCED), prepare=prepare)
    (taken,) = counts
    each = taken.tokens / taken.missing_tokens if taken.missing_tokens else 1.0
    return {"tax": result.recomputed_tokens / computed(result), "tokens": tokens(result), "taken": each}


def shapings(seed: int) -> list[Numbers]:
    """With ample KV, for each of RULES: VIPs' time to first token over that of VIPs alone, tokens/s over FCFS."""
    workload = made("W9", seed, 60.0, SHAPE)
    alone = replace(workload, requests=tuple(r for r in workload.requests if r.tier == "vip"))
    idle = _ttft(run(alone, TiersPolicy.VIP, tiers=vip_tiers(Shaping.OFF)))
    fcfs = tokens(run(workload, TiersPolicy.FCFS))
    shaped = [run(workload, TiersPolicy.VIP, tiers=vip_tiers(rule)) for rule in RULES]
    return [{"ttft": _ttft(result) / idle, "rate": tokens(result) / fcfs} for result in shaped]


def _ttft(result: SimResult) -> float:
    return percentile(waits([o for o in result.outcomes if o.planned.account.tier == "vip"], result.duration_s), 0.99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows there")
    parser.add_argument("--seeds", type=int, default=5, help="how many (default 5)")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        jobs = (reserves, victims, shapings)
        kept, taken, shaped = ([pool.submit(job, seed) for seed in range(arguments.seeds)] for job in jobs)
        of_reserves = _means([job.result() for job in kept])
        of_victims = _means([job.result() for job in taken])
        of_rules = _means([job.result() for job in shaped])
    rates = [numbers["tokens"] / of_victims[-1]["tokens"] for numbers in of_victims]
    tables = [
        [{"reserve": f"{times:g}", "at most": f"{most:.3f}", "host blocks": _host(shape)} | numbers
         for (times, most, shape), numbers in zip(RESERVES, of_reserves, strict=True)],
        [{"reserve": f"{times:g}", "victims": "last come" if last_come else "cheapest"} | numbers | {"tokens": rate}
         for (times, last_come), numbers, rate in zip(VICTIMS, of_victims, rates, strict=True)],
        [{"share": f"{rule.prefill_share:.2f}", "pause": "every other" if rule.rests else "every step"} | numbers
         for rule, numbers in zip(RULES, of_rules, strict=True)],
    ]  # fmt: skip
    print_rows("blocks left free", tables[0])
    print_rows("whom an eviction takes", tables[1])
    print_rows("gentle", tables[2])
    console.print(f"{arguments.seeds} seeds, means")
    write_json(arguments.json, [], [row for table in tables for row in table])


def _host(shape: WorkerShape) -> str:
    return str(shape.num_host_blocks)


def _means(seeds: list[list[Numbers]]) -> list[Numbers]:
    """Of each row over the seeds."""
    return [{name: mean(numbers[name] for numbers in rows) for name in rows[0]} for rows in zip(*seeds, strict=True)]


if __name__ == "__main__":
    main()
