"""`ceil`: in every stretch of time a tier or node takes at most its ceil of it, 0.4 s of its ceil, and what it takes of one step
for every step that is out at a time; whatever the policy, the tree, KV quotas, evictions, swaps, cancels and failing steps. And
everybody gets all their tokens all the same, in a bounded number of turns, and loses blocks three times at most for rank or a
ceil."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import expected_tokens
from fairlane.scheduler.events import EndReason
from fairlane.scheduler.fake_executor import StepTime
from fairlane.scheduler.tenancy import KVAmount
from histories import History, histories, run
from step_times import StepTimes, Taken, most_above
from step_watch import StepWatch

GUARANTEES = st.sampled_from([None, KVAmount(share=0.3)])
LIMITS = st.sampled_from([None, KVAmount(share=0.7), KVAmount(share=1.0)])
BURST_S = 0.4
SHARES = st.sampled_from([None, None, 0.02, 0.1, 0.35, 0.8, 1.0])


@st.composite
def capped(draw: st.DrawFn) -> tuple[History, dict[str, Any]]:
    """Steps are long, so that ceilings bind in a few of them."""
    history = draw(histories())
    options = history.options
    options["tiers"] = tuple(replace(tier, ceil=draw(SHARES)) for tier in options["tiers"])
    nodes = [replace(node, ceil=draw(SHARES)) for node in options["nodes"]]
    if draw(st.booleans()):
        nodes = [
            replace(node, kv_limit=draw(LIMITS)) if "/" in node.path else replace(node, kv_guarantee=draw(GUARANTEES))
            for node in nodes
        ]
    options["nodes"] = tuple(nodes)
    fixed_s = draw(st.sampled_from([0.01, 0.06, 0.7]))
    return history, {"step_time": StepTime(fixed_s=fixed_s), "fail_steps": draw(st.frozensets(st.integers(2, 60), max_size=1))}


def over(taken: list[Taken], share: float, depth: int) -> float:
    """What is taken above the bound, in seconds."""
    bound = share * BURST_S + (1 + depth) * max((seconds for _, seconds in taken), default=0.0)
    return most_above(taken, share) - bound


@settings(max_examples=max(300, settings.default.max_examples))
@given(drawn=capped())
def test_nobody_takes_more_of_any_stretch_of_time_than_its_ceil_and_everybody_is_served(
    drawn: tuple[History, dict[str, Any]],
) -> None:
    history, more = drawn
    driver = history.start(check=True, **more)
    times = StepTimes(driver)
    most_evicted: list[int] = []
    StepWatch(driver, lambda step: most_evicted.append(max(one.num_evictions for one in (*step.running, *step.waiting))))
    run(driver)
    depth = history.options["depth"]
    found = [over(times.of_tier(tier.name), tier.ceil, depth) for tier in history.options["tiers"] if tier.ceil]
    found += [over(times.of_node(node.path), node.ceil, depth) for node in history.options["nodes"] if node.ceil]
    unserved = []
    for one in history.asked:
        transcript = driver.transcripts[one.request_id]
        whole = expected_tokens(one)
        cut = transcript.ended is None or transcript.ended.reason in (EndReason.ABORTED, EndReason.FAILED)
        if transcript.ended is None or transcript.token_ids != (whole[: len(transcript.token_ids)] if cut else whole):
            unserved.append(one.request_id)
    above = [excess for excess in found if excess > 1e-9]
    assert (above, unserved, max(most_evicted, default=0) <= 3) == ([], [], True)
