"""Tokenizer threads are shared by turns: a tenant with many prompts waits for itself, not everybody for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from fairlane.errors import FairlaneError
from fairlane.gateway.tokenizer_pool import TokenizerPool

pytestmark = pytest.mark.asyncio


class GatedEncoder:
    """Encodes a prompt when the test lets it; remembers the order."""

    tokenizer = None

    def __init__(self) -> None:
        self.order: list[str] = []
        self.gate = threading.Semaphore(0)
        self.failing = ""

    def encode_prompt(self, text: str, at_most: int | None = None) -> list[int]:
        self.order.append(text)
        self.gate.acquire()
        if text == self.failing:
            raise FairlaneError("NO_CHAT_TEMPLATE", "no")
        return [len(text)]


def one_thread() -> tuple[TokenizerPool, GatedEncoder]:
    encoder = GatedEncoder()
    return TokenizerPool(encoder, 1), encoder  # type: ignore[arg-type]


async def started(pool: TokenizerPool, node: str, text: str) -> asyncio.Task[list[int]]:
    task = asyncio.ensure_future(pool.encode(node, text))
    await asyncio.sleep(0)
    return task


async def test_nodes_take_turns_however_many_prompts_one_of_them_has() -> None:
    pool, encoder = one_thread()
    tasks = [await started(pool, "greedy", f"greedy-{number}") for number in range(4)]
    tasks += [await started(pool, "modest", "modest-0"), await started(pool, "third", "third-0")]
    encoder.gate.release(6)
    await asyncio.gather(*tasks)
    pool.close()
    # greedy-0 had the thread already; then each waiting node in turn.
    assert encoder.order == ["greedy-0", "greedy-1", "modest-0", "third-0", "greedy-2", "greedy-3"]


async def test_a_cancelled_wait_gives_its_turn_to_the_next() -> None:
    pool, encoder = one_thread()
    running = await started(pool, "a", "first")
    waiting = await started(pool, "a", "cancelled")
    last = await started(pool, "b", "last")
    waiting.cancel()
    encoder.gate.release(2)
    assert (await running, await last) == ([5], [4])
    pool.close()
    assert encoder.order == ["first", "last"]


async def test_a_cancelled_caller_keeps_its_thread_busy_until_the_work_is_done() -> None:
    pool, encoder = one_thread()
    running = await started(pool, "a", "first")
    running.cancel()
    last = await started(pool, "a", "last")
    assert encoder.order == ["first"]
    encoder.gate.release(2)
    assert await last == [4]
    pool.close()


async def test_a_prompt_that_fails_frees_its_thread() -> None:
    pool, encoder = one_thread()
    encoder.failing = "bad"
    encoder.gate.release(2)
    with pytest.raises(FairlaneError):
        await pool.encode("a", "bad")
    assert await pool.encode("a", "good") == [4]
    pool.close()


async def test_without_a_tokenizer_text_is_refused() -> None:
    pool = TokenizerPool(None, 1)
    with pytest.raises(FairlaneError) as caught:
        await pool.encode("a", "text")
    pool.close()
    assert caught.value.reason == "NO_TOKENIZER"
