"""The inbox of one stream and what is made of it: what is sent together, what is kept before a failure, when a reader is cut."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from fairlane.clock import FakeClock
from fairlane.errors import FairlaneError
from fairlane.gateway.generation import Generation, StreamFacts
from fairlane.gateway.output_text import OutputText
from fairlane.gateway.streams import DeltaInbox
from fairlane.protos.fairlane.v1 import inference_pb2 as pb
from fairlane.protos.fairlane.v1 import worker_pb2 as wpb

pytestmark = pytest.mark.asyncio


def make_inbox(clock: FakeClock, max_deltas: int = 100) -> DeltaInbox:
    return DeltaInbox(max_tokens=1000, vocab_size=100, max_deltas=max_deltas, slow_consumer_s=30, clock=clock)


def tokens(*ids: int) -> wpb.Delta:
    return wpb.Delta(token_ids=ids)


ENDED = wpb.Delta(ended=wpb.EndedDelta(reason="length"))
STARTED = wpb.Delta(queue_position=2, started=wpb.StartedDelta(cached_tokens=3, queue_s=0.5))


async def settle() -> None:
    """Lets every task run until it waits for something new."""
    for _ in range(20):
        await asyncio.sleep(0)


def letters() -> Tokenizer:
    """A is 65, B is 66, as in ASCII."""
    tokenizer = Tokenizer(models.WordLevel({chr(code): code for code in range(128)}, unk_token="Z"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


class Stream:
    """A generation whose events are gathered."""

    def __init__(self, coalesce_s: float = 60.0, stop: Sequence[str] = (), **facts: Any) -> None:
        self.clock = FakeClock(100.0)
        self.inbox = make_inbox(self.clock)
        self.events: list[pb.GenerateEvent] = []
        stream = StreamFacts("id", "model", "gold", 7, self.clock.now(), coalesce_s, return_token_ids=True, **facts)
        output = OutputText(letters() if stop else None, list(stop), frozenset())
        self.task = asyncio.ensure_future(Generation(stream, self.inbox, output, self._write, self.clock).run())

    async def _write(self, event: pb.GenerateEvent) -> None:
        self.events.append(event)

    async def offer(self, *deltas: wpb.Delta) -> None:
        for delta in deltas:
            assert self.inbox.offer(delta) is None
        await settle()

    def token_events(self) -> list[list[int]]:
        return [list(e.tokens.token_ids) for e in self.events if e.WhichOneof("event") == "tokens"]


async def test_the_first_token_goes_at_once_and_the_next_wait_for_company() -> None:
    stream = Stream()
    await stream.offer(STARTED, tokens(1))
    assert stream.token_events() == [[1]]
    await stream.offer(tokens(2))
    await stream.offer(tokens(3), tokens(4))
    assert stream.token_events() == [[1]]
    await stream.offer(ENDED)
    assert stream.token_events() == [[1], [2, 3, 4]]
    await stream.task


async def test_after_a_quiet_interval_a_token_goes_at_once() -> None:
    stream = Stream()
    await stream.offer(STARTED, tokens(1))
    stream.clock.advance(60)
    await stream.offer(tokens(2))
    assert stream.token_events() == [[1], [2]]
    stream.task.cancel()


async def test_timing_is_measured_from_arrival_on_the_gateways_clock() -> None:
    stream = Stream()
    stream.clock.advance(2)
    await stream.offer(STARTED, tokens(1))
    stream.clock.advance(3)
    await stream.offer(ENDED)
    await stream.task
    finished = stream.events[-1].finished
    assert finished.timing == pb.Timing(queue_ms=500, time_to_first_token_ms=2000, total_ms=5000)
    assert finished.usage == pb.Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=1, total_tokens=8)


async def test_tokens_that_came_before_a_failure_are_delivered_before_it() -> None:
    stream = Stream()
    await stream.offer(STARTED, tokens(1))
    await stream.offer(tokens(2))
    stream.inbox.fail(FairlaneError("WORKER_LOST", "gone"))
    with pytest.raises(FairlaneError, match="gone"):
        await stream.task
    assert stream.token_events() == [[1], [2]]


async def test_the_first_failure_stays_and_later_deltas_are_dropped() -> None:
    inbox = make_inbox(FakeClock())
    inbox.fail(FairlaneError("CANCELLED", "first"))
    inbox.fail(FairlaneError("WORKER_LOST", "second"))
    assert inbox.offer(tokens(1)) is None
    with pytest.raises(FairlaneError, match="first"):
        inbox.take()


async def test_a_reader_over_its_buffer_has_its_time_to_catch_up_and_is_cut_after_it() -> None:
    clock = FakeClock()
    inbox = make_inbox(clock, max_deltas=2)
    inbox.offer(STARTED)
    inbox.take()
    for _ in range(4):
        inbox.offer(tokens(1))
    clock.advance(30)
    inbox.offer(tokens(1))
    assert len(inbox.take()) == 5
    for _ in range(3):
        inbox.offer(tokens(1))
    clock.advance(30.1)
    inbox.offer(tokens(1))
    with pytest.raises(FairlaneError) as caught:
        inbox.take()
    assert caught.value.reason == "SLOW_CONSUMER"


async def test_a_pause_the_worker_reports_is_told_while_it_lasts() -> None:
    stream = Stream(coalesce_s=0, lifecycle_events=True)
    await stream.offer(STARTED, tokens(1))
    await stream.offer(wpb.Delta(preempted=wpb.PreemptedDelta(kind="paused", reason="higher_rank")))
    expected = pb.Preempted(kind=pb.PREEMPTION_KIND_PAUSED, reason=pb.PREEMPTION_REASON_HIGHER_RANK)
    assert [event.preempted for event in stream.events if event.HasField("preempted")] == [expected]
    stream.task.cancel()


async def test_seq_is_contiguous_over_all_kinds_of_events() -> None:
    stream = Stream(lifecycle_events=True)
    await stream.offer(STARTED, tokens(1), wpb.Delta(preempted=wpb.PreemptedDelta(kind="recomputed", reason="kv_capacity")))
    await stream.offer(wpb.Delta(resumed_after_s=0.1, token_ids=[2]), ENDED)
    await stream.task
    kinds = [e.WhichOneof("event") for e in stream.events]
    assert kinds == ["queued", "started", "tokens", "preempted", "resumed", "tokens", "output_finished", "finished"]
    assert [e.seq for e in stream.events] == list(range(8))


async def test_a_stop_string_after_a_preemption_still_tells_of_it() -> None:
    stream = Stream(coalesce_s=0, stop=["D"])
    lost = wpb.Delta(preempted=wpb.PreemptedDelta(kind="recomputed", reason="higher_rank"))
    paused = wpb.Delta(preempted=wpb.PreemptedDelta(kind="paused", reason="higher_rank"))
    moved = wpb.Delta(preempted=wpb.PreemptedDelta(kind="swapped", reason="higher_rank"))
    await stream.offer(STARTED, tokens(65), lost, wpb.Delta(resumed_after_s=0.1), paused, tokens(66), moved, tokens(67, 68))
    await stream.task
    output, finished = stream.events[-2].output_finished, stream.events[-1].finished
    assert (output.stop_string, finished.usage.preemptions, finished.usage.completion_tokens) == ("D", 2, 4)


async def test_the_workers_own_figures_win_at_the_end() -> None:
    stream = Stream()
    ended = wpb.Delta(ended=wpb.EndedDelta(reason="length", preemptions=3, recomputed_tokens=70))
    await stream.offer(STARTED, wpb.Delta(preempted=wpb.PreemptedDelta(kind="recomputed")), tokens(1), ended)
    await stream.task
    usage = stream.events[-1].finished.usage
    assert (usage.preemptions, usage.recomputed_tokens) == (3, 70)


@pytest.mark.parametrize(
    ("deltas", "violation"),
    [
        ((tokens(1),), "tokens before the start"),
        ((wpb.Delta(queue_position=1), tokens(1)), "tokens before the start"),
        ((STARTED, STARTED), "a second start"),
        ((STARTED, tokens(1), STARTED), "a second start"),
        ((wpb.Delta(started=wpb.StartedDelta(), token_ids=[1]),), None),
        ((wpb.Delta(ended=wpb.EndedDelta(reason="failed")),), None),
    ],
)
async def test_a_request_starts_once_and_before_its_tokens(deltas: tuple[wpb.Delta, ...], violation: str | None) -> None:
    inbox = make_inbox(FakeClock())
    answers = [inbox.offer(delta) for delta in deltas]
    assert answers == [None] * (len(deltas) - 1) + [violation]
