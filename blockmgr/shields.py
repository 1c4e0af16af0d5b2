"""Which cached blocks are used up last: those that an account has within its guarantee. So a neighbour that computes much, and
has no such promise, washes out its own cache and not that of everybody.

    free list   no hash | cached, least recently used first ... | shielded, least recently used first
                taken first                                       taken only when there is nothing else

An account shields as many of its most recently freed cached blocks as its guarantee exceeds what it uses.
"""

from __future__ import annotations

from collections.abc import Sequence

from fairlane.blockmgr.accounts import Account, Accounts
from fairlane.blockmgr.free_list import FreeList


class Shields:
    """Moves free cached blocks between the two ends of the free list. Every operation is O(1) per block, over time."""

    __slots__ = ("_accounts", "_free", "_of")

    def __init__(self, accounts: Accounts, free: FreeList) -> None:
        self._accounts = accounts
        self._free = free
        self._of: dict[int, Account] = {}

    def push(self, blocks: Sequence[int], domain: str) -> None:
        """Cached blocks of the domain become free, those named first to be used up first; they do not count as used any more."""
        account = self._account(domain)
        if account is None:
            self._free.push_back_many(blocks)
            return
        self._free.push_last_many(blocks)
        for block in blocks:
            self._of[block] = account
            account.shield[block] = None
        self._trim(account)

    def used(self, domain: str) -> None:
        """The domain has more blocks in use: the accounts they count for have room for fewer shielded ones."""
        for account in self._accounts.lineage(domain):
            if account.shield:
                self._trim(account)

    def revive(self, block: int) -> None:
        """A free block is about to be taken off the list by name."""
        account = self._of.pop(block, None)
        if account is not None:
            del account.shield[block]
            self._free.num_last -= 1

    def taken(self, block: int) -> None:
        """A block was popped off the list."""
        account = self._of.pop(block, None)
        if account is not None:
            del account.shield[block]

    def clear(self) -> None:
        """Shields nothing any more: all go behind the other cached blocks."""
        for account in set(self._of.values()):
            self._trim(account, 0)

    def find_faults(self, shielded: Sequence[int]) -> list[str]:
        """shielded: what the free list has there."""
        held = {block for account in set(self._of.values()) for block in account.shield}
        if held == set(shielded) == set(self._of):
            return []
        return [
            f"blocks {sorted(shielded)} are shielded on the free list, {sorted(held)} by an account, {sorted(self._of)} are known"
        ]

    def _account(self, domain: str) -> Account | None:
        """The innermost with a guarantee."""
        return next((account for account in self._accounts.lineage(domain) if account.guarantee), None)

    def _trim(self, account: Account, most: int | None = None) -> None:
        room = max(0, account.guarantee - account.used) if most is None else most
        while len(account.shield) > room:
            block, _ = account.shield.popitem(last=False)
            del self._of[block]
            self._free.num_last -= 1
            self._free.remove(block)
            self._free.push_back_many([block])
