"""What a policy costs in throughput: the same load under FCFS (A) and under VIP or FAIR (B), in the order A B B A, so that what
drifts slowly falls on both alike. How a load is run is fairlane.bench.run's business."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fairlane.bench.figures import figures
from fairlane.bench.loads import Load
from fairlane.bench.run import Bench, OutOfTimeError
from fairlane.scheduler.tenancy import PolicySnapshot, Shaping, Tier, TiersPolicy

POLICY_ROUNDS = 3
THREE_TIERS = (
    Tier("gold", 100, shaping=Shaping.BALANCED),
    Tier("standard", 50, min_share=0.1, patience_s=60),
    Tier("batch", 10, min_share=0.05, patience_s=600),
)
SNAPSHOTS = {
    "VIP": PolicySnapshot(1, "", TiersPolicy.VIP, THREE_TIERS),
    "FAIR": PolicySnapshot(1, "", TiersPolicy.FAIR, (Tier("standard", 50),)),
}


def compare(
    bench: Bench, load: Load, name: str, rounds: int, tenants: int, deadline_s: float | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Output tokens/s of both (medians), the median and the worst of the rounds' ratios, and how far the two FCFS runs of a round
    lie apart at most: what a ratio must exceed to mean anything. The same tiers and tenants for both.

    Raises OutOfTimeError if the deadline comes before the first round is over; later rounds that it cuts short are dropped.
    """
    policy = SNAPSHOTS[name]
    fcfs = replace(policy, tiers_policy=TiersPolicy.FCFS)
    rates: dict[str, list[float]] = {"A": [], "B": []}
    ratios: list[float] = []
    apart: list[float] = []
    preemptions = 0
    for number in range(rounds):
        this: dict[str, list[float]] = {"A": [], "B": []}
        try:
            for side in "ABBA":
                snapshot = fcfs if side == "A" else policy
                outcome = bench.run(load, seed=number, snapshot=snapshot, tenants=tenants, deadline_s=deadline_s)
                this[side].append(figures(outcome)["out_tok_s"])
                preemptions = outcome.preemptions if side == "B" else preemptions
                say(f"    POLICY-{name} round {number + 1}: {snapshot.tiers_policy.value} {this[side][-1]:.5g} output tokens/s")
        except OutOfTimeError:
            if not ratios:
                raise
            say(f"    POLICY-{name}: out of time in round {number + 1}")
            break
        ratios.append(sum(this["B"]) / sum(this["A"]))
        apart.append(max(this["A"]) / min(this["A"]) - 1)
        rates = {side: rates[side] + this[side] for side in rates}
    return {
        "fcfs_tok_s": statistics.median(rates["A"]),
        "tok_s": statistics.median(rates["B"]),
        "ratio": statistics.median(ratios),
        "worst_ratio": min(ratios),
        "fcfs_apart": max(apart),
        "rounds": len(ratios),
        "preemptions": preemptions,
    }
