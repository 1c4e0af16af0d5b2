"""The block manager against a naive model under random histories: dicts of sets, brute-force searches over positions, and
block contents written token by token. The model mirrors tables the way a worker does, from what each call returns."""

from __future__ import annotations

import os
from copy import copy

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairlane.blockmgr.accounts import Accounts, Quota
from fairlane.blockmgr.errors import NoFreeBlocks, StaleHit
from fairlane.blockmgr.hashing import HashChain
from fairlane.blockmgr.manager import BlockManager, KVGroup, PrefixHit

FULL, W3, W5, W1 = KVGroup.full(), KVGroup.sliding(3), KVGroup.sliding(5), KVGroup.sliding(1)
GROUPS = [(FULL,), (FULL,), (FULL, W3), (W5,), (W3, FULL, W5), (FULL, FULL), (W1,)]
SALTS = [("acme", ()), ("acme", ()), ("acme", ()), ("acme", (b"lora-1",)), ("bolt", ()), ("bol", (b"t",))]
DOMAINS = sorted({domain for domain, _ in SALTS})

# What the keys and values at a position depend on: the salt, the layers (group) and every token up to there.
Content = tuple[str, tuple[bytes, ...], int, tuple[int, ...]]


class ModelSequence:
    def __init__(self, salt: tuple[str, tuple[bytes, ...]], tokens: list[int], chain: HashChain) -> None:
        self.domain, self.extra_keys = salt
        self.tokens = tokens
        self.chain = chain
        self.tables: list[list[int]] = []
        self.num_covered = 0  # tokens the table is meant to hold
        self.num_computed = 0
        self.num_considered = 0  # full blocks a commit has looked at; it does so once
        self.may_register = True

    def content(self, group: int, position: int) -> Content:
        return (self.domain, self.extra_keys, group, tuple(self.tokens[: position + 1]))


class BlockManagerMachine(RuleBasedStateMachine):
    """Rules are what a scheduler and a worker do; every answer of the manager is predicted first."""

    @initialize(
        num_blocks=st.integers(5, 24),
        block_size=st.sampled_from([1, 2, 2, 3, 4]),
        groups=st.sampled_from(GROUPS),
        caching=st.sampled_from([True] * 7 + [False]),
        num_host_blocks=st.sampled_from([0, 3, 6, 20]),
    )
    def start(self, num_blocks: int, block_size: int, groups: tuple[KVGroup, ...], caching: bool, num_host_blocks: int) -> None:
        self.manager = BlockManager(
            num_blocks, block_size, groups=groups, enable_prefix_caching=caching, num_host_blocks=num_host_blocks
        )
        self.host_blocks = set(range(num_host_blocks))
        self.host_slots: dict[tuple[int, int], Content | None] = {}  # (host block, slot) -> what was copied there
        self.swapped: dict[int, tuple[ModelSequence, int]] = {}  # and how many host blocks it has
        self.leaving = 0  # host blocks that the next step still reads
        self.on_their_way: set[int] = set()  # swapped out since the last step
        self.coming_back: set[int] = set()  # swapped in since the last step: not to be touched before the next
        self.usable = set(range(1, num_blocks))
        self.size, self.groups, self.caching = block_size, groups, caching
        self.sequences: dict[int, ModelSequence] = {}
        self.known: dict[Content, int] = {}  # content of a full block -> the block a lookup may return
        self.slots: dict[tuple[int, int], Content] = {}  # (block, slot) -> what was last written there
        self.kept_hit: tuple[PrefixHit, ModelSequence] | None = None
        self.history: list[ModelSequence] = []  # what was ever computed: prompts worth asking for again
        self.next_id = 0

    # ---- the naive model -------------------------------------------------------------------------------------------------

    def owners(self) -> dict[int, set[int]]:
        owned: dict[int, set[int]] = {block: set() for block in self.usable}
        for seq_id, sequence in self.sequences.items():
            for table in sequence.tables:
                for block in table:
                    if block:
                        owned[block].add(seq_id)
        return owned

    def free_blocks(self) -> set[int]:
        return {block for block, owners in self.owners().items() if not owners}

    def blocks(self, num_tokens: int) -> int:
        return len({position // self.size for position in range(num_tokens)})

    def visible(self, group: KVGroup, index: int, from_query: int) -> bool:
        """Whether any query at from_query or later sees any slot of a block: by trying every slot and query."""
        window = group.window or 10**6
        keys = range(index * self.size, (index + 1) * self.size)
        return any(
            query - window < key <= query for key in keys for query in range(from_query, from_query + (index + 2) * self.size)
        )

    def block_content(self, sequence: ModelSequence, group: int, index: int) -> Content:
        return sequence.content(group, (index + 1) * self.size - 1)

    def expected_hit(self, sequence: ModelSequence, num_tokens: int) -> tuple[tuple[int, ...], ...]:
        """Tries every prefix from the longest on."""
        for count in range((num_tokens - 1) // self.size, 0, -1):
            if not self.caching or count > len(sequence.chain.hashes):
                continue
            rows = [
                [
                    self.known.get(self.block_content(sequence, number, index), -1)
                    if self.visible(group, index, count * self.size)
                    else 0
                    for index in range(count)
                ]
                for number, group in enumerate(self.groups)
            ]
            if all(block >= 0 for row in rows for block in row):
                return tuple(map(tuple, rows))
        return ((),) * len(self.groups)

    def taken(self, blocks: list[int], free_before: set[int]) -> None:
        """`blocks` were handed out as fresh: distinct, free until now, and whatever they were known for is gone."""
        known = set(self.known.values())
        assert len(set(blocks)) == len(blocks) and set(blocks) <= free_before
        assert free_before - known <= set(blocks) or not set(blocks) & known, "evicted while a worthless block was free"
        self.known = {content: block for content, block in self.known.items() if block not in blocks}

    def write(self, sequence: ModelSequence, start: int, end: int) -> None:
        """A step computes [start, end): it reads all keys its queries see, then they are there."""
        for number, table in enumerate(sequence.tables):
            for position in range(start, end):
                self.slots[table[position // self.size], position % self.size] = sequence.content(number, position)
        for number, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True)):
            window = group.window or 10**6
            for key in range(max(0, start - window + 1), end):
                held = self.slots.get((table[key // self.size], key % self.size))
                assert held == sequence.content(number, key), f"group {number} reads a stale key at {key}"

    # ---- rules -----------------------------------------------------------------------------------------------------------

    def new_sequence(self, salt: tuple[str, tuple[bytes, ...]], tokens: list[int]) -> ModelSequence:
        chain = HashChain(salt[0], self.size, salt[1])
        chain.extend(tokens)
        return ModelSequence(salt, list(tokens), chain)

    def admit(self, sequence: ModelSequence, hit: PrefixHit | None, num_tokens: int, *, prefill: bool) -> None:
        seq_id, self.next_id, free = self.next_id, self.next_id + 1, self.free_blocks()
        rows = hit.block_ids if hit else ((),) * len(self.groups)
        revived = {block for row in rows for block in row} & free
        needed = (self.blocks(num_tokens) - len(rows[0])) * len(self.groups) + len(revived)
        assert self.manager.num_blocks_to_allocate(num_tokens, hit) == needed
        if needed > len(free):
            with pytest.raises(NoFreeBlocks) as error:
                self.manager.allocate(seq_id, sequence.domain, num_tokens, hit)
            assert (error.value.needed, error.value.free) == (needed, len(free))
            return
        self.manager.allocate(seq_id, sequence.domain, num_tokens, hit)
        sequence.tables = [self.manager.block_table(seq_id, number) for number in range(len(self.groups))]
        assert [tuple(table[: len(row)]) for table, row in zip(sequence.tables, rows, strict=True)] == list(rows)
        assert {len(table) for table in sequence.tables} == {self.blocks(num_tokens)}
        fresh = [block for table in sequence.tables for block in table[len(rows[0]) :]]
        self.taken(fresh, free - revived)
        sequence.num_covered = num_tokens
        sequence.num_computed = hit.num_tokens if hit else 0
        sequence.num_considered = len(rows[0])
        self.sequences[seq_id] = sequence
        if prefill:
            self.compute(seq_id, len(sequence.tokens), commit=True)

    @rule(
        salt=st.sampled_from(SALTS),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        use_cache=st.sampled_from([True, True, False]),
        whole=st.booleans(),
        prefill=st.sampled_from([True, True, False]),
    )
    def allocate(
        self, salt: tuple[str, tuple[bytes, ...]], tokens: list[int], use_cache: bool, whole: bool, prefill: bool
    ) -> None:
        sequence = self.new_sequence(salt, tokens)
        hit = self.manager.lookup(sequence.chain, len(tokens))
        assert hit.block_ids == self.expected_hit(sequence, len(tokens))
        assert hit.num_tokens == len(hit.block_ids[0]) * self.size < len(tokens)
        assert hit.num_free == len({block for row in hit.block_ids for block in row} & self.free_blocks())
        computed = hit.num_tokens if use_cache else 0
        self.admit(sequence, hit if use_cache else None, len(tokens) if whole else computed + 1, prefill=prefill)

    @precondition(lambda self: self.history)
    @rule(data=st.data(), tail=st.lists(st.integers(0, 1), min_size=1, max_size=3), same_salt=st.booleans())
    def allocate_known_prompt(self, data: st.DataObject, tail: list[int], same_salt: bool) -> None:
        """A prompt that starts like something computed before, of the same domain or of another: hits become likely."""
        other = data.draw(st.sampled_from(self.history))
        cut = data.draw(st.integers(0, len(other.tokens)))
        salt = (other.domain, other.extra_keys) if same_salt else data.draw(st.sampled_from(SALTS))
        self.allocate(salt, [*other.tokens[:cut], *tail], True, data.draw(st.booleans()), data.draw(st.booleans()))

    @precondition(lambda self: self.history and self.kept_hit is None)
    @rule(data=st.data())
    def keep_hit(self, data: st.DataObject) -> None:
        other = data.draw(st.sampled_from(self.history))
        sequence = self.new_sequence((other.domain, other.extra_keys), [*other.tokens, 0])
        hit = self.manager.lookup(sequence.chain, len(sequence.tokens))
        if hit.num_tokens:
            self.kept_hit = (hit, sequence)

    @precondition(lambda self: self.kept_hit is not None)
    @rule()
    def allocate_with_kept_hit(self) -> None:
        """An old hit is either still true, or refused."""
        assert self.kept_hit is not None
        (hit, sequence), self.kept_hit = self.kept_hit, None
        still_true = all(
            block in (0, self.known.get(self.block_content(sequence, number, index)))
            for number, row in enumerate(hit.block_ids)
            for index, block in enumerate(row)
        )
        if still_true:
            self.admit(sequence, hit, len(sequence.tokens), prefill=False)
        else:
            with pytest.raises(StaleHit):
                self.manager.allocate(self.next_id, sequence.domain, len(sequence.tokens), hit)
            assert not self.manager.has(self.next_id)

    def pick(self, data: st.DataObject) -> int:
        """A sequence whose blocks are there."""
        seq_id = data.draw(st.sampled_from(sorted(self.sequences)))
        if seq_id in self.coming_back:
            self.launch()
        return seq_id

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), chunk=st.integers(1, 6), token=st.integers(0, 1), commit=st.booleans())
    def step(self, data: st.DataObject, chunk: int, token: int, commit: bool) -> None:
        """Computes a chunk of what is pending, or, when nothing is, decodes one more token."""
        seq_id = self.pick(data)
        sequence = self.sequences[seq_id]
        if sequence.num_computed == len(sequence.tokens):
            sequence.tokens.append(token)
            sequence.chain.extend(sequence.tokens)
        self.compute(seq_id, chunk, commit=commit)

    def compute(self, seq_id: int, chunk: int, *, commit: bool) -> None:
        sequence = self.sequences[seq_id]
        start = sequence.num_computed
        end = min(start + chunk, len(sequence.tokens))
        if self.grow(seq_id, sequence, start, end):
            self.write(sequence, start, end)
            sequence.num_computed = end
            if commit:
                self.commit_computed(seq_id)
                self.history.append(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=2, max_size=6))
    def decode(self, data: st.DataObject, tokens: list[int]) -> None:
        """Catches up, then several tokens one by one."""
        self.decode_tokens(self.pick(data), tokens)

    def decode_tokens(self, seq_id: int, tokens: list[int]) -> None:
        """Each step is committed after the next one was prepared, as behind a pipelined engine."""
        sequence = self.sequences[seq_id]
        for token in tokens:
            retired = sequence.num_computed
            self.compute(seq_id, len(sequence.tokens), commit=False)
            self.commit_computed(seq_id, retired)
            if sequence.num_computed < len(sequence.tokens):
                return
            sequence.tokens.append(token)
            sequence.chain.extend(sequence.tokens)

    def grow(self, seq_id: int, sequence: ModelSequence, start: int, end: int) -> bool:
        owners = self.owners()
        written = {position // self.size for position in range(start, end)}
        num_appended = max(0, self.blocks(end) - len(sequence.tables[0]))
        shared = {
            (number, index)
            for number, table in enumerate(sequence.tables)
            for index in written & set(range(len(table)))
            if len(owners[table[index]]) > 1
        }
        passed = {
            (number, index)
            for number, (group, table) in enumerate(zip(self.groups, sequence.tables, strict=True))
            for index, block in enumerate(table)
            if block and not self.visible(group, index, start)
        }
        given_back = {sequence.tables[number][index] for number, index in passed}
        given_back = {block for block in given_back if owners[block] == {seq_id}}
        free = self.free_blocks()
        needed = num_appended * len(self.groups) + len(shared)
        assert self.manager.num_new_blocks(seq_id, end, start) == max(0, needed - len(given_back))
        if needed > len(free) + len(given_back):
            with pytest.raises(NoFreeBlocks):
                self.manager.grow(seq_id, end, start)
            return False
        growth = self.manager.grow(seq_id, end, start)
        self.launch()
        for number, index in passed:
            sequence.tables[number][index] = 0
        for number, index in {(number, index) for number in range(len(self.groups)) for index in written}:
            if index < len(sequence.tables[number]) and (number, index) not in shared:  # written in place: no longer known
                block = sequence.tables[number][index]
                self.known = {content: known for content, known in self.known.items() if known != block}
        fresh = [*(new for _, _, new in growth.replaced), *(block for row in growth.block_ids for block in row)]
        self.taken(fresh, free | given_back)
        assert {(number, index) for number, index, _ in growth.replaced} == shared
        assert {len(row) for row in growth.block_ids} == {num_appended}
        assert bool(growth) == bool(needed)
        new_at = {(number, index): new for number, index, new in growth.replaced}
        keep = {(sequence.tables[n][i], new_at[n, i]) for n, i in shared if i * self.size < start}
        assert set(growth.copies) == keep and len(growth.copies) == len(keep)
        for source, destination in growth.copies:
            kept = {key: content for key, content in self.slots.items() if key[0] != destination}
            self.slots = kept | {(destination, slot): content for (block, slot), content in kept.items() if block == source}
        for number, index, new in growth.replaced:
            sequence.tables[number][index] = new
        for table, row in zip(sequence.tables, growth.block_ids, strict=True):
            table.extend(row)
        sequence.num_covered = max(sequence.num_covered, end)
        sequence.num_considered = min(sequence.num_considered, start // self.size)
        return True

    def commit_computed(self, seq_id: int, retired: int | None = None) -> None:
        sequence = self.sequences[seq_id]
        retired = sequence.num_computed if retired is None else retired
        self.manager.commit(seq_id, sequence.chain, retired)
        if not (self.caching and sequence.may_register):
            return
        taken = set(self.known.values())
        for number, table in enumerate(sequence.tables):
            for index in range(sequence.num_considered, retired // self.size):
                content = self.block_content(sequence, number, index)
                if table[index] and table[index] not in taken and content not in self.known:
                    self.known[content] = table[index]
        sequence.num_considered = max(sequence.num_considered, retired // self.size)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        self.commit_computed(self.pick(data))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def rewind(self, data: st.DataObject, tokens: list[int]) -> None:
        """Goes back and writes other tokens over what was computed, committed or shared; no further than windows allow."""
        seq_id = self.pick(data)
        old = self.sequences[seq_id]
        start = data.draw(st.integers(0, old.num_computed))
        for group, table in zip(self.groups, old.tables, strict=True):
            if any(self.visible(group, index, start) for index, block in enumerate(table) if not block):
                return
        end = start + len(tokens)
        changed = self.new_sequence((old.domain, old.extra_keys), [*old.tokens[:start], *tokens])
        fresh = copy(old)
        fresh.tokens, fresh.chain, fresh.tables = changed.tokens, changed.chain, [list(table) for table in old.tables]
        if self.grow(seq_id, fresh, start, end):
            self.write(fresh, start, end)
            fresh.num_computed = end
            self.sequences[seq_id] = fresh

    @precondition(lambda self: 0 < len(self.sequences) < 8)
    @rule(data=st.data(), mine=st.lists(st.integers(0, 1), max_size=4), parents=st.lists(st.integers(0, 1), max_size=4))
    def fork(self, data: st.DataObject, mine: list[int], parents: list[int]) -> None:
        parent_id = self.pick(data)
        parent = self.sequences[parent_id]
        child_id, self.next_id = self.next_id, self.next_id + 1
        self.manager.fork(parent_id, child_id)
        child = self.sequences[child_id] = copy(parent)
        child.tokens, child.chain = list(parent.tokens), parent.chain.copy()
        child.tables = [list(table) for table in parent.tables]
        self.decode_tokens(child_id, mine)
        self.decode_tokens(parent_id, parents)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Finished, preempted or aborted: all the same to the blocks."""
        self.free_one(self.pick(data))

    def free_one(self, seq_id: int) -> None:
        before = self.free_blocks()
        predicted = self.manager.freed_by(seq_id)
        self.manager.free(seq_id)
        del self.sequences[seq_id]
        assert len(self.free_blocks() - before) == predicted
        with pytest.raises(KeyError):
            self.manager.free(seq_id)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def step_fails(self, data: st.DataObject) -> None:
        """The step leaves rubbish in everything it was to write, and the sequence ends."""
        self.launch()
        seq_id = self.pick(data)
        held = {block for block, owners in self.owners().items() if seq_id in owners}
        mine = {block for block, owners in self.owners().items() if owners == {seq_id}}
        self.manager.forget(seq_id)
        self.known = {content: block for content, block in self.known.items() if block not in held}
        self.slots = {key: content for key, content in self.slots.items() if key[0] not in mine}
        self.free_one(seq_id)

    # ---- host memory -----------------------------------------------------------------------------------------------------

    @rule()
    def launch(self) -> None:
        """A step begins: what it has to swap out is read before what it has to swap in is written."""
        out, back = self.manager.host.take_pairs()
        hosts = [host for _, host in out] + [host for host, _ in back]
        assert len(set(hosts)) == len(hosts) and set(hosts) <= self.host_blocks
        assert len({device for _, device in back}) == len(back)
        before = dict(self.slots)
        for host, device in back:
            for slot in range(self.size):
                content = self.host_slots.pop((host, slot))  # read once: nobody else's
                self.slots.pop((device, slot), None)
                if content is not None:
                    self.slots[device, slot] = content
        for device, host in out:
            for slot in range(self.size):
                self.host_slots[host, slot] = before.get((device, slot))
        self.leaving = 0
        self.on_their_way.clear()
        self.coming_back.clear()

    @precondition(lambda self: self.sequences and self.host_blocks)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        seq_id = self.pick(data)
        sequence = self.sequences[seq_id]
        entries = [table[: self.blocks(sequence.num_computed)] for table in sequence.tables]
        needed = sum(1 for row in entries for block in row if block)
        room = len(self.host_blocks) - self.leaving - sum(count for _, count in self.swapped.values())
        assert self.manager.can_swap_out(seq_id, sequence.num_computed) == (0 < needed <= room)
        if needed > room:
            with pytest.raises(NoFreeBlocks) as error:
                self.manager.swap_out(seq_id, sequence.num_computed)
            assert (error.value.needed, error.value.free) == (needed, room)
            return
        self.manager.swap_out(seq_id, sequence.num_computed)
        self.swapped[seq_id] = (self.sequences.pop(seq_id), needed)
        self.on_their_way.add(seq_id)
        assert not self.manager.has(seq_id) and self.manager.host.holds(seq_id)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), ahead=st.integers(0, 3))
    def swap_in(self, data: st.DataObject, ahead: int) -> None:
        """With room for what it has computed, or for more."""
        seq_id = data.draw(st.sampled_from(sorted(self.swapped)))
        sequence, count = self.swapped[seq_id]
        num_tokens, free = max(1, sequence.num_computed + ahead), self.free_blocks()
        if seq_id in self.on_their_way and count:
            with pytest.raises(ValueError, match="on its way out"):
                self.manager.swap_in(seq_id, num_tokens)
            self.launch()
        passed = [sum(not block for block in table) for table in sequence.tables]
        passed = [min(done, self.blocks(sequence.num_computed)) for done in passed]
        needed = sum(self.blocks(num_tokens) - done for done in passed)
        if needed > len(free):
            with pytest.raises(NoFreeBlocks) as error:
                self.manager.swap_in(seq_id, num_tokens)
            assert (error.value.needed, error.value.free) == (needed, len(free))
            return
        self.manager.swap_in(seq_id, num_tokens)
        sequence.tables = [self.manager.block_table(seq_id, number) for number in range(len(self.groups))]
        assert [table[:done] for table, done in zip(sequence.tables, passed, strict=True)] == [[0] * done for done in passed]
        fresh = [block for table, done in zip(sequence.tables, passed, strict=True) for block in table[done:]]
        assert len(fresh) == needed
        self.taken(fresh, free)
        sequence.num_covered, sequence.num_considered = num_tokens, 0
        self.sequences[seq_id] = sequence
        del self.swapped[seq_id]
        self.leaving += count
        self.coming_back.add(seq_id)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swapped_one_ends(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.swapped)))
        self.manager.host.drop(seq_id)
        del self.swapped[seq_id]
        with pytest.raises(KeyError):
            self.manager.host.drop(seq_id)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.manager.reset_prefix_cache()
        self.known.clear()
        for sequence in [*self.sequences.values(), *(sequence for sequence, _ in self.swapped.values())]:
            sequence.may_register = False

    @rule(guarantees=st.lists(st.integers(0, 12), min_size=len(DOMAINS), max_size=len(DOMAINS)), none=st.booleans())
    def change_quotas(self, guarantees: list[int], none: bool) -> None:
        quotas = {domain: Quota(guarantee) for domain, guarantee in zip(DOMAINS, guarantees, strict=True)}
        self.manager.pool.keep_accounts(None if none else Accounts(quotas, lambda domain: (domain,)))

    # ---- what must hold after every rule ---------------------------------------------------------------------------------

    @invariant()
    def books_are_right(self) -> None:
        self.manager.check_integrity()

    @invariant()
    def tables_are_what_the_worker_was_told(self) -> None:
        for seq_id, sequence in self.sequences.items():
            tables = [self.manager.block_table(seq_id, number) for number in range(len(self.groups))]
            assert tables == sequence.tables
            assert self.manager.num_tokens_of(seq_id) == sequence.num_covered

    @invariant()
    def counts_agree(self) -> None:
        owners, manager = self.owners(), self.manager
        assert {block: manager.pool.ref_counts[block] for block in self.usable} == {b: len(o) for b, o in owners.items()}
        free = self.free_blocks()
        assert set(manager.pool.free) == free and 0 not in free
        assert manager.num_free_blocks + manager.num_used_blocks == manager.num_usable_blocks == len(self.usable)
        assert manager.num_free_blocks == len(free)
        assert manager.num_cached_blocks == len(free & set(self.known.values()))
        assert manager.block_utilization_ratio() == (len(self.usable) - len(free)) / len(self.usable)

    @invariant()
    def host_blocks_are_counted(self) -> None:
        host, counts = self.manager.host, dict.fromkeys(DOMAINS, 0)
        for sequence, count in self.swapped.values():
            counts[sequence.domain] += count
        assert host.usage.counts == {domain: count for domain, count in counts.items() if count}
        assert host.num_used_blocks == sum(counts.values()) + self.leaving == len(self.host_blocks) - host.num_free_blocks

    @invariant()
    def domains_are_apart_and_counted(self) -> None:
        domains = {block: {self.sequences[owner].domain for owner in owners} for block, owners in self.owners().items()}
        assert all(len(names) <= 1 for names in domains.values())
        counted = {name: sum(name in names for names in domains.values()) for name in DOMAINS}
        assert {name: self.manager.used_by(name) for name in DOMAINS} == counted
        assert self.manager.domains() == {name: count for name, count in counted.items() if count}
        for name in [None, *counted]:
            used = [block for block, names in domains.items() if names and (name is None or name in names)]
            unused = sum(self.size - self.filled(block) for block in used)
            assert self.manager.fragmentation_rate(name) == pytest.approx(unused / (len(used) * self.size) if used else 0.0)

    def filled(self, block: int) -> int:
        return max(
            min(self.size, sequence.num_covered - index * self.size)
            for sequence in self.sequences.values()
            for table in sequence.tables
            for index, held in enumerate(table)
            if held == block
        )

    @invariant()
    def everything_findable_is_what_it_says(self) -> None:
        for content, block in self.known.items():
            position = len(content[3]) - 1
            assert self.slots.get((block, position % self.size)) == content

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.launch()
        for seq_id in list(self.sequences):
            self.free_one(seq_id)
        for seq_id in self.swapped:
            self.manager.host.drop(seq_id)
        self.manager.check_integrity()
        assert (self.manager.host.num_used_blocks, self.manager.host.usage.counts) == (0, {})
        assert self.manager.num_free_blocks == self.manager.num_usable_blocks
        assert self.manager.domains() == {}


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
EXAMPLES, STEPS = (20_000, 200) if os.environ.get("FAIRLANE_TEST_PROFILE") == "long" else (200, 50)

TestBlockManager = BlockManagerMachine.TestCase
TestBlockManager.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, suppress_health_check=QUIET)
