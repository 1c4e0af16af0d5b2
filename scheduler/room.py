"""How many blocks an admission leaves free, so that it need not be taken back: prevention, the first rung of relief. To wait
costs a request time; to be evicted costs everybody what is computed again.

    what runs grows     R sequences of mean output L take R blocks every block_size steps, and one of them ends every L / R
                        steps: L / block_size blocks until somebody gives his back, however many run
    who may evict comes the blocks that tiers with the right to evict took, per admission of anybody

Both are means of something with a spread as large as itself, so RESERVE times as much is kept. Who has the right to evict
need not leave it: he would take the blocks of others for it. Blocks left free are sequences that do not run, so less is left
where evictions are cheaper than recompute: nothing beyond the least, where they are swapped to host memory beside the steps.
"""

from __future__ import annotations

from typing import Protocol

# W9 with KV for 17 of its 64 sequences (docs/simulator.md): less computes more again, more idles blocks.
RESERVE = 4.5
# Of all blocks; in a small pool a few sequences' growth would be most of it.
LARGEST_PART = 1 / 11
# Of the newest admission, or request that ended, in a mean.
_SMOOTHING = 1 / 32


class Eviction(Protocol):
    """The part of Swaps that is asked here."""

    def part_of_recompute(self, num_blocks: int) -> float: ...


class Rights(Protocol):
    """The part of a Policy that is asked here."""

    def could_preempt(self, tier: str, others: tuple[str, ...]) -> bool: ...


class Room:
    """Learns from what ends and what is admitted; guesses nothing before. share: part of all blocks, left free at least; most:
    the part left free at most."""

    def __init__(
        self,
        num_usable_blocks: int,
        block_size: int,
        share: float,
        eviction: Eviction,
        reserve: float = RESERVE,
        most: float = LARGEST_PART,
    ) -> None:
        self._least = max(1, int(share * num_usable_blocks))
        self._most = max(self._least, int(most * num_usable_blocks))
        self._block_size = block_size
        self._eviction = eviction
        self._reserve = reserve
        self._num_ended = self._num_admitted = 0
        self._output_tokens = 0.0
        self._taken: dict[str, float] = {}

    def ended(self, num_output_tokens: int) -> None:
        """A request that had started has all the tokens it will have."""
        self._num_ended += 1
        self._output_tokens += max(_SMOOTHING, 1 / self._num_ended) * (num_output_tokens - self._output_tokens)

    def admitted(self, tier: str, num_blocks: int) -> None:
        """A request got so many blocks."""
        self._num_admitted += 1
        part = max(_SMOOTHING, 1 / self._num_admitted)
        for name in self._taken:
            self._taken[name] *= 1 - part
        self._taken[tier] = self._taken.get(tier, 0.0) + part * num_blocks

    def forget_tiers(self) -> None:
        """Another policy: its tiers and rights are others."""
        self._taken.clear()
        self._num_admitted = 0

    def least(self, num_running: int) -> int:
        """Blocks that even one with the right to evict leaves, beside so many that run: none if nobody is left to grow."""
        return self._least if num_running else 0

    def kept_from(self, tier: str, policy: Rights, num_running: int) -> int:
        """Blocks that a request of the tier leaves free if it evicts nobody."""
        if not num_running:
            return 0
        others = [other for other in self._taken if other != tier]
        above = [o for o in others if policy.could_preempt(o, (tier,)) and not policy.could_preempt(tier, (o,))]
        return self._kept(sum(self._taken[other] for other in above))

    def most(self, num_running: int) -> int:
        """Blocks that no request leaves more of, whatever its tier."""
        return self._kept(sum(self._taken.values())) if num_running else 0

    def _kept(self, taken: float) -> int:
        expected = self._output_tokens / self._block_size + taken
        reserve = min(self._reserve * expected, self._most)
        return max(self._least, int(reserve * self._eviction.part_of_recompute(int(reserve))))
