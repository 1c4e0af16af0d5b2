"""Whatever arrives, is aborted, swapped, preempted or paused, at whatever pipeline depth: every request gets exactly the tokens
it would get alone, ends exactly once, and leaves no block behind. The fake model reads its context back through the block
tables, so a wrong block is a wrong token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_world import TIERS, expected_tokens, request, world
from fairlane.scheduler.engine import Abort
from fairlane.scheduler.events import EndReason
from fairlane.scheduler.request import CacheMode, Request
from fairlane.scheduler.tenancy import TiersPolicy

PREFIXES = [tuple(range(1000 * k, 1000 * k + 40)) for k in range(1, 4)]


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    """Up to 24 requests; some share a tenant and a prefix, so that blocks are shared while they are preempted."""
    asked = []
    for number in range(1, draw(st.integers(1, 24)) + 1):
        tier = draw(st.sampled_from(TIERS)).name
        tail = tuple((number * 7919 + i) % 50_000 for i in range(draw(st.integers(1, 40))))
        prefix = draw(st.sampled_from([(), *PREFIXES]))
        asked.append(
            request(
                number,
                tier,
                prompt=prefix[: draw(st.integers(0, 40))] + tail,
                max_tokens=draw(st.integers(1, 30)),
                arrival_s=draw(st.floats(0, 0.5)),
                cache_mode=draw(st.sampled_from(CacheMode)),
                tenant=draw(st.sampled_from(["a/x", "a/y"])),
            )
        )
    return asked


@settings(max_examples=150, deadline=None)
@given(
    asked=requests(),
    aborts=st.dictionaries(st.integers(1, 24), st.floats(0, 1.0), max_size=6),
    policy=st.sampled_from(TiersPolicy),
    depth=st.sampled_from([0, 1, 2]),
    num_blocks=st.integers(14, 40),
    block_size=st.sampled_from([8, 16]),
    budget=st.integers(4, 96),
    max_num_seqs=st.integers(1, 4),
    max_resident=st.integers(2, 8),
    chunk=st.sampled_from([0, 5, 16]),
    num_host_blocks=st.sampled_from([0, 3, 10, 60]),
    min_swap_tokens=st.sampled_from([1, 20]),
)
def test_every_request_gets_its_own_tokens_and_ends_once(
    asked: list[Request],
    aborts: dict[int, float],
    policy: TiersPolicy,
    depth: int,
    num_blocks: int,
    block_size: int,
    budget: int,
    max_num_seqs: int,
    max_resident: int,
    chunk: int,
    num_host_blocks: int,
    min_swap_tokens: int,
) -> None:
    driver = world(
        policy=policy,
        depth=depth,
        num_blocks=num_blocks,
        block_size=block_size,
        budget=budget,
        max_num_seqs=max_num_seqs,
        max_resident=max_resident,
        max_prefill_chunk=chunk,
        num_host_blocks=num_host_blocks,
        min_swap_tokens=min_swap_tokens,
    )
    driver.add_at_arrival(asked)
    for number, time_s in aborts.items():
        if number <= len(asked):
            driver.at(time_s, Abort(asked[number - 1].request_id))

    driver.run_until_idle(20_000)

    for one in asked:
        transcript = driver.transcripts[one.request_id]
        assert transcript.ended is not None
        whole = expected_tokens(one)
        if transcript.ended.reason is EndReason.ABORTED:
            assert transcript.token_ids == whole[: len(transcript.token_ids)]
        elif transcript.ended.reason is EndReason.FAILED:
            assert transcript.ended.error_reason == "KV_CAPACITY_EXCEEDED"
            needed = -(-(len(one.prompt_token_ids) + one.max_tokens - 1) // block_size)
            assert needed > num_blocks
        else:
            assert transcript.token_ids == whole
    assert driver.blocks.num_used_blocks == driver.blocks.host.num_used_blocks == 0
    assert driver.scheduler.num_unfinished == 0
