"""What H5's runs come to: latency of the few, throughput of the many, shares; the checks, and what vLLM had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any

from engine_peers import Peers
from tenant_loads import CROWD, FLOOD, LIGHT, VIP, WEIGHTS
from tenant_runs import ENGINE, SIMULATOR, Got, Run

from fairlane.bench.figures import Row, spread
from fairlane.bench.results import Check

SHARE_WINDOW_S = 20.0
TAX_LIMIT, SHARE_LIMIT, SIM_LIMIT, FLOOD_RATE = 0.03, 0.03, 0.15, 0.95
TTFT_P50_MS, TTFT_P99_MS, TPOT_P99_MS, BEST_EFFORT, LIGHT_P99_MS = 45.0, 92.0, 8.2, 4650.0, 500.0
REQUIRED_POLICY = "vip-balanced"


def row_of(runs: Sequence[Run]) -> Row:
    """Runs of one workload under one policy, pooled: percentiles over all their requests, rates as the mean over runs.
    by_workload: the same of each by itself, for comparisons over those that two rows both have; points: of the few."""
    first = runs[0]
    row: Row = {"load": first.workload.name, "policy": first.policy, "via": first.via, "runs": len(runs)}
    if first.workload.name == "shares":
        return row | _shares(first)
    row |= _latency_and_rate(runs)
    row |= {
        "preemptions": None if first.preemptions is None else _mean(run.preemptions or 0 for run in runs),
        "recomputed": _recomputed(runs),
    }
    row["by_workload"] = [{"workload": run.workload.number, **_latency_and_rate([run])} for run in runs]
    points = ((g.call.arrival_s, 1e3 * g.ttft_s, 1e3 * g.tpot_s) for run in runs for g in _few(run))
    row["points"] = [[round(at_s, 3), round(ttft, 2), round(tpot, 3)] for at_s, ttft, tpot in points]
    return row


def _few(run: Run) -> list[Got]:
    return run.of(VIP) if run.workload.name in ("alone", "overload") else run.of(*LIGHT)


def _latency_and_rate(runs: Sequence[Run]) -> Row:
    picked = [got for run in runs for got in _few(run)]
    ttft, tpot = (sorted(1e3 * value for value in values) for values in zip(*((g.ttft_s, g.tpot_s) for g in picked), strict=True))
    many = CROWD if runs[0].workload.name == "overload" else FLOOD
    rate = _mean(_rate(run.of(many)) for run in runs) if runs[0].of(many) else None
    return {"requests": len(picked), **spread("ttft", ttft), **spread("tpot", tpot), "many_tok_s": rate}


def first_workload(row: Row) -> Row:
    """A row as if it had been of its first workload only: the one that all rows have, and the peers'."""
    return row | row["by_workload"][0] if row.get("by_workload") else row


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _rate(got: Sequence[Got]) -> float:
    """Output tokens/s from the first arrival to the last token."""
    return sum(one.call.output for one in got) / (max(one.last_s for one in got) - min(one.call.arrival_s for one in got))


def _recomputed(runs: Sequence[Run]) -> float | None:
    """The part of all computed tokens that had been computed before."""
    if any(run.recomputed_tokens is None for run in runs):
        return None
    again = sum(run.recomputed_tokens or 0 for run in runs)
    return again / (again + sum(one.call.prompt + one.call.output for run in runs for one in run.got))


def _shares(run: Run) -> Row:
    """Service by weight in the middle of the time in which all tenants have requests waiting, as the policy charges it: 1 a token
    of a prompt, once it is read, and 2 an output token, evenly from the first to the last."""
    until_s = min(max(one.first_s for one in run.of(node)) for node in WEIGHTS)  # then somebody's last request has begun
    width_s = min(SHARE_WINDOW_S, 0.8 * until_s)
    from_s, to_s = (until_s - width_s) / 2, (until_s + width_s) / 2
    shares = {node: sum(_service(one, from_s, to_s) for one in run.of(node)) / weight for node, weight in WEIGHTS.items()}
    found = {f"W/w {node.partition('/')[2]}": share for node, share in shares.items()}
    least = min(shares.values())
    each = len(run.got) // len(WEIGHTS)
    apart = max(shares.values()) / least - 1 if least else None
    return found | {"each": each, "from_s": from_s, "to_s": to_s, "window_s": width_s, "apart": apart}


def _service(one: Got, from_s: float, to_s: float) -> float:
    prompt = one.call.prompt if from_s <= one.first_s < to_s else 0
    overlap_s = max(0.0, min(to_s, one.last_s) - max(from_s, one.first_s))
    return prompt + 2 * one.call.output * overlap_s / max(1e-9, one.last_s - one.first_s)


def peer_rows(peers: Peers) -> list[Row]:
    return [{"via": "vllm", **row} for row in peers.document["H5"]]


# -- checks ------------------------------------------------------------------------------------------------------------------


def find(rows: Sequence[Row], load: str, policy: str, via: str) -> Row | None:
    return next((row for row in rows if (row["load"], row["policy"], row["via"]) == (load, policy, via)), None)


def checks(rows: Sequence[Row], via: str = ENGINE) -> list[Check]:
    """Of whatever was run on the engine (or where `via` says)."""
    return [*_overload(rows, via), *_flood(rows, via), *_shares_hold(rows, via), *_simulated(rows, via)]


def _most(check_id: str, what: str, value: Any, limit: float, unit: str) -> Check:
    return Check(check_id, what, value, f"<= {limit:g}", unit, value <= limit)


def _overload(rows: Sequence[Row], via: str) -> Iterator[Check]:
    row = find(rows, "overload", REQUIRED_POLICY, via)
    if row is None:
        return
    many = f"VIP, {row['requests']} requests"
    yield _most("H5-TTFT-P50", f"time to first token, {many}", row["ttft_p50_ms"], TTFT_P50_MS, "ms")
    yield _most("H5-TTFT-P99", f"time to first token, {many}", row["ttft_p99_ms"], TTFT_P99_MS, "ms")
    yield _most("H5-TPOT", f"time per further token p99, {many}", row["tpot_p99_ms"], TPOT_P99_MS, "ms")
    rate = row["many_tok_s"]
    yield Check("H5-BE", "best effort's tokens/s meanwhile", rate, f">= {BEST_EFFORT:g}", "tok/s", rate >= BEST_EFFORT)
    if row["recomputed"] is not None:
        yield _most("H5-SWAP", "tokens computed again, of all", row["recomputed"], TAX_LIMIT, "")


def _flood(rows: Sequence[Row], via: str) -> Iterator[Check]:
    fair, fcfs = (find(rows, "flood", f"flood-{policy}", via) for policy in ("fair", "fcfs"))
    if fair is not None:
        what = f"light tenants' time to first token p99 beside a flood, FAIR, {fair['requests']} requests"
        yield _most("H5-LIGHT", what, fair["ttft_p99_ms"], LIGHT_P99_MS, "ms")
    if fair is not None and fcfs is not None:
        ratio = first_workload(fair)["many_tok_s"] / first_workload(fcfs)["many_tok_s"]
        what = "the flood's tokens/s, FAIR / FCFS, of the same arrivals"
        yield Check("H5-LIGHT-FLOOD", what, ratio, f">= {FLOOD_RATE}", "x", ratio >= FLOOD_RATE)


def _shares_hold(rows: Sequence[Row], via: str) -> Iterator[Check]:
    row = find(rows, "shares", "shares-fair", via)
    if row is not None:
        what = f"largest W/w over smallest, less 1; weights 1:2:3:4, {row['each']} each, middle {row['window_s']:.0f} s"
        yield _most("H5-SHARE", what, inf if row["apart"] is None else row["apart"], SHARE_LIMIT, "")


def _simulated(rows: Sequence[Row], via: str) -> Iterator[Check]:
    if via == SIMULATOR:
        return
    for policy in ("fcfs", REQUIRED_POLICY):
        measured, simulated = find(rows, "overload", policy, via), find(rows, "overload", policy, SIMULATOR)
        if measured is not None and simulated is not None:
            off = _off(simulated, measured)
            worst = max(off, key=lambda name: abs(off[name]))
            what = f"simulator / measured - 1, {policy}, worst of TTFT p50, p99, tokens/s: {worst}"
            yield _most(f"H5-SIM-{policy.upper()}", what, abs(off[worst]), SIM_LIMIT, "")


def predictions(rows: Sequence[Row]) -> list[Row]:
    """Of every row that was both measured on the engine and simulated: by how much the simulator is off."""
    found = []
    for row in rows:
        simulated = find(rows, row["load"], row["policy"], SIMULATOR)
        if row["via"] == ENGINE and simulated is not None and row.get("ttft_p50_ms"):
            off = {name: f"{value:+.1%}" for name, value in _off(simulated, row).items()}
            found.append({"load": row["load"], "policy": row["policy"], **off})
    return found


def _off(simulated: Row, measured: Row) -> dict[str, float]:
    names = ("ttft_p50_ms", "ttft_p99_ms", "many_tok_s")
    return {name: simulated[name] / measured[name] - 1 for name in names if measured[name] is not None}
