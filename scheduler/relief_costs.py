"""What an eviction costs, in seconds of the worker: to compute again, or to copy to host memory and back. Learned from
the worker's own steps. Nobody is charged by it.
"""

from __future__ import annotations

from fairlane.scheduler.policies.pace import Pace

# Until it is measured: an 8B model's on a GPU of 80 GB.
_TOKEN_S = 25.4e-6
# A prompt token's attention to one token before it, as a part of all else it takes.
_ATTENTION = 4e-5
# How much older steps with copies count, per such step.
_DECAY = 0.9


class ReliefCosts:
    """step_tokens: of a full step."""

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._pace = Pace()
        self._copied = self._added_s = 0.0

    @property
    def token_s(self) -> float:
        """Of computing one: its part of a full step. What it adds to a step may be less where others leave room, but where
        somebody is evicted others wait for that room."""
        return self._pace.token_s + self._pace.fixed_s / self._step_tokens or _TOKEN_S

    @property
    def block_s(self) -> float:
        """What copying one, one way, adds to a step: nothing, if it runs beside it. Before it is known copies cost nothing, so
        that it comes to be known."""
        return max(0.0, self._added_s / self._copied) if self._copied else 0.0

    def observe(self, num_tokens: int, num_copied: int, elapsed_s: float) -> None:
        """A step of so many tokens, before which so many blocks were copied to or from host memory, took so long."""
        expected_s = self._pace.fixed_s + self._pace.token_s * num_tokens
        if not num_copied:
            self._pace.observe(num_tokens, elapsed_s)
        elif expected_s > 0 and elapsed_s > 0:
            # Less than nothing, too: single steps are off either way.
            self._added_s = _DECAY * self._added_s + elapsed_s - expected_s
            self._copied = _DECAY * self._copied + num_copied

    def recomputes(self) -> None:
        """Nothing is copied, since that was found to cost more. In time that is tried again: it may have been a stall."""
        self._added_s *= _DECAY

    def recompute_s(self, start: int, num_tokens: int) -> float:
        """Tokens [start, start + num_tokens) of a sequence."""
        return self.token_s * num_tokens * (1 + _ATTENTION * (start + num_tokens / 2))

    def swap_s(self, num_blocks: int) -> float:
        """So many blocks, out and in."""
        return 2 * self.block_s * num_blocks
