"""The curves behind two settings of the scheduler, on W9 over several seeds: how many blocks admissions leave free (room.py), and
how much `shaping: gentle` caps and pauses (policies/vip.py). Prints and judges nothing.

    python benchmarks/bench_relief.py [--json FILE] [--seeds 5]
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean

from policy_runs import GAP_MS, SHAPE, TIGHT, Numbers, computed, made, run, tokens, vip_tiers
from report import console, print_rows, write_json

from fairlane.scheduler.room import LARGEST_PART, RESERVE, Room
from fairlane.scheduler.scheduler import Scheduler
from fairlane.scheduler.simulator.report import percentile, waits
from fairlane.scheduler.simulator.simulation import SimResult
from fairlane.scheduler.tenancy import Shaping, ShapingRule, TiersPolicy

RESERVES = ((0.0, 0.01), (2.0, LARGEST_PART), (3.0, LARGEST_PART), (RESERVE, LARGEST_PART), (6.0, 1 / 8))
RULES = (
    ShapingRule(1.0), ShapingRule(1.0, rests=True), ShapingRule(0.8, rests=True), ShapingRule(2 / 3, rests=True),
    ShapingRule(0.5, rests=True), ShapingRule(0.5),
)  # fmt: skip


def reserve(seed: int, times: float, most: float) -> Numbers:
    """With tight KV: tokens/s over FCFS and the part computed again."""

    def prepare(scheduler: Scheduler) -> None:
        blocks = scheduler.blocks
        scheduler.room = Room(
            blocks.num_usable_blocks, blocks.block_size, scheduler.limits.watermark, scheduler.swaps, times, most
        )

    workload = made("W9", seed, 30.0, TIGHT)
    fcfs = run(workload, TiersPolicy.FCFS, TIGHT, prepare=prepare)
    vip = run(workload, TiersPolicy.VIP, TIGHT, tiers=vip_tiers(Shaping.OFF), prepare=prepare)
    balanced = run(workload, TiersPolicy.VIP, TIGHT, tiers=vip_tiers(Shaping.BALANCED), prepare=prepare)
    fair = run(workload, TiersPolicy.FAIR, TIGHT, gap_ms=GAP_MS, prepare=prepare)
    rates = {"fcfs tokens/s": tokens(fcfs) / 30.0}
    rates |= {name: tokens(r) / tokens(fcfs) for name, r in (("vip", vip), ("fair", fair), ("balanced", balanced))}
    taxes = {
        f"{name} tax": r.recomputed_tokens / computed(r) for name, r in (("fcfs", fcfs), ("vip", vip), ("balanced", balanced))
    }
    return rates | taxes


def shaping(seed: int, rule: ShapingRule) -> Numbers:
    """With ample KV: VIPs' time to first token over that of VIPs alone, tokens/s over FCFS."""
    workload = made("W9", seed, 60.0, SHAPE)
    alone = replace(workload, requests=tuple(r for r in workload.requests if r.tier == "vip"))
    idle = run(alone, TiersPolicy.VIP, tiers=vip_tiers(Shaping.OFF))
    shaped = run(workload, TiersPolicy.VIP, tiers=vip_tiers(rule))
    return {"ttft": _ttft(shaped) / _ttft(idle), "rate": tokens(shaped) / tokens(run(workload, TiersPolicy.FCFS))}


def _ttft(result: SimResult) -> float:
    return percentile(waits([o for o in result.outcomes if o.planned.account.tier == "vip"], result.duration_s), 0.99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows there")
    parser.add_argument("--seeds", type=int, default=5, help="how many (default 5)")
    arguments = parser.parse_args()
    seeds = range(arguments.seeds)
    with ProcessPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        reserves = {pair: [pool.submit(reserve, seed, *pair) for seed in seeds] for pair in RESERVES}
        rules = {rule: [pool.submit(shaping, seed, rule) for seed in seeds] for rule in RULES}
        kept = [{"reserve": f"{times:g}", "at most": f"{most:.3f}"} | _means([job.result() for job in jobs])
                for (times, most), jobs in reserves.items()]  # fmt: skip
        shaped = [{"share": f"{rule.prefill_share:.2f}", "pause": "every other" if rule.rests else "every step"}
                  | _means([job.result() for job in jobs]) for rule, jobs in rules.items()]  # fmt: skip
    print_rows("blocks left free", kept)
    print_rows("gentle", shaped)
    console.print(f"{arguments.seeds} seeds, means")
    write_json(arguments.json, [], [*kept, *shaped])


def _means(seeds: list[Numbers]) -> Numbers:
    return {name: mean(numbers[name] for numbers in seeds) for name in seeds[0]}


if __name__ == "__main__":
    main()
