"""Steps of a GPU executor written by hand, and how near its logits must be to float32's."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from device import cuda
from fairlane.scheduler.output import BlockAppend, NewSequence, ScheduledSequence, ScheduleOutput, StepResult
from fairlane.scheduler.request import SamplingParams
from fairlane.worker.cuda_executor import CudaExecutor

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
