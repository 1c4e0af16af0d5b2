"""D1 to D3 behind bench_policies.py: latency targets under load, sets of jobs that can all be on time, and how long a wait was
said to be against how long it was."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import NamedTuple

from policy_runs import SHAPE, Numbers, tokens

from fairlane.scheduler.simulator.outcome import Outcome
from fairlane.scheduler.simulator.report import percentile
from fairlane.scheduler.simulator.scene import Scene, stream, together
from fairlane.scheduler.simulator.simulation import SimResult, Simulation
from fairlane.scheduler.simulator.traces import SAMPLES, load_trace
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order
from fairlane.scheduler.step_work import work_of
from fairlane.scheduler.tenancy import PolicySnapshot, Shaping, Tier, TiersPolicy, WithinTenant

# What an operator would promise: a chat, an ordinary call, work for later. With the part of all requests that each makes.
TIERS = (
    Tier("chat", 100, shaping=Shaping.BALANCED, ttft_target_s=0.5, tpot_target_s=0.05),
    Tier("standard", 50, ttft_target_s=3.0, tpot_target_s=0.1),
    Tier("later", 10, ttft_target_s=20.0),
)
PARTS = {"chat": 0.2, "standard": 0.3, "later": 0.5}
DURATION_S = 60.0


def mixed(seed: int, load: float) -> Workload:
    """Lengths of Azure's chats; two tenants in each tier."""
    scene = Scene(seed, DURATION_S, SHAPE)
    pairs = [(r.prompt_tokens, r.output_tokens) for r in load_trace(SAMPLES / "azure_conv.csv.gz", seed).requests]
    mean = sum(p for p, _ in pairs) / len(pairs), sum(o for _, o in pairs) / len(pairs)

    def length(random: Random) -> tuple[int, int]:
        return random.choice(pairs)

    requests = together(
        stream(scene, f"{tier}/t{k}", tier, scene.rate(*mean, load * part / 2), length)
        for tier, part in PARTS.items()
        for k in range(2)
    )
    return Workload("D1", in_order(requests), tuple(PARTS), DURATION_S)


def run(workload: Workload, policy: TiersPolicy, within: WithinTenant, tiers: tuple[Tier, ...] = TIERS) -> SimResult:
    return Simulation(workload, PolicySnapshot(1, "", policy, tiers, within_tenant=within), SHAPE).run()


def keeps_targets(outcome: Outcome, tier: Tier, end_s: float) -> bool | None:
    """Whether its first token came in time, and the others at the pace asked for; None: nobody knows yet."""
    asked = outcome.planned.asked
    if tier.ttft_target_s is not None:
        if outcome.first_token_s is None and asked.arrival_s + tier.ttft_target_s > end_s:
            return None
        if outcome.ttft_s is None or outcome.ttft_s > tier.ttft_target_s:
            return False
    return tier.tpot_target_s is None or outcome.tpot_s is None or outcome.tpot_s <= tier.tpot_target_s


def kept(result: SimResult, tiers: Iterable[Tier]) -> float:
    """The part of these tiers' requests that kept their targets."""
    by_name = {tier.name: tier for tier in tiers}
    marks = [
        keeps_targets(outcome, by_name[outcome.planned.account.tier], result.duration_s)
        for outcome in result.outcomes
        if outcome.planned.account.tier in by_name
    ]
    known = [mark for mark in marks if mark is not None]
    return sum(known) / len(known)


def d1(seed: int) -> Numbers:
    """Requests that keep their targets at capacity, and tokens, over FCFS; and how many of the top tier do not at twice that."""
    fcfs, deadline = (
        run(mixed(seed, 1.0), policy, within)
        for policy, within in ((TiersPolicy.FCFS, WithinTenant.FCFS), (TiersPolicy.VIP, WithinTenant.DEADLINE))
    )
    overload = run(mixed(seed, 2.0), TiersPolicy.VIP, WithinTenant.DEADLINE)
    goodput = kept(deadline, TIERS) / kept(fcfs, TIERS)
    return {"goodput": goodput, "rate": tokens(deadline) / tokens(fcfs), "chat missed at 2x": 1 - kept(overload, TIERS[:1])}


# -- sets of jobs that can all be on time ------------------------------------------------------------------------------------

TARGETS_S = (0.3, 0.6, 1.2, 2.5, 5.0, 10.0)
LONGEST_PROMPT, MEAN_PROMPT = 1500, 600
SETS = 10


class Job(NamedTuple):
    """A prompt, and when its first token is due. Times in seconds."""

    arrival_s: float
    due_s: float
    tokens: int
    tier: str


def edf_misses(jobs: Iterable[Job], tokens_per_s: float) -> list[Job]:
    """Who is late on a machine that computes one prompt at a time, always the one that is due first, and may change its mind at
    any moment. If anybody can do it, this does (Dertouzos 1974)."""
    late, ready, now_s = list[Job](), list[tuple[float, int, float, Job]](), 0.0
    coming = sorted(jobs)
    for number, job in enumerate([*coming, None]):
        until_s = inf if job is None else job.arrival_s
        while ready and now_s < until_s:
            due_s, entry, left_s, doing = heappop(ready)
            spent_s = min(left_s, until_s - now_s)
            now_s += spent_s
            if spent_s < left_s:
                heappush(ready, (due_s, entry, left_s - spent_s, doing))
            elif now_s > due_s:
                late.append(doing)
        if job is not None:
            now_s = max(now_s, until_s)
            heappush(ready, (job.due_s, number, job.tokens / tokens_per_s, job))
    return late


def schedulable(random: Random, load: float) -> list[Job]:
    """Six seconds of jobs that EDF does on time on a machine as slow as the worker's slowest steps, with three to spare: one is
    under way when a job comes, one launched ahead, and the last chunk need not fill its own. Who would be late stays away."""
    budget = SHAPE.max_num_batched_tokens
    step_s = SHAPE.step.seconds(work_of(0, 0, [(LONGEST_PROMPT, budget)])) + SHAPE.max_num_seqs * SHAPE.step.sequence_s
    jobs, now_s = list[Job](), 0.0
    while (now_s := now_s + random.expovariate(load * budget / step_s / MEAN_PROMPT)) < 6.0:
        tier = random.randrange(len(TARGETS_S))
        tokens = min(LONGEST_PROMPT, 1 + int(random.expovariate(1 / MEAN_PROMPT)))
        jobs.append(Job(now_s, now_s + TARGETS_S[tier] - 3 * step_s - 2 * SHAPE.network_s, tokens, f"t{tier}"))
    while late := edf_misses(jobs, budget / step_s):
        jobs = [job for job in jobs if job not in late]
    return jobs


def d2(seed: int) -> Numbers:
    """Misses of one tenant's jobs, over sets of little to full load."""
    tiers = tuple(Tier(f"t{number}", 1, ttft_target_s=target_s) for number, target_s in enumerate(TARGETS_S))
    misses = jobs = 0
    for number in range(SETS):
        chosen = schedulable(Random(f"{seed}/{number}"), 0.8 + 0.2 * number)
        requests = [SimRequest(job.arrival_s, "one/tenant", job.tier, job.tokens, 1) for job in chosen]
        workload = Workload("D2", in_order(requests), tuple(tier.name for tier in tiers), 20.0)
        result = run(workload, TiersPolicy.FCFS, WithinTenant.DEADLINE, tiers)
        jobs += len(result.outcomes)
        misses += round((1 - kept(result, tiers)) * len(result.outcomes))
    return {"misses": misses, "jobs": jobs}


# -- how long a wait was said to be ------------------------------------------------------------------------------------------

QUEUED_S = 0.5  # who waits less is not queued in any sense that a client would ask about


def wait_errors(seed: int, policy: TiersPolicy, load: float) -> dict[str, list[float]]:
    """By tier, of those who queued and got in: what they were told when they came over how long they waited, less 1."""
    found: dict[str, list[float]] = {tier: [] for tier in PARTS}
    for outcome in run(mixed(seed, load), policy, WithinTenant.FCFS).outcomes:
        told_s, waited_s = outcome.estimated_wait_s, outcome.queue_s
        if told_s is not None and waited_s is not None and waited_s > QUEUED_S:
            found[outcome.planned.account.tier].append(told_s / waited_s - 1)
    return found


def d3(seed: int) -> Numbers:
    """For half of those who queue, how far what they were told when they came is from how long they waited, as a part of that."""
    found: Numbers = {}
    for policy in (TiersPolicy.FCFS, TiersPolicy.FAIR, TiersPolicy.VIP):
        errors = [abs(error) for of_tier in wait_errors(seed, policy, 1.5).values() for error in of_tier]
        found[policy.value] = percentile(errors, 0.5)
    return found
