"""A counter charged by rate is the counter charged piece by piece, in both ledgers and for contexts that grow."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.scheduler.cost import Ledger, Rate
from fairlane.scheduler.policies.node import Node, SteadyCost


@settings(max_examples=300, deadline=None)
@given(
    weight=st.sampled_from([0.5, 1.0, 3.0]),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["more", "fewer", "step", "charge", "read", "lift"]), st.integers(1, 40), st.sampled_from(Ledger)
        ),
        max_size=60,
    ),
)
def test_a_rate_adds_up_to_the_same_counter(weight: float, actions: list[tuple[str, int, Ledger]]) -> None:
    steady = SteadyCost()
    node = Node("n", "n", None, weight, 1, steady)
    used, lifted = [0, 0], 0.0
    contexts: list[int] = []
    step = 0

    def expected() -> float:
        return lifted + max(used) / weight

    for action, amount, ledger in actions:
        if action == "more":
            node.decode(1, amount - step)
            contexts.append(amount)
        elif action == "fewer" and contexts:
            node.decode(-1, step - contexts.pop())
        elif action == "step":
            rate = Rate(20, amount)
            steady.charge(Rate(rate.of(step), rate.per_token), ledger)
            used[ledger] += sum(rate.of(context) for context in contexts)
            contexts = [context + 1 for context in contexts]
            step += 1
        elif action == "charge":
            node.charge(amount, ledger, 0)
            used[ledger] += amount
        elif action == "lift":
            node.lift(float(amount))
            lifted += max(0.0, amount - expected())
        else:
            assert node.v == pytest.approx(expected())
    assert node.v == pytest.approx(expected())
