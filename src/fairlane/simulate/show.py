"""The runs as people and programs read them: tables in the terminal, one JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fairlane.scheduler.simulator.report import Figures, Metric
from fairlane.simulate.assertions import Verdict
from fairlane.simulate.runs import Asked, Run

MAX_NODES = 20
# The columns of the tables: figure, heading, decimals, percent.
_COLUMNS = (
    (Metric.REQUESTS, "requests", 0, False),
    (Metric.FINISHED, "finished", 0, False),
    (Metric.TTFT_P50_MS, "TTFT p50 ms", 0, False),
    (Metric.TTFT_P99_MS, "p99 ms", 0, False),
    (Metric.TPOT_P50_MS, "TPOT p50 ms", 1, False),
    (Metric.TPOT_P99_MS, "p99 ms", 1, False),
    (Metric.QUEUE_P99_MS, "queue p99 ms", 0, False),
    (Metric.TOKENS_PER_S, "tokens/s", 0, False),
    (Metric.SHARE, "share", 1, True),
    (Metric.WORKER_TIME, "of worker", 1, True),
    (Metric.ENTITLED_SHARE, "entitled", 1, True),
    (Metric.PREEMPTIONS, "evicted", 0, False),
    (Metric.RECOMPUTED_TOKENS, "recomputed", 0, False),
    (Metric.KV_USED_MAX, "KV max", 1, True),
)
_OVERALL = (
    (Metric.TOKENS_PER_S, "tokens/s", 0, False),
    (Metric.JAIN, "Jain index", 4, False),
    (Metric.SERVICE_DIFFERENCE_MAX, "service difference, max", 0, False),
    (Metric.SERVICE_DIFFERENCE_AVG, "service difference, mean", 0, False),
    (Metric.KV_USED_MEAN, "KV used, mean", 1, True),
    (Metric.KV_USED_MAX, "KV used, max", 1, True),
    (Metric.RECOMPUTE_TAX, "recomputed", 2, True),
    (Metric.BUSY, "workers busy", 1, True),
)


def tables(console: Console, runs: Sequence[Run]) -> None:
    """Everything, then tiers, then the nodes that got most. Two runs are the policy and what it is compared with, which
    comes first here: a change is what the policy changes."""
    runs = runs[::-1]
    console.print(_overall(runs))
    hidden = frozenset() if any(run.has_ceilings for run in runs) else frozenset({Metric.WORKER_TIME})
    console.print(_by_name("by tier", [(run.name, run.report.tiers) for run in runs], hidden))
    nodes = [(run.name, run.report.nodes) for run in runs]
    names = _largest(runs)
    shown = [(name, {node: figures[node] for node in names if node in figures}) for name, figures in nodes]
    total = len({node for _, figures in nodes for node in figures})
    console.print(_by_name("by node" if total <= MAX_NODES else f"by node: the largest {MAX_NODES} of {total}", shown, hidden))


def _largest(runs: Sequence[Run]) -> list[str]:
    share: dict[str, float] = {}
    for run in runs:
        for node, figures in run.report.nodes.items():
            share[node] = max(share.get(node, 0.0), figures[Metric.SHARE])
    return sorted(share, key=lambda node: (-share[node], node))[:MAX_NODES]


def _overall(runs: Sequence[Run]) -> Table:
    table = Table(title="everything", title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    if len(runs) > 1:
        table.add_column("change", justify="right")
    for metric, heading, decimals, percent in _OVERALL:
        values = [run.report.overall.get(metric) for run in runs]
        cells = [_text(value, decimals, percent) for value in values]
        if len(runs) > 1:
            cells.append(_change(values[0], values[1]))
        table.add_row(heading, *cells)
    return table


def _by_name(title: str, runs: Sequence[tuple[str, Mapping[str, Figures]]], hidden: frozenset[Metric]) -> Table:
    names = list(dict.fromkeys(name for _, figures in runs for name in figures))
    known = {metric for _, figures in runs for f in figures.values() for metric in f} - hidden
    columns = [column for column in _COLUMNS if column[0] in known]
    table = Table(title=title, title_justify="left")
    table.add_column("")
    if len(runs) > 1:
        table.add_column("policy")
    for _, heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for name in names:
        for number, (policy, figures) in enumerate(runs):
            own = figures.get(name, {})
            cells = [_text(own.get(metric), decimals, percent) for metric, _, decimals, percent in columns]
            table.add_row(name if number == 0 else "", *([policy] if len(runs) > 1 else []), *cells)
        if len(runs) > 1:
            before, after = (figures.get(name, {}) for _, figures in runs)
            changes = [_change(before.get(metric), after.get(metric)) for metric, _, _, _ in columns]
            table.add_row("", "[dim]change[/]", *(f"[dim]{change}[/]" for change in changes), end_section=True)
    return table


def _text(value: float | None, decimals: int, percent: bool) -> str:
    if value is None:
        return "-"
    return f"{value * 100:.{decimals}f}%" if percent else f"{value:,.{decimals}f}"


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return "-"
    if before == after:
        return "="
    return f"{(after / before - 1) * 100:+.1f}%" if before else "new"


def verdicts(console: Console, found: Sequence[Verdict]) -> None:
    table = Table(title="assertions", title_justify="left")
    for heading in ("", "what", "measured", "required"):
        table.add_column(heading)
    for verdict in found:
        mark = "[green]holds[/]" if verdict.holds else "[red]FAILS[/]"
        measured = "nothing to measure" if verdict.measured is None else f"{verdict.measured:.4g}"
        table.add_row(mark, verdict.what, measured, verdict.required)
    console.print(table)


def document(asked: Asked, runs: Sequence[Run], found: Sequence[Verdict]) -> dict[str, Any]:
    """What --json writes: the first run is the policy, a second one what it was compared with."""
    return {
        "trace": None if asked.trace is None else str(asked.trace),
        "workload": asked.workload,
        "seed": asked.seed,
        "workers": asked.num_workers,
        "runs": [_run(run) for run in runs],
        "assertions": [
            {"what": one.what, "required": one.required, "measured": one.measured, "holds": one.holds} for one in found
        ],
    }


def _run(run: Run) -> dict[str, Any]:
    def plain(figures: Figures) -> dict[str, float]:
        return {metric.value: value for metric, value in figures.items()}

    return {
        "policy": run.name,
        "duration_s": run.report.duration_s,
        "steps": run.report.num_steps,
        "event_log_sha256": run.report.digest,
        "overall": plain(run.report.overall),
        "tiers": {name: plain(figures) for name, figures in run.report.tiers.items()},
        "nodes": {name: plain(figures) for name, figures in run.report.nodes.items()},
    }
