"""The runs behind bench_policies.py: each takes a seed and returns the few numbers that a check needs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace

from policy_ledger import run_with_ledger
from policy_lifo import evict_and_admit_like_vllm, evict_last_come

from fairlane.scheduler.scheduler import Scheduler
from fairlane.scheduler.simulator.catalogue import WORKLOADS
from fairlane.scheduler.simulator.fairness import interval_gap, jain, service_differences
from fairlane.scheduler.simulator.meter import Account
from fairlane.scheduler.simulator.outcome import Outcome
from fairlane.scheduler.simulator.report import percentile, service_by_node, waits, windows
from fairlane.scheduler.simulator.scene import Scene, fixed, stream, together
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import SimResult, Simulation
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.simulator.traces import SAMPLES, load_trace
from fairlane.scheduler.simulator.workload import Workload, in_order
from fairlane.scheduler.tenancy import CostName, NodeShare, PolicySnapshot, Shaping, ShapingRule, Tier, TiersPolicy, WithinTier

Numbers = dict[str, float]

SHAPE = WorkerShape(max_num_seqs=64)
TIGHT = replace(SHAPE, num_blocks=1500)  # 24,000 tokens for 64 sequences
# VTC's own machine: Llama-2-7B on an A10G with 10,000 tokens of KV, so that its trace can be replayed at its own pace.
A10G = WorkerShape(
    step=StepModel(weights_s=32e-3, token_s=220e-6, context_s=1.7e-6, attention_s=8e-9), num_blocks=625, max_num_seqs=64
)
WARM_UP_S = 3.0
GAP_MS = 250.0


def run(
    workload: Workload,
    policy: TiersPolicy,
    shape: WorkerShape = SHAPE,
    *,
    tiers: tuple[Tier, ...] | None = None,
    gap_ms: float | None = None,
    predict: bool = False,
    cost: CostName = CostName.TOKENS,
    sample_s: float = 1.0,
    charges: bool = False,
    prepare: Callable[[Scheduler], None] | None = None,
) -> SimResult:
    """One worker; the workload's own tiers and weights, unless others are given. charges: samples are what the policy charged.
    prepare: changes the worker's scheduler before anything arrives."""
    tiers = tiers or tuple(Tier(name, 100 - place) for place, name in enumerate(workload.tiers))
    nodes = tuple(NodeShare(node, workload.weights.get(node, 1.0)) for node in workload.nodes if node.count("/") == 1)
    snapshot = PolicySnapshot(1, "", policy, tiers, WithinTier.FCFS, nodes, gap_ms, cost, predict_output=predict)
    simulation = Simulation(workload, snapshot, shape, sample_s=sample_s)
    if prepare is not None:
        prepare(simulation.workers[0].scheduler)
    return run_with_ledger(simulation) if charges else simulation.run()


def made(name: str, seed: int, duration_s: float, shape: WorkerShape = SHAPE) -> Workload:
    return WORKLOADS[name](Scene(seed, duration_s, shape))


def tokens(result: SimResult) -> float:
    """Throughput: prompt and output tokens, each computed once."""
    return sum(counts.prompt + counts.output for counts in result.counts.values())


# -- fairness --------------------------------------------------------------------------------------------------------------


def widest_gap(result: SimResult, from_s: float = WARM_UP_S) -> float:
    """Largest interval gap of any two nodes' service over weight, from the warm-up on: all are backlogged then."""
    samples = [sample for sample in result.samples if sample.time_s >= from_s]
    nodes = result.workload.nodes
    lines = {node: [0.0] * len(samples) for node in nodes}
    for at, sample in enumerate(samples):
        for account, service in sample.service.items():
            lines[account.node][at] += service / result.workload.weights.get(account.node, 1.0)
    return max(interval_gap(lines[a], lines[b]) for a in nodes for b in nodes if a < b)


def f1(seed: int) -> Numbers:
    """Gap over 2U."""
    runs = {name: run(made(name, seed, 30.0), TiersPolicy.FAIR, sample_s=0) for name in ("W1", "W5", "W6")}
    return {name: widest_gap(result) / (2 * most_at_once(result.workload)) for name, result in runs.items()}


def most_at_once(workload: Workload) -> float:
    """U = max(L_in, 2 M), M: tokens that the running batch can hold of this workload."""
    longest = max(r.prompt_tokens + r.output_tokens for r in workload.requests)
    batch = min(SHAPE.num_blocks * SHAPE.block_size, SHAPE.max_num_seqs * longest)
    return max(max(r.prompt_tokens for r in workload.requests), 2 * batch)


def f2(seed: int) -> Numbers:
    """Gap over 2 (theta + c_step for the step and for the one in flight)."""
    found: Numbers = {}
    for shape, kind in ((SHAPE, ""), (TIGHT, " tight")):
        for name in ("W1", "W5", "W6"):
            shape = replace(shape, max_num_seqs=256 if name == "W6" else 64)  # no cap may bind, and W6's decodes need seats
            result = run(made(name, seed, 30.0, shape), TiersPolicy.FAIR, shape, gap_ms=GAP_MS, sample_s=0, charges=True)
            found[name + kind] = widest_gap(result) / (2 * (theta_of(result, shape) + 2 * largest_step(shape)))
    return found


def largest_step(shape: WorkerShape) -> int:
    """c_step: all of a step's tokens, those of decodes twice."""
    return shape.max_num_batched_tokens + shape.max_num_seqs


def theta_of(result: SimResult, shape: WorkerShape) -> float:
    """GAP_MS in service, at the rate of the run; two steps at least."""
    return max(GAP_MS / 1000 * peak_rate(result), 2 * largest_step(shape))


def peak_rate(result: SimResult) -> float:
    """Most service a second, over half seconds."""
    rates, last_s, last = [0.0], 0.0, 0.0
    for sample in result.samples:
        if sample.time_s - last_s >= 0.5:
            total = sum(sample.service.values())
            rates.append((total - last) / (sample.time_s - last_s))
            last_s, last = sample.time_s, total
    return max(rates)


def f3(seed: int) -> Numbers:
    result = run(made("W3", seed, 120.0), TiersPolicy.FAIR)
    weights = result.workload.weights
    per_weight = [[w.service[node] / weights[node] for node in weights] for w in windows(result, 60.0)]
    apart = max(max(values) - min(values) for values in per_weight)
    lightest = min(weights.values())
    return {"jain": min(map(jain, per_weight)), "apart": apart / (2 * most_at_once(result.workload) / lightest)}


def arena(seed: int, speed: float = 1.0) -> Workload:
    """The Arena log on VTC's own machine, at its own pace: 980 tokens a second are asked for, where their FCFS did 777 (and this
    one does 740). speed: of that pace."""
    log = load_trace(SAMPLES / "arena.csv.gz", seed)
    count = len(log.requests)
    prompt, output = sum(r.prompt_tokens for r in log.requests) / count, sum(r.output_tokens for r in log.requests) / count
    w8_rate = Scene(seed, 600.0, A10G).rate(prompt, output, 1.3)  # what W8 would make of it
    return WORKLOADS["W8"](Scene(seed, 600.0, A10G, speed=speed * count / log.duration_s / w8_rate))


def f4(seed: int, speed: float = 1.0) -> Numbers:
    """FAIR over FCFS on the Arena log: VTC's service difference, and TTFT of clients that ask for less than their share."""
    workload = arena(seed, speed)
    found: dict[TiersPolicy, tuple[float, float, float, float, float]] = {}
    for policy in (TiersPolicy.FCFS, TiersPolicy.FAIR):
        result = run(workload, policy, A10G)
        even = dict.fromkeys(workload.nodes, 1.0)
        values = service_differences(windows(result, 60.0), even)
        mean = sum(values) / len(values)
        small = _small_clients(result)
        found[policy] = (
            max(values), mean, sum((value - mean) ** 2 for value in values) / len(values),
            percentile(small, 0.5), percentile(small, 0.99),
        )  # fmt: skip
    ratios = [fair / fcfs for fair, fcfs in zip(found[TiersPolicy.FAIR], found[TiersPolicy.FCFS], strict=True)]
    return dict(zip(("max", "avg", "var", "p50", "p99"), ratios, strict=True))


def _small_clients(result: SimResult) -> list[float]:
    asked: dict[str, int] = {}
    for request in result.workload.requests:
        asked[request.node] = asked.get(request.node, 0) + request.prompt_tokens + 2 * request.output_tokens
    share = sum(service_by_node(result).values()) / len(asked)
    return waits([o for o in result.outcomes if asked[o.planned.account.node] <= share], result.duration_s)


def f7(seed: int) -> Numbers:
    """What org B's service changes when org A grows from 2 users to 102. Under FAIR with a gap: without one, B may be ahead or
    behind by a batch at either end (F1), which is 12 % of what it gets in this minute. What is left of the change is the
    worker's: how many prompts fall into one step, hence how much it does in all, differs with who comes when."""
    scene = Scene(seed, 60.0, SHAPE)
    rate = scene.rate(256, 256, 1.0)
    base = together(stream(scene, node, "default", rate, fixed(256, 256)) for node in ("a/u0", "a/u1", "b/u0"))
    more = together(stream(scene, f"a/more{k}", "default", rate / 50, fixed(256, 256)) for k in range(100))
    found: Numbers = {}
    for gap_ms, kind in ((GAP_MS, ""), (None, " without a gap")):
        few, many = (
            service_by_node(run(Workload("F7", in_order(requests), ("default",), 60.0), TiersPolicy.FAIR, gap_ms=gap_ms))
            for requests in (base, base + more)
        )
        found[f"change{kind}"] = abs(many["b/u0"] / few["b/u0"] - 1)
        found[f"change of all{kind}"] = abs(sum(many.values()) / sum(few.values()) - 1)
    return found


def prediction(seed: int) -> Numbers:
    """The interval gap with predicted output over that without, once a mean is known, and tokens/s: two clients that are alike,
    four that differ in weight, and two of which one asks for far longer outputs."""
    found: Numbers = {}
    for name in ("W1", "W3", "W5"):
        workload = made(name, seed, 60.0)
        plain, predicted = (run(workload, TiersPolicy.FAIR, predict=on, sample_s=0) for on in (False, True))
        found[f"gap {name}"] = widest_gap(predicted, 10.0) / widest_gap(plain, 10.0)
        found[f"rate {name}"] = tokens(predicted) / tokens(plain)
    return found


def f6(seed: int) -> Numbers:
    """Who was silent and comes back: the most it gets beyond a client that was there all the time, from its return on, by
    charges, over U and with a gap over theta. And W4's steady client's p99 TTFT from then on, over what it is when nobody was
    ever silent; at half its speed, at which the other one's queue does run empty while it is silent."""
    found: Numbers = {}
    for name, workload, returning, steady, from_s in (
        ("idle", _back_from_idle(seed), "onoff/returning", "onoff/steady", 50.0),
        ("W12", made("W12", seed, 120.0), "hoard", "honest", 80.0),
    ):
        for gap_ms, kind in ((None, ""), (GAP_MS, " gap")):
            result = run(workload, TiersPolicy.FAIR, gap_ms=gap_ms, charges=True, sample_s=0.02)
            bound = most_at_once(workload) if gap_ms is None else theta_of(result, SHAPE)
            found[f"gain {name}{kind}"] = _gain(result, returning, steady, from_s) / bound
    scene = Scene(seed, 120.0, SHAPE, speed=0.5)
    workload = WORKLOADS["W4"](scene)
    found["ttft"] = _steady_p99(workload) / _steady_p99(_never_silent(workload, scene))
    return found


def _back_from_idle(seed: int) -> Workload:
    """One that always wants more, and one that asks for a third of what there is, has it all, is silent for twenty seconds, and
    comes back with twice what there is. W4's own is never idle: at its speed its queue lasts until it is back."""
    scene = Scene(seed, 80.0, SHAPE)
    rate = scene.rate(256, 256, 1.0)
    requests = stream(scene, "onoff/steady", "default", 1.25 * rate, fixed(256, 256))
    requests += stream(scene, "onoff/returning", "default", 0.3 * rate, fixed(256, 256), 0.0, 25.0)
    requests += stream(scene, "onoff/returning", "default", 2 * rate, fixed(256, 256), 50.0, scene.duration_s)
    return Workload("idle", in_order(requests), ("default",), scene.duration_s)


def _never_silent(workload: Workload, scene: Scene) -> Workload:
    """W4, but that the other client sends all the time."""
    kept = [request for request in workload.requests if request.node == "onoff/steady"]
    other = stream(scene, "onoff/returning", "default", scene.rate(256, 256, 2.0), fixed(256, 256))
    return replace(workload, requests=in_order(kept + other))


def _steady_p99(workload: Workload) -> float:
    """Time to first token of W4's steady client while the other is back; watched until its last request has one."""
    result = run(replace(workload, duration_s=600.0), TiersPolicy.FAIR)
    steady = [o for o in result.outcomes if o.planned.account.node == "onoff/steady"]
    return percentile(waits([o for o in steady if 60.0 <= o.planned.asked.arrival_s < 90.0], 600.0), 0.99)


def _gain(result: SimResult, node: str, other: str, from_s: float) -> float:
    """The most by which `node` is ahead of `other` since it came back, at from_s or later, by charges. ValueError if it was not
    idle when it came."""
    own = [outcome for outcome in result.outcomes if outcome.planned.account.node.startswith(node)]
    back_s = min(one.planned.asked.arrival_s for one in own if one.planned.asked.arrival_s >= from_s)
    if any(one.planned.asked.arrival_s < from_s and (one.ended_s is None or one.ended_s > back_s) for one in own):
        raise ValueError(f"{node} has requests of before {from_s:g} s when it returns")
    leads = [(s.time_s, _charged(s.service, node) - _charged(s.service, other)) for s in result.samples]
    before = [lead for at_s, lead in leads if at_s <= back_s][-1]
    return max(lead - before for at_s, lead in leads if at_s > back_s)


def _charged(service: Mapping[Account, int], node: str) -> int:
    return sum(charged for account, charged in service.items() if account.node.startswith(node))


ADVERSARIES = ("hog", "flood", "aborts", "hoard", "names")


def a1(seed: int) -> Numbers:
    """What each organisation of W12 was charged by `roofline`, over what an honest one of the same weight was, which always wants
    more: that is the most anybody is entitled to. The hoarder from its first request on."""
    workload = made("W12", seed, 120.0)
    result = run(workload, TiersPolicy.FAIR, cost=CostName.ROOFLINE, charges=True)
    found: Numbers = {}
    for adversary in ADVERSARIES:
        since_s = 80.0 if adversary == "hoard" else WARM_UP_S
        before = next(s.service for s in result.samples if s.time_s >= since_s)
        got = dict.fromkeys((adversary, "honest"), 0)
        for account, charged in result.samples[-1].service.items():
            organisation = account.node.partition("/")[0]
            if organisation in got:
                got[organisation] += charged - before.get(account, 0)
        found[adversary] = got[adversary] / got["honest"]
    return found


# -- tiers -----------------------------------------------------------------------------------------------------------------


def vip_tiers(shaping: Shaping | ShapingRule, patience_s: float | None = None, min_share: float = 0.0) -> tuple[Tier, ...]:
    """Both are of the lower tier."""
    return Tier("vip", 100, shaping=shaping), Tier("best_effort", 10, patience_s=patience_s, min_share=min_share)


def _of(result: SimResult, tier: str) -> list[Outcome]:
    return [outcome for outcome in result.outcomes if outcome.planned.account.tier == tier]


def v(seed: int) -> Numbers:
    """W9 under each shaping, against the VIPs alone and against FCFS."""
    workload = made("W9", seed, 60.0)
    alone = replace(workload, requests=tuple(r for r in workload.requests if r.tier == "vip"))
    idle = run(alone, TiersPolicy.VIP, tiers=vip_tiers(Shaping.OFF))
    base = percentile(waits(_of(idle, "vip"), 60.0), 0.99), percentile(_tpots(idle), 0.99)
    fcfs = tokens(run(workload, TiersPolicy.FCFS))
    found: Numbers = {}
    for shaping in (Shaping.GENTLE, Shaping.BALANCED, Shaping.STRICT):
        result = run(workload, TiersPolicy.VIP, tiers=vip_tiers(shaping))
        vips, name = _of(result, "vip"), shaping.value
        found[f"{name} ttft"] = percentile(waits(vips, 60.0), 0.99) / base[0]
        found[f"{name} tpot"] = percentile(_tpots(result), 0.99) / base[1]
        found[f"{name} rate"] = tokens(result) / fcfs
        if shaping is Shaping.BALANCED:
            queued = percentile([o.queue_s for o in _undisturbed(vips) if o.queue_s is not None], 0.99)
            found["first chunk"] = queued / (2 * result.longest_step_s + 0.005)
            found["inversions"] = _inversions(result)
            found["stalled"] = result.stalled_s
    return found


def _tpots(result: SimResult) -> list[float]:
    return [outcome.tpot_s for outcome in _of(result, "vip") if outcome.tpot_s is not None]


def _undisturbed(vips: list[Outcome]) -> list[Outcome]:
    """Those that arrive while no other VIP is on its way to its first token: they would share the step."""
    found, busy_until_s = [], 0.0
    for outcome in vips:
        if outcome.planned.asked.arrival_s >= busy_until_s:
            found.append(outcome)
        if outcome.first_token_s is not None:
            busy_until_s = max(busy_until_s, outcome.first_token_s)
    return found


def _inversions(result: SimResult) -> float:
    """Starts of lower requests while a VIP that the worker knew of had not started. The pool is ample: every VIP fits."""
    starts = sorted(o.planned.asked.arrival_s + o.queue_s for o in _of(result, "best_effort") if o.queue_s is not None)
    found = 0
    for outcome in _of(result, "vip"):
        arrival_s = outcome.planned.asked.arrival_s
        start_s = arrival_s + (outcome.queue_s if outcome.queue_s is not None else result.duration_s)
        known_s = arrival_s + SHAPE.network_s
        found += bisect_left(starts, start_s - 1e-9) - bisect_left(starts, known_s)
    return found


def s1(seed: int) -> Numbers:
    """Bursts of VIPs, below capacity over time; a lower tier's longest wait over patience for each band above it and the longest
    wait of a VIP. With one tier below the VIPs, and with two."""
    scene, patience_s = Scene(seed, 60.0, SHAPE), 3.0
    rate = scene.rate(512, 256, 1.0)
    vips = together(
        stream(scene, "vip/main", "vip", 1.8 * rate, fixed(512, 256), start_s, start_s + 10) for start_s in range(0, 60, 20)
    )
    found: Numbers = {}
    for below in (("best_effort",), ("standard", "best_effort")):
        crowd = together(stream(scene, f"crowd/{t}", t, 0.08 / len(below) * rate, fixed(512, 256)) for t in below)
        tiers = (
            Tier("vip", 100, shaping=Shaping.BALANCED),
            *(Tier(t, 50 - n, patience_s=patience_s) for n, t in enumerate(below)),
        )
        workload = Workload("S1", in_order(vips + crowd), ("vip", *below), 90.0)
        result = run(workload, TiersPolicy.VIP, tiers=tiers)
        queued = {tier: max(o.queue_s if o.queue_s is not None else 1e9 for o in _of(result, tier)) for tier in workload.tiers}
        for bands, tier in enumerate(below, 1):
            allowed_s = bands * patience_s + queued["vip"] + 2 * result.longest_step_s
            found[f"wait {tier}, {len(below)} below"] = queued[tier] / allowed_s
    return found


def s2(seed: int) -> Numbers:
    """Smallest share of the lower tier in any 10 s, over its `min`, with VIPs that ask for 1.6 times everything."""
    scene = Scene(seed, 60.0, SHAPE)
    rate = scene.rate(512, 256, 1.0)
    vips = stream(scene, "vip/main", "vip", 1.6 * rate, fixed(512, 256))
    batch = stream(scene, "crowd/c0", "best_effort", rate, fixed(512, 256))
    workload = Workload("S2", in_order(vips + batch), ("vip", "best_effort"), 60.0)
    found: Numbers = {}
    for share in (0.05, 0.1):
        result = run(workload, TiersPolicy.VIP, tiers=vip_tiers(Shaping.BALANCED, min_share=share))
        shares = []
        for before, after in zip(result.samples, result.samples[10:], strict=False):
            got = {account: after.service[account] - before.service.get(account, 0) for account in after.service}
            shares.append(got.get(Account("crowd/c0", "best_effort"), 0) / sum(got.values()))
        found[f"min {share:.0%}"] = min(shares) / share
    return found


# -- cost of a policy ------------------------------------------------------------------------------------------------------


def c(seed: int) -> Numbers:
    """Service of each policy over FCFS, with ample and with tight KV; evictions, recompute, and time with work and no step."""
    found: Numbers = {}
    stalled, evictions = 0.0, 0
    for shape, kind in ((SHAPE, "ample"), (TIGHT, "tight")):
        for name in ("W2", "W5", "W6", "W8", "W9"):
            workload = made(name, seed, 30.0, shape)
            tiers = vip_tiers(Shaping.OFF) if name == "W9" else None
            fcfs = run(workload, TiersPolicy.FCFS, shape)
            fair = run(workload, TiersPolicy.FAIR, shape, gap_ms=GAP_MS if kind == "tight" else None)
            vip = run(workload, TiersPolicy.VIP, shape, tiers=tiers)
            found[f"fair {kind} {name}"] = tokens(fair) / tokens(fcfs)
            found[f"vip {kind} {name}"] = tokens(vip) / tokens(fcfs)
            stalled = max(stalled, *(result.stalled_s for result in (fcfs, fair, vip)))
            evictions = max(evictions, *(o.evictions for result in (fair, vip) for o in result.outcomes))
            if name == "W9":
                shaped = run(workload, TiersPolicy.VIP, shape, tiers=vip_tiers(Shaping.BALANCED))
                found[f"tax {kind}"] = shaped.recomputed_tokens / computed(shaped)
                for rule, prepare in (("lifo", evict_last_come), ("vllm", evict_and_admit_like_vllm)):
                    other = run(workload, TiersPolicy.VIP, shape, tiers=vip_tiers(Shaping.BALANCED), prepare=prepare)
                    found[f"{rule} tax {kind}"] = other.recomputed_tokens / computed(other)
                evictions = max(evictions, *(outcome.evictions for outcome in shaped.outcomes))
    found |= {f"tax over {rule}": found["tax tight"] / found[f"{rule} tax tight"] for rule in ("lifo", "vllm")}
    return found | {"stalled": stalled, "evictions": evictions}


def computed(result: SimResult) -> int:
    return sum(counts.prompt + counts.output + counts.recomputed for counts in result.counts.values())


RUNS: Mapping[str, Callable[[int], Numbers]] = {
    "F1": f1,
    "F2": f2,
    "F3": f3,
    "F4": f4,
    "F6": f6,
    "F7": f7,
    "A1": a1,
    "prediction": prediction,
    "V": v,
    "S1": s1,
    "S2": s2,
    "C": c,
}
