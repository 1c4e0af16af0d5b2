"""H5, tenants beside each other on one worker: who sends what when, and the policies under which it is served. Workload 1 of each
has the arrivals that the peers' figures were measured with (peers_h200.json); the others differ in chance only.

    alone      40 VIP requests of 512 / 64 tokens, 2 a second in the mean
    overload   the same beside 300 best-effort requests of 800 / 400 tokens, all there from the start
    flood      one of four equal tenants sends those 300, the others 25 requests of 512 / 64 each, 1 a second in the mean
    shares     four tenants of weights 1 to 4, each 200 or more requests of 256 / 256, all there from the start
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from fairlane.bench.calls import Call
from fairlane.gateway.policy.loader import load_policy_text
from fairlane.simulate.policies import Candidate

VIP, CROWD, FLOOD = "shop/vip", "shop/batch", "shop/flood"
LIGHT = tuple(f"shop/light{number}" for number in range(3))
WEIGHTS = {f"shop/w{weight}": weight for weight in (1, 2, 3, 4)}
GOLD, STANDARD, BATCH = "gold", "standard", "batch"
SMALL, LARGE, EVEN = (512, 64), (800, 400), (256, 256)  # prompt and output tokens
NUM_VIPS, NUM_CROWD, NUM_LIGHT = 40, 300, 25
VIPS_PER_S, LIGHT_PER_S = 2.0, 1.0
FIRST_VIP_S, FIRST_LIGHT_S = 2.0, 1.0
_APART = 1000  # of the seeds of workloads 1, 2, ...


@dataclass(frozen=True, slots=True)
class Workload:
    """Calls in order of arrival."""

    name: str
    number: int
    calls: tuple[Call, ...]

    def scaled(self, scale: float) -> Workload:
        """Fewer and shorter requests, as often as before, for a machine that could not serve the whole; at least 2 of a node."""
        if scale == 1:
            return self
        kept: list[Call] = []
        for node in dict.fromkeys(call.node for call in self.calls):
            own = [call for call in self.calls if call.node == node]
            kept += own[: max(2, round(len(own) * scale))]
        shorter = (replace(c, prompt=max(1, round(c.prompt * scale)), output=max(2, round(c.output * scale))) for c in kept)
        return replace(self, calls=_in_order(shorter))


def _arrivals(seed: int, count: int, first_s: float, per_s: float) -> Iterator[float]:
    rng, at_s = random.Random(seed), first_s
    for _ in range(count):
        yield round(at_s, 6)
        at_s += rng.expovariate(per_s)


def _in_order(calls: Iterable[Call]) -> tuple[Call, ...]:
    return tuple(sorted(calls, key=lambda call: call.arrival_s))


def _vips(number: int) -> Iterator[Call]:
    for at_s in _arrivals(5 + _APART * (number - 1), NUM_VIPS, FIRST_VIP_S, VIPS_PER_S):
        yield Call(VIP, GOLD, at_s, *SMALL)


def alone(number: int) -> Workload:
    return Workload("alone", number, _in_order(_vips(number)))


def overload(number: int) -> Workload:
    crowd = (Call(CROWD, BATCH, 0.0, *LARGE) for _ in range(NUM_CROWD))
    return Workload("overload", number, (*crowd, *_vips(number)))


def flood(number: int) -> Workload:
    def calls() -> Iterator[Call]:
        yield from (Call(FLOOD, STANDARD, 0.0, *LARGE) for _ in range(NUM_CROWD))
        for place, node in enumerate(LIGHT):
            for at_s in _arrivals(70 + place + _APART * (number - 1), NUM_LIGHT, FIRST_LIGHT_S, LIGHT_PER_S):
                yield Call(node, STANDARD, at_s, *SMALL)

    return Workload("flood", number, _in_order(calls()))


def shares(each: int) -> Workload:
    """`each` requests of each tenant; they go round, so that FCFS would serve them evenly."""
    return Workload("shares", 1, tuple(Call(node, STANDARD, 0.0, *EVEN) for _ in range(each) for node in WEIGHTS))


# -- policies ----------------------------------------------------------------------------------------------------------------

_FILE = """version: 1
scheduler: {scheduler}
tiers:
{tiers}
organisations: {{shop: {{tenants: {{{tenants}}}}}}}
"""
_BANDS = """  gold: {{priority: 100{gold}}}
  standard: {{priority: 50}}
  batch: {{priority: 10}}"""
TARGETS = ", ttft_target: 80ms, tpot_target: 7ms"


def _file(scheduler: str, tiers: str, senders: Mapping[str, str]) -> str:
    """senders: what stands at each tenant."""
    tenants = ", ".join(f"{node.partition('/')[2]}: {{{keys}}}" for node, keys in senders.items())
    return _FILE.format(scheduler=scheduler, tiers=tiers, tenants=tenants)


_BESIDE = {VIP: "tiers: [gold]", CROWD: "tiers: [batch]"}
_EQUAL = dict.fromkeys((FLOOD, *LIGHT), "tiers: [standard]")
_WEIGHTED = {node: f"tiers: [standard], weight: {weight}" for node, weight in WEIGHTS.items()}
_FAIR = "{tiers: fair, cost: tokens, preempt_gap_ms: 50}"

# By name: policy files, as an operator would write them. vip-*: the shapings; targets beside them are what steps are bounded by.
POLICIES = {
    "fcfs": _file("{tiers: fcfs}", _BANDS.format(gold=""), _BESIDE),
    "vip-off": _file("{tiers: vip}", _BANDS.format(gold=""), _BESIDE),
    **{
        f"vip-{shaping}{name}": _file("{tiers: vip}", _BANDS.format(gold=f", shaping: {shaping}{targets}"), _BESIDE)
        for shaping in ("gentle", "balanced", "strict")
        for name, targets in (("", TARGETS), ("-no-targets", ""))
    },
    "flood-fcfs": _file("{tiers: fcfs}", "  standard: {priority: 50}", _EQUAL),
    "flood-fair": _file(_FAIR, "  standard: {priority: 50, ttft_target: 300ms}", _EQUAL),
    "shares-fair": _file("{tiers: fair, cost: tokens, predict_output: true}", "  standard: {priority: 50}", _WEIGHTED),
}


def candidate(name: str) -> Candidate:
    """The policy of that name. Raises KeyError."""
    return Candidate(name, load_policy_text(POLICIES[name].encode(), f"{name}.yaml"))
