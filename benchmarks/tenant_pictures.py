"""H5 as pictures, from its JSON: what each policy gives the few against what it leaves the many, and how each VIP fared over
time. Needs matplotlib (the extra `demo`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fairlane.bench.figures import Row

_COLOURS = {"engine": "#2f7ed8", "gateway": "#3a9d5d", "simulator": "#b0b0b0", "vllm": "#d99a00"}
_COLUMNS = ("fcfs", "vip-off", "vip-balanced-no-targets", "vip-balanced")  # of the time lines


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_trade_off(rows: Sequence[Row], path: Path) -> None:
    """Best effort's tokens/s against VIPs' TTFT and TPOT p99, one point a policy; vLLM's in the same picture."""
    pyplot = _pyplot()
    shown = [row for row in rows if row["load"] == "overload" and row.get("many_tok_s")]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.2), dpi=110)  # as saved: names are placed by pixels
    figure.tight_layout(rect=(0.02, 0.09, 1, 0.95), w_pad=3)
    rates = [row["many_tok_s"] for row in shown]
    margin = 0.08 * (max(rates) - min(rates))
    for axis, key, title in zip(
        axes, ("ttft_p99_ms", "tpot_p99_ms"), ("time to first token", "time per further token"), strict=True
    ):
        for row in shown:
            axis.scatter(row["many_tok_s"], row[key], s=46, color=_COLOURS[row["via"]], label=row["via"], zorder=3)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_minor_formatter("{x:,.0f}" if key == "tpot_p99_ms" else "")
        axis.grid(alpha=0.25, which="both")
        axis.set_xlim(min(rates) - margin, max(rates) + 6 * margin)  # names stand to the right of the points
        axis.set_xlabel("best effort, output tokens/s (right is better)")
        axis.set_title(f"VIP {title}, p99 in ms (low is better)", fontsize=11)
        _name_points(axis, shown, key)
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=figure.dpi)
    pyplot.close(figure)


def _name_points(axis: Any, rows: Sequence[Row], key: str) -> None:
    """Names beside the points, from below, each at least a line above the one before, with a thin line to its point."""
    above = float("-inf")
    for row in sorted(rows, key=lambda row: float(row[key])):
        at_x, at_y = axis.transData.transform((row["many_tok_s"], row[key]))
        above = max(at_y, above + 13)
        axis.annotate(
            row["policy"].removeprefix("vip-"),
            (row["many_tok_s"], row[key]),
            xytext=(at_x + 40, above),
            textcoords="figure pixels",
            va="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "color": "#999999", "lw": 0.6},
        )


def draw_time_lines(rows: Sequence[Row], path: Path) -> None:
    """Every VIP's TTFT and TPOT by its arrival, a column a policy."""
    pyplot = _pyplot()
    found = [row for row in rows if row["load"] == "overload" and row["policy"] in _COLUMNS and row.get("points")]
    via = "engine" if any(row["via"] == "engine" for row in found) else "simulator"
    shown = sorted((row for row in found if row["via"] == via), key=lambda row: _COLUMNS.index(row["policy"]))
    figure, axes = pyplot.subplots(2, len(shown), figsize=(3.1 * len(shown) + 1, 5.6), sharex=True, sharey="row", squeeze=False)
    for column, row in enumerate(shown):
        for line, (name, place) in enumerate((("TTFT, ms", 1), ("TPOT, ms", 2))):
            axis = axes[line][column]
            axis.scatter([p[0] for p in row["points"]], [p[place] for p in row["points"]], s=8, color=_COLOURS[via])
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:,.0f}")
            axis.grid(alpha=0.25)
            if not column:
                axis.set_ylabel(f"VIP {name}")
        axes[0][column].set_title(f"{row['policy']} ({via})", fontsize=10)
        axes[1][column].set_xlabel("arrival, s")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
