"""The load that bench_serving.py puts on a server: processes that do nothing else send token ids over gRPC and note when each
message came; messages are kept as bytes and read when all is over, so that the client costs as little as it can. It measures
one run; starting servers and comparing are bench_serving.py's.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from fairlane.bench.figures import Row, percentile
from fairlane.bench.loads import Load
from fairlane.protos.fairlane.v1 import inference_pb2 as pb

GENERATE = "/fairlane.v1.Inference/Generate"
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.enable_http_proxy", 0))
PROGRESS_S = 2.0
GRACE_S = 15.0  # beyond the deadlines of the requests, for what a load process does before and after
NO_ANSWER, LOST = "NO_ANSWER", "LOAD_PROCESS_LOST"


class NotServingError(Exception):
    """The server cannot be measured; the message says why."""


# -- what one process does ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Order:
    """One process's part of a load. concurrency: the most of its requests in flight, None: all at once. timeout_s: a request's
    deadline, which counts from its own start. starts_s: when each is sent, after the common start; None: as soon as it may."""

    target: str
    key: str = field(repr=False)
    prompts: Sequence[tuple[int, ...]]
    outputs: Sequence[int]
    concurrency: int | None
    timeout_s: float
    starts_s: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request got; times of the monotonic clock. failure: empty, or the code and reason. first_tokens: in the first
    message that had any; TPOT is of those after it."""

    sent_s: float = 0.0
    first_s: float = 0.0
    last_s: float = 0.0
    ended_s: float = 0.0
    first_tokens: int = 0
    num_tokens: int = 0
    messages: int = 0
    failure: str = ""

    @property
    def tpot_ms(self) -> float | None:
        after = self.num_tokens - self.first_tokens
        return 1e3 * (self.last_s - self.first_s) / after if after else None


@dataclass(slots=True)
class _Kept:
    """One stream as it came."""

    sent_s: float = 0.0
    ended_s: float = 0.0
    messages: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str = ""


def load_process(order: Order, pipe: Connection) -> None:
    """Says ("ready",), waits for a word, sends the load; then ("progress", done, messages) and at last ("done", answers, CPU
    seconds), or ("failed", why)."""
    try:
        asyncio.run(_drive(order, pipe))
    except NotServingError as error:
        pipe.send(("failed", str(error)))
    except (EOFError, BrokenPipeError):  # whoever started us is gone
        return


async def _drive(order: Order, pipe: Connection) -> None:
    requests = [_request(prompt, output) for prompt, output in zip(order.prompts, order.outputs, strict=True)]
    async with grpc.aio.insecure_channel(order.target, options=CHANNEL_OPTIONS) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), GRACE_S)
        except TimeoutError:
            raise NotServingError(f"no connection to {order.target} within {GRACE_S:g} s") from None
        pipe.send(("ready",))
        pipe.recv()
        gc.collect()
        gc.freeze()
        gc.disable()
        began_cpu_s = time.process_time()
        kept = await _all(order, channel, requests, pipe)
        cpu_s = time.process_time() - began_cpu_s
        pipe.send(("done", [_read(one, output) for one, output in zip(kept, order.outputs, strict=True)], cpu_s))


async def _all(order: Order, channel: grpc.aio.Channel, requests: Sequence[bytes], pipe: Connection) -> list[_Kept]:
    kept = [_Kept() for _ in requests]
    waiting, now = iter(range(len(requests))), time.monotonic
    method = channel.unary_stream(GENERATE)  # no serializers: bytes in, bytes out
    metadata = (("authorization", f"Bearer {order.key}"),)
    began_s = now()

    async def one_after_another() -> None:
        for number in waiting:
            one = kept[number]
            if order.starts_s is not None:
                await asyncio.sleep(began_s + order.starts_s[number] - now())
            one.sent_s = now()
            try:
                async for message in method(requests[number], metadata=metadata, timeout=order.timeout_s):
                    one.messages.append((now(), message))
            except grpc.aio.AioRpcError as error:
                one.failure = failure_of(error)
            one.ended_s = now()

    async def report() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            pipe.send(("progress", sum(one.ended_s > 0 for one in kept), sum(len(one.messages) for one in kept)))

    reporting = asyncio.create_task(report())
    try:
        await asyncio.gather(*(one_after_another() for _ in range(order.concurrency or len(requests))))
    finally:
        reporting.cancel()
    return kept


def _request(prompt: Sequence[int], output: int) -> bytes:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(temperature=0),
        stopping=pb.StoppingParams(max_tokens=output, ignore_eos=True),
        response=pb.ResponseOptions(return_token_ids=True),
    ).SerializeToString()


def _read(kept: _Kept, output: int) -> Answer:
    """A stream that ends well has `finished` and as many token ids as were asked for; else that is its failure."""
    first_s = last_s = 0.0
    first_tokens = num_tokens = 0
    finished = False
    for now_s, message in kept.messages:
        event = pb.GenerateEvent.FromString(message)
        finished |= event.HasField("finished")
        if came := len(event.tokens.token_ids):
            first_s, first_tokens = (first_s, first_tokens) if num_tokens else (now_s, came)
            last_s, num_tokens = now_s, num_tokens + came
    failure = kept.failure
    if not failure and not (finished and num_tokens == output):
        failure = f"SHORT {num_tokens} of {output} tokens" if finished else "UNFINISHED"
    return Answer(kept.sent_s, first_s, last_s, kept.ended_s, first_tokens, num_tokens, len(kept.messages), failure)


def failure_of(error: Any) -> str:
    """A refusal's code and stable reason: RESOURCE_EXHAUSTED MAX_IN_FLIGHT."""
    code = error.code().name
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # details that do not belong to this status
        status = None
    info = error_details_pb2.ErrorInfo()
    reasons = [info.reason for detail in (status.details if status else ()) if detail.Unpack(info)]
    return " ".join(dict.fromkeys((code, *reasons)))


# -- all processes -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Driven:
    """One run: an answer per request of every order, in order, and what the load processes cost."""

    start_s: float
    answers: list[Answer]
    cpu_s: float = 0.0


@dataclass(slots=True)
class _Part:
    order: Order
    process: BaseProcess
    pipe: Connection
    done: int = 0
    messages: int = 0
    answers: list[Answer] | None = None


def shared_out(order: Order, processes: int) -> list[Order]:
    """The same load as up to `processes` orders: requests go round, the concurrency is divided."""
    count = max(1, min(processes, len(order.prompts), order.concurrency or len(order.prompts)))
    most = [None if order.concurrency is None else (order.concurrency + n) // count for n in range(count)]
    return [
        replace(order, prompts=order.prompts[n::count], outputs=order.outputs[n::count], concurrency=most[n])
        for n in range(count)
    ]


def drive(orders: Sequence[Order], limit_s: float, say: Callable[[str], None]) -> Driven:
    """Runs the orders side by side, each in a process of its own, for at most limit_s from the common start; what has not
    answered by then, or was lost with its process, is a failure. Raises NotServingError if not all of them could connect."""
    context = multiprocessing.get_context("spawn")
    parts: list[_Part] = []
    try:
        for order in orders:
            ours, theirs = context.Pipe()
            process = context.Process(target=load_process, args=(order, theirs), daemon=True)
            process.start()
            theirs.close()
            parts.append(_Part(order, process, ours))
        for part in parts:
            said = part.pipe.recv() if part.pipe.poll(4 * GRACE_S) else ("failed", "a load process did not come up")
            if said[0] != "ready":
                raise NotServingError(said[1])
        driven = Driven(time.monotonic(), [])
        for part in parts:
            part.pipe.send("go")
        driven.cpu_s = sum(_gather(parts, driven.start_s + limit_s, say))
        for part in parts:
            driven.answers += part.answers or [Answer(driven.start_s, failure=NO_ANSWER)] * len(part.order.prompts)
        return driven
    except (EOFError, OSError) as error:
        raise NotServingError(f"a load process ended before the load began: {error}") from None
    finally:
        for part in parts:
            part.process.kill()
            part.process.join()
            part.pipe.close()


def _gather(parts: Sequence[_Part], deadline_s: float, say: Callable[[str], None]) -> Iterator[float]:
    """Hears the parts until each has answered; yields the CPU seconds of each that did."""
    waiting, said_s = {part.pipe: part for part in parts}, time.monotonic()
    total = sum(len(part.order.prompts) for part in parts)
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left_s):
            part = waiting[pipe]  # type: ignore[index]
            try:
                kind, *said = part.pipe.recv()
            except (EOFError, OSError):
                part.answers = [Answer(failure=LOST)] * len(part.order.prompts)
                kind = LOST
            if kind == "progress":
                part.done, part.messages = said
                if time.monotonic() - said_s >= PROGRESS_S:
                    said_s = time.monotonic()
                    say(f"  {sum(p.done for p in parts)} of {total} requests done, {sum(p.messages for p in parts):,} messages")
                continue
            del waiting[pipe]  # type: ignore[arg-type]
            if kind == "done":
                part.answers, part.done = said[0], len(said[0])
                yield said[1]


def figures(load: Load, driven: Driven) -> Row:
    """Rates count the requests that ended well, over the time from the common start to the last end; TTFT counts from when a
    request was sent. None where there is nothing to take a figure of."""
    well = [answer for answer in driven.answers if not answer.failure]
    failures = Counter(answer.failure for answer in driven.answers if answer.failure)
    wall_s = max(0.0, max(answer.ended_s for answer in driven.answers) - driven.start_s)
    output = sum(answer.num_tokens for answer in well)
    return {
        "requests": load.num_requests,
        "failed": failures.total(),
        "failures": ", ".join(f"{count} x {what}" for what, count in failures.most_common()),
        "prompt_tokens": load.prompt_tokens,
        "output_tokens": output,
        "wall_s": wall_s,
        "out_tok_s": output / wall_s if output else 0.0,
        **_spread("ttft", [1e3 * (answer.first_s - answer.sent_s) for answer in well]),
        **_spread("tpot", [answer.tpot_ms for answer in well if answer.tpot_ms is not None]),
        "messages": sum(answer.messages for answer in driven.answers),
        "client_cpus": driven.cpu_s / wall_s if wall_s > 0 else None,
    }


def _spread(name: str, values: Sequence[float]) -> Row:
    parts = {f"{name}_p50_ms": 0.5, f"{name}_p90_ms": 0.9, f"{name}_p99_ms": 0.99}
    return {key: percentile(sorted(values), part) if values else None for key, part in parts.items()}
