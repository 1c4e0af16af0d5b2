"""W1 to W7 and W12: made-up clients that put a policy on the spot. Rates are multiples of the workers' estimated capacity, so
that the same name means the same pressure on any worker."""

from __future__ import annotations

from dataclasses import replace

from fairlane.scheduler.simulator.scene import Scene, fixed, poisson, stream, together
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order

TIER = "default"


def _workload(name: str, scene: Scene, requests: list[SimRequest], weights: dict[str, float] | None = None) -> Workload:
    return Workload(name, in_order(requests), (TIER,), scene.duration_s, weights or {})


def overload(scene: Scene) -> Workload:
    """W1: two clients, 256/256 tokens, both beyond their half; the second sends twice as much."""
    rate = scene.rate(256, 256, 1.0)
    first = stream(scene, "pair/a", TIER, rate, fixed(256, 256))
    return _workload("W1", scene, first + stream(scene, "pair/b", TIER, 2 * rate, fixed(256, 256)))


def eight_clients(scene: Scene) -> Workload:
    """W2: eight clients, 256/256 tokens, from half to twice their share times two."""
    rate = scene.rate(256, 256, 1 / 8)
    every = [stream(scene, f"eight/c{k}", TIER, rate * (2 + k % 4), fixed(256, 256)) for k in range(8)]
    return _workload("W2", scene, together(every))


def weighted(scene: Scene) -> Workload:
    """W3: four clients of weights 1:2:3:4, each able to fill everything."""
    weights = {f"weighted/w{k}": float(k) for k in (1, 2, 3, 4)}
    rate = scene.rate(256, 256, 1.0)
    every = [stream(scene, node, TIER, rate, fixed(256, 256)) for node in weights]
    return _workload("W3", scene, together(every), weights)


def on_off(scene: Scene) -> Workload:
    """W4: a steady client beyond its half, and one that sends twice everything for a minute (a quarter, if that is shorter) and
    is silent for as long."""
    rate = scene.rate(256, 256, 1.0)
    period_s = min(60.0, scene.duration_s / 4)
    requests = stream(scene, "onoff/steady", TIER, 0.75 * rate, fixed(256, 256))
    start_s = 0.0
    while start_s < scene.duration_s:
        end_s = min(start_s + period_s, scene.duration_s)
        requests += stream(scene, "onoff/returning", TIER, 2 * rate, fixed(256, 256), start_s, end_s)
        start_s += 2 * period_s
    return _workload("W4", scene, requests)


def short_long(scene: Scene) -> Workload:
    """W5: 64/64 tokens against 256/768, each 1.5 times what fits."""
    short = stream(scene, "lengths/short", TIER, scene.rate(64, 64, 1.5), fixed(64, 64))
    return _workload("W5", scene, short + stream(scene, "lengths/long", TIER, scene.rate(256, 768, 1.5), fixed(256, 768)))


def prefill_decode(scene: Scene) -> Workload:
    """W6: 1500/32 tokens against 32/400, each 1.5 times what fits."""
    prefill = stream(scene, "work/prefill", TIER, scene.rate(1500, 32, 1.5), fixed(1500, 32))
    return _workload("W6", scene, prefill + stream(scene, "work/decode", TIER, scene.rate(32, 400, 1.5), fixed(32, 400)))


def ramp_shift(scene: Scene) -> Workload:
    """W7: a client with half of everything, whose lengths turn from 64/256 to 512/128 half way, and one that ramps up from
    nothing to twice everything."""
    half_s = scene.duration_s / 2
    requests = stream(scene, "shift/steady", TIER, scene.rate(64, 256, 0.5), fixed(64, 256), 0.0, half_s)
    requests += stream(scene, "shift/steady", TIER, scene.rate(512, 128, 0.5), fixed(512, 128), half_s)
    random = scene.random("shift/ramp")
    for at_s in poisson(random, scene.rate(256, 256, 2.0), 0.0, scene.duration_s):
        if random.random() < at_s / scene.duration_s:
            requests.append(SimRequest(at_s, "shift/ramp", TIER, 256, 256))
    return _workload("W7", scene, requests)


def adversaries(scene: Scene) -> Workload:
    """W12: three honest clients and five that try to get more than their share, each asking for everything: 32k contexts, a flood
    of single tokens, requests that are cancelled after half a second, one that saves itself up for the last third, and a
    tenant behind 32 names."""
    honest = [stream(scene, f"honest/h{k}", TIER, scene.rate(512, 256, 1.0), fixed(512, 256)) for k in range(3)]
    hog = stream(scene, "hog/main", TIER, scene.rate(32_000, 512, 1.0), fixed(32_000, 512))
    flood = stream(scene, "flood/main", TIER, min(scene.rate(1, 1, 0.25), 500.0 * scene.num_workers), fixed(1, 1))
    aborts = [
        replace(request, cancel_after_s=0.5)
        for request in stream(scene, "aborts/main", TIER, scene.rate(512, 1024, 2.0), fixed(512, 1024))
    ]
    hoard = stream(scene, "hoard/main", TIER, scene.rate(512, 256, 2.0), fixed(512, 256), scene.duration_s * 2 / 3)
    names = [stream(scene, f"names/main/m{k}", TIER, scene.rate(512, 256, 1 / 32), fixed(512, 256)) for k in range(32)]
    return _workload("W12", scene, together(honest) + hog + flood + aborts + hoard + together(names))
