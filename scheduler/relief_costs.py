"""What an eviction costs, in seconds of the worker: to compute again, or to copy to host memory and back. Learned from
the worker's own steps; before it has seen any, an 8B model's on a GPU of 80 GB. Nobody is charged by it.
"""

from __future__ import annotations

from fairlane.scheduler.policies.pace import Pace

# Until they are measured: computing a token; copying a block of 16 tokens one way (2 MiB at 35 GB/s).
_TOKEN_S = 25.4e-6
_BLOCK_S = 60e-6
# A prompt token's attention to one token before it, as a part of all else it takes.
_ATTENTION = 4e-5
_SMOOTHING = 0.1


class ReliefCosts:
    """token_s: of computing one. block_s: what copying a block, one way, adds to a step: nothing, if it runs beside it."""

    def __init__(self) -> None:
        self.block_s = _BLOCK_S
        self._pace = Pace()

    @property
    def token_s(self) -> float:
        return self._pace.token_s or _TOKEN_S

    def observe(self, num_tokens: int, num_copied: int, elapsed_s: float) -> None:
        """A step of so many tokens, before which so many blocks were copied to or from host memory, took so long."""
        if not num_copied:
            self._pace.observe(num_tokens, elapsed_s)
        elif self._pace.token_s and elapsed_s > 0:  # else it cannot be told what the copies added
            added_s = max(0.0, elapsed_s - self._pace.fixed_s - self._pace.token_s * num_tokens)
            self.block_s += _SMOOTHING * (added_s / num_copied - self.block_s)

    def recompute_s(self, start: int, num_tokens: int) -> float:
        """Tokens [start, start + num_tokens) of a sequence."""
        return self.token_s * num_tokens * (1 + _ATTENTION * (start + num_tokens / 2))

    def swap_s(self, num_blocks: int) -> float:
        """So many blocks, out and in."""
        return 2 * self.block_s * num_blocks
