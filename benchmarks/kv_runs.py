"""The run behind the check KV of bench_policies.py: tight KV, VIPs that would fill it, a hoarder at its limit, and a low tenant
with a guarantee. After every step the blocks of each are counted anew, from their cache domains."""

from __future__ import annotations

from policy_runs import TIGHT, Numbers

from fairlane.scheduler.request import Sequence, SequenceStatus
from fairlane.scheduler.simulator.scene import Scene, fixed, stream, together
from fairlane.scheduler.simulator.simulation import Simulation
from fairlane.scheduler.simulator.worker import SimWorker
from fairlane.scheduler.simulator.workload import Workload, in_order
from fairlane.scheduler.tenancy import KVAmount, NodeShare, PolicySnapshot, Shaping, Tier, TiersPolicy

DURATION_S = 30.0
LIMIT, GUARANTEE = 0.3, 0.2
HOARDER, GUARDED = "hog/crowd", "small/guarded"


class Watch:
    """fullest, borrowed: most blocks of the hoarder and of the VIPs. above: most blocks of the hoarder above its limit. denied:
    most steps in a row in which somebody who waits for the guaranteed tenant would stay within its guarantee and finds too few
    blocks."""

    def __init__(self, worker: SimWorker, num_blocks: int) -> None:
        self.above = self.denied = self.fullest = self.borrowed = 0
        self._limit, self._guarantee = int(LIMIT * num_blocks), int(GUARANTEE * num_blocks)
        self._row = self._step = 0
        self._worker = worker
        self._turn = worker.turn
        worker.turn = self.turn  # type: ignore[method-assign]

    def turn(self) -> float | None:
        next_s = self._turn()
        scheduler, blocks = self._worker.scheduler, self._worker.blocks
        used = blocks.used_by(f"tenant:{HOARDER}")
        self.above = max(self.above, used - self._limit)
        self.fullest = max(self.fullest, used)
        self.borrowed = max(self.borrowed, blocks.used_by("tenant:vip/main"))
        if scheduler.step_id > self._step:
            self._step = scheduler.step_id
            self._row = self._row + 1 if self._is_denied() else 0
            self.denied = max(self.denied, self._row)
        return next_s

    def _is_denied(self) -> bool:
        scheduler, blocks = self._worker.scheduler, self._worker.blocks
        left = self._guarantee - blocks.used_by(f"tenant:{GUARDED}")
        needed = [blocks.blocks_for(one.num_tokens) for one in scheduler.sequences() if _waits(one)]
        ready = scheduler.running.has_free_slot and bool(needed)
        return ready and any(blocks.num_free_blocks < count <= left for count in needed)


def _waits(one: Sequence) -> bool:
    return one.request.tenant == GUARDED and one.status is SequenceStatus.WAITING and not one.steps_in_flight


def kv(seed: int) -> Numbers:
    scene = Scene(seed, DURATION_S, TIGHT)
    rate = scene.rate(512, 256, 1.0)
    asked = together(
        (
            stream(scene, "vip/main", "vip", 1.5 * rate, fixed(512, 256)),
            stream(scene, HOARDER, "vip", 1.5 * rate, fixed(512, 256)),
            stream(scene, GUARDED, "best_effort", 0.3 * rate, fixed(512, 256)),
        )
    )
    nodes = (
        NodeShare(HOARDER, kv_limit=KVAmount(share=LIMIT)),
        NodeShare(GUARDED, kv_guarantee=KVAmount(share=GUARANTEE)),
    )
    tiers = (Tier("vip", 100, shaping=Shaping.BALANCED), Tier("best_effort", 10, min_share=0.1))
    snapshot = PolicySnapshot(1, "", TiersPolicy.VIP, tiers, nodes=nodes)
    simulation = Simulation(Workload("KV", in_order(asked), ("vip", "best_effort"), DURATION_S), snapshot, TIGHT)
    watch = Watch(simulation.workers[0], TIGHT.num_blocks)
    result = simulation.run()
    finished = sum(o.finished for o in result.outcomes if o.planned.account.node == GUARDED)
    return {
        "above": watch.above,
        "denied": watch.denied,
        "hoarder": watch.fullest / TIGHT.num_blocks,
        "borrowed": watch.borrowed / TIGHT.num_blocks,
        "reclaims": simulation.workers[0].scheduler.stats().evictions_by_reason.get("kv_guarantee", 0),
        "guarded finished": finished,
    }
