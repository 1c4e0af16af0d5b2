"""Looks for a counterexample to the scheduler's hard properties in many random histories, with several processes: each takes its
part of them, with a seed of its own, and every line it prints is passed on at once. `make test-long` starts it.

    python tests/support/long_search.py --histories 10000 --jobs 2 -k f1
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn


def main() -> NoReturn:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Whatever else is given goes to pytest.")
    parser.add_argument("--histories", type=int, default=10_000, help="of each property, by all jobs together (default 10000)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    options, rest = parser.parse_known_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the jobs, too
    if min(options.histories, options.jobs) < 1:
        parser.error("--histories and --jobs must be at least 1")
    sys.exit(search(options.histories, options.jobs, rest))


def search(histories: int, jobs: int, rest: Sequence[str] = ()) -> int:
    """Exit code: 0 when every job's is. A job that fails leaves the others to finish."""
    share = -(-histories // jobs)
    seeds = [random.SystemRandom().getrandbits(32) for _ in range(jobs)]
    running = [_start(share, seed, rest) for seed in seeds]
    with ThreadPoolExecutor(jobs) as pool:
        followed = pool.map(_follow, range(1, jobs + 1), running)
        try:
            codes = list(followed)
        except KeyboardInterrupt:  # from the keyboard it came to the jobs as well; a second one does no harm
            for process in running:
                process.send_signal(signal.SIGINT)
            codes = [process.wait() for process in running]
    for job, (seed, code) in enumerate(zip(seeds, codes, strict=True), start=1):
        told = "passed" if code == 0 else f"FAILED, exit code {code}; to see it again: --hypothesis-seed={seed}"
        print(f"job {job} of {jobs}, {share} histories of each: {told}")
    return int(any(codes))


def _start(share: int, seed: int, rest: Sequence[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "pytest", "-sv", "--timeout=0", "tests/properties", f"--hypothesis-seed={seed}", *rest]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "long", "HISTORIES": str(share)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _follow(job: int, process: subprocess.Popen[str]) -> int:
    """Passes its lines on, and returns its exit code."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip():
            print(f"{job}| {line}", end="", flush=True)
    return process.wait()


if __name__ == "__main__":
    main()
