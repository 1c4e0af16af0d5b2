"""What is asked for on the command line, and the runs that answer it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fairlane.scheduler.simulator.catalogue import WORKLOADS
from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.simulator.placement import Placed
from fairlane.scheduler.simulator.report import Report, report
from fairlane.scheduler.simulator.scene import Scene
from fairlane.scheduler.simulator.shape import WorkerShape
from fairlane.scheduler.simulator.simulation import SimResult, Simulation
from fairlane.scheduler.simulator.traces import load_trace
from fairlane.scheduler.simulator.workload import Workload
from fairlane.simulate.policies import Candidate


@dataclass(frozen=True, slots=True)
class Asked:
    """trace or workload, not both. duration_s None: a trace's own length, a minute of a workload."""

    trace: Path | None
    workload: str | None
    seed: int = 0
    duration_s: float | None = None
    speed: float = 1.0
    num_workers: int = 1
    shape: WorkerShape = field(default_factory=WorkerShape)

    def load(self) -> Workload:
        """Raises SimulationInputError."""
        if self.trace is not None:
            return load_trace(self.trace, self.seed, self.duration_s, self.speed)
        if self.workload not in WORKLOADS:
            raise SimulationInputError(f"--workload: {self.workload!r}: one of {', '.join(WORKLOADS)} is needed")
        duration_s = 60.0 if self.duration_s is None else self.duration_s
        workload = WORKLOADS[self.workload](Scene(self.seed, duration_s, self.shape, self.num_workers, self.speed))
        if not workload.requests:
            raise SimulationInputError(f"{self.workload}: no request arrives in {duration_s:g} s")
        return workload


@dataclass(frozen=True, slots=True)
class Run:
    """One policy's answer. has_ceilings: some tier or node of it has a `ceil`."""

    name: str
    result: SimResult
    report: Report
    has_ceilings: bool


def prepare(candidates: Sequence[Candidate], workload: Workload) -> list[Placed]:
    """The workload in each policy's words. Raises SimulationInputError."""
    return [candidate.place(workload) for candidate in candidates]


def simulate(candidate: Candidate, placed: Placed, asked: Asked, progress: Callable[[float], None]) -> Run:
    """progress is told the simulated time."""
    snapshot = candidate.snapshot()
    simulation = Simulation(placed.workload, snapshot, asked.shape, num_workers=asked.num_workers)
    result = simulation.run(progress=progress)
    ceilings = [*(tier.ceil for tier in snapshot.tiers), *(node.ceil for node in snapshot.nodes)]
    has_ceilings = any(ceil is not None for ceil in ceilings)
    return Run(candidate.name, result, report(result, candidate.weights(placed.workload.nodes)), has_ceilings)
