"""Growth of many sequences that each write one token a step. Those whose last block is full at the same step meet again every
block_size steps, so they are kept in one of block_size buckets and nobody's table is looked at in between.

    step % block_size    0        1        2     ...        a step touches one bucket: each sequence in it gets one block
                      [a, f]    [b]     [c, d, e]           per KV-cache group
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from fairlane.blockmgr.block_table import NEVER, BlockTables
from fairlane.blockmgr.errors import NoFreeBlocks

if TYPE_CHECKING:
    from fairlane.blockmgr.manager import BlockManager


T = TypeVar("T")


class _Bucket:
    """Sequences that grow at the same steps, as parallel lists; `index` finds one to take it out. `keys` is a new list whenever
    somebody comes or goes: the old one may be on its way to the worker."""

    __slots__ = ("domains", "index", "keys", "seq_ids", "tables")

    def __init__(self) -> None:
        self.seq_ids: list[int] = []
        self.tables: list[BlockTables] = []
        self.domains: list[str] = []
        self.keys: list[int] = []
        self.index: dict[int, int] = {}

    def add(self, seq_id: int, key: int, tables: BlockTables) -> None:
        self.index[seq_id] = len(self.tables)
        self.seq_ids.append(seq_id)
        self.tables.append(tables)
        self.domains.append(tables.domain)
        self.keys = [*self.keys, key]

    def remove(self, seq_id: int) -> None:
        """The last one takes its place."""
        at = self.index[seq_id]
        self.keys = self.keys.copy()
        _swap_out(self.seq_ids, at)
        _swap_out(self.tables, at)
        _swap_out(self.domains, at)
        _swap_out(self.keys, at)
        if at < len(self.seq_ids):
            self.index[self.seq_ids[at]] = at
        del self.index[seq_id]


def _swap_out(column: list[T], at: int) -> None:
    column[at] = column[-1]
    column.pop()


class Lockstep:
    """Sequences of one manager that write one token in every step, from their next step on.

    A member's tables may be grown, forked or freed by nobody else until it has left. commit() of what it had written before it
    joined may still come: those blocks are behind where it writes.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._size = manager.block_size
        self._step = 0
        self._buckets = [_Bucket() for _ in range(self._size)]
        # sequence -> (its bucket, num_tokens when it joined, the step it joined after)
        self._members: dict[int, tuple[_Bucket, int, int]] = {}

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._members

    def __len__(self) -> int:
        return len(self._members)

    def can_join(self, seq_id: int, write_from: int) -> bool:
        """Whether a sequence that writes its token write_from next needs nothing but a new block now and then: no window to
        give blocks back from, no shared block to copy, less than a block allocated ahead. KeyError for an unknown one."""
        tables = self._manager.tables_of(seq_id)
        ahead = tables.capacity - write_from
        return tables.next_release_at == NEVER and tables.private_from <= write_from and 0 <= ahead < self._size

    def join(self, seq_id: int, key: int, write_from: int) -> None:
        """It writes write_from in the next step. key: what advance() names it by. ValueError if it cannot join."""
        if seq_id in self._members or not self.can_join(seq_id, write_from):
            raise ValueError(f"sequence {seq_id} cannot grow in lockstep from token {write_from}")
        tables = self._manager.tables_of(seq_id)
        bucket = self._buckets[(self._step + 1 + tables.capacity - write_from) % self._size]
        bucket.add(seq_id, key, tables)
        self._members[seq_id] = (bucket, write_from, self._step)

    def leave(self, seq_id: int) -> None:
        """Its tables are up to date again. KeyError if it is not a member."""
        bucket, num_tokens, since = self._members.pop(seq_id)
        bucket.remove(seq_id)
        self._update(seq_id, num_tokens, since)

    def num_new_blocks(self) -> int:
        """Free blocks that advance() would use up now."""
        return len(self._buckets[(self._step + 1) % self._size].tables) * len(self._manager.groups)

    def fits(self) -> bool:
        """Whether advance() could be called now: there are blocks, and every account that they count for has room."""
        return self.num_new_blocks() <= self._manager.num_free_blocks and not self.set_aside()

    def set_aside(self) -> bool:
        """Counts the blocks of the next advance() as good as used by their accounts until it comes, or this is called again.
        True: that is more than one of them may get."""
        accounts = self._manager.pool.usage.accounts
        if accounts is None:
            return False
        bucket = self._buckets[(self._step + 1) % self._size]
        accounts.set_aside(bucket.domains, len(self._manager.groups))
        return accounts.exceeds()

    def advance(self) -> tuple[list[int], list[list[int]]]:
        """One step: every member may write its next token. Returns the keys of those that got a block and, per KV-cache group,
        their new blocks; read-only. Raises NoFreeBlocks, and takes none, if there are too few."""
        bucket = self._buckets[(self._step + 1) % self._size]
        if not bucket.tables:
            self._step += 1
            return [], []
        pool, groups, needed = self._manager.pool, self._manager.groups, self.num_new_blocks()
        if needed > pool.free.size:
            raise NoFreeBlocks(needed, pool.free.size)
        self._step += 1
        if pool.usage.accounts is not None:
            pool.usage.accounts.set_aside((), 0)
        block_ids = [pool.take_each(bucket.domains) for _ in groups]
        for group, blocks in enumerate(block_ids):
            for tables, block in zip(bucket.tables, blocks, strict=True):
                tables.tables[group].append(block)
        for tables in bucket.tables:
            tables.capacity += self._size
        return bucket.keys, block_ids

    def update_tables(self) -> None:
        """Brings every member's num_tokens up to date, for reports and checks."""
        for seq_id, (_, num_tokens, since) in self._members.items():
            self._update(seq_id, num_tokens, since)

    def _update(self, seq_id: int, num_tokens: int, since: int) -> None:
        tables = self._manager.tables_of(seq_id)
        tables.num_tokens = max(tables.num_tokens, num_tokens + self._step - since)
