"""The comparison as a PNG: one column a policy, above every request's time to first token, below who got the tokens. Same
scales everywhere, so that columns can be compared by eye. Needs matplotlib (the extra `demo`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairlane.demo.board import PhaseResult, TierResult

_COLOURS = ("#d99a00", "#2f7ed8", "#8a8a8a")
_DARK = {"#d99a00": "#a87400", "#2f7ed8": "#1f5fa8", "#8a8a8a": "#5f5f5f"}  # of texts
_TEXT_AT = (0.15, 0.40, 0.73)
_MARKERS = ("o", "s", "^")
_TICKS_S = (0.1, 0.3, 1, 3, 10, 30, 100)
_SMOOTH_S = 3


def draw(results: Sequence[PhaseResult], path: Path) -> None:
    """Writes the PNG. Raises ModuleNotFoundError without matplotlib and OSError for a path that cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = len(results)
    figure, axes = pyplot.subplots(
        2, columns, figsize=(5.2 * columns + 0.6, 7.2), sharex=True, sharey="row", squeeze=False, height_ratios=(3, 2)
    )
    try:
        low, high = _span(results)
        for column, result in enumerate(results):
            _first_tokens(axes[0][column], result, low, high)
            _tokens(axes[1][column], result)
        axes[0][0].set_ylabel("time to first token (s, log scale)\nlower is better", fontsize=11)
        axes[1][0].set_ylabel("tokens per second", fontsize=11)
        tiers = [tier.tier for tier in results[0].tiers]
        handles, labels = axes[0][0].get_legend_handles_labels()
        order = [labels.index(tier) for tier in tiers if tier in labels]
        figure.legend(
            [handles[i] for i in order], [labels[i] for i in order],
            loc="lower center", bbox_to_anchor=(0.5, 0.022), ncols=len(tiers), frameon=False, fontsize=12,
        )  # fmt: skip
        figure.suptitle("Same requests, same machine, another policy", fontsize=15, fontweight="bold")
        note = "a mark: one request, at the moment it was sent    hollow: still waiting when the phase ended    line: median"
        figure.text(0.5, 0.008, note, ha="center", fontsize=9.5, color="#555555")
        figure.tight_layout(rect=(0, 0.065, 1, 0.985))
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)


def _span(results: Sequence[PhaseResult]) -> tuple[float, float]:
    every = [point.ttft_s for result in results for tier in result.tiers for point in tier.points] or [1.0]
    return max(0.02, min(every)) / 1.5, max(*every, 1.0) * 4


def _first_tokens(axis: Any, result: PhaseResult, low: float, high: float) -> None:
    """A mark a request at the moment it was sent; hollow if it was still waiting when the phase ended."""
    for tier, colour, marker in reversed(list(zip(result.tiers, _COLOURS, _MARKERS, strict=False))):
        style = {"color": colour, "marker": marker, "linestyle": "none", "markersize": 7}
        got = [point for point in tier.points if not point.censored]
        median = tier.ttft_s(0.5)
        # Who was sent just before the end tells nothing; who has waited longer than most already does.
        still = [point for point in tier.points if point.censored and median and point.ttft_s >= median.seconds]
        axis.plot([p.sent_s for p in got], [p.ttft_s for p in got], label=tier.tier, alpha=0.85, **style)
        axis.plot([p.sent_s for p in still], [p.ttft_s for p in still], fillstyle="none", **style)
        if median is not None:
            axis.axhline(median.seconds, color=colour, linewidth=1.4, alpha=0.6)
    axis.set_yscale("log")
    axis.set_ylim(low, high)
    ticks = [tick for tick in _TICKS_S if low <= tick <= high]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(axis="y", alpha=0.25)
    axis.set_title(result.title, fontsize=13.5, fontweight="bold")
    axis.set_xlim(0, result.seconds)
    for row, (quantile, name) in enumerate(((0.5, "median"), (0.95, "p95"))):
        place = {"transform": axis.transAxes, "va": "top", "fontsize": 10.5}
        axis.text(0.03, 0.975 - 0.065 * row, name, color="#555555", **place)
        for column, (tier, colour) in enumerate(zip(result.tiers, _COLOURS, strict=False)):
            wait = tier.ttft_s(quantile)
            text = f"{tier.tier} {wait}" if wait is not None else ""
            axis.text(_TEXT_AT[column], 0.975 - 0.065 * row, text, color=_DARK[colour], fontweight="bold", **place)


def _tokens(axis: Any, result: PhaseResult) -> None:
    seconds = [second + 0.5 for second in range(len(result.tiers[0].rates))]
    rates = [_smooth(tier) for tier in result.tiers]
    axis.stackplot(seconds, *reversed(rates), colors=list(reversed(_COLOURS[: len(rates)])), alpha=0.85, linewidth=0)
    total = sum(tier.tokens for tier in result.tiers) or 1
    shares = "   ".join(f"{tier.tier} {tier.tokens / total:.0%}" for tier in result.tiers)
    axis.set_title(f"share of tokens:  {shares}", fontsize=10.5)
    axis.set_xlabel("seconds since the phase began", fontsize=11)
    axis.grid(axis="y", alpha=0.25)


def _smooth(tier: TierResult) -> list[float]:
    """Mean over a few seconds: single seconds are too jagged to be read."""
    half = _SMOOTH_S // 2
    rates = tier.rates
    windows = [rates[max(0, i - half) : i + half + 1] for i in range(len(rates))]
    return [sum(window) / len(window) for window in windows]
