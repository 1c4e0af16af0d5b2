"""D3 in detail: how far the wait that a request is told is from the one it has, by policy, load and tier; of those who queue and
get in before the run ends. The check itself is at 1.5 times capacity, all tiers together (bench_policies.py, run D3).

    python benchmarks/bench_waits.py [--json FILE] [--seeds 5] [--loads 1.2,1.5]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from deadline_runs import wait_errors
from report import print_rows, write_json

from fairlane.scheduler.tenancy import TiersPolicy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows there")
    parser.add_argument("--seeds", type=int, default=5, help="how many (default 5)")
    parser.add_argument("--loads", default="1.2,1.5", metavar="LIST", help="times what fits")
    given = parser.parse_args()
    rows = []
    for load in map(float, given.loads.split(",")):
        for policy in TiersPolicy:
            found = [wait_errors(seed, policy, load) for seed in range(given.seeds)]
            for tier in found[0]:
                errors = [error for of_seed in found for error in of_seed[tier]]
                if errors:
                    rows.append(
                        {"load": load, "policy": policy.value, "tier": tier, "queued": len(errors),
                         "off": median(abs(error) for error in errors), "told / waited - 1": median(errors)}
                    )  # fmt: skip
    print_rows(f"wait told against wait had, medians of {given.seeds} seeds", rows)
    write_json(given.json, [], rows)


if __name__ == "__main__":
    main()
