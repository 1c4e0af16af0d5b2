"""How a row of bench_engine.py is shown: which of its figures are columns of its group's table, as one line, and as CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from fairlane.bench.figures import Row

# What is shown of a row; "ttft" and "tpot" stand for mean/p50/p99 in milliseconds. --json and --csv have all.
TABLES = {
    "H1": ("out_tok_s", "ttft", "tpot"),
    "H2": ("out_tok_s", "decoding_tok_s", "ttft", "tpot", "preemptions"),
    "H3": ("requests", "wall_s", "req_s", "out_tok_s", "ttft", "tpot", "preemptions"),
    "H4": ("ttft_last_ms", "ttft_mean_ms", "prefill_tok_s"),
    "IDLE": ("step_ms", "host_ms", "host_p99_ms", "schedule_ms", "launch_ms", "update_ms", "take_ms", "rest_ms", "wait_ms",
             "runner_ms", "device_idle_us"),
    "POLICY": ("fcfs_tok_s", "tok_s", "ratio", "worst_ratio", "fcfs_apart", "rounds", "preemptions"),
}  # fmt: skip
COMPARED = {
    "H1": ("tpot_ms", "ttft_ms"),
    "H2": ("out_tok_s", "decoding_tok_s", "ttft_mean_ms"),
    "H3": ("req_s",),
    "H4": ("ttft_last_ms",),
}


def group_of(row: Row) -> str:
    return str(row["row"]).split("-")[0]


def table(rows: Sequence[Row]) -> list[Row]:
    """Rows of one group as they are printed, without the comparisons that none of them has."""
    printed = [{"model": row["model"], "row": row["row"], **_shown(row)} for row in rows]
    empty = {key for key in chain(*printed) if key.endswith("/ vllm") and all(row[key] == "-" for row in printed)}
    return [{key: value for key, value in row.items() if key not in empty} for row in printed]


def summary(row: Row) -> str:
    """One line."""
    present = {key: value for key, value in _shown(row).items() if value != "-"}
    return ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in present.items())


def _shown(row: Row) -> Row:
    group = group_of(row)
    columns = {key: _spread(row, key) if key in ("ttft", "tpot") else row.get(key) for key in TABLES[group]}
    ratios = {f"{key} / vllm": row.get(f"{key} / vllm") for key in COMPARED.get(group, ())}
    return {key: "-" if value is None else value for key, value in (columns | ratios).items()}


def _spread(row: Row, name: str) -> str | None:
    values = [row[f"{name}_{part}_ms"] for part in ("mean", "p50", "p99")]
    return None if None in values else "/".join(f"{value:.0f}" if value >= 100 else f"{value:.3g}" for value in values)


def append_csv(path: Path, row: Row, *, new: bool) -> None:
    """One line a figure, so that rows of all groups fit: model, row, figure, value."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w" if new else "a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(("model", "row", "figure", "value"))
        writer.writerows((row["model"], row["row"], key, value) for key, value in row.items() if key not in ("model", "row"))
