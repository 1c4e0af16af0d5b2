"""The two sides of bench_replay.py: a load on the real worker under a policy, and its recording in the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from random import Random

from replay_figures import Served

from fairlane.clock import Clock
from fairlane.gateway.policy.loader import load_policy_text
from fairlane.gateway.trace.export import export
from fairlane.gateway.trace.record import Record
from fairlane.gateway.trace.recorder import line
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.executor import Executor
from fairlane.scheduler.request import Request, RequestId, SamplingParams
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import Simulation
from fairlane.scheduler.simulator.step_time import StepModel
from fairlane.scheduler.simulator.traces import load_trace
from fairlane.scheduler.simulator.workload import Workload
from fairlane.scheduler.step_work import StepWork
from fairlane.simulate.policies import Candidate
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executors import limits_of

POLICY = """version: 1
scheduler: {{tiers: {tiers}, within_tier: fair}}
tiers:
  gold: {{priority: 100, shaping: balanced}}
  standard: {{priority: 50, min: 10%, patience: 60s}}
  batch: {{priority: 10, min: 5%, patience: 10m}}
organisations:
  shop: {{weight: 2, tenants: {{checkout: {{tiers: [gold]}}, search: {{tiers: [standard]}}}}}}
  lab: {{tiers: [batch]}}
"""
POLICIES = ("fcfs", "vip", "fair")


@dataclass(frozen=True, slots=True)
class Flow:
    """Requests of one node: count of them, evenly but for some chance over [start_s, end_s) of the clock."""

    node: str
    tier: str
    count: int
    start_s: float
    end_s: float
    prompt: int
    output: int


# More than the worker can do for most of the run, so that who waits is decided by the policy; about 10 s of work.
LOAD = (
    Flow("lab", "batch", 36, 0.0, 1.7, 72, 20),
    Flow("shop/search", "standard", 34, 0.0, 5.0, 40, 8),
    Flow("shop/checkout", "gold", 40, 0.3, 6.6, 28, 6),
)
# KV cache for ten of them.
NUM_BLOCKS = 100
WORKER = WorkerConfig(num_blocks=NUM_BLOCKS, max_num_seqs=16, max_num_batched_tokens=128, threads=1)


def candidate(tiers: str) -> Candidate:
    return Candidate(tiers, load_policy_text(POLICY.format(tiers=tiers).encode(), f"{tiers}.yaml"))


def requests(load: int, start_s: float, vocab_size: int) -> list[Request]:
    """Lengths vary by a third about the flow's."""
    rng = Random(load)
    found: list[Request] = []
    for flow in LOAD:
        gap_s = (flow.end_s - flow.start_s) / flow.count
        for number in range(flow.count):
            arrival_s = start_s + flow.start_s + (number + rng.random()) * gap_s
            prompt = tuple(rng.randrange(vocab_size) for _ in range(round(flow.prompt * rng.uniform(0.67, 1.33))))
            output = round(flow.output * rng.uniform(0.67, 1.33))
            found.append(
                Request(
                    RequestId(len(found)),
                    flow.node,
                    flow.tier,
                    prompt,
                    output,
                    SamplingParams(temperature=0.0),
                    cache_domain=f"tenant:{flow.node}",
                    arrival_s=arrival_s,
                )
            )
    return found


def serve(executor: Executor, config: WorkerConfig, clock: Clock, policy: Candidate, load: int) -> tuple[list[Served], list[str]]:
    """The load on the real engine; what each request got, and the recording as the gateway's recorder writes it."""
    limits = limits_of(config, executor.info.max_model_len)
    driver = EngineDriver(executor, clock, policy.snapshot(), limits, depth=config.pipeline_depth)
    start_s = clock.now()
    asked = requests(load, start_s, executor.info.vocab_size)
    driver.add_at_arrival(asked)
    driver.run_until_idle()
    served, lines = [], []
    for request in asked:
        found = driver.transcripts[request.request_id]
        if found.first_token_s is None or found.ended_s is None or found.ended is None:
            raise RuntimeError(f"request {request.request_id} got no token: {found.ended}")
        ttft_s, end_s = found.first_token_s - request.arrival_s, found.ended_s - request.arrival_s
        tokens, preemptions = len(found.token_ids), found.ended.preemptions
        arrival_s = request.arrival_s - start_s
        served.append(Served(load, request.tier, arrival_s, ttft_s, arrival_s + end_s, tokens, preemptions))
        record = Record(
            at=1e9 + arrival_s, node=request.tenant, tier=request.tier, model=executor.info.model,
            prompt=request.prompt_token_ids, domain=request.cache_domain, max_tokens=request.max_tokens,
            output_tokens=tokens, ttft_s=ttft_s, end_s=end_s, end=found.ended.reason.value, preemptions=preemptions,
        )  # fmt: skip
        lines.append(line(record, b"k" * 32))
    return served, lines


def exported(lines: Iterable[str], file: Path) -> Path:
    """The trace that `fairlane trace export` makes of a recording."""

    def skipped(path: Path, number: int) -> None:
        raise RuntimeError(f"the recorder wrote a line that is no record: {number}")

    numbered = [(file, number, text) for number, text in enumerate(lines, 1)]
    file.write_text("".join(f"{one}\n" for one in export(numbered, skipped=skipped)))
    return file


def scattered(model: StepModel, factors: Iterator[float]) -> StepModel:
    """The model's steps, each times the next factor."""

    class Scattered(StepModel):
        def seconds(self, work: StepWork) -> float:
            return StepModel.seconds(self, work) * next(factors)

    return Scattered(**asdict(model))


def independent(spread: float, seed: str, of_run: float = 1.0) -> Iterator[float]:
    """Factors by chance, each on its own: log-normal with this deviation of the logarithm; and all of them times of_run."""
    random = Random(seed)
    while True:
        yield of_run * random.lognormvariate(0.0, spread)


def in_order(factors: Sequence[float], seed: str) -> Iterator[float]:
    """Those that there were, one after another from a place by chance on, and round again: a machine that is slow stays so for a
    while, and what queues up meanwhile makes the slowest requests."""
    start = Random(seed).randrange(len(factors))
    return islice(cycle(factors), start, None)


def simulate(load: int, trace: Path, policy: Candidate, shape: WorkerShape) -> list[Served]:
    """The trace under a policy, to the last request's end."""
    return served_in(load, load_trace(trace), policy, shape)


def served_in(load: int, workload: Workload, policy: Candidate, shape: WorkerShape) -> list[Served]:
    placed = policy.place(workload)
    if placed.renamed:
        raise RuntimeError(f"the policy does not have {list(placed.renamed)}")
    simulation = Simulation(placed.workload, policy.snapshot(), replace(shape, network_s=0.0))
    result = simulation.run(duration_s=1e6)
    served = []
    for outcome in result.outcomes:
        asked, ttft_s, ended_s = outcome.planned.asked, outcome.ttft_s, outcome.ended_s
        if ttft_s is None or ended_s is None:
            raise RuntimeError(f"request {outcome.planned.number} did not end in the simulator")
        served.append(Served(load, asked.tier, asked.arrival_s, ttft_s, ended_s, asked.output_tokens, outcome.preemptions))
    return served
