"""Policies that others write: found by entry point, put to the test by the conformance check, and replaced in the same step when
they raise or answer nonsense, with every request served to its last token whatever they did."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from math import nan
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from engine_world import BATCH, GOLD, STANDARD, expected_tokens, request, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.policies import FairPolicy, FCFSPolicy, VIPPolicy
from fairlane.scheduler.policies.base import Policy, StepPlan
from fairlane.scheduler.policies.conformance import ConformanceError, check_policy
from fairlane.scheduler.policies.guard import SLOW_S, GuardedPolicy
from fairlane.scheduler.policies.ordered import OrderedPolicy
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.tenancy import NodeShare, PolicySnapshot, TiersPolicy, WithinTenant, WithinTier

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_policy.py"
# All that a policy of somebody else's is asked: who is next it says with peek() alone.
HOOKS = sorted({name for name, value in vars(Policy).items() if callable(value) and not name.startswith("_")} - {"rivals"})


class ByArrival(OrderedPolicy):
    name = "by-arrival"

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return ()

    def may_preempt(self, candidate: Sequence, victim: Sequence) -> bool:
        return self.priority(candidate) > self.priority(victim)


# -- what ships ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [FCFSPolicy, VIPPolicy, FairPolicy, ByArrival])
def test_every_shipped_policy_keeps_the_rules(make: Callable[[PolicySnapshot], Policy]) -> None:
    check_policy(make, histories=25)


@pytest.mark.parametrize("policy", [VIPPolicy, FairPolicy])
def test_they_keep_them_with_fair_shares_and_deadlines(policy: Callable[[PolicySnapshot], Policy]) -> None:
    def make(snapshot: PolicySnapshot) -> Policy:
        tiers = tuple(replace(tier, ttft_target_s=0.1, tpot_target_s=0.02) for tier in snapshot.tiers)
        changes: dict[str, Any] = {"within_tier": WithinTier.FAIR, "within_tenant": WithinTenant.DEADLINE, "preempt_gap_ms": 20.0}
        return policy(replace(snapshot, tiers=tiers, **changes))

    check_policy(make, histories=25, seed=1)


def test_the_example_keeps_the_rules_and_serves_the_shortest_prompt_first() -> None:
    make = runpy.run_path(str(EXAMPLE))["ShortestPromptFirst"]
    check_policy(make, histories=25)
    driver = with_policy(make, max_num_seqs=1, max_resident=1)
    prompts = {1: 40, 2: 9, 3: 30, 4: 12}
    for number, prompt in prompts.items():
        driver.add(request(number, "batch", prompt=prompt, max_tokens=2))
    driver.run_until_idle()
    order = sorted(prompts, key=lambda number: driver.transcripts[request(number).request_id].first_token_s or 0.0)
    assert order == [2, 4, 3, 1]


# -- the check -------------------------------------------------------------------------------------------------------------


class Forgetful(ByArrival):
    """Loses every fifth request."""

    def push(self, sequence: Sequence, since_s: float) -> None:
        super().push(sequence, since_s)
        if sequence.request_id % 5 == 0:
            self._heap = [entry for entry in self._heap if entry[2] is not sequence]


class CaplessByArrival(ByArrival):
    def __init__(self, snapshot: PolicySnapshot) -> None:
        super().__init__(replace(snapshot, nodes=()))


class Stubborn(ByArrival):
    """Offers again what was set aside."""

    def skip(self, sequence: Sequence) -> None:
        return None


class Elsewhere(ByArrival):
    """Names the first of all for any node."""

    def peek_below(self, path: str) -> Sequence | None:
        return self.peek()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (Elsewhere, "peek_below answered Sequence"),
        (Forgetful, "peek answered None"),
        (CaplessByArrival, "max_running"),
        (Stubborn, "peek answered Sequence"),
    ],
)
def test_the_check_finds_a_policy_that_breaks_a_rule(make: Callable[[PolicySnapshot], Policy], says: str) -> None:
    with pytest.raises(ConformanceError, match=says):
        check_policy(make)


# -- at the worker ---------------------------------------------------------------------------------------------------------


def with_policy(make: Callable[[PolicySnapshot], Policy], **options: Any) -> EngineDriver:
    """A world whose policy is made by an entry point called `theirs`."""
    driver = world(**options)
    driver.turn()
    assert driver.engine._snapshot is not None
    theirs = replace(driver.engine._snapshot, generation=2, sha256="2" * 64, plugin="theirs")
    point = EntryPoint("theirs", "nowhere:made", "fairlane.policies")
    with (
        patch("fairlane.scheduler.policies.plugins.entry_points", return_value=EntryPoints([point])),
        patch.object(EntryPoint, "load", lambda self: make),
    ):
        driver.apply(theirs)
        driver.turn()
    return driver


def busy(driver: EngineDriver) -> dict[int, list[int]]:
    """Twelve requests of three tiers that come while others run; returns what each must get."""
    asked = [
        request(number, tier, prompt=10 + 5 * number, max_tokens=12, arrival_s=0.02 * number, tenant=f"a/{number % 2}")
        for number, tier in zip(range(1, 13), ["batch", "standard", "gold"] * 4, strict=True)
    ]
    driver.add_at_arrival(asked)
    return {one.request_id: expected_tokens(one) for one in asked}


def raising(hook: str, at_call: int) -> Callable[[PolicySnapshot], Policy]:
    def make(snapshot: PolicySnapshot) -> Policy:
        policy, calls = ByArrival(snapshot), 0
        inner = getattr(policy, hook)

        def fails(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= at_call:
                raise ZeroDivisionError("of the policy's own")
            return inner(*arguments)

        setattr(policy, hook, fails)
        return policy

    return make


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("at_call", [1, 4])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_policy_that_raises_at_any_hook_is_replaced_and_nobody_is_lost(hook: str, at_call: int, depth: int) -> None:
    nodes = (NodeShare("a/1", max_running=2),)
    driver = with_policy(
        raising(hook, at_call), tiers=(GOLD, STANDARD, BATCH), num_blocks=14, max_num_seqs=4, depth=depth, nodes=nodes
    )
    expected = busy(driver)
    driver.run_until_idle(20_000)
    got = {number: driver.transcripts[number].token_ids for number in expected}  # type: ignore[index]
    policy = driver.scheduler.policy
    assert isinstance(policy, GuardedPolicy)
    # Not every hook is called so often here, and one may call another; but a policy that raised is gone.
    assert got == expected and policy.fault.endswith("raised ZeroDivisionError: of the policy's own") == bool(policy.fault)
    assert driver.scheduler.stats().policy_fault == policy.fault
    assert (policy.fault == "") == (policy.name == "by-arrival")
    driver.scheduler.check_integrity()


class Nonsense(ByArrival):
    """answer: what the hook gives from its third call on."""

    def __init__(self, snapshot: PolicySnapshot, hook: str, answer: Any) -> None:
        super().__init__(snapshot)
        self._calls = 0
        inner = getattr(self, hook)

        def answers(*arguments: Any) -> Any:
            self._calls += 1
            given = inner(*arguments)
            if self._calls < 3:
                return given
            return answer(self, *arguments) if callable(answer) else answer

        setattr(self, hook, answers)


def foreign(policy: Nonsense) -> Sequence:
    return Sequence(request(99, "batch"), 99, None)  # type: ignore[arg-type]


def mutates(policy: Nonsense, sequence: Sequence) -> tuple[float, ...]:
    sequence.num_computed_tokens += 7
    return (1.0,)


@pytest.mark.parametrize(
    ("hook", "answer", "says"),
    [
        ("rank", nan, "rank answered nan"),
        ("rank", (nan,), r"rank answered \(nan,\)"),
        ("rank", ("first",), "rank answered"),
        ("rank", mutates, "rank changed a sequence"),
        ("peek", foreign, "peek answered Sequence"),
        ("peek", "somebody", "peek answered 'somebody'"),
        ("plan", None, "plan answered None"),
        ("plan", StepPlan(0), "plan answered"),
        ("plan", StepPlan(10**9), "plan answered"),
        ("num_waiting", -1, "num_waiting answered -1"),
        ("next_change_s", nan, "next_change_s answered nan"),
        ("may_preempt", "yes", "may_preempt answered 'yes'"),
        ("position", -3, "position answered -3"),
    ],
)
def test_an_answer_that_cannot_be_right_is_not_taken(hook: str, answer: Any, says: str, caplog: pytest.LogCaptureFixture) -> None:
    driver = with_policy(lambda snapshot: Nonsense(snapshot, hook, answer), num_blocks=14, max_num_seqs=4)
    expected = busy(driver)
    driver.run_until_idle(20_000)
    got = {number: driver.transcripts[number].token_ids for number in expected}  # type: ignore[index]
    assert got == expected
    assert [record.levelname for record in caplog.records if "is replaced by fcfs" in record.message] == ["ERROR"]
    policy = driver.scheduler.policy
    assert isinstance(policy, GuardedPolicy)
    assert re.match(says, policy.fault), policy.fault


def test_a_policy_that_takes_long_is_replaced() -> None:
    times = iter([0.0, SLOW_S / 2, 10.0, 10.0 + 2 * SLOW_S])
    snapshot = PolicySnapshot(1, "0" * 64, TiersPolicy.VIP, (BATCH,))
    policy = GuardedPolicy(ByArrival(snapshot), snapshot, timer=lambda: next(times))
    policy.begin_step(0.0)
    quick = policy.fault
    policy.begin_step(1.0)
    assert (quick, policy.fault) == ("", f"begin_step took longer than {SLOW_S:g} s")


def test_what_a_policy_is_shown_of_the_batch_is_not_the_engines_own() -> None:
    class Greedy(ByArrival):
        def plan(self, view: Any) -> StepPlan:
            view.running["gold"] = 1000
            return StepPlan(view.token_budget)

    driver = with_policy(Greedy, num_blocks=14)
    expected = busy(driver)
    driver.run_until_idle(20_000)
    assert {number: driver.transcripts[number].token_ids for number in expected} == expected  # type: ignore[index]
    assert driver.scheduler.stats().policy_fault.startswith("plan raised TypeError")


def test_a_policy_that_is_not_installed_or_cannot_be_made_is_refused_and_the_one_before_stays() -> None:
    driver = world()
    driver.turn()
    before = driver.scheduler.policy
    assert driver.engine._snapshot is not None
    driver.apply(replace(driver.engine._snapshot, generation=2, sha256="2" * 64, plugin="nobodys"))
    driver.turn()

    def broken(snapshot: PolicySnapshot) -> Policy:
        raise KeyError("no such tier")

    refused = with_policy(broken)
    assert driver.refusals == ["no policy 'nobodys' is installed at the worker (fairlane.policies); installed: none"]
    assert refused.refusals == ["policy 'theirs' cannot be made: KeyError: 'no such tier'"]
    assert (driver.scheduler.policy is before, refused.scheduler.policy.name) == (True, "vip")
