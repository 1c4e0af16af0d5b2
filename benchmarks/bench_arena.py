"""F4 and F5 at other loads than VTC's: the Arena log played slower and faster on its own machine, FAIR over FCFS, each figure a
mean over seeds. The check itself is at speed 1 (bench_policies.py, run F4).

    python benchmarks/bench_arena.py [--json FILE] [--seeds 5] [--speeds 0.75,1,1.25,1.5]
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from statistics import mean

from policy_runs import f4
from report import print_rows, write_json


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows there")
    parser.add_argument("--seeds", type=int, default=5, help="how many (default 5)")
    parser.add_argument("--speeds", default="0.75,1,1.25,1.5", metavar="LIST", help="times the log's own pace")
    arguments = parser.parse_args()
    speeds = [float(speed) for speed in arguments.speeds.split(",")]
    jobs = list(product(speeds, range(arguments.seeds)))
    with ProcessPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        found = list(pool.map(f4, [seed for _, seed in jobs], [speed for speed, _ in jobs]))
    of_speed = {speed: [numbers for (at, _), numbers in zip(jobs, found, strict=True) if at == speed] for speed in speeds}
    rows = [{"speed": speed} | {name: mean(n[name] for n in of) for name in of[0]} for speed, of in of_speed.items()]
    print_rows(f"FAIR over FCFS on the Arena log, {arguments.seeds} seeds", rows)
    write_json(arguments.json, [], rows)


if __name__ == "__main__":
    main()
