"""The runs as a PNG: one column a policy, above every request's time to first token, below who got the tokens. Same scales
everywhere. Needs matplotlib (the extra `demo`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fairlane.simulate.runs import Run

_COLOURS = ("#d99a00", "#2f7ed8", "#8a8a8a", "#3a9d5d", "#b3446c", "#6f5bb5")
_MAX_POINTS = 4000  # a tier: more only make the file larger


def draw(runs: Sequence[Run], path: Path) -> None:
    """Writes the PNG. Raises ModuleNotFoundError without matplotlib and OSError for a path that cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = runs[::-1]  # what it is compared with comes first
    columns = len(runs)
    figure, axes = pyplot.subplots(
        2, columns, figsize=(5.6 * columns + 0.6, 7.2), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 2)
    )
    try:
        tiers = list(dict.fromkeys(tier for run in runs for tier in run.result.workload.tiers if tier in run.report.tiers))
        for column, run in enumerate(runs):
            _first_tokens(axes[0][column], run, tiers)
            _tokens(axes[1][column], run, tiers)
        axes[1][0].set_ylim(bottom=0)
        axes[0][0].set_ylabel("time to first token (s, log scale)")
        axes[1][0].set_ylabel("service per second\n(prompt token 1, output token 2)")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", bbox_to_anchor=(0.5, 0.02), ncols=max(1, len(tiers)), frameon=False)
        figure.text(0.5, 0.008, "hollow: still waiting at the end", ha="center", fontsize=9, color="#555555")
        figure.tight_layout(rect=(0, 0.065, 1, 1))
        figure.savefig(path, dpi=110, format="png")  # whatever the name says
    finally:
        pyplot.close(figure)


def _first_tokens(axis: Any, run: Run, tiers: Sequence[str]) -> None:
    axis.set_title(run.name, fontweight="bold")
    axis.set_yscale("log")
    axis.grid(alpha=0.25)
    for number, (tier, colour) in enumerate(zip(tiers, _COLOURS * len(tiers), strict=False)):
        order = 2 + len(tiers) - number  # the most important on top
        outcomes = [outcome for outcome in run.result.outcomes if outcome.planned.account.tier == tier]
        outcomes = outcomes[:: max(1, len(outcomes) // _MAX_POINTS)]
        served = [(o.planned.asked.arrival_s, o.ttft_s) for o in outcomes if o.ttft_s is not None]
        end_s = run.result.duration_s
        waiting = [o.planned.asked.arrival_s for o in outcomes if o.ttft_s is None and o.ended is None]
        axis.scatter([a for a, _ in served], [t for _, t in served], s=7, color=colour, label=tier, linewidths=0, zorder=order)
        axis.scatter(
            waiting,
            [max(1e-3, end_s - a) for a in waiting],
            s=9,
            facecolors="none",
            edgecolors=colour,
            linewidths=0.6,
            zorder=order,
        )


def _tokens(axis: Any, run: Run, tiers: Sequence[str]) -> None:
    axis.set_xlabel("time (s)")
    axis.grid(alpha=0.25)
    for tier, colour in zip(tiers, _COLOURS * len(tiers), strict=False):
        points = [
            (sample.time_s, sum(service for account, service in sample.service.items() if account.tier == tier))
            for sample in run.result.samples
        ]
        spans = [((t1 + t0) / 2, (s1 - s0) / (t1 - t0)) for (t0, s0), (t1, s1) in pairwise([(0.0, 0), *points]) if t1 > t0]
        axis.plot([t for t, _ in spans], [rate for _, rate in spans], color=colour, linewidth=1.6)
