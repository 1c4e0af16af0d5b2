"""A counter charged by rate is the counter charged piece by piece."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.scheduler.policies.node import Node, SteadyCost


@settings(max_examples=200, deadline=None)
@given(
    weight=st.sampled_from([0.5, 1.0, 3.0]),
    actions=st.lists(
        st.tuples(st.sampled_from(["more", "fewer", "step", "charge", "read", "lift"]), st.integers(1, 40)), max_size=60
    ),
)
def test_a_rate_adds_up_to_the_same_counter(weight: float, actions: list[tuple[str, int]]) -> None:
    steady = SteadyCost()
    node = Node("n", "n", None, weight, 1, steady)
    expected, decoding = 0.0, 0
    for action, amount in actions:
        if action == "more":
            node.decode(amount)
            decoding += amount
        elif action == "fewer":
            gone = min(amount, decoding)
            node.decode(-gone)
            decoding -= gone
        elif action == "step":
            steady.units += 20
            expected += decoding * 20 / weight
        elif action == "charge":
            node.v += amount / weight
            expected += amount / weight
        elif action == "lift":
            node.v = max(node.v, float(amount))
            expected = max(expected, float(amount))
        else:
            assert node.v == pytest.approx(expected)
    assert node.v == pytest.approx(expected)
