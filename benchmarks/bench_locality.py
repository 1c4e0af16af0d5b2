"""What a locality window gives on Mooncake's chats (W11, all of the sample, most of it waiting together) by its width: prompt
tokens found in the cache and tokens/s, over those of longest-prefix-first, which knows no tenants.

    python benchmarks/bench_locality.py [--seeds 2] [--windows 100,1000,10000] [--json FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

from locality_runs import chats, hits_of, rate_of, run_with_window
from policy_runs import SHAPE
from report import console, print_rows, write_json
from rich.progress import track

WINDOWS_MS = (0.0, 100.0, 1000.0, 10_000.0, 60_000.0)


def curve(seed: int, windows_ms: tuple[float, ...]) -> list[tuple[float, float]]:
    """Hits and rate of each window over longest-prefix-first's."""
    workload = chats(seed)
    base = run_with_window(workload, SHAPE, None)
    runs = (run_with_window(workload, SHAPE, window_ms) for window_ms in windows_ms)
    return [(hits_of(fair) / hits_of(base), rate_of(fair) / rate_of(base)) for fair in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="how many (default 2)")
    parser.add_argument("--windows", type=lambda text: tuple(map(float, text.split(","))), default=WINDOWS_MS, help="in ms")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows there")
    given = parser.parse_args()
    curves = [curve(seed, given.windows) for seed in track(range(given.seeds), "simulating", console=console)]
    rows: list[dict[str, Any]] = []
    for window_ms, of_seeds in zip(given.windows, zip(*curves, strict=True), strict=True):
        found, rates = zip(*of_seeds, strict=True)
        rows.append({"window ms": window_ms, "hits": mean(found), "least": min(found), "most": max(found), "rate": mean(rates)})
    print_rows("over longest prefix first", rows)
    write_json(given.json, [], rows)


if __name__ == "__main__":
    main()
