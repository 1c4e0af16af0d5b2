"""What other engines had on the same loads (peers_h200.json), and the checks: which figure must reach how much of whose. What a
run comes to in figures is fairlane.bench.figures'."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairlane.bench.figures import Row
from fairlane.bench.results import Check

PEERS = Path(__file__).resolve().parent / "peers_h200.json"
VLLM, HF_CONTINUOUS, HF_STATIC = "vllm", "transformers continuous batching", "transformers generate"


# -- peers ---------------------------------------------------------------------------------------------------------------


class Peers:
    """The figures of peers_h200.json, by engine, load and model."""

    def __init__(self, path: Path = PEERS) -> None:
        self.document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))

    def row(self, group: str, engine: str, model: str, **match: Any) -> Row | None:
        """The first row of H1 to H4 with these values, in the file's order."""
        wanted = {"engine": engine, "model": model, **match}
        found = (row for row in self.document[group] if all(row[key] == value for key, value in wanted.items()))
        return next(found, None)

    def ratios(self, row: Row) -> dict[str, float]:
        """Ours over vLLM's for the figures that both have, with vLLM's closest setting. Times below 1 are better, rates above."""
        peer = self._vllm(row)
        if peer is None:
            return {}
        ours = {**row, "tpot_ms": row.get("tpot_mean_ms"), "ttft_ms": row.get("ttft_mean_ms")}  # H1 has one request
        shared = [key for key in peer if key.endswith(("_ms", "_tok_s", "req_s")) and peer[key] and ours.get(key)]
        return {key: ours[key] / peer[key] for key in shared}

    def _vllm(self, row: Row) -> Row | None:
        group, _, case = row["row"].partition("-")
        model = row["model"]
        match group:
            case "H1":
                return self.row("H1", VLLM, model)
            case "H2":
                return self.row("H2", VLLM, model, batch=int(case.removeprefix("B")))
            case "H3" if case in ("512", "512-256seqs"):
                large = case == "512" and self.row("H3", VLLM, model, setting="1024 seqs, 16k step")
                return large or self.row("H3", VLLM, model, setting="256 seqs")
            case "H4":
                return self.row("H4", VLLM, model, case=case)
        return None


# -- checks --------------------------------------------------------------------------------------------------------------

MAX_TPOT_MS = {"llama-3.1-8b": 4.4, "qwen3-0.6b": 1.3}
MIN_POLICY_RATIO = 0.99
MAX_HOST_MS = {"IDLE-B32": 0.7, "IDLE-B256": 1.5}
MEAN_DECODING_RATIO = 1.07
SHORT = {"llama-3.1-8b": "8B", "llama-2-7b": "7B", "qwen3-0.6b": "0.6B"}


def checks(rows: Sequence[Row], peers: Peers) -> list[Check]:
    """For every row that something is required of. Rows must be of unscaled loads."""
    return [check for model in SHORT for check in _of_model(model, {r["row"]: r for r in rows if r["model"] == model}, peers)]


def _of_model(model: str, rows: Mapping[str, Row], peers: Peers) -> Iterator[Check]:
    name = SHORT[model]
    if "H1" in rows and model in MAX_TPOT_MS:
        peer = peers.row("H1", VLLM, model)
        theirs = None if peer is None else float(peer["tpot_ms"])
        yield _at_most(f"H1-{name}", "TPOT, one request", rows["H1"]["tpot_mean_ms"], MAX_TPOT_MS[model], theirs)
    yield from _h2(model, rows, peers)
    yield from _h3(model, rows, peers)
    for case in ("1x8000", "8x2000"):
        peer = peers.row("H4", VLLM, model, case=case)
        if peer and f"H4-{case}" in rows:
            last = peer["ttft_last_ms"]
            yield _at_most(f"H4-{name}-{case}", "last first token", rows[f"H4-{case}"]["ttft_last_ms"], 1.05 * last, last)
    if model == "llama-3.1-8b":
        for row, most in MAX_HOST_MS.items():
            if row in rows:
                yield _at_most(f"{row}-{name}", "host work a step", rows[row]["host_ms"], most, None)
        yield from (_policy(row) for key, row in rows.items() if key.startswith("POLICY-"))


def _policy(row: Row) -> Check:
    what = f"output rate / FCFS, 100 tenants, A B B A x {row['rounds']}"
    return Check(row["row"], what, row["ratio"], f">= {MIN_POLICY_RATIO}", "x", row["ratio"] >= MIN_POLICY_RATIO)


def _h2(model: str, rows: Mapping[str, Row], peers: Peers) -> Iterator[Check]:
    name, ratios = SHORT[model], []
    batches = [peer["batch"] for peer in peers.document["H2"] if (peer["engine"], peer["model"]) == (VLLM, model)]
    for batch in batches:
        row, peer = rows.get(f"H2-B{batch}"), peers.row("H2", VLLM, model, batch=batch)
        if row is None or peer is None:
            continue
        if model == "qwen3-0.6b":
            yield _at_least(f"H2-{name}-B{batch}", "output", row["out_tok_s"], 1.2, VLLM, peer["out_tok_s"], "tok/s")
            continue
        decoding = row["decoding_tok_s"] or 0.0
        ratios.append(decoding / peer["decoding_tok_s"])
        yield _at_least(f"H2-{name}-B{batch}-DEC", "all decoding", decoding, 1.0, VLLM, peer["decoding_tok_s"], "tok/s")
        yield _at_least(f"H2-{name}-B{batch}-OUT", "output", row["out_tok_s"], 1.0, VLLM, peer["out_tok_s"], "tok/s")
    if ratios and len(ratios) == len(batches):
        mean = statistics.fmean(ratios)
        required = f">= {MEAN_DECODING_RATIO}"
        yield Check(f"H2-{name}-DEC", "all decoding / vLLM's, mean of B", mean, required, "x", mean >= MEAN_DECODING_RATIO)


def _h3(model: str, rows: Mapping[str, Row], peers: Peers) -> Iterator[Check]:
    name = SHORT[model]
    best = "1024 seqs, 16k step, not streamed" if model == "llama-3.1-8b" else "256 seqs, not streamed"
    required: list[tuple[str, float, str, dict[str, Any]]] = [
        ("H3-512", 1.0, VLLM, {"requests": 512, "setting": best}),
        ("H3-512", 1.5, HF_CONTINUOUS, {"requests": 512}),
        ("H3-128", 1.5, HF_CONTINUOUS, {"requests": 128}),
        ("H3-32", 6.8, HF_STATIC, {"requests": 32}),
    ]
    for row, factor, engine, match in required:
        peer = peers.row("H3", engine, model, **match)
        if peer and row in rows:
            short = {VLLM: "VLLM", HF_CONTINUOUS: "HF", HF_STATIC: "HF-STATIC"}[engine]
            count = match["requests"]
            what = f"chat list, {count} requests"
            yield _at_least(f"H3-{name}-{count}-{short}", what, rows[row]["req_s"], factor, engine, peer["req_s"], "req/s")


def _at_least(name: str, what: str, measured: float, factor: float, peer: str, figure: float, unit: str) -> Check:
    ratio = measured / figure
    text = f">= {factor * figure:.4g} ({factor:g} x {figure:g})"
    return Check(name, f"{what}; {ratio:.2f} x {peer}", measured, text, unit, ratio >= factor)


def _at_most(name: str, what: str, measured: float, most: float, peer: float | None) -> Check:
    against = "" if peer is None else f"; {measured / peer:.2f} x vllm's {peer:g}"
    return Check(name, f"{what}{against}", measured, f"<= {most:.4g}", "ms", measured <= most)
