"""KV quotas under any history: no node is ever above its `kv_limit`, and what a `kv_guarantee` covers is there within two steps,
whatever the policy, the tiers, the pipeline depth, the swaps, failing steps and a change of quotas on the way. The oracle counts
blocks by itself, from the cache domains."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import BATCH, GOLD, STANDARD, expected_tokens, request, snapshot, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.engine import Abort
from fairlane.scheduler.events import EndReason
from fairlane.scheduler.fake_executor import StepTime
from fairlane.scheduler.request import CacheMode, Request, Sequence, SequenceStatus
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.tenancy import GroupShare, KVAmount, NodeShare, Tier, TiersPolicy, WithinTenant, WithinTier

SIZE = 8  # tokens in a block
TIERS = (GOLD, replace(STANDARD, patience_s=0.3, ttft_target_s=0.2), replace(BATCH, patience_s=1.0))
PLAIN = (Tier("gold", 100), Tier("standard", 50), Tier("batch", 10))
# Whose requests count for which account, and what is above it.
TENANTS = {"a/x": ("a/x", "a"), "a/y": ("a/y", "a"), "b/z": ("b/z", "b"), "b/w": ("group:g",), "c/v": ()}
NEVER = 10**9
NODES = ("a", "a/x", "a/y", "b", "b/z", "c", "c/v")
LIMITS = SchedulerLimits()


@dataclass(frozen=True)
class Blocks:
    guarantee: int = 0
    limit: int = NEVER


Quotas = dict[str, Blocks]


@st.composite
def quotas(draw: st.DrawFn, num_blocks: int) -> Quotas:
    """At most everything is promised, at every level; every limit is at least the promises under it."""
    left = num_blocks
    found: Quotas = {}
    for above, below in (("a", ("a/x", "a/y")), ("b", ("b/z",)), ("group:g", ())):
        promises = {}
        for name in below:
            promises[name] = draw(st.integers(0, left // 2))
            left -= promises[name]
        spare = draw(st.integers(0, left // 2)) if draw(st.booleans()) else 0
        total = sum(promises.values()) + spare
        left -= spare
        promises[above] = total if spare or draw(st.booleans()) else 0
        for name, promise in promises.items():
            least = max(promise, total if name == above else 0, 4)
            found[name] = Blocks(promise, draw(st.one_of(st.just(NEVER), st.integers(least, num_blocks))))
    return found


def shares(quotas: Quotas, caps: dict[str, int]) -> tuple[tuple[NodeShare, ...], tuple[GroupShare, ...]]:
    def amounts(name: str) -> dict[str, KVAmount]:
        quota = quotas.get(name, Blocks())
        found = {}
        if quota.guarantee:
            found["kv_guarantee"] = KVAmount(tokens=quota.guarantee * SIZE)
        if quota.limit < NEVER:
            found["kv_limit"] = KVAmount(tokens=quota.limit * SIZE)
        return found

    nodes = [NodeShare(path, max_running=caps.get(path), **amounts(path)) for path in NODES]  # type: ignore[arg-type]
    return (*nodes, NodeShare("b/w", shared_domain="group:g")), (GroupShare("g", **amounts("group:g")),)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Request]:
    asked = []
    for number in range(1, draw(st.integers(2, 20)) + 1):
        tenant = draw(st.sampled_from(sorted(TENANTS)))
        prefix = (*range(7000, 7000 + draw(st.sampled_from([0, 0, 8, 20]))),)
        tail = tuple((number * 7919 + i) % 50_000 for i in range(draw(st.integers(1, 60))))
        asked.append(
            request(
                number,
                draw(st.sampled_from(TIERS)).name,
                prompt=prefix + tail,
                max_tokens=draw(st.integers(1, 50)),
                arrival_s=draw(st.sampled_from([0.0, 0.05, 0.15, 0.3])) + draw(st.floats(0, 0.02)),
                tenant=tenant,
                cache_domain="group:g" if tenant == "b/w" else None,
                cache_mode=draw(st.sampled_from([CacheMode.READ_WRITE, CacheMode.READ_WRITE, CacheMode.NONE])),
                order=draw(st.sampled_from([0, 0, 1])),
            )
        )
    return asked


class Watch:
    """After every step: what each account has, and for how long each request has been denied what a guarantee covers. quotas: by
    generation of the policy. Those of a new one are held to from the step after it on."""

    def __init__(self, driver: EngineDriver, quotas: dict[int, Quotas], caps: dict[str, int]) -> None:
        self.above: list[tuple[str, int, int]] = []
        self.longest = 0
        self._driver = driver
        self._by_generation = quotas
        self._quotas: Quotas = {}
        self._generation = 0
        self._caps = caps
        self._denied: dict[int, int] = {}
        self._step = 0

    def run(self, max_turns: int = 20_000) -> None:
        driver = self._driver
        for _ in range(max_turns):
            busy = driver.turn()
            self._look()
            if not busy and not driver.scheduler.num_unfinished and not driver._commands:
                if not driver._later:
                    return
                driver._wait_until(driver._later[0][0])
        raise AssertionError(f"{driver.scheduler.num_unfinished} requests unfinished after {max_turns} turns")

    def used(self) -> Counter[str]:
        found = Counter[str]()
        for domain, count in self._driver.blocks.domains().items():
            names = TENANTS[domain.removeprefix("tenant:")] if domain.startswith("tenant:") else (domain,)
            found.update(dict.fromkeys(names, count))
        return found

    def _look(self) -> None:
        scheduler = self._driver.scheduler
        if scheduler.policy_generation != self._generation:
            self._generation, self._step = scheduler.policy_generation, scheduler.step_id
            self._quotas, self._denied = self._by_generation.get(self._generation, {}), {}
        used = self.used()
        if scheduler.step_id == self._step:
            return
        self.above += [(name, used[name], quota.limit) for name, quota in self._quotas.items() if used[name] > quota.limit]
        self._step = scheduler.step_id
        scheduler.lane.settle()
        denied = {one.request_id for name, quota in self._quotas.items() for one in self._find_denied(name, quota, used)}
        self._denied = {one: self._denied.get(one, 0) + 1 for one in denied}
        self.longest = max(self.longest, *self._denied.values(), 0)

    def _find_denied(self, name: str, quota: Blocks, used: Counter[str]) -> list[Sequence]:
        """Who would stay within the account's guarantee, and does not find the blocks though no limit below it is in the way:
        to decode, or to run. Not who is still on the way out, nor who lacks a slot or is kept by `max_running`, and not behind
        many others or one that was passed over too often."""
        if not quota.guarantee:
            return []
        own = [one for one in self._driver.scheduler.sequences() if name in TENANTS[one.request.tenant]]
        waiting = [one for one in own if one.status is SequenceStatus.WAITING]
        growing = [one for one in own if one.status is SequenceStatus.RUNNING and self._growth(one)]
        lacking = [one for one in growing if self._lacks(name, one, self._growth(one), used)]
        is_open = len(waiting) <= LIMITS.lookahead and all(one.num_skips < LIMITS.max_skips for one in waiting)
        if is_open and self._driver.scheduler.running.has_free_slot:
            may_run = [one for one in waiting if not one.steps_in_flight and not self._is_capped(one)]
            lacking += [one for one in may_run if self._lacks(name, one, self._needs(one), used)]
        return lacking

    def _is_capped(self, one: Sequence) -> bool:
        running = [other.request.tenant for other in self._driver.scheduler.running]
        paths = (one.request.tenant, one.request.tenant.split("/")[0])
        counts = {path: sum(1 for other in running if other == path or other.startswith(f"{path}/")) for path in paths}
        return any(counts[path] >= self._caps.get(path, NEVER) for path in paths)

    def _lacks(self, name: str, one: Sequence, needed: int, used: Counter[str]) -> bool:
        names = TENANTS[one.request.tenant]
        below, above = names[: names.index(name)], names[names.index(name) :]
        if used[name] + needed > self._quotas[name].guarantee or any(self._room(n, used) < needed for n in below):
            return False
        return self._driver.blocks.num_free_blocks < needed or any(self._room(n, used) < needed for n in above)

    def _room(self, name: str, used: Counter[str]) -> int:
        return self._quotas[name].limit - used[name]

    def _needs(self, one: Sequence) -> int:
        blocks = self._driver.blocks
        if one.num_computed_tokens or not one.request.cache_mode.reads:
            return blocks.blocks_for(one.num_tokens)
        one.chain.extend(one.token_ids)
        return blocks.num_blocks_to_allocate(one.num_tokens, blocks.lookup(one.chain, one.num_tokens))

    def _growth(self, one: Sequence) -> int:
        """Blocks for its next token, where it has one to compute and all before that are computed."""
        if one.num_pending_tokens != 1 or not one.is_due:
            return 0
        self._driver.scheduler.lane.update_tables()
        return self._driver.blocks.num_new_blocks(one.request_id, one.num_computed_tokens + 1, one.num_computed_tokens)


def check_outcomes(driver: EngineDriver, asked: list[Request], quotas: list[Quotas], num_blocks: int, *, may_fail: bool) -> None:
    """Whatever was in their way, requests get the tokens they would get alone, or one of the few ends that there are."""
    for one in asked:
        ended = driver.transcripts[one.request_id].ended
        assert ended is not None
        if ended.reason is EndReason.FAILED:
            needed = -(-(len(one.prompt_token_ids) + one.max_tokens - 1) // SIZE)
            most = min(num_blocks, *(q[name].limit for q in quotas for name in TENANTS[one.tenant] if name in q), NEVER)
            known = ended.error_reason == "KV_CAPACITY_EXCEEDED" and needed > most
            assert known or (may_fail and ended.error_reason == "STEP_FAILED")
        elif ended.reason is not EndReason.ABORTED:
            assert driver.transcripts[one.request_id].token_ids == expected_tokens(one)


@pytest.mark.parametrize("depth", [0, 1, 2])
@settings(max_examples=max(100, settings.default.max_examples // 3 + 1))
@given(
    data=st.data(),
    asked=arrivals(),
    aborts=st.dictionaries(st.integers(1, 20), st.floats(0, 0.6), max_size=3),
    fails=st.frozensets(st.integers(2, 60), max_size=1),
    policy=st.sampled_from(TiersPolicy),
    within=st.sampled_from(WithinTier),
    within_tenant=st.sampled_from(WithinTenant),
    plain=st.booleans(),
    num_blocks=st.integers(16, 44),
    budget=st.integers(8, 64),
    max_num_seqs=st.integers(1, 6),
    max_resident=st.integers(2, 12),
    num_host_blocks=st.sampled_from([0, 8, 40]),
    gap_ms=st.sampled_from([None, 20.0]),
    caps=st.dictionaries(st.sampled_from(["a", "a/x", "b/z"]), st.integers(1, 3), max_size=2),
    changes_at_s=st.one_of(st.none(), st.floats(0.02, 0.5)),
)
def test_no_limit_is_exceeded_and_no_guarantee_denied_for_longer_than_two_steps(
    depth: int,
    data: st.DataObject,
    asked: list[Request],
    aborts: dict[int, float],
    fails: frozenset[int],
    policy: TiersPolicy,
    within: WithinTier,
    within_tenant: WithinTenant,
    plain: bool,
    num_blocks: int,
    budget: int,
    max_num_seqs: int,
    max_resident: int,
    num_host_blocks: int,
    gap_ms: float | None,
    caps: dict[str, int],
    changes_at_s: float | None,
) -> None:
    promised = {1: data.draw(quotas(num_blocks))}
    tiers = PLAIN if plain else TIERS
    nodes, groups = shares(promised[1], caps)
    driver = world(
        policy=policy,
        tiers=tiers,
        within=within,
        within_tenant=within_tenant,
        depth=depth,
        num_blocks=num_blocks,
        block_size=SIZE,
        budget=budget,
        max_num_seqs=max_num_seqs,
        max_resident=max_resident,
        num_host_blocks=num_host_blocks,
        min_swap_tokens=9,
        step_time=StepTime(fixed_s=0.01),
        nodes=nodes,
        groups=groups,
        gap_ms=gap_ms,
        fail_steps=fails,
    )
    driver.add_at_arrival(asked)
    if changes_at_s is not None:
        promised[2] = data.draw(quotas(num_blocks))
        nodes, groups = shares(promised[2], caps)
        changed = replace(
            snapshot(policy, tiers, generation=2),
            within_tier=within,
            within_tenant=within_tenant,
            nodes=nodes,
            groups=groups,
            preempt_gap_ms=gap_ms,
        )
        driver.apply(changed, changes_at_s)
    for number, time_s in aborts.items():
        if number <= len(asked):
            driver.at(time_s, Abort(asked[number - 1].request_id))
    watch = Watch(driver, promised, caps)

    watch.run()

    check_outcomes(driver, asked, list(promised.values()), num_blocks, may_fail=bool(fails))
    assert (driver.refusals, watch.above, max(2, watch.longest), driver.blocks.num_used_blocks) == ([], [], 2, 0)
