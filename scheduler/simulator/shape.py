"""What a simulated worker is: its KV pool, its limits, how it is reached."""

from __future__ import annotations

from dataclasses import dataclass

from fairlane.scheduler.executor import ExecutorInfo
from fairlane.scheduler.scheduler import SchedulerLimits
from fairlane.scheduler.simulator.step_time import H100, StepModel

# Of outputs; the model is not there, so any two ids would do.
TOKEN, END_OF_TEXT = 7, 2
# Prefix ids are hashed like token ids, so that they have to fit in the same place.
VOCAB = 1 << 31


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """Defaults: an 80 GB GPU with an 8B model (400,000 tokens of KV), steps of 512 tokens.

    network_s: from the gateway to the worker, and back. depth: pipeline depth, 0 or 1.
    """

    step: StepModel = H100
    num_blocks: int = 25_000
    block_size: int = 16
    num_host_blocks: int = 0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_model_len: int = 131_072
    depth: int = 1
    network_s: float = 0.3e-3

    def info(self) -> ExecutorInfo:
        """The null block comes on top of num_blocks."""
        return ExecutorInfo(
            "simulated", VOCAB, self.max_model_len, self.block_size, self.num_blocks + 1, (END_OF_TEXT,), self.num_host_blocks
        )

    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_resident=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
