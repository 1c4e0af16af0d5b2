"""Steps of a GPU executor written by hand, and how near its logits must be to float32's."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from device import cuda
from engine_world import snapshot
from fairlane.clock import FakeClock
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.output import BlockAppend, NewSequence, ScheduledSequence, ScheduleOutput, StepResult
from fairlane.scheduler.request import SamplingParams
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.worker.cuda_executor import CudaExecutor, CudaStep

BLOCK = 16
GREEDY = asdict(SamplingParams(temperature=0.0))


class Run:
    """Steps of one executor, written by hand."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.executor = executor
        self.step = 0
        self.free = list(range(executor.info.num_blocks - 1, 0, -1))
        self.logits: list[Tensor] = []
        runner = executor.runner
        sample = runner._sample

        def keep(logits: Tensor, inputs: Any) -> Any:
            self.logits.append(logits.float().clone())
            return sample(logits, inputs)

        runner._sample = keep  # type: ignore[method-assign]
        graphs = runner._graphs
        if graphs is None:  # decodes are replayed as chunks of one token, and sampled as those are
            return
        replay = graphs.replay

        def replay_and_keep(graph: Any, slots: Any) -> Tensor:
            hidden = replay(graph, slots)
            self.logits.append(runner._model.logits(hidden[: len(slots)]).float())
            return hidden

        graphs.replay = replay_and_keep  # type: ignore[method-assign]

    def run(self, **parts: Any) -> StepResult:
        self.step += 1
        output = ScheduleOutput(self.step, **parts)
        return self.executor.result(self.executor.launch(output))

    def generate(
        self, slot: int, tokens: list[int], count: int, *, chunk: int = 4096, table: list[int] | None = None
    ) -> list[int]:
        """Greedy tokens after `tokens`, whose first len(table) blocks are there already. Leaves logits, one row a token."""
        self.logits.clear()
        table = list(table or [])
        start = len(table) * BLOCK
        table += [self.free.pop() for _ in range(-(-len(tokens) // BLOCK) - len(table))]
        new = [NewSequence(slot, tokens, len(tokens), [list(table)], GREEDY)]
        found: list[int] = []
        while start < len(tokens):
            size = min(chunk, len(tokens) - start)
            last = start + size == len(tokens)
            result = self.run(new=new, scheduled=[ScheduledSequence(slot, start, size, last)])
            found += result.tokens[0]
            new, start = [], start + size
        slots = [slot]
        while len(found) < count:
            appends = []
            if (len(tokens) + len(found) - 1) % BLOCK == 0:
                table.append(self.free.pop())
                appends = [BlockAppend(slot, [[table[-1]]])]
            found += self.run(appends=appends, decode_slots=slots).decode_tokens
        self.table = table
        return found

    def swap_away(self, slot: int, *, other: list[int], slot_of_other: int) -> None:
        """Swaps out the sequence that generate() ran last, and gives its blocks to another in the same step."""
        self.hosts = list(range(len(self.table)))[::-1]
        self.run(
            released_slots=[slot],
            swap_out=list(zip(self.table, self.hosts, strict=True)),
            new=[NewSequence(slot_of_other, other, len(other), [self.table[: -(-len(other) // BLOCK)]], GREEDY)],
            scheduled=[whole(slot_of_other, len(other))],
        )

    def swap_back(self, slot: int, tokens: list[int], count: int) -> list[int]:
        """Into fresh blocks, and goes on: tokens as generate() left them. Leaves logits, one row a token."""
        self.logits.clear()
        table = [self.free.pop() for _ in self.hosts]
        pairs = list(zip(self.hosts, table, strict=True))
        more = [self.free.pop() for _ in range(-(-(len(tokens) + count) // BLOCK) - len(table))]
        new = [NewSequence(slot, tokens, len(tokens), [table + more], GREEDY)]
        slots = [slot]
        found = self.run(new=new, swap_in=pairs, decode_slots=slots).decode_tokens
        while len(found) < count:
            found = found + self.run(decode_slots=slots).decode_tokens
        return found


def whole(slot: int, num_tokens: int) -> ScheduledSequence:
    """All of a prompt, and a token."""
    return ScheduledSequence(slot, 0, num_tokens, True)


class _Small:
    """The executor, as one with fewer blocks, whose steps' times are not told: so nothing is known that speaks against a swap."""

    def __init__(self, executor: CudaExecutor, num_blocks: int) -> None:
        self.info = replace(executor.info, num_blocks=num_blocks)
        self.launch, self.close = executor.launch, executor.close
        self._result = executor.result

    def result(self, step: CudaStep) -> StepResult:
        return replace(self._result(step), elapsed_s=0.0)


def small_engine(run: Run, depth: int, num_blocks: int) -> EngineDriver:
    """An engine over so many of the executor's blocks, all invariants checked after every turn. Who is evicted is swapped."""
    limits = SchedulerLimits(
        max_num_seqs=8, max_num_resident=8, max_num_batched_tokens=256, max_model_len=2048, min_swap_tokens=1
    )
    executor = _Small(run.executor, num_blocks)
    return EngineDriver(executor, FakeClock(), snapshot(), limits, depth=depth, prefix_caching=False, check=True)


@torch.no_grad()
def wrong_tokens(models: Any, tokens: list[int], found: list[int]) -> list[int]:
    """Places in `found` where transformers in float32 clearly prefers another token after what came before."""
    ids = torch.tensor([tokens + found[:-1]], device=cuda)
    half, full = (model(ids).logits[0, len(tokens) - 1 :].float() for model in models)
    bound = 2 * (half - full).abs().max() + 2 * torch.finfo(torch.bfloat16).eps * full.abs().max()
    top2 = full.topk(2, dim=-1)
    decided = (top2.values[:, 0] - top2.values[:, 1]) > bound
    wrong = decided & (top2.indices[:, 0] != torch.tensor(found, device=cuda))
    return torch.nonzero(wrong).flatten().tolist()


@torch.no_grad()
def assert_close(models: Any, tokens: list[int], found: list[int], logits: list[Tensor]) -> None:
    """logits: the rows after tokens, after tokens + found[:1], ..."""
    ids = torch.tensor([tokens + found[:-1]], device=cuda)
    rows = slice(len(tokens) - 1, None)
    half, full = (model(ids).logits[0, rows].float() for model in models)
    ours = torch.cat(logits)
    bound = 2 * (half - full).abs().max() + 2 * torch.finfo(torch.bfloat16).eps * full.abs().max()
    error = (ours - full).abs().max()
    assert ours.shape == full.shape
    assert float(error) <= float(bound)
    top2 = full.topk(2, dim=-1).values
    decided = (top2[:, 0] - top2[:, 1]) > bound
    assert full.argmax(-1)[decided].tolist() == torch.tensor(found, device=cuda)[decided].tolist()
