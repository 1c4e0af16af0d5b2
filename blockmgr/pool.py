"""Every block's state: how many tables hold it, whose it is, which content it is known to have, and the order in which free
blocks are used up. The manager decides who gets blocks and when content counts as known; the pool keeps the books."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fairlane.blockmgr.accounting import DomainUsage
from fairlane.blockmgr.accounts import Accounts
from fairlane.blockmgr.free_list import FreeList
from fairlane.blockmgr.shields import Shields


class BlockPool:
    """Blocks 1 .. num_blocks - 1; block 0 is the null block, which nobody owns. Parallel lists indexed by block id.

    A block is *used* (ref_counts > 0, not on the free list) or *free* (0, on it). A free block that still has a hash is
    *cached*: a lookup may revive it until it is taken for something else. Free blocks without a hash lie before cached
    ones, so nothing known is evicted while something worthless is free.

    domain_of: meaningful while a block is used or has a hash. group_of: while it has a hash. index: per KV-cache group, hash ->
    the one block registered under it. shields: which cached blocks go last; None: by age alone.
    """

    __slots__ = (
        "domain_of",
        "free",
        "group_of",
        "hash_of",
        "index",
        "num_blocks",
        "num_cached",
        "ref_counts",
        "shields",
        "usage",
        "version",
    )

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.group_of = [0] * num_blocks
        self.domain_of = [""] * num_blocks
        self.index: tuple[dict[bytes, int], ...] = tuple({} for _ in range(num_groups))
        self.free = FreeList(num_blocks)
        self.num_cached = 0
        self.version = 0  # counts the changes of `index`
        self.usage = DomainUsage()
        self.shields: Shields | None = None

    def keep_accounts(self, accounts: Accounts | None) -> None:
        """Counts blocks for these accounts from now on, with those that are in use; None: for none."""
        if self.shields is not None:
            self.shields.clear()
        self.usage.accounts, self.shields = accounts, None
        if accounts is None:
            return
        if accounts.guarantees:
            self.shields = Shields(accounts, self.free)
        for domain, count in self.usage.counts.items():
            accounts.add(domain, count)
        accounts.lowered = [account for account in accounts if account.room < 0]

    def take(self, count: int, domain: str) -> list[int]:
        """`count` blocks with ref_count 1 for `domain`, evicting cached ones from the least recently used on.

        Raises NoFreeBlocks and changes nothing if there are fewer.
        """
        blocks = self.free.pop_many(count)
        ref_counts, hash_of, domain_of = self.ref_counts, self.hash_of, self.domain_of
        for block in blocks:
            if hash_of[block] is not None:
                self._evict(block)
            ref_counts[block] = 1
            domain_of[block] = domain
        self.usage.add(domain, count)
        if self.shields is not None:
            self.shields.used(domain)
        return blocks

    def take_each(self, domains: Sequence[str]) -> list[int]:
        """One block for each of `domains`, as take() gives it; each of them has used blocks already. Raises like take()."""
        blocks = self.free.pop_many(len(domains))
        ref_counts, hash_of, domain_of, counts = self.ref_counts, self.hash_of, self.domain_of, self.usage.counts
        for block, domain in zip(blocks, domains, strict=True):
            if hash_of[block] is not None:
                self._evict(block)
            ref_counts[block] = 1
            domain_of[block] = domain
            counts[domain] += 1
        if self.usage.accounts is not None:
            for domain in domains:
                self.usage.accounts.add(domain, 1)
                if self.shields is not None:
                    self.shields.used(domain)
        return blocks

    def _evict(self, block: int) -> None:
        """A cached block that was popped off the free list."""
        self.unregister(block)
        if self.shields is not None:
            self.shields.taken(block)

    def share(self, blocks: Iterable[int], domain: str) -> None:
        """One more holder for each of `blocks`, which are used by `domain` or cached for it."""
        ref_counts, revived = self.ref_counts, 0
        for block in blocks:
            if not ref_counts[block]:
                if self.shields is not None:
                    self.shields.revive(block)
                self.free.remove(block)
                revived += 1
            ref_counts[block] += 1
        self.num_cached -= revived
        self.usage.add(domain, revived)
        if self.shields is not None and revived:
            self.shields.used(domain)

    def release(self, blocks: Sequence[int], domain: str) -> None:
        """One holder fewer for each of `blocks`, all used by `domain`. Those without any left become free: cached ones go to
        the most recently used end, so that of two the one named first is evicted first; the others are used up next."""
        ref_counts, hash_of = self.ref_counts, self.hash_of
        worthless: list[int] = []
        cached: list[int] = []
        for block in blocks:
            left = ref_counts[block] - 1
            ref_counts[block] = left
            if not left:
                (worthless if hash_of[block] is None else cached).append(block)
        self.free.push_front_many(worthless)
        self.num_cached += len(cached)
        self.usage.remove(domain, len(worthless) + len(cached))
        if self.shields is None:
            self.free.push_back_many(cached)
        else:
            self.shields.push(cached, domain)

    def register(self, block: int, group: int, content: bytes) -> None:
        """A used block without a hash is known to hold `content`. If another block already is, that one stays the known
        one and this one stays unknown: existing tables point at both, and no copy is saved by choosing."""
        if content not in self.index[group]:
            self.index[group][content] = block
            self.version += 1
            self.hash_of[block] = content
            self.group_of[block] = group

    def unregister(self, block: int) -> None:
        """A block that has a hash loses it: no lookup returns it any more."""
        content = self.hash_of[block]
        if content is None:
            raise ValueError(f"block {block} has no hash")
        del self.index[self.group_of[block]][content]
        self.version += 1
        self.hash_of[block] = None
        if not self.ref_counts[block]:
            self.num_cached -= 1

    def holds(self, block: int, group: int, content: bytes) -> bool:
        """Whether `block` is the one registered for `content`."""
        return self.index[group].get(content) == block

    def num_with_ref_count(self, blocks: Iterable[int], ref_count: int) -> int:
        """How many of `blocks` have this ref_count. The null block counts as one with 0."""
        return list(map(self.ref_counts.__getitem__, blocks)).count(ref_count)
