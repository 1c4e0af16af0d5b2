"""The Triton kernels on one GPU, against the ceilings of that GPU and the best published figures. Prints the ceilings first, then
a row per case: bfloat16, an 8B model's sizes, shuffled blocks, random data, a cold L2 cache, CUDA graph replays.

    rate       bytes (each input read once, each output written once; decode: K and V alone) or floating-point operations
    % ceil     of the copy rate, or of the rate of a bfloat16 product of 8192^3
    ref us     the best published figure for an H200 (kernel_targets.py has the sources); x ref: measured / published
    rel err    the worst row's ||error|| / ||exact||, exact in float64; sample: the share of rows with another token
    sdpa us    torch's scaled_dot_product_attention, the faster of flash and cuDNN, over contiguous keys and values

    python benchmarks/bench_kernels.py                  everything, about two minutes
    python benchmarks/bench_kernels.py --only decode    some of it
    python benchmarks/bench_kernels.py --sweep          the configurations that the tuning tables could hold instead
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_timing import GraphTimer, WallTimer
from kernel_case import Case, World
from report import print_checks, print_rows, write_csv, write_json

GROUPS = ("decode", "rope", "cascade", "prefill", "small", "linear", "sample", "copy")
SWEEP_S = 280.0  # what is not tried by then is left out


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there, as they come")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--only", metavar="GROUP,...", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--cases", metavar="REGEX", default="", help="only cases in whose names this is found")
    parser.add_argument("--sweep", action="store_true", help="try every candidate configuration, print the best three per case")
    parser.add_argument("--quick", action="store_true", help="fewer samples, no comparison with torch's attention")
    parser.add_argument("--block-sizes", metavar="N,...", default="16", help="of the KV cache, for the attention (default 16)")
    parser.add_argument("--budget-s", type=float, metavar="S", help=f"begin no case later than this (a sweep: {SWEEP_S:.0f})")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)  # cpu: tiny, interpreted
    arguments = parser.parse_args(words)
    arguments.groups = arguments.only.split(",")
    try:
        re.compile(arguments.cases)
    except re.error as error:
        parser.error(f"--cases: {error}")
    if unknown := sorted(set(arguments.groups) - set(GROUPS)):
        parser.error(f"--only: there is no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    try:
        arguments.block_sizes = [int(size) for size in arguments.block_sizes.split(",")]
    except ValueError:
        parser.error(f"--block-sizes: {arguments.block_sizes!r} is not a list of numbers")
    return arguments


def world_of(device: str) -> World:
    """Raises SystemExit where there is no such device."""
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        torch.set_num_threads(2)
        return World(torch.device("cpu"), torch.float32, tiny=True)
    if not torch.cuda.is_available():
        raise SystemExit(
            f"no CUDA device: torch {torch.__version__} "
            + ("is built without CUDA; run this with a Python that has a CUDA build of torch"
               if torch.version.cuda is None else "sees none; `nvidia-smi` says whether the driver does")
        )  # fmt: skip
    return World(torch.device("cuda"), torch.bfloat16)


def cases_of(groups: Sequence[str], block_sizes: Sequence[int], pattern: str = "") -> list[Case]:
    """Of these groups, those in whose names the regular expression is found."""
    # Imported here: Triton must learn from the environment first whether it interprets.
    from attention_cases import cascade_cases, decode_cases, prefill_cases
    from linear_cases import linear_cases
    from rope_cases import rope_cases
    from sample_cases import copy_cases, sample_cases
    from small_cases import small_cases

    attention = decode_cases, rope_cases, cascade_cases, prefill_cases
    cases = [case for size in block_sizes for cases_of_one in attention for case in cases_of_one(size)]
    cases += [*small_cases(block_sizes[0]), *linear_cases(), *sample_cases(), *copy_cases()]
    cases = [case for case in cases if case.group in groups and re.search(pattern, case.name)]
    return sorted(cases, key=lambda case: GROUPS.index(case.group))


def keep(path: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """What is known so far, in case the run is cut short; the final document replaces it."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"env": None, "checks": [], "rows": list(rows)}) + "\n")


def shown(row: dict[str, Any]) -> dict[str, str]:
    """A measured row as the table shows it."""

    def number(name: str, form: str = ".1f") -> str:
        return "-" if row.get(name) is None else format(row[name], form)

    work = "-"
    if row.get("bytes"):
        work = f"{row['flops'] / 1e9:.1f} GFLOP" if row.get("flops") else f"{row['bytes'] / 1e6:.2f} MB"
    return {
        "kernel": row["kernel"],
        "case": row["case"],
        "BS": str(row.get("BS") or "-"),
        "work": work,
        "us p50": number("us p50", ".2f"),
        "p10-p90": f"{row['us p10']:.2f}-{row['us p90']:.2f}" if "us p10" in row else "-",
        "rate": f"{row['rate']:.3g} {row['unit']}" if "rate" in row else "-",
        "% ceil": number("% ceiling", ".0f"),
        "ref us": number("ref us"),
        "x ref": number("ratio", ".2f"),
        "sdpa us": f"{row['sdpa us']:.1f} {row['sdpa by']}" if "sdpa us" in row else "-",
        "rel err": number("rel err", ".1e"),
        "verdict": row["verdict"],
    }


def shown_candidate(row: dict[str, Any]) -> dict[str, str]:
    return {
        "kernel": row["kernel"],
        "case": row["case"],
        "BS": str(row["BS"] or "-"),
        "us": f"{row['us p50']:.2f}",
        "% ceil": f"{row['% ceiling']:.0f}",
        "candidate": f"{row['number']}: {row['label']}",
    }


def main(words: Sequence[str] | None = None) -> int:
    arguments = arguments_of(words)
    begin = time.monotonic()
    world = world_of(arguments.device)
    from gpu_ceilings import measure_ceilings
    from kernel_runs import Runner, best_rows, checks_of, overall_rows, table_entries

    torch.manual_seed(0)
    samples = 12 if arguments.quick else 40
    timer = WallTimer() if world.tiny else GraphTimer(world.device, samples=samples)
    ceilings = measure_ceilings(world, timer)
    print_rows("ceilings of this GPU", [dict(list(row.items())[1:]) for row in ceilings.rows()])
    budget_s = arguments.budget_s or (SWEEP_S if arguments.sweep else None)
    runner = Runner(
        world,
        timer,
        ceilings,
        kept=lambda rows: keep(arguments.json, [*ceilings.rows(), *rows]),
        until_s=None if budget_s is None else begin + budget_s,
    )
    cases = cases_of(arguments.groups, arguments.block_sizes, arguments.cases)
    if not cases:
        raise SystemExit(f"--cases: no case of {', '.join(arguments.groups)} has such a name")
    if arguments.sweep:
        runner.sweep(cases)
        print_rows("the best candidates, and the first of the list", [shown_candidate(row) for row in best_rows(runner.rows)])
        print_rows("time over that of the case's best candidate", overall_rows(runner.rows))
        if entries := table_entries(runner.rows):
            print("for the tuning table, where better than what it says now:", *entries, sep="\n    ")
        checks = []
    else:
        runner.measure(cases, peers=not arguments.quick)
        if "copy" in arguments.groups:
            runner.measure_bus()
        print_rows(f"kernels, {runner.rows[0]['dtype']}", [shown(row) for row in runner.rows])
        checks = checks_of(runner.rows)
        print_checks(checks)
    for row in runner.rows:
        if row.get("note") and row["verdict"] != "not run":
            print(f"{row['kernel']} {row['case']} {row.get('label', '')}: {row['note']}")
    print(f"{time.monotonic() - begin:.0f} s")
    write_json(arguments.json, checks, [*ceilings.rows(), *runner.rows])
    write_csv(arguments.csv, runner.rows)
    return int(not arguments.sweep and any(row["verdict"] in ("ERROR", "not run") for row in runner.rows))


if __name__ == "__main__":
    sys.exit(main())
