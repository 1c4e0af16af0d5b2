"""BlockManager: who holds which KV-cache blocks. It allocates, grows, shares, copies on write and frees the block tables of
sequences and answers prefix lookups; whom to admit, evict or limit is the scheduler's decision, contents are the worker's."""

from __future__ import annotations

from dataclasses import dataclass

from fairlane.blockmgr.accounting import num_unused_slots
from fairlane.blockmgr.block_table import BlockTables
from fairlane.blockmgr.errors import IntegrityError, NoFreeBlocks, StaleHit
from fairlane.blockmgr.free_list import NULL_BLOCK
from fairlane.blockmgr.groups import GroupKind, KVGroup
from fairlane.blockmgr.hashing import HashChain
from fairlane.blockmgr.host_pool import HostPool, entries_to_keep
from fairlane.blockmgr.integrity import find_faults
from fairlane.blockmgr.pool import BlockPool
from fairlane.blockmgr.prefix import PrefixHit, check_hit, find_prefix, may_be_longer

__all__ = ["BlockManager", "GroupKind", "Growth", "IntegrityError", "KVGroup", "NoFreeBlocks", "PrefixHit", "StaleHit"]


@dataclass(frozen=True, slots=True)
class Growth:
    """What a growth changed, for the worker's copy of the table. Read-only: an empty one is shared. Falsy if nothing did.

    block_ids: per group, new ids to append. replaced: (group, index, new id) where a shared block was exchanged.
    copies: (source, destination), to be carried out before the step writes anything, and all sources read before any
    destination is written: a block copied from may be freed and handed out as a destination within the same step. A
    sequence grown for a step must not be forked or freed before that step is launched.
    Entries that fell behind a window are not listed: nothing reads them any more.
    """

    block_ids: list[list[int]]
    copies: list[tuple[int, int]]
    replaced: list[tuple[int, int, int]]

    def __bool__(self) -> bool:
        return bool(self.replaced) or any(self.block_ids)


class BlockManager:
    """All blocks of one model's KV cache on one worker. Single-threaded; O(1) per block touched.

    It has more public methods than a class should because it is the one place that keeps tables, pool and accounting in
    step; each method is a few lines over those three. Whatever raises has changed nothing.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        groups: tuple[KVGroup, ...] = (KVGroup.full(),),
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
    ) -> None:
        """num_blocks counts the null block 0; num_host_blocks: for sequences that are swapped out (`host`).

        Raises ValueError for fewer than 2 blocks, no slot per block, or no group.
        """
        if num_blocks < 2 or block_size < 1 or not groups:
            raise ValueError(f"need 2 blocks, 1 slot each and 1 group: got {num_blocks}, {block_size}, {len(groups)}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = groups
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks, len(groups))
        self.host = HostPool(num_host_blocks)
        self._sequences: dict[int, BlockTables] = {}
        self._no_growth = Growth([[] for _ in groups], [], [])
        self._miss = PrefixHit(0, ((),) * len(groups), 0)

    # ---- counts ----------------------------------------------------------------------------------------------------------

    @property
    def num_usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken now, cached free ones included."""
        return self.pool.free.size

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - 1 - self.pool.free.size

    @property
    def prefix_version(self) -> int:
        """Another whenever what lookup() finds may have changed."""
        return self.pool.version

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that still hold a hash."""
        return self.pool.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks a fresh sequence of that many tokens needs, over all groups, without any prefix hit."""
        return -(-num_tokens // self.block_size) * len(self.groups)

    def used_by(self, domain: str) -> int:
        """Used blocks that belong to `domain`; one shared by several of its sequences counts 1."""
        return self.pool.usage.counts.get(domain, 0)

    def domains(self) -> dict[str, int]:
        """Used blocks of every domain that has any."""
        return dict(self.pool.usage.counts)

    def block_utilization_ratio(self) -> float:
        """Used blocks / usable blocks."""
        return self.num_used_blocks / self.num_usable_blocks

    def fragmentation_rate(self, domain: str | None = None) -> float:
        """Allocated but unused slots / allocated slots, of everything or of one domain; 0 when nothing is allocated.

        A slot is used when a table's num_tokens reaches it; a shared block's slots count once. O(sequences).
        """
        allocated = self.num_used_blocks if domain is None else self.used_by(domain)
        if not allocated:
            return 0.0
        owners = [tables for tables in self._sequences.values() if domain is None or tables.domain == domain]
        return num_unused_slots(owners, self.block_size) / (allocated * self.block_size)

    # ---- one sequence, read-only -----------------------------------------------------------------------------------------

    def has(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def block_table(self, seq_id: int, group: int = 0) -> list[int]:
        """A copy of one group's table; 0 where the window has passed. Raises KeyError for an unknown sequence."""
        return list(self._sequences[seq_id].tables[group])

    def tables_of(self, seq_id: int) -> BlockTables:
        """The record itself, for this package's own parts. Raises KeyError for an unknown sequence."""
        return self._sequences[seq_id]

    def num_tokens_of(self, seq_id: int) -> int:
        """Tokens the sequence's tables are meant to hold. Raises KeyError for an unknown sequence."""
        return self._sequences[seq_id].num_tokens

    def freed_by(self, seq_id: int) -> int:
        """Blocks that free(seq_id) would make free now: those nobody else holds. Raises KeyError for an unknown sequence."""
        return sum(self.pool.num_with_ref_count(table, 1) for table in self._sequences[seq_id].tables)

    def freed_with(self, seq_id: int, held: dict[int, int]) -> int:
        """Blocks that free(seq_id) would make free once the sequences counted in `held` (block to holders) are freed too: a
        block goes with its last holder. Adds what it shares to `held`. Raises KeyError for an unknown sequence."""
        ref_counts, freed = self.pool.ref_counts, self.freed_by(seq_id)
        for table in self._sequences[seq_id].tables:
            for block in table:
                if ref_counts[block] > 1:
                    count = held[block] = held.get(block, 0) + 1
                    freed += count == ref_counts[block]
        return freed

    # ---- admission -------------------------------------------------------------------------------------------------------

    def lookup(self, chain: HashChain, num_tokens: int) -> PrefixHit:
        """The longest cached prefix of the chain, in whole blocks and at most num_tokens - 1 tokens: the last token must be
        computed, because its logits are wanted. Changes nothing, not even the eviction order.

        The hit is a fact about this moment: frees leave it valid (but its num_free may grow, see num_blocks_to_allocate),
        other allocations may evict its blocks. Raises ValueError for a chain of another block size.
        """
        self._check_chain(chain)
        max_blocks = (num_tokens - 1) // self.block_size
        if not self.enable_prefix_caching or max_blocks < 1 or not chain.hashes:
            return self._miss
        return find_prefix(self.pool, self.groups, chain, max_blocks)

    def may_have_cached(self, chain: HashChain, num_tokens: int) -> bool:
        """Whether lookup() could find more than num_tokens tokens of the chain. False is sure, and costs next to nothing."""
        return may_be_longer(self.pool, self.groups, chain, num_tokens // self.block_size)

    def num_blocks_to_allocate(self, num_tokens: int, hit: PrefixHit | None = None) -> int:
        """Free blocks that allocate(num_tokens, hit) would use up now: fresh ones, and those of the hit that nobody holds."""
        if hit is None or not hit.num_tokens:
            return self.blocks_for(num_tokens)
        fresh = self.blocks_for(num_tokens) - len(hit.hashes) * len(self.groups)
        revived = sum(self.pool.num_with_ref_count(row, 0) - row.count(NULL_BLOCK) for row in hit.block_ids)
        return fresh + revived

    def allocate(self, seq_id: int, domain: str, num_tokens: int, hit: PrefixHit | None = None) -> None:
        """Gives a new sequence tables for `num_tokens` tokens: the hit's blocks, shared, then fresh ones.

        Raises NoFreeBlocks if they do not fit; StaleHit if the hit is no longer true; ValueError for a known sequence, no
        tokens, fewer than the hit has, or a hit of another domain.
        """
        if seq_id in self._sequences or self.host.holds(seq_id):
            raise ValueError(f"sequence {seq_id} has blocks already")
        hit = hit if hit is not None and hit.num_tokens else self._miss
        if num_tokens < max(1, hit.num_tokens):
            raise ValueError(f"cannot hold {num_tokens} tokens with a prefix hit of {hit.num_tokens}")
        if hit.num_tokens and hit.domain != domain:
            raise ValueError("a prefix hit belongs to one cache domain")
        check_hit(self.pool, hit, len(self.groups), self.block_size)
        needed = self.num_blocks_to_allocate(num_tokens, hit)
        if needed > self.pool.free.size:
            raise NoFreeBlocks(needed, self.pool.free.size)

        tables = []
        for row in hit.block_ids:  # all hits first: a fresh block must not evict one
            self.pool.share([block for block in row if block != NULL_BLOCK], domain)
            tables.append(list(row))
        num_fresh = -(-num_tokens // self.block_size) - len(hit.hashes)
        for table in tables:
            table += self.pool.take(num_fresh, domain)
        sequence = BlockTables(domain, tables, num_tokens, self.block_size)
        sequence.private_from = hit.num_tokens
        sequence.num_hashed = len(hit.hashes)
        sequence.num_released = [group.num_dead_blocks(hit.num_tokens, self.block_size) for group in self.groups]
        sequence.schedule_release(self.groups, self.block_size)
        self._sequences[seq_id] = sequence

    # ---- growth ----------------------------------------------------------------------------------------------------------

    def num_new_blocks(self, seq_id: int, num_tokens: int, write_from: int | None = None) -> int:
        """Free blocks that grow(seq_id, num_tokens, write_from) would use up: new and copied ones, less those it gives back
        from behind a window; at least 0. write_from defaults to the end of what the table holds, the case of a decode.

        grow succeeds iff this is at most num_free_blocks. Raises KeyError for an unknown sequence.
        """
        sequence = self._sequences[seq_id]
        if write_from is None:
            write_from = min(num_tokens, sequence.num_tokens)
        if sequence.private_from <= write_from <= num_tokens <= sequence.capacity and write_from < sequence.next_release_at:
            return 0
        needed = len(self.groups) * self._num_appended(sequence, num_tokens) + len(
            self._shared_entries(sequence, num_tokens, write_from)
        )
        behind = [block for entries in self._dead_entries(sequence, write_from) for block in entries]
        return max(0, needed - self.pool.num_with_ref_count(behind, 1))

    def grow(self, seq_id: int, num_tokens: int, write_from: int) -> Growth:
        """Prepares a step that writes tokens [write_from, num_tokens) and reads what those see.

        The tables are extended to hold num_tokens; blocks to be written that somebody else holds too are exchanged for
        fresh ones (copied first, if tokens before write_from live in them); blocks wholly behind a window as seen from
        write_from are given back. A block to be written in place that has a hash loses it: its content is about to change.
        That never happens while write_from only moves forward, since only full blocks of computed tokens have hashes.

        Raises NoFreeBlocks if the blocks do not suffice; KeyError for an unknown sequence; ValueError for a write_from
        below 0, above num_tokens, or inside what a window has already given back.
        """
        sequence = self._sequences[seq_id]
        if sequence.private_from <= write_from <= num_tokens <= sequence.capacity and write_from < sequence.next_release_at:
            if num_tokens > sequence.num_tokens:
                sequence.num_tokens = num_tokens
            return self._no_growth
        return self._grow(sequence, num_tokens, write_from)

    def _grow(self, sequence: BlockTables, num_tokens: int, write_from: int) -> Growth:
        if not 0 <= write_from <= num_tokens:
            raise ValueError(f"cannot write tokens {write_from} to {num_tokens}")
        first_written = write_from // self.block_size
        if write_from < num_tokens and first_written < max(sequence.num_released):
            raise ValueError(f"cannot write token {write_from}: a window has passed it and its block is gone")
        num_appended = self._num_appended(sequence, num_tokens)
        shared = self._shared_entries(sequence, num_tokens, write_from)
        dead = self._dead_entries(sequence, write_from)
        needed = len(self.groups) * num_appended + len(shared)
        if needed > self.pool.free.size:  # only then do the blocks this very call gives back matter
            room = self.pool.free.size + sum(self.pool.num_with_ref_count(entries, 1) for entries in dead)
            if needed > room:
                raise NoFreeBlocks(needed, room)

        if any(dead):
            self._give_back(sequence, dead)
        copies, replaced = self._copy_on_write(sequence, shared, write_from) if shared else ([], [])
        block_ids = [self.pool.take(num_appended, sequence.domain) for _ in self.groups]
        for table, fresh in zip(sequence.tables, block_ids, strict=True):
            table += fresh
        sequence.capacity = sequence.num_blocks * self.block_size
        sequence.num_tokens = max(sequence.num_tokens, num_tokens)
        if write_from < num_tokens:
            self._own_written(sequence, first_written, -(-num_tokens // self.block_size))
        return Growth(block_ids, copies, replaced)

    def _num_appended(self, sequence: BlockTables, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - sequence.num_blocks)

    def _shared_entries(self, sequence: BlockTables, num_tokens: int, write_from: int) -> list[tuple[int, int]]:
        """(group, index) of every block that is to be written and has another holder."""
        if write_from >= num_tokens or write_from >= sequence.private_from:
            return []
        ref_counts = self.pool.ref_counts
        first, last = write_from // self.block_size, -(-num_tokens // self.block_size)
        return [
            (group, index)
            for group, table in enumerate(sequence.tables)
            for index, block in enumerate(table[first:last], first)
            if ref_counts[block] > 1
        ]

    def _dead_entries(self, sequence: BlockTables, write_from: int) -> list[list[int]]:
        """Per group, the blocks that queries from write_from on cannot see and that were not given back yet."""
        if write_from < sequence.next_release_at:
            return [[] for _ in self.groups]
        return [
            table[done : max(done, group.num_dead_blocks(write_from, self.block_size))]
            for group, table, done in zip(self.groups, sequence.tables, sequence.num_released, strict=True)
        ]

    def _give_back(self, sequence: BlockTables, dead: list[list[int]]) -> None:
        for number, (table, blocks) in enumerate(zip(sequence.tables, dead, strict=True)):
            done = sequence.num_released[number]
            self.pool.release(blocks, sequence.domain)
            table[done : done + len(blocks)] = [NULL_BLOCK] * len(blocks)
            sequence.num_released[number] = done + len(blocks)
        sequence.private_from = max(sequence.private_from, max(sequence.num_released) * self.block_size)
        sequence.schedule_release(self.groups, self.block_size)

    def _copy_on_write(
        self, sequence: BlockTables, shared: list[tuple[int, int]], write_from: int
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
        copies: list[tuple[int, int]] = []
        replaced: list[tuple[int, int, int]] = []
        for (group, index), fresh in zip(shared, self.pool.take(len(shared), sequence.domain), strict=True):
            table = sequence.tables[group]
            old = table[index]
            if index * self.block_size < write_from:
                copies.append((old, fresh))
            self.pool.release([old], sequence.domain)
            table[index] = fresh
            replaced.append((group, index, fresh))
        return copies, replaced

    def _own_written(self, sequence: BlockTables, first: int, last: int) -> None:
        """Blocks first .. last - 1 are about to be written and have no other holder: nothing in them is known any more."""
        if first * self.block_size < sequence.private_from:
            for table in sequence.tables:
                for block in table[first:last]:
                    if self.pool.hash_of[block] is not None:
                        self.pool.unregister(block)
            if last == sequence.num_blocks:
                sequence.private_from = first * self.block_size
        sequence.num_hashed = min(sequence.num_hashed, first)

    # ---- contents --------------------------------------------------------------------------------------------------------

    def commit(self, seq_id: int, chain: HashChain, num_computed_tokens: int) -> None:
        """Makes the full blocks among the first num_computed_tokens tokens findable, as far as the chain reaches. Call it
        when the steps that wrote them have succeeded. Idempotent; costs O(blocks not committed before).

        Where another block is already known for the same content, that one stays known and this one is not looked at again,
        even if the other is evicted later. Raises KeyError for an unknown sequence,
        ValueError for a chain of another domain or block size or for more tokens than the table holds.
        """
        sequence = self._sequences[seq_id]
        num_full = num_computed_tokens // self.block_size
        if num_full <= sequence.num_hashed or not self.enable_prefix_caching or not sequence.may_register:
            return
        self._check_chain(chain)
        if chain.domain != sequence.domain:
            raise ValueError("a hash chain of another cache domain")
        if num_full > sequence.num_blocks:
            raise ValueError(f"{num_computed_tokens} tokens computed, but there are only {sequence.capacity} slots")
        num_full = min(num_full, len(chain.hashes))
        pool, start = self.pool, sequence.num_hashed
        for group, table in enumerate(sequence.tables):
            for block, content in zip(table[start:num_full], chain.hashes[start:num_full], strict=True):
                if block != NULL_BLOCK and pool.hash_of[block] is None:
                    pool.register(block, group, content)
        sequence.num_hashed = max(start, num_full)
        sequence.private_from = max(sequence.private_from, num_full * self.block_size)

    def forget(self, seq_id: int) -> None:
        """A step of this sequence failed: none of its blocks is findable any more, whoever else holds them, since they may be
        half written or be what it failed on, nor will be again. Its tables stay. Raises KeyError for an unknown sequence."""
        sequence = self._sequences[seq_id]
        pool = self.pool
        for table in sequence.tables:
            for block in table:
                if block != NULL_BLOCK and pool.hash_of[block] is not None:
                    pool.unregister(block)
        sequence.num_hashed = 0
        sequence.may_register = False

    def reset_prefix_cache(self) -> None:
        """Makes nothing findable any more (new weights, say). What live sequences hold stays theirs, but is never registered
        again, nor is what they compute on top of it."""
        if self.pool.shields is not None:
            self.pool.shields.clear()
        for block, content in enumerate(self.pool.hash_of):
            if content is not None:
                self.pool.unregister(block)
        for sequence in self._sequences.values():
            sequence.may_register = False
        for swapped in self.host.held.values():
            swapped.may_register = False

    # ---- sharing and leaving ---------------------------------------------------------------------------------------------

    def fork(self, parent_id: int, child_id: int) -> None:
        """The child holds every block the parent holds; whoever writes into one first gets its own copy (grow).

        Raises KeyError for an unknown parent, ValueError for a known child. Takes no free block.
        """
        parent = self._sequences[parent_id]
        if child_id in self._sequences or self.host.holds(child_id):
            raise ValueError(f"sequence {child_id} has blocks already")
        self.pool.share(parent.blocks_last_first(), parent.domain)
        parent.private_from = parent.capacity
        self._sequences[child_id] = parent.clone(self.block_size)

    def free(self, seq_id: int) -> None:
        """Lets go of every block of the sequence. Blocks nobody else holds are free at once; those with a hash stay findable
        until they are needed, the end of a prefix going before its start. Raises KeyError for an unknown sequence."""
        sequence = self._sequences.pop(seq_id)
        self.pool.release(sequence.blocks_last_first(), sequence.domain)

    # ---- host memory -----------------------------------------------------------------------------------------------------

    def can_swap_out(self, seq_id: int, num_tokens: int) -> bool:
        """Whether there is anything to keep of its first num_tokens tokens, and room for it. KeyError for an unknown sequence."""
        needed = sum(map(len, entries_to_keep(self._sequences[seq_id], num_tokens, self.block_size)))
        return 0 < needed <= self.host.num_free_blocks

    def swap_out(self, seq_id: int, num_tokens: int) -> None:
        """As free(), but what its first num_tokens tokens have written is kept in host memory: the copies are the next step's
        to carry out (`host.take_pairs()`), until swap_in() or `host.drop()`.

        Raises NoFreeBlocks if host blocks are short, KeyError for an unknown sequence.
        """
        self.host.keep(seq_id, self._sequences[seq_id], num_tokens, self.block_size)
        self.free(seq_id)

    def swap_in(self, seq_id: int, num_tokens: int) -> None:
        """A swapped sequence gets tables for num_tokens tokens, all of fresh blocks; what was kept goes into the first of them
        (`host.take_pairs()`). It uses up blocks_for(num_tokens) blocks, fewer where a window has passed some. Like a sequence
        that was grown for a step, it must not be forked, freed or swapped out before that step is launched.

        Raises NoFreeBlocks if they do not fit, KeyError for a sequence that is not swapped out, ValueError for fewer tokens than
        were kept, or before the step that swaps it out has taken its pairs.
        """
        self._sequences[seq_id] = self.host.bring_back(seq_id, num_tokens, self.pool, self.groups, self.block_size)

    def check_integrity(self) -> None:
        """Recounts everything from the tables. Raises IntegrityError naming all that disagrees. O(blocks + table entries)."""
        faults = find_faults(self.pool, self._sequences, self.groups, self.block_size)
        faults += self.host.find_faults(self._sequences, self.block_size)
        if self._no_growth or self._no_growth.copies:
            faults.append("the shared empty growth was changed by a caller")
        if faults:
            raise IntegrityError(faults)

    def _check_chain(self, chain: HashChain) -> None:
        if chain.block_size != self.block_size:
            raise ValueError(f"a hash chain over blocks of {chain.block_size} tokens, not {self.block_size}")
