"""Steps of one batch under a profiler: torch's for operators and kernels, viztracer for the host's Python. It brings the batch to
where it is steady, times steps without any profiler, then records others; what is shown of it is the caller's business."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from fairlane.bench.calls import GREEDY
from fairlane.bench.loads import uniform
from fairlane.bench.run import FCFS
from fairlane.clock import MonotonicClock
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.executor import Executor
from fairlane.scheduler.request import Request, RequestId
from fairlane.worker.config import Device, WorkerConfig
from fairlane.worker.executors import limits_of

WARM_UP = 5
MAX_TURNS = 100_000
_SPANS = ("schedule", "launch", "result", "update")
_STEP = "step"


class ProfileError(Exception):
    """The batch cannot be brought to where it is to be profiled; the message says why."""


@dataclass(frozen=True, slots=True)
class Batch:
    """size sequences with prompts of `context` tokens. prefill: steps from the first on, instead of steps that only decode."""

    size: int
    context: int
    prefill: bool = False


@dataclass(frozen=True, slots=True)
class Spent:
    """What one operator or kernel took: calls and its own milliseconds, children not counted, per step."""

    name: str
    calls: float
    self_ms: float


@dataclass(frozen=True, slots=True)
class Recording:
    """steps: how many were recorded. step_ms: of as many others, without a profiler. spent: by where it ran, "host" or "device",
    the largest first; spans: of the parts of a step, on the host."""

    steps: int
    step_ms: float
    recorded_step_ms: float
    spans: list[Spent]
    spent: dict[str, list[Spent]]


class Profiler:
    """An engine on a loaded executor, to be profiled once."""

    def __init__(self, executor: Executor, config: WorkerConfig, batch: Batch, steps: int) -> None:
        """Raises ProfileError for a batch that the settings or the KV cache do not hold at once."""
        info = executor.info
        self._steps = steps
        self._batch = batch
        self._on_gpu = config.device is Device.CUDA
        self._executor = executor
        # Enough for three recordings, after what the first sequences decode while the last ones' prompts are computed.
        self._outputs = WARM_UP + 4 * (steps + config.pipeline_depth) + (0 if batch.prefill else _prompt_steps(config, batch))
        tokens = batch.context + self._outputs
        if batch.size > config.max_num_seqs:
            raise ProfileError(f"a batch of {batch.size} is more than max_num_seqs ({config.max_num_seqs})")
        if tokens > info.max_model_len:
            raise ProfileError(f"{batch.context} tokens and {self._outputs} more exceed the context of {info.max_model_len}")
        needed, there = batch.size * -(-tokens // info.block_size), info.num_blocks - 1
        if needed > there:
            raise ProfileError(f"the batch needs {needed} blocks of KV cache, and there are {there}: raise kv_cache, or lower it")
        self._driver = self._new_driver(config)

    def record(self, trace: Path) -> Recording:
        """Times steps, then records as many under torch's profiler and writes them to `trace`, which chrome://tracing and
        Perfetto show."""
        self._bring_up()
        if self._batch.prefill:  # nothing of it has run yet
            self._timed(nullcontext)
            self._bring_up()
        step_ms = self._timed(nullcontext)
        self._bring_up()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        with self._spans(), profile(activities=activities) as profiler:
            recorded_ms = self._timed(lambda: record_function(_STEP))
        profiler.export_chrome_trace(str(trace))
        return _recording(profiler, self._steps, step_ms, recorded_ms)

    def record_host(self, file: Path) -> None:
        """Records steps with viztracer. Raises ModuleNotFoundError where it is not installed."""
        from viztracer import VizTracer

        self._bring_up()
        tracer = VizTracer(output_file=str(file), verbose=0)
        tracer.start()
        try:
            self._timed(nullcontext)
        finally:
            tracer.stop()
        tracer.save()

    def close(self) -> None:
        """Lets the batch go."""
        for request_id in list(self._driver.transcripts):
            self._driver.abort(request_id)
        self._driver.run_until_idle(MAX_TURNS)

    def _new_driver(self, config: WorkerConfig) -> EngineDriver:
        limits = limits_of(config, self._executor.info.max_model_len)
        depth = config.pipeline_depth
        return EngineDriver(self._executor, MonotonicClock(), FCFS, limits, depth=depth, prefix_caching=False)

    def _bring_up(self) -> None:
        """A batch that all decodes, unless there is one; with `prefill` a new one that has not begun."""
        driver = self._driver
        if driver.transcripts and not self._batch.prefill:
            return
        self.close()
        driver.transcripts.clear()
        prompts = uniform(self._batch.size, self._batch.context, self._outputs).prompts(self._executor.info.vocab_size, 0)
        for number, prompt in enumerate(prompts):
            identity = (RequestId(number), "bench/load", FCFS.tiers[0].name)
            arrival_s = driver.clock.now()
            driver.add(Request(*identity, prompt, self._outputs, GREEDY, arrival_s=arrival_s, cache_domain="tenant:bench"))
        if self._batch.prefill:
            return
        for _ in range(MAX_TURNS):
            driver.turn()
            if all(len(transcript.token_ids) > WARM_UP for transcript in driver.transcripts.values()):
                return
            if any(transcript.ended is not None for transcript in driver.transcripts.values()):
                break
        raise ProfileError("the batch did not come to decode all at once: its prompts take too many steps, or a request failed")

    def _timed(self, around: Callable[[], AbstractContextManager[Any]]) -> float:
        """Milliseconds a step, over as many as are to be recorded."""
        began = time.perf_counter()
        for _ in range(self._steps):
            with around():
                self._driver.turn()
        return 1e3 * (time.perf_counter() - began) / self._steps

    @contextmanager
    def _spans(self) -> Iterator[None]:
        """Names the parts of a step in the trace, for as long as the block lasts."""
        owners: list[tuple[Any, str]] = [(self._driver.scheduler, "schedule"), (self._driver.scheduler, "update")]
        owners += [(self._executor, "launch"), (self._executor, "result")]
        for owner, name in owners:
            setattr(owner, name, _named(name, getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name in owners:
                delattr(owner, name)  # the class's own shows again


def _prompt_steps(config: WorkerConfig, batch: Batch) -> int:
    """At most so many steps pass until every prompt of the batch is computed."""
    tokens = max(1, config.max_num_batched_tokens - batch.size)
    tokens = min(tokens, config.max_prefill_chunk or tokens)
    return batch.size * (1 + batch.context // tokens)


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with record_function(name):
            return function(*arguments)

    return call


def _recording(profiler: Any, steps: int, step_ms: float, recorded_ms: float) -> Recording:
    spent: dict[str, list[Spent]] = {"host": [], "device": []}
    spans: list[Spent] = []
    for event in profiler.key_averages():
        on_host = event.device_type.name == "CPU"
        if event.key in _SPANS or event.key == _STEP:
            if on_host:
                spans.append(Spent(event.key, event.count / steps, event.cpu_time_total / 1e3 / steps))
            continue
        own_us = event.self_cpu_time_total if on_host else event.self_device_time_total
        if own_us > 0 and not event.key.startswith("ProfilerStep"):
            spent["host" if on_host else "device"].append(Spent(event.key, event.count / steps, own_us / 1e3 / steps))
    for found in spent.values():
        found.sort(key=lambda one: -one.self_ms)
    order = {name: place for place, name in enumerate((_STEP, *_SPANS))}
    return Recording(steps, step_ms, recorded_ms, sorted(spans, key=lambda one: order[one.name]), spent)
