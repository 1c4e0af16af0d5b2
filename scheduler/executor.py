"""The Executor port: what the scheduler's engine loop needs from whoever runs the model. `worker/` implements it on real
devices; FakeExecutor (fake_executor.py) implements it for tests and the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from fairlane.scheduler.output import ScheduleOutput, StepResult


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """Facts about the loaded model and its KV cache.

    num_blocks counts the null block 0, so num_blocks - 1 can be allocated; num_host_blocks: in host memory, for sequences that
    are swapped out. max_model_len: most tokens of one sequence, prompt and output together.
    """

    model: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    num_host_blocks: int = 0


class StepError(Exception):
    """A whole step failed: every sequence scheduled in it must end, and the executor can run further steps."""


class Executor(Protocol):
    """Runs steps in the order they are launched."""

    @property
    def info(self) -> ExecutorInfo: ...

    def launch(self, output: ScheduleOutput) -> Any:
        """Starts a step and returns a handle for result(). May be called again before result(), up to the pipeline depth.

        Raises StepError if the step could not be started; its diffs (slots, tables) count as applied all the same. What it was to
        swap out counts as lost, as with a step that fails in result().
        """

    def result(self, handle: Any) -> StepResult:
        """Waits for a launched step, in launch order. Raises StepError if it failed."""

    def close(self) -> None:
        """Releases the device; launched steps are abandoned."""
