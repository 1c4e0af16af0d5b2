"""What a workload builder may know: the seed, how long it is watched, and the workers, so that rates can be given in multiples of
what they can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from random import Random

from fairlane.scheduler.simulator.capacity import requests_per_s
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.workload import SimRequest


@dataclass(frozen=True, slots=True)
class Scene:
    """speed: multiplies every rate."""

    seed: int = 0
    duration_s: float = 60.0
    shape: WorkerShape = field(default_factory=WorkerShape)
    num_workers: int = 1
    speed: float = 1.0

    def rate(self, prompt: float, output: float, load: float) -> float:
        """Requests a second that ask for `load` times what all workers can do together."""
        return load * self.speed * self.num_workers * requests_per_s(self.shape, prompt, output)

    def random(self, who: str) -> Random:
        """A stream of its own for each name, so that one client's draws do not move another's."""
        return Random(f"{self.seed}/{who}")  # noqa: S311 - a simulation's


Length = Callable[[Random], tuple[int, int]]  # prompt and output tokens


def fixed(prompt: int, output: int) -> Length:
    return lambda random: (prompt, output)


def poisson(random: Random, rate: float, start_s: float, end_s: float) -> Iterator[float]:
    """Arrival times in [start_s, end_s) of a Poisson process."""
    at_s = start_s
    while rate > 0 and (at_s := at_s + random.expovariate(rate)) < end_s:
        yield at_s


def together(streams: Iterable[list[SimRequest]]) -> list[SimRequest]:
    return list(chain.from_iterable(streams))


def stream(
    scene: Scene, node: str, tier: str, rate: float, length: Length, start_s: float = 0.0, end_s: float | None = None
) -> list[SimRequest]:
    """A client that sends at a steady mean rate."""
    random = scene.random(f"{node}/{tier}/{start_s}")
    times = list(poisson(random, rate, start_s, scene.duration_s if end_s is None else end_s))
    return [SimRequest(at_s, node, tier, *length(random)) for at_s in times]
