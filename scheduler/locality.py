"""Whose turn is taken by somebody with more of its prompt in the prefix cache: locality within fair shares, as in DLPM
(arXiv 2501.14312). The policy says who may (its window); what is cached only the blocks know; this brings the two together. It is
about order alone: everybody is charged as ever.
"""

from __future__ import annotations

from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.hits import lookup
from fairlane.scheduler.policies.base import Policy
from fairlane.scheduler.request import RequestId, Sequence

# Guard beside the policy's window, which newcomers could pass one after another: then a head is let go first.
MAX_PASSED = 16


class Locality:
    """Cached lengths are remembered until the prefix cache changes, so that heads that nobody lets in are not looked up anew."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._version = -1
        self._num_cached: dict[RequestId, int] = {}

    def choose(self, head: Sequence, policy: Policy) -> Sequence:
        """The head whose turn it is, or the rival with the longest cached prefix, if that is longer."""
        if head.num_passed >= MAX_PASSED:
            return head
        rivals = policy.rivals(head)
        if len(rivals) < 2:  # the head is one of them
            return head
        chosen, longest = head, self._cached_tokens(head)
        for rival in rivals:
            if self._may_have_more(rival, longest):
                cached = self._cached_tokens(rival)
                if cached > longest:
                    chosen, longest = rival, cached
        return chosen

    def admitted(self, sequence: Sequence, head: Sequence | None) -> None:
        """A sequence was let in; head: whose turn it was."""
        sequence.num_passed = 0
        if head is not None and head is not sequence:
            head.num_passed += 1

    def _may_have_more(self, sequence: Sequence, num_tokens: int) -> bool:
        """False for nearly all, and soon."""
        if not sequence.request.cache_mode.reads:
            return False
        sequence.chain.extend(sequence.token_ids)
        return self._blocks.may_have_cached(sequence.chain, num_tokens)

    def _cached_tokens(self, sequence: Sequence) -> int:
        if self._version != self._blocks.prefix_version:
            self._version = self._blocks.prefix_version
            self._num_cached.clear()
        cached = self._num_cached.get(sequence.request_id)
        if cached is None:
            hit = lookup(sequence, self._blocks)
            cached = self._num_cached[sequence.request_id] = 0 if hit is None else hit.num_tokens
        return cached
