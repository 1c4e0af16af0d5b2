"""What becomes of an evicted sequence's keys and values: kept in host memory, or computed again. This file makes that choice and
keeps account of who is on the way; who is evicted, and when it is admitted again, is the step's pass's business.

    RUNNING --evict--> WAITING, swapped: its swap-out is owed to the next step and must have retired before it is admitted again
                       WAITING, to be recomputed: num_computed_tokens is 0
"""

from __future__ import annotations

from itertools import takewhile
from math import inf

from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.output import ScheduleOutput
from fairlane.scheduler.relief_costs import ReliefCosts
from fairlane.scheduler.request import Sequence


def tokens_to_recompute(sequence: Sequence, blocks: BlockManager) -> int:
    """Tokens that a running sequence would compute again if it lost its blocks now. Leading blocks that others hold too stay in
    the prefix cache; its own are the next to be taken, so they do not count as a hit."""
    ref_counts = blocks.pool.ref_counts
    shared = sum(1 for _ in takewhile(lambda block: ref_counts[block] > 1, blocks.block_table(sequence.request_id)))
    return max(0, sequence.num_computed_tokens - shared * blocks.block_size)


class Swaps:
    """num_out, num_in: sequences swapped out and in so far. costs: what either way takes, as measured. min_tokens: fewer to
    recompute are not worth the trouble of two copies."""

    def __init__(self, blocks: BlockManager, min_tokens: int, step_tokens: int) -> None:
        self.num_out = 0
        self.num_in = 0
        self.leaving: list[Sequence] = []  # swapped out since the last launch
        self.costs = ReliefCosts(step_tokens)
        self._blocks = blocks
        self._min_tokens = min_tokens

    def is_worth_it(self, sequence: Sequence) -> bool:
        """The choice, while the sequence still has its blocks: whether it can be swapped, and that is cheaper than recompute."""
        lost = tokens_to_recompute(sequence, self._blocks)
        return self._swap_s(sequence, lost) < self._recompute_s(sequence, lost)

    def cost_s(self, sequence: Sequence) -> float:
        """What evicting a running sequence now would cost the worker, the cheaper way."""
        lost = tokens_to_recompute(sequence, self._blocks)
        return min(self._swap_s(sequence, lost), self._recompute_s(sequence, lost))

    def _recompute_s(self, sequence: Sequence, lost: int) -> float:
        return self.costs.recompute_s(sequence.num_computed_tokens - lost, lost)

    def _swap_s(self, sequence: Sequence, lost: int) -> float:
        """inf without room. All of it would move, and come back in blocks of its own: where others keep most of it, the rest is
        sooner computed, and takes fewer blocks."""
        blocks, num_tokens = self._blocks, sequence.num_computed_tokens
        least = max(self._min_tokens, num_tokens // 2)
        if not blocks.host.num_free_blocks or lost < least or not blocks.can_swap_out(sequence.request_id, num_tokens):
            return inf
        return self.costs.swap_s(blocks.blocks_for(num_tokens))

    def part_of_recompute(self, num_blocks: int) -> float:
        """What an eviction of so many blocks costs of what their recompute would, 0 to 1: 1 without room for them."""
        if self._blocks.host.num_free_blocks < max(1, num_blocks):
            return 1.0
        return min(1.0, self.costs.swap_s(1) / self.costs.recompute_s(0, self._blocks.block_size))

    def observe(self, output: ScheduleOutput, num_tokens: int, elapsed_s: float) -> None:
        """A step of so many tokens took so long. Without host memory there is nothing to choose, and nothing is learned."""
        if self._blocks.host.num_blocks:
            self.costs.observe(num_tokens, len(output.swap_out) + len(output.swap_in), elapsed_s)

    def evict(self, sequence: Sequence) -> bool:
        """Takes the blocks of a sequence that has left the running set. True: its keys and values are kept, those included that
        steps in flight still write; its counts stay. False: it starts over."""
        if not self.is_worth_it(sequence):
            self.costs.recomputes()
            self._blocks.free(sequence.request_id)
            _start_over(sequence)
            return False
        self._blocks.swap_out(sequence.request_id, sequence.num_computed_tokens)
        sequence.steps_in_flight += 1  # of the step that carries it out; until that has retired it is not sure to be there
        self.leaving.append(sequence)
        self.num_out += 1
        return True

    def bring_back(self, sequence: Sequence) -> bool:
        """A swapped sequence that is admitted gets all its blocks, with what was kept on its way: nothing in them has retired
        before the step has that brings it. False for any other."""
        if not self._blocks.host.holds(sequence.request_id):
            return False
        self._blocks.swap_in(sequence.request_id, sequence.num_tokens)
        sequence.num_retired_tokens = 0
        self.num_in += 1
        return True

    def launch(self, output: ScheduleOutput) -> list[Sequence]:
        """Tells the runner of this step which blocks to copy; returns whom it swaps out."""
        output.swap_out, output.swap_in = self._blocks.host.take_pairs()
        leaving, self.leaving = self.leaving, []
        return leaving

    def drop(self, sequence: Sequence) -> None:
        """A waiting sequence ends."""
        if self._blocks.host.holds(sequence.request_id):
            self._blocks.host.drop(sequence.request_id)

    def lose(self, sequence: Sequence) -> None:
        """The step that was to swap it out failed: it is computed again, if it still waits."""
        if self._blocks.host.holds(sequence.request_id):
            self._blocks.host.drop(sequence.request_id)
            _start_over(sequence)


def _start_over(sequence: Sequence) -> None:
    sequence.recompute_until = max(sequence.recompute_until, sequence.num_computed_tokens)
    sequence.num_computed_tokens = sequence.num_retired_tokens = 0
