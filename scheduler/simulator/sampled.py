"""W8 to W11: workloads out of traces, by default the samples that come along."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from fairlane.scheduler.simulator.scene import Scene, stream, together
from fairlane.scheduler.simulator.servegen import draw_client, read_clients
from fairlane.scheduler.simulator.trace_files import lines
from fairlane.scheduler.simulator.traces import SAMPLES, load_trace
from fairlane.scheduler.simulator.workload import SimRequest, Workload, in_order

VIP, STANDARD, BEST_EFFORT = "vip", "standard", "best_effort"
W10_TENANTS = 1000


def _mean(requests: tuple[SimRequest, ...] | list[SimRequest]) -> tuple[float, float]:
    count = len(requests)
    return sum(r.prompt_tokens for r in requests) / count, sum(r.output_tokens for r in requests) / count


def _sized(scene: Scene, workload: Workload, load: float, name: str) -> Workload:
    """Played at the speed at which it asks for `load` times the workers' capacity, over and over if it is too short. Each seed
    begins at another place of the trace, 0 at its beginning."""
    rate = scene.rate(*_mean(workload.requests), load)
    stretch = len(workload.requests) / workload.duration_s / rate
    turn_s = scene.random(name).uniform(0, workload.duration_s) if scene.seed else 0.0
    turned = in_order([replace(r, arrival_s=(r.arrival_s - turn_s) % workload.duration_s) for r in workload.requests])
    requests: list[SimRequest] = []
    start_s = 0.0
    while start_s < scene.duration_s:
        requests += [replace(r, arrival_s=start_s + r.arrival_s * stretch) for r in turned]
        start_s += workload.duration_s * stretch
    return replace(workload, name=name, requests=in_order(requests)).first(scene.duration_s)


def arena(scene: Scene, path: Path = SAMPLES / "arena.csv.gz") -> Workload:
    """W8: the 27 clients of the Arena log, together 1.3 times what fits."""
    return _sized(scene, load_trace(path, scene.seed), 1.3, "W8")


def vip_overload(scene: Scene, path: Path = SAMPLES / "azure_conv.csv.gz") -> Workload:
    """W9: VIPs that ask for a fifth of capacity, best effort that asks for ten times all of it; lengths of Azure's chats."""
    pairs = [(r.prompt_tokens, r.output_tokens) for r in load_trace(path, scene.seed).requests]
    mean = sum(p for p, _ in pairs) / len(pairs), sum(o for _, o in pairs) / len(pairs)

    def length(random: Random) -> tuple[int, int]:
        return random.choice(pairs)

    vips = stream(scene, "vip/main", VIP, scene.rate(*mean, 0.2), length)
    crowd = together(stream(scene, f"crowd/c{k}", BEST_EFFORT, scene.rate(*mean, 10 / 4), length) for k in range(4))
    return Workload("W9", in_order(vips + crowd), (VIP, BEST_EFFORT), scene.duration_s)


def many_tenants(scene: Scene, path: Path = SAMPLES / "servegen_rates.csv.gz") -> Workload:
    """W10: a thousand tenants, each drawn like one of ServeGen's clients, together 1.3 times what fits. The first 2 % are
    VIPs, the next 18 % standard, the rest best effort."""
    clients = read_clients(path, lines(path))
    random = scene.random("W10")
    rates = {name: clients.mean_rate(name, scene.duration_s) for name in sorted(clients.windows)}
    names = [name for name, rate in rates.items() if rate]
    picked = [random.choice(names) for _ in range(W10_TENANTS)]
    total = sum(rates[name] for name in picked)
    drawn = random.choices(picked, [rates[name] for name in picked], k=500)  # what an average request is like
    lengths = [[quantiles.draw(random) for quantiles in clients.lengths_of(name, random)] for name in drawn]
    mean = [sum(column) / len(drawn) for column in zip(*lengths, strict=True)]
    speed = scene.rate(mean[0], mean[1], 1.3) / total
    requests: list[SimRequest] = []
    for number, name in enumerate(picked):
        tier = VIP if number < 0.02 * W10_TENANTS else STANDARD if number < 0.2 * W10_TENANTS else BEST_EFFORT
        node = f"org{number % 50}/t{number}"
        own = draw_client(clients, name, node, scene.random(node), scene.duration_s, speed=speed)
        requests += [replace(request, tier=tier) for request in own]
    return Workload("W10", in_order(requests), (VIP, STANDARD, BEST_EFFORT), scene.duration_s)


def conversations(scene: Scene, path: Path = SAMPLES / "mooncake.jsonl.gz") -> Workload:
    """W11: Mooncake's chats with their shared prefixes, 1.3 times what fits without a cache."""
    return _sized(scene, load_trace(path, scene.seed), 1.3, "W11")
