"""Blocks of host memory that keep sequences' keys and values while they have none on the device: who holds which, and the copies
that the step under construction owes them. Who is swapped out, and when it comes back, is the scheduler's decision.

    swap out   device blocks -> host blocks      read before the step writes anything: the device blocks are free at once
    swap in    host blocks -> device blocks      in place before the step reads; the host blocks are free after that step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairlane.blockmgr.accounting import DomainUsage
from fairlane.blockmgr.block_table import BlockTables
from fairlane.blockmgr.errors import NoFreeBlocks
from fairlane.blockmgr.free_list import NULL_BLOCK
from fairlane.blockmgr.groups import KVGroup
from fairlane.blockmgr.pool import BlockPool

Pairs = list[tuple[int, int]]


@dataclass(slots=True)
class SwappedTables:
    """What is kept of a sequence's tables. blocks: per group, the host block of each entry from num_released on, as far as its
    num_tokens tokens reach; entries before num_released had fallen behind a window. may_register: as BlockTables has it."""

    domain: str
    num_tokens: int
    num_released: list[int]
    blocks: list[list[int]]
    may_register: bool

    def host_blocks(self) -> list[int]:
        return [block for row in self.blocks for block in row]


class HostPool:
    """Host blocks 0 .. num_blocks - 1. A block has one holder: what sequences share on the device is copied for each of them.

    usage: held blocks by domain. Blocks of a sequence that comes back are nobody's and not yet free until take_pairs(): a step
    must not overwrite what it still has to read.
    """

    __slots__ = ("_free", "_leaving", "_swap_in", "_swap_out", "held", "num_blocks", "usage")

    def __init__(self, num_blocks: int) -> None:
        """Raises ValueError for a negative number; 0: nothing is ever swapped."""
        if num_blocks < 0:
            raise ValueError(f"a host pool cannot have {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.held: dict[int, SwappedTables] = {}
        self.usage = DomainUsage()
        self._free = list(range(num_blocks - 1, -1, -1))  # the next one last; neighbours stay neighbours, for longer copies
        self._leaving: list[int] = []
        self._swap_out: Pairs = []
        self._swap_in: Pairs = []

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that cannot be taken now."""
        return self.num_blocks - len(self._free)

    def holds(self, seq_id: int) -> bool:
        """Whether the sequence is swapped out."""
        return seq_id in self.held

    def take_pairs(self) -> tuple[Pairs, Pairs]:
        """(device, host) blocks to swap out and (host, device) blocks to swap in by the step that is launched now. No host block
        is in both."""
        pairs = self._swap_out, self._swap_in
        self._swap_out, self._swap_in = [], []
        self._give_back(self._leaving)
        self._leaving = []
        return pairs

    def drop(self, seq_id: int) -> None:
        """A swapped sequence ends: nobody will read what is kept of it. Raises KeyError for one that is not swapped out."""
        blocks = self._forget(seq_id)
        if self._swap_out:
            dropped = set(blocks)
            self._swap_out = [pair for pair in self._swap_out if pair[1] not in dropped]
        self._give_back(blocks)

    def keep(self, seq_id: int, tables: BlockTables, num_tokens: int, block_size: int) -> None:
        """Takes host blocks for the first num_tokens tokens of tables that are given up, and owes the copies.

        Raises NoFreeBlocks, and has changed nothing then, if there are too few.
        """
        rows = entries_to_keep(tables, num_tokens, block_size)
        needed = sum(map(len, rows))
        if needed > len(self._free):
            raise NoFreeBlocks(needed, len(self._free))
        released = [min(done, -(-num_tokens // block_size)) for done in tables.num_released]
        kept = SwappedTables(tables.domain, num_tokens, released, [self._take(len(row)) for row in rows], tables.may_register)
        for row, hosts in zip(rows, kept.blocks, strict=True):
            self._swap_out += zip(row, hosts, strict=True)
        self.held[seq_id] = kept
        self.usage.add(kept.domain, needed)

    def bring_back(
        self, seq_id: int, num_tokens: int, pool: BlockPool, groups: tuple[KVGroup, ...], block_size: int
    ) -> BlockTables:
        """Tables over fresh blocks of `pool` for num_tokens tokens, of which those that were kept are on their way. Raises like
        BlockManager.swap_in, and has changed nothing then."""
        kept = self.held[seq_id]
        if num_tokens < kept.num_tokens:
            raise ValueError(f"sequence {seq_id} has {kept.num_tokens} tokens in host memory, more than {num_tokens}")
        if not {host for _, host in self._swap_out}.isdisjoint(kept.host_blocks()):
            raise ValueError(f"sequence {seq_id} is still on its way out")
        num_entries = -(-num_tokens // block_size)
        needed = sum(num_entries - released for released in kept.num_released)
        if needed > pool.free.size:
            raise NoFreeBlocks(needed, pool.free.size)
        rows = [pool.take(num_entries - released, kept.domain) for released in kept.num_released]
        for row, hosts in zip(rows, kept.blocks, strict=True):
            self._swap_in += zip(hosts, row, strict=False)  # the row is longer: blocks for what is still to be computed
        self._leaving += self._forget(seq_id)
        full = [[NULL_BLOCK] * released + row for released, row in zip(kept.num_released, rows, strict=True)]
        tables = BlockTables(kept.domain, full, num_tokens, block_size)
        tables.num_released = list(kept.num_released)
        tables.private_from = max(kept.num_released) * block_size
        tables.may_register = kept.may_register
        tables.schedule_release(groups, block_size)
        return tables

    def find_faults(self, resident: Mapping[int, BlockTables], block_size: int) -> list[str]:
        """Every disagreement in its books, in words; empty when they are right."""
        faults = [f"sequence {seq_id} is swapped out and has blocks on the device" for seq_id in self.held.keys() & resident]
        for seq_id, kept in self.held.items():
            entries = -(-kept.num_tokens // block_size)
            if any(len(row) + done != entries for row, done in zip(kept.blocks, kept.num_released, strict=True)):
                faults.append(f"sequence {seq_id}: its host blocks do not cover its {kept.num_tokens} tokens exactly")
        held = [block for kept in self.held.values() for block in kept.host_blocks()]
        if Counter([*held, *self._leaving, *self._free]) != Counter(range(self.num_blocks)):
            faults.append("host blocks: held, leaving and free ones are not all there are, once each")
        recount: Counter[str] = Counter()
        for kept in self.held.values():
            recount[kept.domain] += len(kept.host_blocks())
        if +recount != Counter(self.usage.counts):
            faults.append("host blocks counted per domain differ from a recount")
        if not {host for _, host in self._swap_out} <= set(held) or not {host for host, _ in self._swap_in} <= set(self._leaving):
            faults.append("host blocks: a copy is owed to or from a block that it was not arranged for")
        return faults

    def _forget(self, seq_id: int) -> list[int]:
        kept = self.held.pop(seq_id)
        blocks = kept.host_blocks()
        self.usage.remove(kept.domain, len(blocks))
        return blocks

    def _take(self, count: int) -> list[int]:
        cut = len(self._free) - count
        blocks = self._free[cut:][::-1]
        del self._free[cut:]
        return blocks

    def _give_back(self, blocks: Sequence[int]) -> None:
        self._free += reversed(blocks)


def entries_to_keep(tables: BlockTables, num_tokens: int, block_size: int) -> list[list[int]]:
    """Per group, the device blocks that hold the first num_tokens tokens, but for those behind a window."""
    end = -(-num_tokens // block_size)
    return [table[done:end] for table, done in zip(tables.tables, tables.num_released, strict=True)]
