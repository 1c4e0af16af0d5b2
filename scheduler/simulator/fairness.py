"""Was it fair: who was entitled to what, and by how much they missed it. Service as VTC has it: a prompt token 1, an output
token 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def jain(values: Sequence[float]) -> float:
    """Jain's index: 1 when all are equal, 1/n when one has everything; 1 for nothing at all."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def relative_weights(nodes: Sequence[str], weights: Mapping[str, float]) -> dict[str, float]:
    """Each sender's part of everything (they sum to 1), when all are busy: at every level of the tree by weight among siblings
    that send or have senders below. weights: by path; a node without one has 1."""
    parts = dict[str, float]()

    def divide(prefix: str, part: float, below: Sequence[str]) -> None:
        heads: dict[str, list[str]] = {}
        for node in below:
            rest = node[len(prefix) :]
            heads.setdefault(prefix + rest.partition("/")[0], []).append(node)
        total = sum(weights.get(head, 1.0) for head in heads)
        for head, members in heads.items():
            own = part * weights.get(head, 1.0) / total
            if members == [head]:
                parts[head] = own
            elif head in members:  # a tenant's own requests beside its members': siblings of weight 1
                others = [node for node in members if node != head]
                parts[head] = own / (1 + len(others))
                divide(head + "/", own - parts[head], others)
            else:
                divide(head + "/", own, members)

    divide("", 1.0, nodes)
    return parts


def entitled(demand: Mapping[str, float], weights: Mapping[str, float], total: float) -> dict[str, float]:
    """Weighted max-min: `total` by weight, but to nobody more than its demand; what one leaves goes to the others."""
    given = dict.fromkeys(demand, 0.0)
    hungry = {node for node in demand if demand[node] > 0}
    left = min(total, sum(demand.values()))
    while hungry and left > 1e-9:
        level = left / sum(weights[node] for node in hungry)
        full = {node for node in hungry if demand[node] - given[node] <= level * weights[node]}
        for node in full or hungry:
            part = demand[node] - given[node] if full else level * weights[node]
            given[node] += part
            left -= part
        if not full:
            break
        hungry -= full
    return given


@dataclass(frozen=True, slots=True)
class Window:
    """What everybody got and asked for in one window of window_s."""

    window_s: float
    service: Mapping[str, float]
    demand: Mapping[str, float]


def service_differences(windows: Sequence[Window], weights: Mapping[str, float]) -> list[float]:
    """VTC's measure, by window, in units of service a second: how far everybody is behind the one that got most for its weight,
    or behind what it asked for, if that is less."""
    found = []
    for window in windows:
        nodes = window.demand.keys() | window.service.keys()
        served = {node: window.service.get(node, 0.0) / weights[node] for node in nodes}
        most = max(served.values(), default=0.0)
        behind = (min(most - served[node], abs(window.demand.get(node, 0.0) / weights[node] - served[node])) for node in nodes)
        found.append(sum(behind) / window.window_s)
    return found


def interval_gap(first: Sequence[float], second: Sequence[float]) -> float:
    """Largest difference between what two got in any interval, from what they had got (over weight) at the same moments."""
    lead = [one - other for one, other in zip(first, second, strict=True)]
    return max(lead, default=0.0) - min(lead, default=0.0)
