"""What a run comes to in figures: rates, and the spread of times to the first token and per token after it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from fairlane.bench.run import Outcome

Row = dict[str, Any]


def figures(outcome: Outcome) -> Row:
    """Rates over the time from submission to the last end; TTFT counts from submission; TPOT of a request is the time from its
    first to its last token over its tokens less one (None where no request has two)."""
    load, tracks = outcome.load, outcome.tracks
    wall_s = max(track.ended_s for track in tracks) - outcome.start_s
    ttft = sorted(1e3 * (track.first_s - outcome.start_s) for track in tracks)
    tpot = sorted(1e3 * (t.last_s - t.first_s) / (t.num_tokens - 1) for t in tracks if t.num_tokens > 1)
    return {
        "requests": load.num_requests,
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": load.output_tokens,
        "wall_s": wall_s,
        "out_tok_s": load.output_tokens / wall_s,
        "total_tok_s": (load.prompt_tokens + load.output_tokens) / wall_s,
        "req_s": load.num_requests / wall_s,
        **spread("ttft", ttft),
        "ttft_last_ms": ttft[-1],
        "prefill_tok_s": 1e3 * load.prompt_tokens / ttft[-1],
        **spread("tpot", tpot),
        "decoding_tok_s": all_decoding(outcome),
        "preemptions": outcome.preemptions,
        "recomputed_tokens": outcome.recomputed_tokens,
    }


def all_decoding(outcome: Outcome) -> float | None:
    """Tokens/s between the last first token and the first end of a request; None if there is no such time."""
    since_s, until_s = outcome.all_decoding_s
    if until_s <= since_s:
        return None
    return sum(count for now_s, count in outcome.steps if since_s < now_s <= until_s) / (until_s - since_s)


def percentile(ordered: Sequence[float], part: float) -> float:
    """Of sorted values, linear between neighbours."""
    place = part * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread(name: str, ordered: Sequence[float]) -> Row:
    """Of sorted milliseconds: mean, p50 and p99; None of each where there are none."""
    if not ordered:
        return dict.fromkeys((f"{name}_mean_ms", f"{name}_p50_ms", f"{name}_p99_ms"))
    mean, p50, p99 = statistics.fmean(ordered), percentile(ordered, 0.5), percentile(ordered, 0.99)
    return {f"{name}_mean_ms": mean, f"{name}_p50_ms": p50, f"{name}_p99_ms": p99}


def median_run(runs: Sequence[Row], by: str) -> Row:
    """The run whose figure is the middle one; of an even number the lower middle."""
    key: Callable[[Row], float] = lambda run: run[by]  # noqa: E731
    return sorted(runs, key=key)[(len(runs) - 1) // 2]
