"""What must hold of a simulated policy, as a YAML file, so that it can gate a merge:

assertions:
  - {tier: gold, metric: ttft_p99_ms, max: 150}
  - {node: chatly/free, metric: share, min: 0.05}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fairlane.config.fields import Bounds, Doc, Text
from fairlane.config.source import read_file
from fairlane.config.strict import Located, load_located
from fairlane.errors import ConfigError
from fairlane.scheduler.simulator.report import Figures, Metric, Report, with_ancestors
from fairlane.scheduler.simulator.workload import Workload
from fairlane.simulate.policies import Candidate

_Name = Annotated[str, Text(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}", "a name")]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertionPart:
    """One figure and its bounds."""

    metric: Annotated[Metric, Doc("Which figure, as --json calls it.")]
    tier: Annotated[_Name | None, Doc("Of this tier.")] = None
    node: Annotated[_Name | None, Doc("Of this node and all below it. Neither: of everything.")] = None
    max: Annotated[float | None, Bounds(), Doc("The most it may be.")] = None
    min: Annotated[float | None, Bounds(), Doc("The least it may be.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertionFile:
    """The whole file."""

    assertions: Annotated[tuple[AssertionPart, ...], Doc("What must hold.")]


@dataclass(frozen=True, slots=True)
class Verdict:
    """measured None: no request got far enough to say; then it does not hold."""

    what: str
    required: str
    measured: float | None
    holds: bool


def load_assertions(path: Path) -> Located[AssertionFile]:
    """Raises ConfigError with every finding."""
    found = load_located(read_file(path), str(path), AssertionFile)
    findings = [] if found.value.assertions else [found.finding(("assertions",), "at least one is needed")]
    for index, part in enumerate(found.value.assertions):
        where = ("assertions", index)
        if part.tier is not None and part.node is not None:
            findings.append(found.finding(where, "a tier or a node, not both, is needed"))
        if part.max is None and part.min is None:
            findings.append(found.finding(where, "max or min is needed"))
        if part.max is not None and part.min is not None and part.min > part.max:
            findings.append(
                found.finding((*where, "min"), f"{part.min:g} is above the max, {part.max:g} at {found.mark(*where, 'max')}")
            )
        if (part.tier or part.node) and part.metric in _OF_EVERYTHING:
            findings.append(found.finding((*where, "metric"), f"{part.metric.value} is of everything: leave out tier and node"))
        if part.tier and part.metric in _NOT_OF_TIERS:
            findings.append(found.finding((*where, "metric"), f"{part.metric.value} is of everything or a node: leave out tier"))
        if part.metric is Metric.ENTITLED_SHARE and part.node is None:
            findings.append(found.finding((*where, "metric"), f"{part.metric.value} is of a node: name one"))
    if findings:
        raise ConfigError(findings)
    return found


def check_names(found: Located[AssertionFile], workload: Workload, candidate: Candidate) -> None:
    """Raises ConfigError for a tier or node that the policy does not have, or that sends nothing in this run."""
    findings = []
    policy = candidate.policy
    tiers, nodes = {request.tier for request in workload.requests}, set(with_ancestors(workload.nodes))
    for index, part in enumerate(found.value.assertions):
        for what, name, sends, has in (("tier", part.tier, tiers, policy.tiers), ("node", part.node, nodes, policy.nodes)):
            if name is not None and name not in sends:
                why = "sends nothing in this run" if name in has else f"is no {what} of {candidate.name} that sends in this run"
                among = ", ".join(sorted(sends)[:12])
                findings.append(found.finding(("assertions", index, what), f"{name} {why}: one of {among}"))
    if findings:
        raise ConfigError(findings)


_OF_EVERYTHING = (
    Metric.JAIN, Metric.SERVICE_DIFFERENCE_MAX, Metric.SERVICE_DIFFERENCE_AVG, Metric.RECOMPUTE_TAX, Metric.BUSY,
)  # fmt: skip
_NOT_OF_TIERS = (Metric.KV_USED_MEAN, Metric.KV_USED_MAX)


def judge(parts: tuple[AssertionPart, ...], report: Report) -> list[Verdict]:
    """After check_names()."""
    verdicts = []
    for part in parts:
        figures: Figures = report.overall
        if part.tier is not None:
            figures = report.tiers[part.tier]
        elif part.node is not None:
            figures = report.subtrees[part.node] if part.node in report.subtrees else report.nodes[part.node]
        measured = figures.get(part.metric)
        limits = (("<=", part.max), (">=", part.min))
        bounds = [f"{sign} {limit:g}" for sign, limit in limits if limit is not None]
        holds = measured is not None and (part.max is None or measured <= part.max) and (part.min is None or measured >= part.min)
        verdicts.append(Verdict(f"{part.tier or part.node or 'all'} {part.metric.value}", ", ".join(bounds), measured, holds))
    return verdicts
