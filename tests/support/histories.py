"""Random histories for the hard properties: tenants, weights, arrivals, lengths, cancels, KV size, limits, depth, policy. A
history is drawn value by value, so that a failing one shrinks to a few requests."""

from __future__ import annotations

import os
import time
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from engine_world import expected_tokens, request, world
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.engine import Abort
from fairlane.scheduler.request import CacheMode, Request
from fairlane.scheduler.tenancy import NodeShare, Shaping, Tier, TiersPolicy, WithinTier

TENANTS = ("a/x", "a/y", "b/x", "b/y/m", "b/y/n")
PREFIX = tuple(range(900, 940))

# A hard property is looked for in more histories than hypothesis draws otherwise, or in as many as the profile says.
many = settings(max_examples=max(200, settings.default.max_examples))


class History:
    """What arrives, who gives up and when (by request number), and the world it happens in (engine_world.world's arguments)."""

    def __init__(self, asked: list[Request], cancels: dict[int, float], options: dict[str, Any]) -> None:
        self.asked = asked
        self.cancels = cancels
        self.options = options

    def __repr__(self) -> str:
        """A line per request, or a failure could not be read."""
        lines = [
            f"{one.request_id}: {one.tenant} {one.tier} {len(one.prompt_token_ids)}+{one.max_tokens} at {one.arrival_s:g}"
            f"{' order' * one.order}{' stops' * bool(one.stop_token_ids)}{' shares' * one.cache_mode.reads}"
            for one in self.asked
        ]
        shown = {name: value for name, value in self.options.items() if name not in ("tiers", "nodes")}
        tiers = [f"{t.name}={t.priority}/{t.weight:g}/{t.min_share:g}/{t.patience_s}/{t.shaping}" for t in self.options["tiers"]]
        nodes = [
            f"{n.path}={n.weight:g}/{n.max_running}/{n.member_weight:g}/{n.member_max_running}" for n in self.options["nodes"]
        ]
        return "\n".join([*lines, f"cancels {self.cancels}", f"{shown}", ", ".join(tiers), ", ".join(nodes)])

    def start(self, **more: Any) -> EngineDriver:
        """The engine, its policy in force, with everything in its diary."""
        driver = world(**({"check": False} | self.options | more))
        driver.turn()
        driver.add_at_arrival(self.asked)
        for number, time_s in self.cancels.items():
            if number <= len(self.asked):
                driver.at(time_s, Abort(self.asked[number - 1].request_id))
        return driver


class _Progress:
    """Tells, in the long target, how many histories have been run."""

    def __init__(self) -> None:
        self._shown = os.environ.get("HYPOTHESIS_PROFILE") == "long"
        self._runs = 0
        self._since_s = time.monotonic()

    def ran(self) -> None:
        self._runs += 1
        if self._shown and self._runs % 1000 == 0:
            print(f"\n  {self._runs} histories in {time.monotonic() - self._since_s:.0f} s ", end="", flush=True)


_progress = _Progress()


def run(driver: EngineDriver) -> None:
    """To the end."""
    driver.run_until_idle(20_000)
    _progress.ran()


@st.composite
def requests(
    draw: st.DrawFn,
    tiers: tuple[Tier, ...],
    *,
    tenants: tuple[str, ...] = TENANTS,
    most: int = 16,
    prompts: int = 60,
    outputs: int = 40,
    prefixes: bool = True,
) -> list[Request]:
    """Half of them at the start; some share a prefix, some stop before their max_tokens."""
    asked = []
    for number in range(1, draw(st.integers(1, most)) + 1):
        length, max_tokens = draw(st.integers(1, prompts)), draw(st.integers(1, outputs))
        prefix = PREFIX if prefixes and draw(st.booleans()) else ()
        one = request(
            number,
            draw(st.sampled_from(tiers)).name,
            prompt=prefix + tuple((number * 7919 + 31 * i) % 50_000 for i in range(length)),
            max_tokens=max_tokens,
            arrival_s=draw(st.one_of(st.just(0.0), st.floats(0, 0.4))),
            tenant=draw(st.sampled_from(tenants)),
            order=draw(st.sampled_from([0, 0, 0, 1])),
            cache_mode=CacheMode.READ_WRITE if prefix else CacheMode.NONE,
        )
        asked.append(_stopping(one, draw(st.integers(1, outputs))) if draw(st.booleans()) else one)
    return asked


def _stopping(one: Request, after: int) -> Request:
    """The same, ended by the token that it would get as number `after`."""
    tokens = expected_tokens(one)
    if after >= len(tokens):
        return one
    return request(
        int(one.request_id), one.tier, prompt=one.prompt_token_ids, max_tokens=one.max_tokens, arrival_s=one.arrival_s,
        tenant=one.tenant, order=one.order, cache_mode=one.cache_mode, stop=[tokens[after - 1]],
    )  # fmt: skip


cancels = st.dictionaries(st.integers(1, 16), st.floats(0, 0.8), max_size=4)


@st.composite
def shares(draw: st.DrawFn, *, caps: bool) -> tuple[NodeShare, ...]:
    """Weights of the organisations and tenants, members by template; caps: some have a max_running."""
    weight = st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0])
    cap = st.sampled_from([None, None, 1, 2, 3]) if caps else st.none()
    return tuple(
        NodeShare(path, draw(weight), 0.0, draw(cap), draw(weight), draw(cap)) for path in ("a", "b", "a/x", "a/y", "b/x", "b/y")
    )


@st.composite
def machines(draw: st.DrawFn, *, least_blocks: int = 18, most_blocks: int = 60) -> dict[str, Any]:
    """Limits of the worker. Every request of requests() fits into the smallest pool."""
    seats = draw(st.integers(1, 6))
    return {
        "depth": draw(st.sampled_from([0, 1, 2])),
        "block_size": 8,
        "num_blocks": draw(st.integers(least_blocks, most_blocks)),
        "max_num_seqs": seats,
        "max_resident": draw(st.integers(1, 8)),
        "budget": draw(st.integers(seats, 64)),
        "max_prefill_chunk": draw(st.sampled_from([0, 5, 16])),
        "num_host_blocks": draw(st.sampled_from([0, 0, 20])),
    }


@st.composite
def tiers(draw: st.DrawFn, *, shaping: bool = True, lifts: bool = True) -> tuple[Tier, ...]:
    """Three, two of them of one band at times. lifts: patience and minimum shares may bring lower ones forward."""
    shapings = st.sampled_from([Shaping.OFF, *Shaping]) if shaping else st.just(Shaping.OFF)
    patience = st.sampled_from([None, 0.05, 0.3]) if lifts else st.none()
    least = st.sampled_from([0.0, 0.0, 0.1]) if lifts else st.just(0.0)
    return (
        Tier("gold", 100, shaping=draw(shapings)),
        Tier("standard", draw(st.sampled_from([50, 100])), 2.0, draw(least), draw(patience), draw(shapings)),
        Tier("batch", 10, 1.0, draw(least), draw(patience)),
    )


@st.composite
def histories(
    draw: st.DrawFn, *, policies: tuple[TiersPolicy, ...] = tuple(TiersPolicy), shaping: bool = True, lifts: bool = True
) -> History:
    """Anything at all: small pools, caps, cancels, swaps."""
    known = draw(tiers(shaping=shaping, lifts=lifts))
    options = draw(machines()) | {
        "tiers": known,
        "policy": draw(st.sampled_from(policies)),
        "within": draw(st.sampled_from(WithinTier)),
        "nodes": draw(shares(caps=True)),
        "gap_ms": draw(st.sampled_from([None, 5.0])),
    }
    return History(draw(requests(known)), draw(cancels), options)
