"""H5 as pictures, from its JSON: what each policy gives the few against what it leaves the many, and how each VIP fared over
time. Needs matplotlib (the extra `demo`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tenant_figures import first_workload

from fairlane.bench.figures import Row

_COLOURS = {"engine": "#2f7ed8", "gateway": "#3a9d5d", "simulator": "#b0b0b0", "vllm": "#d99a00"}
_WORLDS = {"engine": "Fairlane, engine", "gateway": "through the gateway", "simulator": "Fairlane, simulated", "vllm": "vLLM"}
_COLUMNS = ("fcfs", "vip-off", "vip-balanced-no-targets", "vip-balanced")  # of the time lines


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_trade_off(rows: Sequence[Row], path: Path) -> None:
    """Best effort's tokens/s against VIPs' TTFT and TPOT p99, one point a policy; beside them those through the gateway, and
    vLLM's, all of the same arrivals. Where nothing was measured: the simulator's."""
    pyplot = _pyplot()
    found = [first_workload(row) for row in rows if row["load"] == "overload" and row.get("many_tok_s")]
    via = _best_world(found)
    shown = [row for row in found if row["via"] in (via, "gateway", "vllm")]
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.2), dpi=110)  # as saved: names are placed by pixels
    figure.tight_layout(rect=(0.02, 0.09, 1, 0.95), w_pad=3)
    rates = [row["many_tok_s"] for row in shown]
    margin = 0.08 * (max(rates) - min(rates))
    for axis, key, title in zip(
        axes, ("ttft_p99_ms", "tpot_p99_ms"), ("time to first token", "time per further token"), strict=True
    ):
        for row in shown:
            world, face = row["via"], "none" if row["via"] == "gateway" else _COLOURS[row["via"]]
            size = 110 if world == "gateway" else 46
            axis.scatter(
                row["many_tok_s"], row[key], s=size, facecolor=face, edgecolor=_COLOURS[world], label=_WORLDS[world], zorder=3
            )
        values = [row[key] for row in shown]
        axis.set_yscale("log")
        axis.set_ylim(min(values) / 1.4, max(values) * 1.6)  # names stand above the points
        axis.yaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_minor_formatter("")
        if key == "tpot_p99_ms":  # not a power of ten wide
            axis.set_yticks(
                [tick for tick in (4, 6, 8, 10, 15, 20, 30, 40, 60, 80) if min(values) / 1.4 < tick < max(values) * 1.6]
            )
        axis.grid(alpha=0.25, which="both")
        axis.set_xlim(min(rates) - margin, max(rates) + 6 * margin)  # and to the right of them
        axis.set_xlabel("best effort, output tokens/s (right is better)")
        axis.set_title(f"VIP {title}, p99 in ms (low is better)", fontsize=11)
        _name_points(axis, [row for row in shown if row["via"] != "gateway"], key)
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=figure.dpi)
    pyplot.close(figure)


def _best_world(rows: Sequence[Row]) -> str:
    return "engine" if any(row["via"] == "engine" for row in rows) else "simulator"


def _name(row: Row) -> str:
    shaping = row["policy"].removeprefix("vip-")
    if row["via"] == "vllm":
        return f"vLLM, {shaping}"
    if row["policy"] == "fcfs":
        return "FCFS"
    return f"VIP, {shaping.replace('-no-targets', ', no targets')}" + (", with targets" if _has_targets(row) else "")


def _has_targets(row: Row) -> bool:
    return row["policy"] in ("vip-gentle", "vip-balanced", "vip-strict")


def _name_points(axis: Any, rows: Sequence[Row], key: str) -> None:
    """Names beside the points, each at least a line from the next: a crowd's spread about its middle, with thin lines to the
    points."""
    line = 14.0
    points = sorted((*axis.transData.transform((row["many_tok_s"], row[key])), number) for number, row in enumerate(rows))
    crowds: list[list[tuple[float, float, int]]] = []
    for at_x, at_y, number in sorted(points, key=lambda point: point[1]):
        near = (one for one in crowds if at_y - one[-1][1] < line and abs(at_x - one[-1][0]) < 200)
        crowd = next(near, None)
        if crowd is None:
            crowds.append(crowd := [])
        crowd.append((at_x, at_y, number))
    for crowd in crowds:
        middle = sum(at_y for _, at_y, _ in crowd) / len(crowd)
        right = max(at_x for at_x, _, _ in crowd)
        for place, (_, _, number) in enumerate(crowd):
            row = rows[number]
            axis.annotate(
                _name(row),
                (row["many_tok_s"], row[key]),
                xytext=(right + 24, middle + line * (place - (len(crowd) - 1) / 2)),
                textcoords="figure pixels",
                va="center",
                fontsize=8,
                arrowprops={"arrowstyle": "-", "color": "#999999", "lw": 0.6},
            )


def draw_time_lines(rows: Sequence[Row], path: Path) -> None:
    """Every VIP's TTFT and TPOT by its arrival, a column a policy."""
    pyplot = _pyplot()
    found = [row for row in rows if row["load"] == "overload" and row["policy"] in _COLUMNS and row.get("points")]
    via = _best_world(found)
    shown = sorted((row for row in found if row["via"] == via), key=lambda row: _COLUMNS.index(row["policy"]))
    figure, axes = pyplot.subplots(2, len(shown), figsize=(3.1 * len(shown) + 1, 5.6), sharex=True, sharey="row", squeeze=False)
    for column, row in enumerate(shown):
        for line, (name, place) in enumerate((("TTFT, ms", 1), ("TPOT, ms", 2))):
            axis = axes[line][column]
            points = row["points"][: first_workload(row)["requests"]]
            axis.scatter([p[0] for p in points], [p[place] for p in points], s=8, color=_COLOURS[via])
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:,.0f}")
            axis.yaxis.set_minor_formatter("{x:,.0f}" if place == 2 else "")
            axis.grid(alpha=0.25)
            if not column:
                axis.set_ylabel(f"VIP {name}")
        axes[0][column].set_title(f"{row['policy']} ({via})", fontsize=10)
        axes[1][column].set_xlabel("arrival, s")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
