"""Fairlane against transformers' `generate` on this CPU: the same requests, weights (float32), threads and greedy tokens.

    sequential   transformers, one request after the other
    static       transformers, batches of 8 in order of arrival, left padding; a batch runs until its longest output is done
    fairlane     the engine, 16 sequences at once, all requests submitted at the start

Every contender runs in a process of its own (so peak memory and thread pools are its own), after one warm-up request. Prompts
are windows of 16 to 256 tokens cut from the Apache licence, no two alike; outputs are 16 to 96 tokens, exactly (no stop token).
A request's time to first token counts from the start of the run, when all of them are waiting.

    python benchmarks/bench_cpu.py                     a table, the ceilings of this machine, a profile, three checks
    python benchmarks/bench_cpu.py --repeat 3          medians of three rounds: for a machine that is not quiet
    python benchmarks/bench_cpu.py --json cpu.json     the same for programs
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import profile_cpu
from report import console, print_checks, print_rows, write_json

from fairlane.bench.results import Check

PROMPT_TOKENS = (16, 256)
OUTPUT_TOKENS = (16, 96)
REQUIRED_SEQUENTIAL, REQUIRED_STATIC = 4.0, 1.0
TEXT = Path(__file__).resolve().parents[1] / "LICENSE"


@dataclass(frozen=True)
class Workload:
    """What every contender gets. prompts[i] is to give exactly max_tokens[i] tokens."""

    folder: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: tuple[int, ...]
    threads: int
    concurrency: int
    static_batch: int

    def batches(self, size: int) -> list[range]:
        count = len(self.prompts)
        return [range(first, min(first + size, count)) for first in range(0, count, size)]


@dataclass
class Outcome:
    """One run. Times in seconds from its start; rss in MiB, with what was resident when the run began."""

    tokens: list[list[int]]
    ttft_s: list[float]
    elapsed_s: float
    rss_before: float = 0.0
    rss_peak: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.elapsed_s


Report = Callable[[int], None]  # told how many requests are done


def make_workload(given: argparse.Namespace) -> Workload:
    from tokenizers import Tokenizer

    from fairlane.embedded import pull

    folder = pull(profile_cpu.MODEL)
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    rng = random.Random(given.seed)
    starts = rng.sample(range(len(text) - PROMPT_TOKENS[1]), given.requests)
    prompts = tuple(tuple(text[start : start + rng.randint(*PROMPT_TOKENS)]) for start in starts)
    outputs = tuple(rng.randint(*OUTPUT_TOKENS) for _ in prompts)
    threads = given.threads or len(os.sched_getaffinity(0))
    return Workload(str(folder), prompts, outputs, threads, given.concurrency, given.static_batch)


# -- the contenders ------------------------------------------------------------------------------------------------------


def run_static(work: Workload, size: int, report: Report, started: Callable[[], None]) -> Outcome:
    """transformers in batches of `size`; 1 is the sequential contender."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(work.threads)
    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = None  # outputs have exactly the length that was asked for
    model.generation_config.pad_token_id = 0
    _generate(model, [work.prompts[0][:16]] * size, 4)
    started()
    tokens: list[list[int]] = []
    ttft_s: list[float] = []
    begin = time.perf_counter()
    for members in work.batches(size):
        longest = max(work.max_tokens[i] for i in members)
        rows, first = _generate(model, [work.prompts[i] for i in members], longest)
        tokens += [row[: work.max_tokens[i]] for row, i in zip(rows, members, strict=True)]
        ttft_s += [first - begin] * len(members)
        report(len(tokens))
    return Outcome(tokens, ttft_s, time.perf_counter() - begin)


class _FirstToken:
    """A streamer that only notes when the first new token came; the first thing it is handed is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        if len(self.times) < 2:
            self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate(model: Any, prompts: list[tuple[int, ...]], max_tokens: int) -> tuple[list[list[int]], float]:
    """New tokens of each prompt, and when the first came."""
    import torch

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    streamer = _FirstToken()
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, streamer=streamer)
    return output[:, width:].tolist(), streamer.times[1]


def run_fairlane(work: Workload, report: Report, started: Callable[[], None]) -> Outcome:
    greedy = profile_cpu.SAMPLINGS["greedy"]
    driver, executor = profile_cpu.make_driver(work.concurrency, work.threads)
    try:
        driver.add(profile_cpu.make_request(-1, work.prompts[0][:15], 4, greedy, driver.clock.now()))
        driver.run_until_idle()
        started()
        begin = driver.clock.now()
        for number, (prompt, max_tokens) in enumerate(zip(work.prompts, work.max_tokens, strict=True)):
            driver.add(profile_cpu.make_request(number, prompt, max_tokens, greedy, begin))
        transcripts = [driver.transcripts[number] for number in range(len(work.prompts))]  # type: ignore[index]
        while driver.turn() or driver.scheduler.num_unfinished:
            report(sum(transcript.ended is not None for transcript in transcripts))
        elapsed_s = driver.clock.now() - begin
        return Outcome([t.token_ids for t in transcripts], [(t.first_token_s or 0.0) - begin for t in transcripts], elapsed_s)
    finally:
        executor.close()


def contenders(work: Workload) -> dict[str, Callable[[Report, Callable[[], None]], Outcome]]:
    return {
        "sequential": lambda report, started: run_static(work, 1, report, started),
        "static": lambda report, started: run_static(work, work.static_batch, report, started),
        "fairlane": lambda report, started: run_fairlane(work, report, started),
    }


# -- processes -----------------------------------------------------------------------------------------------------------


def memory_mib(field: str) -> float:
    """VmRSS or VmHWM (its peak) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    return float("nan")


def _contender(pipe: Connection, name: str, work: Workload) -> None:
    before: list[float] = []
    outcome = contenders(work)[name](lambda done: pipe.send(("done", done)), lambda: before.append(memory_mib("VmRSS")))
    outcome.rss_before, outcome.rss_peak = before[0], memory_mib("VmHWM")
    pipe.send(("outcome", outcome))


def _ceilings(pipe: Connection, threads: int) -> None:
    pipe.send(("outcome", profile_cpu.ceilings(threads)))


def _profile(pipe: Connection, batch: int, threads: int) -> None:
    pipe.send(("outcome", profile_cpu.profile_decode(batch, profile_cpu.CONTEXT, 40, threads)))


def in_child(label: str, target: Callable[..., None], *arguments: Any) -> Any:
    """What `target` sends as its outcome, from a fresh process. Raises RuntimeError if it dies first."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(sender, *arguments))
    process.start()
    sender.close()
    try:
        with console.status(f"{label}: starting") as status:
            while True:
                kind, value = receiver.recv()
                if kind == "outcome":
                    return value
                status.update(f"{label}: {value} requests done")
    except EOFError as error:
        raise RuntimeError(f"{label}: the process died before it had a result") from error
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
        receiver.close()


# -- the report ----------------------------------------------------------------------------------------------------------


def contender_row(name: str, runs: list[Outcome], sequential: list[Outcome]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    ratios = [run.tokens_per_s / base.tokens_per_s for run, base in zip(runs, sequential, strict=True)]
    return {
        "contender": name,
        "output tokens/s": median([run.tokens_per_s for run in runs]),
        "x sequential": median(ratios),
        "seconds": median([run.elapsed_s for run in runs]),
        "TTFT mean s": median([statistics.fmean(run.ttft_s) for run in runs]),
        "TTFT max s": median([max(run.ttft_s) for run in runs]),
        "peak RSS MiB": max(run.rss_peak for run in runs),
        "RSS loaded MiB": max(run.rss_before for run in runs),
    }


def make_checks(runs: dict[str, list[Outcome]]) -> list[Check]:
    def ratio(base: str) -> float:
        return statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in zip(runs["fairlane"], runs[base], strict=True))

    over_sequential, over_static = ratio("sequential"), ratio("static")
    expected = runs["sequential"][0].tokens
    others = [run.tokens for name in runs for run in runs[name]]
    same = sum(all(tokens[i] == expected[i] for tokens in others) for i in range(len(expected)))
    need = f">= {REQUIRED_SEQUENTIAL:g}"
    return [
        Check("CPU-SEQ", "throughput, Fairlane / sequential", over_sequential, need, "x", over_sequential >= REQUIRED_SEQUENTIAL),
        Check("CPU-STATIC", "throughput, Fairlane / static batches", over_static, "> 1", "x", over_static > REQUIRED_STATIC),
        Check("CPU-TOKENS", "requests with equal tokens", same, f"= {len(expected)}", "requests", same == len(expected)),
    ]


def floor_rows(work: Workload, limits: dict[str, float], profile: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a decode step must at least cost here, beside what it did cost."""
    weight_bytes, kv_bytes, flops = profile_cpu.step_costs(Path(work.folder), work.concurrency, profile_cpu.CONTEXT)
    parts = {row["part"]: row["ms"] for row in profile}

    def took(prefix: str) -> float:
        return sum(float(ms) for part, ms in parts.items() if part.startswith(prefix))

    read = limits["read GB/s"] * 1e6
    weights_ms, kv_ms, gemm_ms = weight_bytes / read, kv_bytes / read, flops / (limits["GEMM GFLOP/s"] * 1e6)
    linear_ms = max(weights_ms, gemm_ms)
    rows = [
        ("weights, read once", f"{weight_bytes / 1e6:.0f} MB", weights_ms, took("linear")),
        ("their products", f"{flops / 1e9:.2f} GFLOP", gemm_ms, took("linear")),
        ("K and V, read once", f"{kv_bytes / 1e6:.0f} MB", kv_ms, took("attention")),
        ("the whole step", "", linear_ms + kv_ms, parts["the whole step"]),
    ]
    return [{"floor of": a, "size": b, "floor ms": c, "measured ms": d, "floor / measured": c / d} for a, b, c, d in rows]


def next_limit(floors: list[dict[str, Any]], profile: list[dict[str, Any]]) -> str:
    """Names the group that lies furthest above its floor."""
    parts = {row["part"]: row["ms"] for row in profile}
    over = {
        "linear layers": floors[0]["measured ms"] - max(floors[0]["floor ms"], floors[1]["floor ms"]),
        "attention": floors[2]["measured ms"] - floors[2]["floor ms"],
        "norms and activation": parts.get("norms, activation", 0.0),
        "sampling": parts.get("sampling", 0.0),
        "host": sum(ms for part, ms in parts.items() if part.startswith("host")),
    }
    name = max(over, key=lambda group: over[group])
    listed = ", ".join(f"{group} {ms:.1f}" for group, ms in sorted(over.items(), key=lambda item: -item[1]))
    return f"Next limit: {name}. Milliseconds above the floor: {listed}."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24, help="how many requests (default 24)")
    parser.add_argument("--concurrency", type=int, default=16, help="sequences in one of Fairlane's steps (default 16)")
    parser.add_argument("--static-batch", type=int, default=8, help="size of transformers' static batches (default 8)")
    parser.add_argument("--threads", type=int, default=0, help="for every contender; 0: one per core that may be used")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="rounds; figures are medians over them (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths and the text windows (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment, checks and rows there")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    # The same for all contenders, before any of them loads torch: long spins at barriers hurt whoever shares the cores.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    work = make_workload(given)
    limits = in_child("ceilings", _ceilings, work.threads)
    runs: dict[str, list[Outcome]] = {name: [] for name in contenders(work)}
    for turn in range(given.repeat):
        for name in runs:
            label = f"{name}, round {turn + 1} of {given.repeat}"
            runs[name].append(in_child(label, _contender, name, work))
            console.print(f"{label}: {runs[name][-1].elapsed_s:.1f} s", style="dim")
    profile = in_child("profile", _profile, work.concurrency, work.threads)
    rows = [contender_row(name, outcomes, runs["sequential"]) for name, outcomes in runs.items()]
    floors, checks = floor_rows(work, limits, profile), make_checks(runs)
    asked = f"{len(work.prompts)} requests, {sum(map(len, work.prompts))} prompt tokens, {sum(work.max_tokens)} output tokens"
    print_rows(f"{asked}, float32, {work.threads} threads", rows)
    print_rows("ceilings of this machine, measured now", [limits])
    step = f"{work.concurrency} sequences of {profile_cpu.CONTEXT} tokens on average"
    print_rows(f"a decode step, {step}", profile)
    print_rows(f"the floor of that step, {step}", floors)
    console.print(next_limit(floors, profile))
    print_checks(checks)
    write_json(given.json, checks, [*rows, limits, *profile, *floors])


if __name__ == "__main__":
    main()
