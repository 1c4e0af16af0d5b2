"""Where a decode step of the CPU worker spends its time, and what this machine allows at best: memory bandwidth, matrix products
and the floor they give. It only measures; bench_cpu.py prints the same beside its comparison.

    python benchmarks/profile_cpu.py --batch 16 --context 200
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import console, print_rows, write_json

from fairlane.clock import MonotonicClock
from fairlane.embedded import resolve
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import Request, RequestId, SamplingParams
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.tenancy import PolicySnapshot, Tier, TiersPolicy
from fairlane.worker.config import WorkerConfig
from fairlane.worker.executor import LocalExecutor

MODEL = "smollm2"
CONTEXT = 200
TIER = Tier("only", 1)
TEXT = Path(__file__).resolve().parents[1] / "LICENSE"  # real text: how sharp a distribution is decides what sampling costs
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8, seed=7),
    "top-p": SamplingParams(temperature=0.8, top_p=0.95, seed=7),
    "penalties": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, presence_penalty=0.3, seed=7),
}
COPY_BYTES = 512 << 20
GEMM_SIZE = 2048


class Stopwatch:
    """Seconds by name. What a timed part spends in another timed part counts for the inner one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = [0.0]

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                total = time.perf_counter() - started
                own = total - self._inner.pop()
                self._inner[-1] += total
                self.seconds[name] = self.seconds.get(name, 0.0) + own

        return timed


def make_driver(max_num_seqs: int, threads: int, **limits: Any) -> tuple[EngineDriver, LocalExecutor]:
    """Engine and executor on the embedded model; the caller closes the executor."""
    clock = MonotonicClock()
    executor = LocalExecutor(WorkerConfig(model=str(resolve(MODEL)), threads=threads, max_num_seqs=max_num_seqs), clock)
    chosen = SchedulerLimits(max_num_seqs=max_num_seqs, max_model_len=executor.info.max_model_len, **limits)
    return EngineDriver(executor, clock, PolicySnapshot(1, "", TiersPolicy.FCFS, (TIER,)), chosen), executor


def make_request(number: int, prompt: tuple[int, ...], max_tokens: int, sampling: SamplingParams, now_s: float) -> Request:
    """A request that ends at exactly max_tokens: it has no stop tokens."""
    identity = (RequestId(number), "org/app", TIER.name)
    return Request(*identity, prompt, max_tokens, sampling, arrival_s=now_s, cache_domain="tenant:org/app")


@contextmanager
def instrumented(executor: LocalExecutor, watch: Stopwatch) -> Iterator[None]:
    """Times the worker's parts, by wrapping them for as long as the block lasts."""
    from fairlane.worker import attention, linear, model_runner
    from fairlane.worker.ops import Ops

    runner, plain = executor.runner, linear.Linear.__call__
    ops = runner._model._ops
    names = {id(runner._model._head): "linear: lm_head"}
    for layer in runner._model._layers:
        names |= {id(getattr(layer, part)): f"linear: {part}" for part in ("qkv", "o", "gate_up", "down")}

    def call(self: Any, x: Any) -> Any:
        return watch.around(names[id(self)], plain)(self, x)

    changes: list[tuple[Any, str, str | None]] = [
        (attention, "rope_norm_write", "attention: rope, KV write"),
        (attention, "paged_attention", "attention: gather, scores, values"),
        (runner._attention, "plan", "attention: plan of the step"),
        (model_runner, "sample_tokens", "sampling"),
        (runner._batch, "apply", "host: input batch"),
        (runner._batch, "prepare", "host: input batch"),
        (runner._batch, "store", "host: input batch"),
        (runner, "execute", "host: the rest of the runner"),
    ]
    saved = [(owner, name, owner.__dict__.get(name)) for owner, name, _ in changes]
    try:
        linear.Linear.__call__ = call  # type: ignore[method-assign]
        runner._model._ops = Ops(*(watch.around("norms, activation", getattr(ops, name)) for name in Ops.__slots__))
        for owner, name, label in changes:
            setattr(owner, name, watch.around(str(label), getattr(owner, name)))
        yield
    finally:
        linear.Linear.__call__ = plain  # type: ignore[method-assign]
        runner._model._ops = ops
        for owner, name, value in saved:
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def profile_decode(batch: int, context: int, steps: int, threads: int, sampling: str = "greedy") -> list[dict[str, Any]]:
    """Rows: part, ms a step, share of it; the last is the whole step, scheduler included. Lengths are spread evenly from a
    quarter of `context` to seven quarters, because like lengths share a batch of the attention."""
    driver, executor = make_driver(batch, threads)
    try:
        text, rng = _text_tokens(), random.Random(1)
        for number in range(batch):
            length = max(1, context // 4 + number * 3 * context // (2 * max(1, batch - 1)) - steps // 2)
            start = rng.randrange(len(text) - length)
            prompt = tuple(text[start : start + length])
            driver.add(make_request(number, prompt, steps + 64, SAMPLINGS[sampling], driver.clock.now()))
        while any(transcript.first_token_s is None for transcript in driver.transcripts.values()):
            driver.turn()
        return _table(list(_measured(driver, executor, steps)))
    finally:
        executor.close()


def _text_tokens() -> list[int]:
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(resolve(MODEL) / "tokenizer.json")).encode(TEXT.read_text(encoding="utf-8")).ids
    return ids


def _measured(driver: EngineDriver, executor: LocalExecutor, steps: int) -> Iterator[dict[str, float]]:
    for _ in range(4):
        driver.turn()
    for _ in range(steps):
        watch = Stopwatch()
        with instrumented(executor, watch):
            watch.around("host: scheduler and engine", driver.turn)()
        yield watch.seconds


def _table(samples: list[dict[str, float]]) -> list[dict[str, Any]]:
    """Means over the faster half of the steps: another process on these cores shows in the slower one."""
    samples.sort(key=lambda parts: sum(parts.values()))
    chosen = samples[: max(1, len(samples) // 2)]
    means = {name: statistics.fmean(parts.get(name, 0.0) for parts in chosen) for name in chosen[0]}
    total = sum(means.values())
    rows = [{"part": name, "ms": 1e3 * value, "share %": 100 * value / total} for name, value in sorted(means.items())]
    return [*rows, {"part": "the whole step", "ms": 1e3 * total, "share %": 100.0}]


def ceilings(threads: int) -> dict[str, float]:
    """What this machine does at best: copy and read GB/s over memory far larger than its caches, float32 GFLOP/s."""
    import torch

    torch.set_num_threads(threads)
    with torch.inference_mode():
        source = torch.ones(COPY_BYTES // 4)
        target = torch.empty_like(source)
        copy_s = _best_s(lambda: target.copy_(source))
        read_s = _best_s(lambda: torch.dot(source, source))
        a, b = torch.ones(GEMM_SIZE, GEMM_SIZE), torch.ones(GEMM_SIZE, GEMM_SIZE)
        products = [lambda: torch.mm(a, b)]
        if hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            packed = torch.ops.mkldnn._reorder_linear_weight(b, GEMM_SIZE)
            products.append(lambda: torch.ops.mkldnn._linear_pointwise(a, packed, None, "none", [], ""))
        gemm_s = min(_best_s(product) for product in products)
    return {
        "copy GB/s": 2 * COPY_BYTES / copy_s / 1e9,
        "read GB/s": COPY_BYTES / read_s / 1e9,
        "GEMM GFLOP/s": 2 * GEMM_SIZE**3 / gemm_s / 1e9,
    }


def step_costs(folder: Path, batch: int, context: int) -> tuple[int, int, int]:
    """Of a decode step: bytes of float32 weights read, bytes of K and V read, floating-point operations of its linears."""
    from fairlane.worker.models.config import load_model_config

    config = load_model_config(folder)
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * q + 2 * kv + 3 * config.intermediate_size)
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    return 4 * weights, 4 * batch * context * config.num_layers * 2 * kv, 2 * weights * batch


def _best_s(function: Callable[[], Any], repeats: int = 12) -> float:
    """The fastest of a dozen: a ceiling is what the machine can do, not what it usually gets to."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16, help="sequences that decode together (default 16)")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of each, on average (default %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="decode steps to measure (default 40)")
    parser.add_argument("--threads", type=int, default=0, help="for torch; 0: one per core that this process may use")
    parser.add_argument("--sampling", choices=sorted(SAMPLINGS), default="greedy", help="how tokens are picked (default greedy)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write environment and rows there")
    given = parser.parse_args()
    rows = profile_decode(given.batch, given.context, given.steps, given.threads, given.sampling)
    print_rows(f"a decode step, {given.batch} sequences of {given.context} tokens on average, {given.sampling}", rows)
    console.print("Times include what the stopwatch itself costs, about 1 µs a call (some 400 calls a step).", style="dim")
    write_json(given.json, [], rows)


if __name__ == "__main__":
    main()
