"""C1 and C2 at equal mix behind bench_policies.py. In a fixed time under overload another policy serves other requests, whose
tokens may cost another time; here all policies serve the same ones, and what counts is how long they take."""

from __future__ import annotations

from dataclasses import replace

from policy_runs import GAP_MS, SHAPE, TIGHT, Numbers, made, run, vip_tiers

from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order
from fairlane.scheduler.tenancy import Shaping, Tier, TiersPolicy

# Of each workload, what comes in so many seconds: work for half a minute to a minute.
SECONDS = {"W1": 8.0, "W2": 8.0, "W3": 6.0, "W5": 15.0, "W6": 15.0, "W9": 4.0, "W10": 10.0}
# Lengths differ by client.
UNEVEN = ("W5", "W6")
FAIR_ON = ("W1", "W3", *UNEVEN, "W9")
# Lengths do not differ by tier. The first three have one tier: every other client is a VIP.
SPLIT = ("W1", "W2", "W3")
VIP_ON = (*SPLIT, "W9", "W10")
# The last ones run beside ever fewer others, and how long that takes is a matter of who happens to be the last.
PART = 0.95
LONG_S = 3600.0


def mix(seed: int) -> Numbers:
    """FCFS's time over that of FAIR (KV tight: with a gap) and VIP, KV ample and tight. And, KV ample, of FAIR on
    W6 as it is, where the clients are not evened."""
    found: Numbers = {}
    for shape, kind in ((SHAPE, "ample"), (TIGHT, "tight")):
        gap_ms = GAP_MS if shape is TIGHT else None
        for name in SECONDS:
            workload = _fitting(made(name, seed, SECONDS[name], shape), shape)
            if name in UNEVEN:
                if name == "W6" and shape is SHAPE:
                    uneven = [_time_s(workload, policy, shape) for policy in (TiersPolicy.FCFS, TiersPolicy.FAIR)]
                    found[f"fair {kind} {name} uneven"] = uneven[0] / uneven[1]
                workload = evened(workload)
            if name in SPLIT:
                workload = in_two_tiers(workload)
            tiers = vip_tiers(Shaping.OFF) if len(workload.tiers) == 2 else None
            fcfs = _time_s(workload, TiersPolicy.FCFS, shape, tiers=tiers)
            if name in FAIR_ON:
                found[f"fair {kind} {name}"] = fcfs / _time_s(_in_one_tier(workload), TiersPolicy.FAIR, shape, gap_ms=gap_ms)
            if name in VIP_ON:
                found[f"vip {kind} {name}"] = fcfs / _time_s(workload, TiersPolicy.VIP, shape, tiers=tiers)
    return found


def evened(workload: Workload) -> Workload:
    """The same clients, each asking for the same service over weight in the same time: as much as the one that asks for least.
    Else FAIR, which serves them evenly, has only one of them left in the end, and steps full of its kind of tokens alone."""
    asked: dict[str, float] = {}
    for request in workload.requests:
        asked[request.node] = asked.get(request.node, 0.0) + _asks(workload, request)
    least = min(asked.values())
    so_far = dict.fromkeys(asked, 0.0)
    kept = []
    for request in workload.requests:
        so_far[request.node] += _asks(workload, request)
        if so_far[request.node] <= least:
            kept.append(replace(request, arrival_s=request.arrival_s * asked[request.node] / least))
    return replace(workload, requests=in_order(kept))


def _asks(workload: Workload, request: SimRequest) -> float:
    return (request.prompt_tokens + 2 * request.output_tokens) / workload.weights.get(request.node, 1.0)


def in_two_tiers(workload: Workload) -> Workload:
    vips = set(workload.nodes[::2])
    requests = tuple(replace(r, tier="vip" if r.node in vips else "best_effort") for r in workload.requests)
    return replace(workload, requests=requests, tiers=("vip", "best_effort"))


def _in_one_tier(workload: Workload) -> Workload:
    return replace(workload, requests=tuple(replace(r, tier="default") for r in workload.requests), tiers=("default",))


def _fitting(workload: Workload, shape: WorkerShape) -> Workload:
    """Without those that every policy would refuse."""
    room = shape.num_blocks * shape.block_size
    return replace(workload, requests=tuple(r for r in workload.requests if r.prompt_tokens + r.output_tokens < room))


def _time_s(
    workload: Workload,
    policy: TiersPolicy,
    shape: WorkerShape,
    *,
    tiers: tuple[Tier, ...] | None = None,
    gap_ms: float | None = None,
) -> float:
    """Until PART of the service of all its requests has been given."""
    workload = replace(workload, duration_s=LONG_S)
    result = run(workload, policy, shape, tiers=tiers, gap_ms=gap_ms, sample_s=0.1)
    if any(outcome.ended is None for outcome in result.outcomes):
        raise RuntimeError(f"{workload.name} under {policy.value}: not served within {LONG_S:g} s")
    wanted = PART * sum(r.prompt_tokens + 2 * r.output_tokens for r in workload.requests)
    last_s = last = 0.0
    for sample in result.samples:
        served = float(sum(sample.service.values()))
        if served >= wanted:
            return last_s + (sample.time_s - last_s) * (wanted - last) / (served - last)
        last_s, last = sample.time_s, served
    raise RuntimeError(f"{workload.name} under {policy.value}: requests ended without what they asked for")
