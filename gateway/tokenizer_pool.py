"""Tokenizing off the event loop, fairly: a few threads, shared by turns among the tenants that wait for one. Decides whose
prompt is next; how a prompt becomes ids is tokenizer.py's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Tokenizer

from fairlane.errors import FairlaneError
from fairlane.gateway.tokenizer import ChatMessage, PromptEncoder


class TokenizerPool:
    """Belongs to the event loop's thread. Encoding 1 MiB takes about half a second of a thread, so a tenant that sends many
    long prompts would otherwise hold up everybody's first token."""

    def __init__(self, encoder: PromptEncoder | None, threads: int) -> None:
        self._encoder = encoder
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._free = threads
        # Turns per node; the node at the front is next.
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """For detokenizing; None when the model has no tokenizer here."""
        return None if self._encoder is None else self._encoder.tokenizer

    async def encode(self, node: str, prompt: str | Sequence[ChatMessage], at_most: int | None = None) -> list[int]:
        """Ids of a plain prompt or of a conversation. Raises NO_TOKENIZER, and what PromptEncoder raises."""
        encoder = self._encoder
        if encoder is None:
            raise FairlaneError("NO_TOKENIZER", "this deployment has no tokenizer; send `token_ids`")
        await self._turn(node)
        loop = asyncio.get_running_loop()
        if isinstance(prompt, str):
            work = self._executor.submit(encoder.encode_prompt, prompt, at_most)
        else:
            work = self._executor.submit(encoder.encode_chat, prompt, at_most)
        # A thread cannot be interrupted: a cancelled caller's thread is free when its work is done, not before.
        work.add_done_callback(lambda _: self._release_from_thread(loop))
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Ends the threads; work not begun is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, node: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(node, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # the turn had come; it goes to the next
            raise

    def _release_from_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile: nobody is waiting
            loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        while self._waiting:
            node, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[node] = turns  # to the back: one prompt a node and round
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
