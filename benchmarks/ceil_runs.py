"""The runs behind the check CEIL of bench_policies.py: a crowd that floods the worker under a `ceil`, with the rest idle and
beside somebody who has none. What is measured is the simulator's own split of the steps' time, not what the scheduler counts."""

from __future__ import annotations

from collections.abc import Callable

from policy_runs import SHAPE, TIGHT, Numbers

from fairlane.scheduler.simulator.meter import Account
from fairlane.scheduler.simulator.report import percentile, waits
from fairlane.scheduler.simulator.scene import Scene, fixed, stream
from fairlane.scheduler.simulator.simulation import SimResult, Simulation
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order
from fairlane.scheduler.tenancy import NodeShare, PolicySnapshot, Tier, TiersPolicy, WithinTier

DURATION_S, WINDOW_S, WARM_UP_S = 40.0, 10.0, 5.0
CROWD = ("crowd/c0", "crowd/c1")


def ceil(seed: int) -> Numbers:
    """Of any ten seconds, what was taken over what the bound allows: 1.04 ceil, and a step and the one in flight."""
    scene = Scene(seed, DURATION_S, SHAPE)
    rate = scene.rate(512, 256, 1.0)
    crowd = [one for node in CROWD for one in stream(scene, node, "batch", 0.8 * rate, fixed(512, 256))]
    paid = stream(scene, "paid/main", "gold", 1.2 * rate, fixed(512, 256))
    found: Numbers = {}
    for share in (0.2, 0.6):
        for name, tiers, nodes, policy in (
            ("tier", _tiers(share), (), TiersPolicy.VIP),
            ("node", _tiers(None), (NodeShare("crowd", ceil=share),), TiersPolicy.FAIR),
            ("tier fcfs", _tiers(share), (), TiersPolicy.FCFS),
        ):
            snapshot = PolicySnapshot(1, "", policy, tiers, WithinTier.FCFS, nodes)
            alone = _run(crowd, snapshot)
            found[f"{name} {share:.0%} most"] = _most(alone) / (1.04 * share * WINDOW_S + 2 * alone.longest_step_s)
            found[f"{name} {share:.0%} used"] = _whole(alone, _is_crowd) / share
            beside = _run([*crowd, *paid], snapshot)
            found[f"{name} {share:.0%} most beside"] = _most(beside) / (1.04 * share * WINDOW_S + 2 * beside.longest_step_s)
            found[f"{name} {share:.0%} busy beside"] = _whole(beside, lambda account: True)
    return found | _waits_beside(seed)


def _waits_beside(seed: int) -> Numbers:
    """Tight KV that the crowd would fill and hold: time to first token of one without a ceil, over that without the crowd."""
    scene = Scene(seed, 30.0, TIGHT)
    rate = scene.rate(512, 256, 1.0)
    crowd = stream(scene, "crowd/c0", "batch", 2 * rate, fixed(512, 256))
    paid = stream(scene, "paid/main", "batch", 0.4 * rate, fixed(512, 256))

    def ttft_s(asked: list[SimRequest], share: float | None, policy: TiersPolicy) -> float:
        nodes = (NodeShare("crowd", ceil=share),)
        snapshot = PolicySnapshot(1, "", policy, (Tier("batch", 10),), WithinTier.FCFS, nodes)
        result = Simulation(Workload("CEIL", in_order(asked), ("batch",), 30.0), snapshot, TIGHT).run()
        return percentile(waits([one for one in result.outcomes if one.planned.account.node == "paid/main"], 30.0), 0.99)

    found: Numbers = {}
    for policy in (TiersPolicy.FAIR, TiersPolicy.FCFS):
        alone = ttft_s(paid, None, policy)
        found[f"{policy.value} wait"] = ttft_s([*crowd, *paid], 0.2, policy) / alone
        found[f"{policy.value} wait without a ceil"] = ttft_s([*crowd, *paid], None, policy) / alone
    return found


def _tiers(share: float | None) -> tuple[Tier, ...]:
    return Tier("gold", 100), Tier("batch", 10, ceil=share)


def _run(asked: list[SimRequest], snapshot: PolicySnapshot) -> SimResult:
    workload = Workload("CEIL", in_order(asked), ("gold", "batch"), DURATION_S)
    return Simulation(workload, snapshot, SHAPE, sample_s=0.25).run()


def _is_crowd(account: Account) -> bool:
    return account.node in CROWD


def _taken(result: SimResult, of: Callable[[Account], bool]) -> list[tuple[float, float]]:
    """At each sample, the time so far."""
    return [(one.time_s, sum(seconds for account, seconds in one.seconds.items() if of(account))) for one in result.samples]


def _most(result: SimResult) -> float:
    """Worker time of the crowd in ten seconds, the most of any."""
    line = _taken(result, _is_crowd)
    at = int(WINDOW_S / 0.25)
    return max(after[1] - before[1] for before, after in zip(line, line[at:], strict=False))


def _whole(result: SimResult, of: Callable[[Account], bool]) -> float:
    """The part of the worker's time from the warm-up on."""
    line = [one for one in _taken(result, of) if one[0] >= WARM_UP_S]
    return (line[-1][1] - line[0][1]) / (line[-1][0] - line[0][0])
