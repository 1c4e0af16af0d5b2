"""L1 behind bench_policies.py: fair shares with a locality window against longest-prefix-first, which knows no tenants and lives
here only, on loads that share prefixes."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from operator import attrgetter

from policy_ledger import ChargeLedger
from policy_runs import GAP_MS, SHAPE, Numbers, largest_step, peak_rate, theta_of, widest_gap

from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.hits import lookup
from fairlane.scheduler.policies.ordered import OrderedPolicy
from fairlane.scheduler.request import RequestId, Sequence
from fairlane.scheduler.simulator.catalogue import WORKLOADS
from fairlane.scheduler.simulator.scene import Scene, poisson
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import SimResult, Simulation
from fairlane.scheduler.simulator.traces import SAMPLES, load_trace
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order
from fairlane.scheduler.tenancy import PolicySnapshot, Tier, TiersPolicy

WINDOW_MS = 100.0
# KV for a third of what the documents have.
SMALL = replace(SHAPE, num_blocks=2000)
LONG_S = 3600.0
# The gap is watched for so long at most.
GAP_S = 200.0


class LongestPrefixFirst(OrderedPolicy):
    """Of all that wait, whoever has most tokens in the prefix cache; among equals by arrival."""

    name = "longest prefix first"

    def __init__(self, snapshot: PolicySnapshot, blocks: BlockManager) -> None:
        super().__init__(snapshot)
        self._blocks = blocks
        self._waiting: dict[RequestId, Sequence] = {}
        self._version = -1
        self._cached: dict[RequestId, int] = {}

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return ()

    def push(self, sequence: Sequence, since_s: float) -> None:
        super().push(sequence, since_s)
        sequence.chain.extend(sequence.token_ids)
        self._waiting[sequence.request_id] = sequence

    def peek(self) -> Sequence | None:
        chosen, longest = None, -1
        for one in [] if self._closed else sorted(self._waiting.values(), key=attrgetter("arrival_index")):
            if one.request_id not in self._skipped and (cached := self._num_cached(one, longest)) > longest:
                chosen, longest = one, cached
        return chosen

    def _num_cached(self, sequence: Sequence, most: int) -> int:
        """0 for nearly all that have no more than `most`, which is soon said."""
        if most > 0 and not self._blocks.may_have_cached(sequence.chain, most):
            return 0
        if self._version != self._blocks.prefix_version:
            self._version = self._blocks.prefix_version
            self._cached.clear()
        found = self._cached.get(sequence.request_id)
        if found is None:
            hit = lookup(sequence, self._blocks)
            found = self._cached[sequence.request_id] = 0 if hit is None else hit.num_tokens
        return found

    def rivals(self, head: Sequence) -> list[Sequence]:
        return []

    def pop(self, sequence: Sequence) -> None:
        super().pop(sequence)
        del self._waiting[sequence.request_id]

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        del self._waiting[sequence.request_id]

    def end_step(self) -> None:
        super().end_step()
        self._skipped.clear()


def documents(seed: int, shape: WorkerShape, duration_s: float = 20.0) -> Workload:
    """Eight tenants, each of which asks about six documents of 2048 tokens, in no order: 128 tokens of question, 64 of answer,
    together twice what fits without a cache."""
    blocks = 4  # of 512 tokens
    scene = Scene(seed, duration_s, shape)
    rate = scene.rate(512 * blocks + 128, 64, 2.0) / 8
    requests = []
    for tenant in range(8):
        random = scene.random(f"documents/t{tenant}")
        for at_s in poisson(random, rate, 0.0, duration_s):
            first = (6 * tenant + random.randrange(6)) * blocks
            prefix = tuple(range(first, first + blocks))
            requests.append(SimRequest(at_s, f"documents/t{tenant}", "default", 512 * blocks + 128, 64, prefix=prefix))
    return Workload("documents", in_order(requests), ("default",), duration_s)


def chats(seed: int) -> Workload:
    """Every request of W11's sample once, at 2.6 times what fits without a cache, served to the end: nearly all come within a
    third of that time, so that most of them wait together."""
    count = len(load_trace(SAMPLES / "mooncake.jsonl.gz").requests)
    workload = WORKLOADS["W11"](Scene(seed, LONG_S, SHAPE, speed=2.0))
    return replace(workload, requests=workload.requests[:count])


def l1(seed: int) -> Numbers:
    """Of Mooncake's chats (W11) and documents: prompt tokens found in the cache and tokens/s, over longest-prefix-first's, with a
    window, and of documents without one; and the interval gap over its bound."""
    found: Numbers = {}
    for name, workload, shape in (("W11", chats(seed), SHAPE), ("documents", documents(seed, SMALL), SMALL)):
        base = run_with_window(workload, shape, None)
        found[f"found {name}"] = hits_of(base)
        windows = {"": WINDOW_MS} | ({" without a window": 0.0} if shape is SMALL else {})
        for kind, window_ms in windows.items():
            fair = run_with_window(workload, shape, window_ms)
            found[f"hits {name}{kind}"] = hits_of(fair) / hits_of(base)
            found[f"rate {name}{kind}"] = rate_of(fair) / rate_of(base)
        found |= {f"{kind} {name}": value for kind, value in _gaps(workload, shape).items()}
    return found


def _gaps(workload: Workload, shape: WorkerShape) -> Numbers:
    """The interval gap over 2 (max(theta, R) + c_step + Q), R: the recompute of the longest request, which nobody is evicted for
    unless the lead is more; and over that without R, which it may break where R is more than theta."""
    result = all_wait(
        run_with_window(replace(workload, duration_s=min(workload.duration_s, GAP_S)), shape, WINDOW_MS, gap_ms=GAP_MS)
    )
    theta, rest = theta_of(result, shape), 2 * largest_step(shape) + WINDOW_MS / 1000 * peak_rate(result)
    longest = max(r.prompt_tokens + r.output_tokens for r in workload.requests)
    gap = widest_gap(result)
    return {"gap": gap / (2 * (max(theta, longest) + rest)), "gap but for recompute": gap / (2 * (theta + rest))}


def all_wait(result: SimResult) -> SimResult:
    """With the samples of the longest time only in which every node has a request that waits. Evicted ones are not counted."""
    changes: list[tuple[float, str, int]] = []
    for outcome in result.outcomes:
        node, known_s = outcome.planned.account.node, outcome.planned.asked.arrival_s + SHAPE.network_s
        changes.append((known_s, node, 1))
        if outcome.queue_s is not None:
            changes.append((known_s + outcome.queue_s, node, -1))
    waiting = dict.fromkeys(result.workload.nodes, 0)
    spans, since_s = [(0.0, 0.0)], inf
    for at_s, node, change in [*sorted(changes), (result.duration_s, result.workload.nodes[0], 0)]:
        waiting[node] += change
        if all(waiting.values()) and since_s == inf:
            since_s = at_s
        elif not all(waiting.values()) or at_s == result.duration_s:
            spans.append((since_s, at_s))
            since_s = inf
    from_s, until_s = max(spans, key=lambda span: span[1] - span[0])
    return replace(result, samples=[sample for sample in result.samples if from_s <= sample.time_s <= until_s])


def run_with_window(workload: Workload, shape: WorkerShape, window_ms: float | None, *, gap_ms: float | None = None) -> SimResult:
    """window_ms: of FAIR; None: longest-prefix-first. With a gap samples are charges, after every step."""
    tiers = tuple(Tier(name, 100 - place) for place, name in enumerate(workload.tiers))
    snapshot = PolicySnapshot(
        1, "", TiersPolicy.FAIR, tiers, preempt_gap_ms=gap_ms, locality_window_ms=0.0 if window_ms is None else window_ms
    )
    simulation = Simulation(workload, snapshot, shape, sample_s=1.0 if gap_ms is None else 0)
    worker = simulation.workers[0]
    worker.turn()  # puts the policy in force
    if window_ms is None:
        worker.scheduler.apply_policy(LongestPrefixFirst(snapshot, worker.blocks), 1)
    if gap_ms is not None:
        simulation.meter = ChargeLedger(simulation.meter, worker.scheduler.policy)
    return simulation.run()


def hits_of(result: SimResult) -> float:
    counts = result.counts.values()
    return sum(c.cached for c in counts) / sum(c.cached + c.prompt for c in counts)


def rate_of(result: SimResult) -> float:
    """Prompt tokens, computed or found, and output tokens, a second until the last request ended, or the run did."""
    ended = [result.duration_s if outcome.ended_s is None else outcome.ended_s for outcome in result.outcomes]
    return sum(c.cached + c.prompt + c.output for c in result.counts.values()) / max(ended)
