"""Runs kernel cases one after the other and judges them. A case that fails becomes a row that says why, and the next one runs;
only a device that no longer answers ends the run."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from gpu_ceilings import Ceilings
from gpu_timing import Timer, Timing
from kernel_case import Bench, Case, World
from kernel_targets import BUS_BLOCKS

from fairlane.bench.results import Check

Row = dict[str, Any]


@dataclass
class Runner:
    """kept: called with all rows so far after each one, so that they outlive an interrupted run. until_s: on time.monotonic();
    what is not begun by then is reported as not run."""

    world: World
    timer: Timer
    ceilings: Ceilings
    kept: Callable[[Sequence[Row]], None]
    until_s: float | None = None
    rows: list[Row] = field(default_factory=list)
    lost: str = ""

    def measure(self, cases: Iterable[Case], *, peers: bool = True) -> None:
        """One row per case."""
        for case in cases:
            row = self._row("case", case)
            self._guarded(row, partial(self._measure, case, row, peers))

    def sweep(self, cases: Iterable[Case]) -> None:
        """One row per case and candidate of its configuration."""
        for case in cases:
            benches: list[Bench] = []
            if self._guarded(self._row("sweep", case), partial(_prepare, case, self.world, benches), keep=False):
                candidates = benches[0].candidates
                for number, config in enumerate(candidates):
                    row = self._row("sweep", case)
                    row |= {"number": number, "label": _label(config, candidates), "config": str(config)}
                    row["entry"] = benches[0].entry(config)
                    self._guarded(row, partial(self._try, benches[0], config, row))

    def measure_bus(self) -> None:
        """Rows of what the ceilings' measurement found about copies of single blocks."""
        found = self.ceilings
        for way, block, whole in (
            ("host to device", found.h2d_block_gbs, found.h2d_gbs),
            ("device to host", found.d2h_block_gbs, found.d2h_gbs),
        ):
            share = 100 * block / whole
            row: Row = {"kind": "case", "group": "copy", "kernel": "pinned copy", "case": f"{way}, 2 MiB each", "BS": 16}
            row |= {"rate": block / 1e3, "unit": "TB/s", "% ceiling": share, "source": BUS_BLOCKS.source}
            self._keep(row | {"verdict": BUS_BLOCKS.verdict(0.0, 0.0, share)})

    def _row(self, kind: str, case: Case) -> Row:
        dtype = str(self.world.dtype).removeprefix("torch.")
        head = {"kind": kind, "group": case.group, "kernel": case.kernel, "case": case.name, "dtype": dtype}
        return head | {"BS": case.block_size or None}

    def _measure(self, case: Case, row: Row, peers: bool) -> None:
        bench = case.prepare(self.world)
        wrong = _check_error(bench, None, row)
        timing = self._time(bench)
        row |= self._figures(bench, timing)
        row["verdict"] = "-"
        if case.target is not None:
            reference = case.target.reference_us(bench.flops)
            row |= {"ref us": reference, "ratio": reference and timing.p50_us / reference, "source": case.target.source}
            tflops = row["rate"] if bench.flops else 0.0
            row["verdict"] = case.target.verdict(timing.p50_us, tflops, row["% ceiling"])
        row["verdict"] = "WRONG" if wrong else row["verdict"]
        if peers:
            row |= self._peers(bench)

    def _try(self, bench: Bench, config: Any, row: Row) -> None:
        wrong = _check_error(bench, config, row)
        row |= self._figures(bench, self._time(bench, config))
        row["verdict"] = "WRONG" if wrong else "-"

    def _time(self, bench: Bench, config: Any = None) -> Timing:
        return self.timer.time(bench.calls(config), bytes_per_call=bench.bytes_moved, warm=bench.warm)

    def _figures(self, bench: Bench, timing: Timing) -> Row:
        rate = (bench.flops or bench.bytes_moved) / timing.p50_us / 1e6
        ceiling = self.ceilings.matmul_tflops if bench.flops else self.ceilings.copy_tbs
        return {
            "bytes": bench.bytes_moved,
            "flops": bench.flops or None,
            "us p50": timing.p50_us,
            "us p10": timing.p10_us,
            "us p90": timing.p90_us,
            "rate": rate,
            "unit": "TFLOP/s" if bench.flops else "TB/s",
            "% ceiling": 100 * rate / ceiling,
        }

    def _peers(self, bench: Bench) -> Row:
        """The fastest peer, if any runs."""
        found: dict[str, float] = {}
        refused: list[str] = []
        for name, calls in bench.peers().items():
            try:
                found[name] = self.timer.time(calls, bytes_per_call=bench.bytes_moved).p50_us
            except Exception as error:  # noqa: BLE001  (a peer may refuse for any reason; the kernel's row stands)
                refused.append(f"no sdpa by {name}: {_first_line(error)}")
        best = min(found, key=found.__getitem__, default=None)
        if best is None:
            return {"note": "; ".join(refused)} if refused else {}
        return {"sdpa us": found[best], "sdpa by": best}

    def _guarded(self, row: Row, work: Callable[[], object], *, keep: bool = True) -> bool:
        """Runs work, which fills the row, and keeps the row; says whether it went well. keep: also then."""
        begin = time.monotonic()
        if self.lost or (self.until_s is not None and begin > self.until_s):
            self._keep(row | {"verdict": "not run", "note": self.lost or "out of time"})
            return False
        try:
            work()
            self.world.synchronize()
        except Exception as error:  # noqa: BLE001  (whatever one case raises, the others are measured)
            self._keep(row | {"verdict": "ERROR", "note": f"{type(error).__name__}: {_first_line(error)}"})
            self._look_after_the_device()
            return False
        if keep:
            self._keep(row | {"took s": round(time.monotonic() - begin, 2)})
        return True

    def _look_after_the_device(self) -> None:
        """After an illegal access nothing works any more in this process."""
        try:
            self.world.synchronize()
            if self.world.device.type == "cuda":
                torch.cuda.empty_cache()
        except Exception as error:  # noqa: BLE001  (torch has no type of its own for a lost device in all versions)
            self.lost = f"the device is lost: {_first_line(error)}"

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        self.kept(self.rows)
        if row["kind"] == "sweep" and row["verdict"] == "-":
            return
        shown = [row.get("kernel"), row.get("case"), row.get("label", ""), row["verdict"], row.get("note", "")]
        took = f"{row['us p50']:.2f} us, {row['% ceiling']:.0f} %" if "us p50" in row else ""
        print("  ".join(str(part) for part in (*shown, took) if part), file=sys.stderr, flush=True)


def checks_of(rows: Sequence[Row]) -> list[Check]:
    """What the project requires of the attention, for the groups that were measured."""
    checks = []
    for groups, name, half in ((("decode", "cascade"), "ATT-D", True), (("prefill",), "ATT-P", False)):
        judged = [row["verdict"] for row in rows if row["kind"] == "case" and row["group"] in groups and _has_target(row)]
        if not judged:
            continue
        good, accepted = judged.count("good"), judged.count("good") + judged.count("accept")
        needed = -(-len(judged) // 2) if half else 0
        required = f"= {len(judged)}" + (f", and good in >= {needed}" if half else "")
        what = f"{groups[0]} rows that reach accept ({good} of them good)"
        checks.append(Check(name, what, accepted, required, "rows", accepted == len(judged) and good >= needed))
    return checks


def best_rows(rows: Sequence[Row], count: int = 3) -> list[Row]:
    """Of each case that was swept the fastest candidates that are right, and number 0 for comparison."""
    chosen: list[Row] = []
    for swept in _by_case(rows).values():
        chosen += swept[:count] + [row for row in swept[count:] if row["number"] == 0]
    return chosen


def table_entries(rows: Sequence[Row]) -> list[str]:
    """Of each case that was swept, where another candidate than number 0 is the fastest, the line that a tuning table would hold
    it in; once for cases that one entry serves."""
    lines: dict[str, str] = {}
    for (_, case, _), swept in _by_case(rows).items():
        best, now = swept[0], next((row for row in swept if row["number"] == 0), None)
        if best["entry"] and best is not now:
            was = "" if now is None else f", was {now['us p50']:.2f}"
            lines.setdefault(best["entry"], f"{best['config']},  # {case}: {best['us p50']:.2f} us{was}")
    return [f"{entry}: {line}" for entry, line in lines.items()]


def overall_rows(rows: Sequence[Row]) -> list[Row]:
    """Of each kernel's candidates, over the cases it was tried on: its time over that of the case's best, as a geometric mean and
    at worst. The best candidate comes first; one that failed in a case is not comparable and says in how many it did not."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for swept in _by_case(rows).values():
        for row in swept:
            key = row["kernel"], str(row["BS"] or "-"), row["label"]
            ratios.setdefault(key, []).append(row["us p50"] / swept[0]["us p50"])
    order = list(dict.fromkeys(key[:2] for key in ratios))
    ranked = sorted(ratios.items(), key=lambda item: (order.index(item[0][:2]), -len(item[1]), geometric_mean(item[1])))
    return [
        {
            "kernel": kernel,
            "BS": size,
            "candidate": label,
            "cases": len(times),
            "mean": geometric_mean(times),
            "worst": max(times),
        }
        for (kernel, size, label), times in ranked
    ]


def _by_case(rows: Sequence[Row]) -> dict[tuple[str, str, int | None], list[Row]]:
    """The swept candidates that are right, by case, fastest first."""
    cases: dict[tuple[str, str, int | None], list[Row]] = {}
    for row in rows:
        if row["kind"] == "sweep" and row["verdict"] == "-":
            cases.setdefault((row["kernel"], row["case"], row["BS"]), []).append(row)
    return {case: sorted(swept, key=lambda row: row["us p50"]) for case, swept in cases.items()}


def _label(config: Any, candidates: Sequence[Any]) -> str:
    """The fields in which the candidates differ."""
    names = [part.name for part in fields(config) if len({str(getattr(other, part.name)) for other in candidates}) > 1]
    return ", ".join(f"{name}={getattr(getattr(config, name), 'sizes', getattr(config, name))}" for name in names)


def _check_error(bench: Bench, config: Any, row: Row) -> bool:
    """Notes the error in the row, None where a result is not finite; says whether it is too large."""
    error = bench.error(config)
    row["rel err"] = error if math.isfinite(error) else None
    if not math.isfinite(error):
        row["note"] = "a result is not finite"
    return not error <= bench.tolerance


def _prepare(case: Case, world: World, into: list[Bench]) -> None:
    into.append(case.prepare(world))


def _has_target(row: Row) -> bool:
    """Rows that did not get as far as a verdict count, and fail."""
    return bool(row["verdict"] != "-")


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:200] if lines else ""
