"""Which steps are measured: so many sequences that decode, with so much context each, and beside them a prompt's chunk."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from fairlane.scheduler.executor import ExecutorInfo
from fairlane.worker.config import WorkerConfig

DECODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CONTEXTS = (128, 512, 2048, 8192)
BESIDE_CHUNKS = (128, 2048)
CHUNKS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Short prompts share a step; a step of four costs more than one of a prompt that long.
PROMPTS, BESIDE_PROMPTS = 4, (0, 8, 32)
STARTS = (512, 2048, 8192)
COPIES = (64, 512)
# Tokens that a sequence may grow by while it is measured.
ROOM = 32


@dataclass(frozen=True, slots=True)
class Point:
    """decodes sequences, of `context` tokens on average: lengths are spread from half of that to one and a half times that, as
    running sequences differ. chunk: tokens of prompts, of as many more sequences as `prompts`, each of which has `start` tokens
    already. copies: blocks to the host.
    """

    decodes: int
    context: int = 0
    chunk: int = 0
    start: int = 0
    prompts: int = 1
    copies: int = 0

    def chunks(self) -> list[int]:
        """Tokens of each prompt in the step."""
        return [self.chunk // self.prompts] * self.prompts if self.chunk else []

    def lengths(self) -> list[int]:
        """Tokens with keys and values of each sequence that decodes."""
        if self.decodes < 2:
            return [self.context] * self.decodes
        return [round(self.context * (0.5 + i / (self.decodes - 1))) for i in range(self.decodes)]

    def num_blocks(self, block_size: int) -> int:
        """Blocks that its sequences take. Whoever decodes has one token more than it has keys and values."""
        ends = [*(length + 1 for length in self.lengths()), *(self.start + chunk for chunk in self.chunks())]
        return sum(-(-(end + ROOM) // block_size) for end in ends) + self.copies

    def is_held_by(self, info: ExecutorInfo) -> bool:
        """Whether memory has those blocks."""
        return self.num_blocks(info.block_size) < info.num_blocks


def points_for(config: WorkerConfig, info: ExecutorInfo) -> list[Point]:
    """What fits this worker's limits and memory, in an order without meaning, so that a machine that becomes slower does not make
    one kind of step look slow."""
    chunks, room = _chunks(config), info.max_model_len - ROOM
    contexts = _up_to(CONTEXTS, max(1, room * 2 // 3))
    points = _held([Point(n, c) for n in _up_to(DECODES, config.max_num_seqs) for c in contexts], info)
    decodes = _up_to(DECODES, max(1, config.max_num_seqs - 1))
    points += [point for k in chunks for point in _held([Point(n, c, k) for n in decodes for c in BESIDE_CHUNKS], info)]
    points += [Point(0, 0, k, start) for k in chunks for start in (0, *STARTS)]
    points += [Point(n, CONTEXTS[0], k, prompts=PROMPTS) for n in BESIDE_PROMPTS for k in chunks]
    points += [Point(1, CONTEXTS[0], copies=k) for k in COPIES if k <= info.num_host_blocks]
    fitting = [point for point in points if _fits(point, config, info)]
    Random(0).shuffle(fitting)  # noqa: S311 - an order
    return fitting


def _chunks(config: WorkerConfig) -> list[int]:
    most = config.max_num_batched_tokens
    return _up_to(CHUNKS, min(most, config.max_prefill_chunk or most))


def _up_to(values: tuple[int, ...], most: int) -> list[int]:
    """With the limit itself, which a busy worker is mostly at."""
    return sorted({*(value for value in values if value < most), min(most, values[-1])})


def _held(points: Sequence[Point], info: ExecutorInfo) -> list[Point]:
    """Those that memory holds; of so many sequences of which it holds none, the shortest with as much context as it does hold:
    a worker with little memory is busy like that, and a line through fewer sequences does not say how long its steps are."""
    held = [point for point in points if point.is_held_by(info)]
    missing = {point.decodes for point in points} - {point.decodes for point in held}
    shortest = [min((p for p in points if p.decodes == number), key=lambda p: p.context) for number in sorted(missing)]
    return held + [_shortened(point, info) for point in shortest]


def _shortened(point: Point, info: ExecutorInfo) -> Point:
    """With as much of its context as memory holds, which may be none."""
    too_long = bisect_left(range(point.context + 1), True, key=lambda c: not replace(point, context=c).is_held_by(info))
    return replace(point, context=max(0, too_long - 1))


def _fits(point: Point, config: WorkerConfig, info: ExecutorInfo) -> bool:
    longest = max([*point.lengths(), *(point.start + chunk for chunk in point.chunks())]) + ROOM
    return (
        point.decodes + len(point.chunks()) <= config.max_num_seqs
        and point.decodes + point.chunk <= config.max_num_batched_tokens
        and longest <= info.max_model_len
        and point.is_held_by(info)
    )
