"""One sequence's block tables and the three positions that let the manager answer most growth requests with integer
compares. It never touches the pool: whoever changes a table here has taken or released the blocks there."""

from __future__ import annotations

import sys

from fairlane.blockmgr.free_list import NULL_BLOCK
from fairlane.blockmgr.groups import KVGroup

NEVER = sys.maxsize


class BlockTables:
    """The block tables of one sequence, one per KV-cache group, all of the same length.

        index        0      1      2      3      4
        full group [ 12  |  9   |  30  |  4   |  17  ]
        window     [  0  |  0   |  31  |  5   |  18  ]      0: behind the window, released
        num_tokens  -------------------------------->|      tokens the tables are meant to hold
        capacity    ---------------------------------->|    slots there are

    private_from: a position; every block at or after it has ref_count 1, no hash and is not null: it may be written in place.
    next_release_at: the first write position at which a further block falls behind a window; NEVER without windows.
    num_hashed: leading blocks commit() need not look at again.
    num_released: per group, leading entries that are null.
    may_register: False once the prefix cache was reset during this sequence's life.
    """

    __slots__ = (
        "capacity",
        "domain",
        "may_register",
        "next_release_at",
        "num_hashed",
        "num_released",
        "num_tokens",
        "private_from",
        "tables",
    )

    def __init__(self, domain: str, tables: list[list[int]], num_tokens: int, block_size: int) -> None:
        self.domain = domain
        self.tables = tables
        self.num_tokens = num_tokens
        self.capacity = len(tables[0]) * block_size
        self.private_from = 0
        self.next_release_at = NEVER
        self.num_hashed = 0
        self.num_released = [0] * len(tables)
        self.may_register = True

    def clone(self, block_size: int) -> BlockTables:
        """A second holder of the same blocks; private_from is the caller's to raise on both."""
        twin = BlockTables(self.domain, [list(table) for table in self.tables], self.num_tokens, block_size)
        twin.private_from = self.private_from
        twin.next_release_at = self.next_release_at
        twin.num_hashed = self.num_hashed
        twin.num_released = list(self.num_released)
        twin.may_register = self.may_register
        return twin

    @property
    def num_blocks(self) -> int:
        """Length of each table, null entries included."""
        return len(self.tables[0])

    def schedule_release(self, groups: tuple[KVGroup, ...], block_size: int) -> None:
        """Recomputes next_release_at from num_released."""
        deaths = [group.position_of_death(done, block_size) for group, done in zip(groups, self.num_released, strict=True)]
        self.next_release_at = min((death for death in deaths if death is not None), default=NEVER)

    def blocks_last_first(self) -> list[int]:
        """Every block held, from the end of the sequence to its start, the groups side by side: freed in this order, what
        few prefixes share is evicted before what many share, and no group loses its start before another its end."""
        if len(self.tables) == 1:
            blocks = self.tables[0][::-1]
        else:
            blocks = [block for row in zip(*map(reversed, self.tables), strict=True) for block in row]
        return [block for block in blocks if block != NULL_BLOCK] if any(self.num_released) else blocks
