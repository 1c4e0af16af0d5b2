"""Who uses how many blocks, in integers: a used block counts 1 for the domain it belongs to, however many of the domain's
sequences share it; free blocks, cached or not, count for nobody. Limits and guarantees are accounts.py's and the scheduler's."""

from __future__ import annotations

from collections.abc import Iterable

from fairlane.blockmgr.accounts import Accounts
from fairlane.blockmgr.block_table import BlockTables


class DomainUsage:
    """Used blocks per domain. A domain without any has no entry, so idle tenants cost no memory. accounts: told of every change;
    None where nobody has a quota."""

    __slots__ = ("accounts", "counts")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.accounts: Accounts | None = None

    def add(self, domain: str, num_blocks: int) -> None:
        if num_blocks:
            self.counts[domain] = self.counts.get(domain, 0) + num_blocks
            if self.accounts is not None:
                self.accounts.add(domain, num_blocks)

    def remove(self, domain: str, num_blocks: int) -> None:
        if not num_blocks:
            return
        left = self.counts[domain] - num_blocks
        if self.accounts is not None:
            self.accounts.remove(domain, num_blocks, is_last=not left)
        if left:
            self.counts[domain] = left
        else:
            del self.counts[domain]


def num_unused_slots(sequences: Iterable[BlockTables], block_size: int) -> int:
    """Slots of used blocks that hold no token of any table. Only a table's last block can have some; a block that is the
    last of several tables counts once, as full as the longest of them makes it."""
    filled: dict[int, int] = {}
    for tables in sequences:
        in_last = tables.num_tokens % block_size
        if in_last:
            for table in tables.tables:
                filled[table[-1]] = max(filled.get(table[-1], 0), in_last)
    return sum(block_size - count for count in filled.values())
