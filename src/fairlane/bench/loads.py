"""Loads for a benchmark: how many requests of which lengths, and the random token ids they are made of. How a load is run is
run.py's business."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

CHAT = Path(__file__).resolve().parent / "workloads" / "chat_512.json"

Lengths = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are all submitted at once. lengths: (prompt tokens, output tokens) of each, in order."""

    lengths: Lengths

    @property
    def num_requests(self) -> int:
        return len(self.lengths)

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt for prompt, _ in self.lengths)

    @property
    def output_tokens(self) -> int:
        return sum(output for _, output in self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(prompt + output for prompt, output in self.lengths)

    def prompts(self, vocab_size: int, seed: int) -> list[tuple[int, ...]]:
        """Uniformly random token ids, the same for the same seed."""
        rng, ids = random.Random(seed), range(vocab_size)  # noqa: S311 - a load, no secret
        return [tuple(rng.choices(ids, k=prompt)) for prompt, _ in self.lengths]

    def scaled(self, scale: float) -> Load:
        """Fewer and shorter requests, for a machine that could not run the whole: counts and lengths times `scale`, at least
        1, outputs at least 2 unless the load is prefill only. A scale of 1 changes nothing."""
        if scale == 1:
            return self
        count = max(1, round(self.num_requests * scale))
        return Load(tuple((max(1, round(p * scale)), max(min(2, o), round(o * scale))) for p, o in self.lengths[:count]))


def uniform(count: int, prompt: int, output: int) -> Load:
    return Load(((prompt, output),) * count)


def chat_lengths(path: Path = CHAT) -> Lengths:
    """(prompt, output) of the chat list, in order."""
    return tuple((prompt, output) for prompt, output in json.loads(path.read_text(encoding="utf-8"))["lengths"])


def named_load(name: str) -> Load:
    """`one` (a single request, 128 tokens in and 256 out), `batch-N` (N at once, 512 in and 128 out), `prefill-P` (a prompt of P
    tokens, one out), `chat` (the chat list), `chat-N` (its first N), or NxPxO (N requests of P tokens in and O out).

    Raises ValueError for anything else.
    """
    if name == "one":
        return uniform(1, 128, 256)
    if name == "chat":
        return Load(chat_lengths())
    if found := re.fullmatch(r"(batch|prefill|chat)-([1-9]\d{0,5})", name):
        kind, number = found[1], int(found[2])
        if kind == "chat":
            return Load(chat_lengths()[:number])
        return uniform(number, 512, 128) if kind == "batch" else uniform(1, number, 1)
    if found := re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,6})x([1-9]\d{0,6})", name):
        return uniform(*map(int, found.groups()))
    raise ValueError(f'there is no load "{name}": give one, batch-N, prefill-P, chat, chat-N or NxPxO (such as 8x512x128)')
