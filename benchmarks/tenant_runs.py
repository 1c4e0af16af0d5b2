"""H5 on three worlds: the real engine in this process, the simulator, and the gateway over gRPC. Each gives the same: what every
request got, in seconds from the start of its run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from serving_load import GRACE_S, NotServingError, Order, drive
from tenant_loads import Workload, candidate

from fairlane.bench.calls import Call, requests
from fairlane.bench.run import Bench
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import Simulation
from fairlane.scheduler.simulator.workload import SimRequest
from fairlane.scheduler.simulator.workload import Workload as SimWorkload

ENGINE, SIMULATOR, GATEWAY = "engine", "simulator", "gateway"
# The KV cache and the batch that the peers had.
SETTINGS = {"num_blocks": 3750, "max_num_seqs": 128, "max_num_batched_tokens": 8192}


@dataclass(frozen=True, slots=True)
class Got:
    """first_s, last_s: when its first and its last token came; early: how many came at once with the first."""

    call: Call
    first_s: float
    last_s: float
    early: int = 1

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.call.arrival_s

    @property
    def tpot_s(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.call.output - self.early)


@dataclass(frozen=True, slots=True)
class Run:
    """One workload under one policy. got: in order of arrival. preemptions, recomputed_tokens: None where nobody can tell."""

    workload: Workload
    policy: str
    via: str
    got: tuple[Got, ...]
    preemptions: int | None = None
    recomputed_tokens: int | None = None

    def of(self, *nodes: str) -> list[Got]:
        return [got for got in self.got if got.call.node in nodes]


def on_engine(bench: Bench, workload: Workload, policy: str, deadline_s: float | None, progress: Callable[[int], None]) -> Run:
    """Raises RunError, and OutOfTimeError past deadline_s of the monotonic clock."""
    snapshot = candidate(policy).snapshot()
    served = bench.serve(workload.calls, seed=workload.number, snapshot=snapshot, deadline_s=deadline_s, progress=progress)
    got = (
        Got(call, track.first_s - served.start_s, track.last_s - served.start_s)
        for call, track in zip(workload.calls, served.tracks, strict=True)
    )
    return Run(workload, policy, ENGINE, tuple(got), served.preemptions, served.recomputed_tokens)


def in_simulator(shape: WorkerShape, workload: Workload, policy: str) -> Run:
    """The engine alone: nothing is added for the way to it."""
    asked = tuple(SimRequest(c.arrival_s, c.node, c.tier, c.prompt, c.output) for c in workload.calls)
    tried = candidate(policy)
    placed = tried.place(SimWorkload(workload.name, asked, ("gold", "standard", "batch"), 1e6))
    result = Simulation(placed.workload, tried.snapshot(), replace(shape, network_s=0.0)).run(1e6)
    got = []
    for call, outcome in zip(workload.calls, result.outcomes, strict=True):
        if outcome.first_token_s is None or outcome.ended_s is None or not outcome.finished:
            raise RuntimeError(f"a request of {call.node} did not end in the simulator: {outcome.ended}")
        got.append(Got(call, outcome.first_token_s, outcome.ended_s))
    return Run(workload, policy, SIMULATOR, tuple(got), result.preemptions, result.recomputed_tokens)


def through_gateway(
    target: str,
    keys: Mapping[str, str],
    vocab_size: int,
    workload: Workload,
    policy: str,
    limit_s: float,
    say: Callable[[str], None],
) -> Run:
    """A process for each tenant, which sends its requests when their time has come. Raises NotServingError, also for a request
    that was refused or failed."""
    made = requests(workload.calls, vocab_size, workload.number)
    nodes = list(dict.fromkeys(call.node for call in workload.calls))
    own = {node: [number for number, call in enumerate(workload.calls) if call.node == node] for node in nodes}
    orders = [
        Order(
            target, keys[node], [made[n].prompt_token_ids for n in own[node]], [workload.calls[n].output for n in own[node]],
            None, limit_s, tuple(workload.calls[n].arrival_s for n in own[node]),
        )
        for node in nodes
    ]  # fmt: skip
    driven = drive(orders, limit_s + GRACE_S, say)
    got: list[Got | None] = [None] * len(workload.calls)
    for number, answer in zip((n for node in nodes for n in own[node]), driven.answers, strict=True):
        call = workload.calls[number]
        if answer.failure:
            raise NotServingError(f"a request of {call.node} failed: {answer.failure}")
        # TTFT as its client saw it: from when it was sent.
        first_s = call.arrival_s + answer.first_s - answer.sent_s
        got[number] = Got(call, first_s, first_s + answer.last_s - answer.first_s, answer.first_tokens)
    return Run(workload, policy, GATEWAY, tuple(one for one in got if one is not None))
