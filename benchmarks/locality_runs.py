"""L1 behind bench_policies.py: fair shares with a locality window against longest-prefix-first, which knows no tenants and lives
here only, on loads that share prefixes."""

from __future__ import annotations

from dataclasses import replace

from policy_ledger import ChargeLedger
from policy_runs import GAP_MS, SHAPE, Numbers, made, peak_rate, widest_gap

from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.hits import lookup
from fairlane.scheduler.policies.ordered import OrderedPolicy
from fairlane.scheduler.request import RequestId, Sequence
from fairlane.scheduler.simulator.scene import Scene, poisson
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import SimResult, Simulation
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order
from fairlane.scheduler.tenancy import PolicySnapshot, Tier, TiersPolicy

WINDOW_MS = 100.0
# KV for a third of what the documents have.
SMALL = replace(SHAPE, num_blocks=2000)


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
        self._waiting[sequence.request_id] = sequence

    def peek(self) -> Sequence | None:
        heads = [] if self._closed else [one for one in self._waiting.values() if one.request_id not in self._skipped]
        return max(heads, key=lambda one: (self._num_cached(one), -one.arrival_index), default=None)

    def _num_cached(self, sequence: Sequence) -> int:
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


def l1(seed: int) -> Numbers:
    """Of Mooncake's chats (W11) and documents: prompt tokens found in the cache and tokens/s, over longest-prefix-first's, with a
    window and without one; and on documents the interval gap over 2 (theta + c_step + Q)."""
    found: Numbers = {}
    for name, workload, shape in (("W11", made("W11", seed, 60.0), SHAPE), ("documents", documents(seed, SMALL), SMALL)):
        base = _run(workload, shape, None)
        for window_ms, kind in ((WINDOW_MS, ""), (0.0, " without a window")):
            fair = _run(workload, shape, window_ms)
            found[f"hits {name}{kind}"] = _hits(fair) / _hits(base)
            found[f"rate {name}{kind}"] = _tokens(fair) / _tokens(base)
    result = _run(documents(seed, SMALL), SMALL, WINDOW_MS, gap_ms=GAP_MS)
    step = SMALL.max_num_batched_tokens + SMALL.max_num_seqs
    rate = peak_rate(result)
    found["gap"] = widest_gap(result) / (2 * (max(GAP_MS / 1000 * rate, 2 * step) + 2 * step + WINDOW_MS / 1000 * rate))
    return found


def _run(workload: Workload, shape: WorkerShape, window_ms: float | None, *, gap_ms: float | None = None) -> SimResult:
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


def _hits(result: SimResult) -> float:
    counts = result.counts.values()
    return sum(c.cached for c in counts) / sum(c.cached + c.prompt for c in counts)


def _tokens(result: SimResult) -> float:
    """Prompt tokens, computed or found, and output tokens."""
    return sum(c.cached + c.prompt + c.output for c in result.counts.values())
