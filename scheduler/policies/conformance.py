"""Whether a policy keeps the engine's rules: runs it on random histories over a fake model, with every invariant checked in every
step. For the tests of policies that live elsewhere; it needs no test framework.

    from fairlane.scheduler.policies.conformance import check_policy

    def test_my_policy() -> None:
        check_policy(MyPolicy)
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from fairlane.clock import FakeClock
from fairlane.scheduler.ceilings import Ceilings
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.engine import Abort
from fairlane.scheduler.events import EndReason
from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.fake_executor import FakeExecutor, StepTime, crc_token
from fairlane.scheduler.kv_quotas import make_quotas
from fairlane.scheduler.policies.guard import GuardedPolicy
from fairlane.scheduler.policies.plugins import PolicyFactory
from fairlane.scheduler.request import Request, RequestId
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.tenancy import KVAmount, NodeShare, PolicySnapshot, Tier, TiersPolicy

_VOCAB = 50_000
_BLOCK_SIZE = 8
_TIERS = (Tier("gold", 100), Tier("standard", 50, weight=3.0, patience_s=0.5), Tier("batch", 10, min_share=0.05))
_CAPPED = NodeShare("a/x", max_running=2)
_LIMIT = 13  # blocks: the largest request
_WITH_QUOTAS = (
    NodeShare("a", kv_guarantee=KVAmount(share=0.4)),
    NodeShare("a/x", max_running=2, kv_limit=KVAmount(tokens=_LIMIT * _BLOCK_SIZE)),
    NodeShare("b/z", kv_guarantee=KVAmount(share=0.2)),
)


class ConformanceError(AssertionError):
    """A rule that the policy breaks, and the history that showed it."""


def check_policy(make: PolicyFactory, *, histories: int = 60, seed: int = 0) -> None:
    """Raises ConformanceError unless, in so many histories of arrivals, cancels, evictions and shortages, the policy answers
    every call as the Policy protocol says, keeps `max_running`, and every request gets exactly its tokens, in a bounded number
    of steps. Every other history has KV quotas, every third a `ceil` that binds.
    """
    for number in range(histories):
        try:
            draw = random.Random(seed * 1_000_003 + number)  # noqa: S311 to be repeated
            _run(make, draw, depth=number % 3, with_quotas=number % 2 > 0, with_ceilings=number // 3 % 3 == 0)
        except ConformanceError as error:
            raise ConformanceError(f"history {number} of seed {seed}: {error}") from error


def _run(make: PolicyFactory, draw: random.Random, depth: int, *, with_quotas: bool, with_ceilings: bool) -> None:
    tiers: tuple[Tier, ...] = _TIERS
    nodes: tuple[NodeShare, ...] = _WITH_QUOTAS if with_quotas else (_CAPPED,)
    if with_ceilings:
        tiers, nodes = tuple(replace(tier, ceil=0.5) for tier in tiers), tuple(replace(node, ceil=0.2) for node in nodes)
    snapshot = PolicySnapshot(1, "0" * 64, TiersPolicy.VIP, tiers, nodes=nodes)
    asked = list(_requests(draw))
    driver = _driver(draw, snapshot, depth)
    policy = GuardedPolicy(make(snapshot), snapshot)
    blocks, limits = driver.blocks, driver.scheduler.limits
    quotas = make_quotas(snapshot, blocks.num_usable_blocks, blocks.block_size, limits.watermark_blocks)
    driver.scheduler.apply_policy(policy, 1, quotas=quotas, ceilings=Ceilings(snapshot.tiers, snapshot.nodes))
    driver.add_at_arrival(asked)
    cancelled = {draw.choice(asked).request_id for _ in range(draw.randint(0, 3))}
    for request_id in cancelled:
        driver.at(draw.uniform(0.0, 0.6), Abort(request_id))
    turns = 0
    while driver.turn() or driver.scheduler.num_unfinished or not all(t.ended for t in driver.transcripts.values()):
        turns += 1
        driver.rest()
        if policy.fault:
            raise ConformanceError(policy.fault)
        if driver.scheduler.census.running_by_node.copy().get("a/x", 0) > 2:
            raise ConformanceError("a node has more sequences running than its max_running")
        if with_quotas and blocks.used_by("tenant:a/x") > _LIMIT:
            raise ConformanceError("a node has more KV cache than its kv_limit")
        if turns > 20_000:
            raise ConformanceError(f"{driver.scheduler.num_unfinished} requests are not served however long they wait")
        if not driver.scheduler.num_unfinished:
            driver.clock.advance(0.01)  # type: ignore[attr-defined]
    for request in asked:
        _check_outcome(driver, request, request.request_id in cancelled)


def _requests(draw: random.Random) -> Iterator[Request]:
    for number in range(1, draw.randint(3, 16)):
        prompt = tuple(draw.randrange(_VOCAB) for _ in range(draw.randint(1, 60)))
        tenant = draw.choice(("a/x", "a/y", "b/z"))
        yield Request(
            RequestId(number),
            tenant,
            draw.choice(_TIERS).name,
            prompt,
            draw.randint(1, 40),
            order=draw.choice((0, 0, 1)),
            cache_domain=f"tenant:{tenant}",
            arrival_s=draw.choice((0.0, 0.1, 0.3)) + draw.uniform(0.0, 0.02),
        )


def _driver(draw: random.Random, snapshot: PolicySnapshot, depth: int) -> EngineDriver:
    clock = FakeClock()
    info = ExecutorInfo("fake", _VOCAB, 1024, _BLOCK_SIZE, draw.randint(16, 60), (2,), draw.choice((0, 20)))
    seats = draw.randint(1, 6)
    limits = SchedulerLimits(
        max_num_seqs=seats,
        max_num_resident=draw.randint(1, 8),
        max_num_batched_tokens=draw.randint(seats, 64),
        max_model_len=info.max_model_len,
        min_swap_tokens=9,
    )
    executor = FakeExecutor(info, clock, step_time=StepTime(fixed_s=0.01))
    driver = EngineDriver(executor, clock, snapshot, limits, depth=depth, check=True)
    driver.turn()  # tiers are known from here on
    return driver


def _check_outcome(driver: EngineDriver, request: Request, cancelled: bool) -> None:
    transcript = driver.transcripts[request.request_id]
    context = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        context.append(crc_token(context, _VOCAB))
    expected = context[len(request.prompt_token_ids) :]
    complete = transcript.ended is not None and transcript.ended.reason is EndReason.LENGTH
    if transcript.token_ids != (expected if complete else expected[: len(transcript.token_ids)]):
        raise ConformanceError(f"request {request.request_id} got other tokens than it must")
    if not complete and not cancelled:
        raise ConformanceError(f"request {request.request_id} was not served to its end")
