"""Accounts that blocks count for, with what each may have: a limit that it never exceeds and a guarantee that it can always have
back. Accounts are a tree: a block counts for its domain's own account and for all above it. Who gets in, who is evicted for whom
and when, is the scheduler's to decide; here is what that is decided by, kept as blocks come and go in O(depth) each.

    used    blocks in use. Free blocks, cached or not, count for nobody.
    aside   blocks that a step under construction will take for sequences which are not asked one by one
    room    limit - used - aside, the least of an account and those above it
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

UNLIMITED = sys.maxsize

NamesOf = Callable[[str], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Quota:
    """What an account may have, in blocks. guarantee 0: nothing is promised. each_below: the limit of every account right below
    it that has no quota of its own; None: none."""

    guarantee: int = 0
    limit: int = UNLIMITED
    each_below: int | None = None


class Account:
    """waiting: sequences that wait for blocks of it. claim: blocks that it is below its guarantee, while somebody waits. held:
    it was too full for somebody; whoever has set this is told when that may have changed. shield: its cached blocks that are
    used up after all others, the oldest first (shields.py). holds: accounts below it that were held, and may still be; above:
    those above it. enough: with so many free blocks everybody finds theirs who waits there and whom a guarantee covers, as far
    as whoever has set this knows; 0 once something has changed."""

    __slots__ = ("above", "aside", "claim", "enough", "guarantee", "held", "holds", "limit", "name", "shield", "used", "waiting")

    def __init__(self, name: str, guarantee: int, limit: int) -> None:
        self.name = name
        self.guarantee = guarantee
        self.limit = limit
        self.used = 0
        self.aside = 0
        self.waiting = 0
        self.claim = 0
        self.enough = 0
        self.held = False
        self.holds: dict[Account, None] = {}
        self.above: dict[Account, None] = {}
        self.shield: OrderedDict[int, None] = OrderedDict()

    @property
    def room(self) -> int:
        """Blocks that it may still get by its own limit; negative where a limit was lowered."""
        return self.limit - self.used - self.aside

    @property
    def is_borrowing(self) -> bool:
        """Whether it has blocks that nobody promised it."""
        return self.used > self.guarantee

    def __repr__(self) -> str:
        return f"Account({self.name}: {self.used} used, {self.guarantee} guaranteed, at most {self.limit})"


Lineage = tuple[Account, ...]


class Accounts:
    """The accounts with a quota, by name, and which of them a domain's blocks count for.

    claimants: accounts below their guarantee for whose blocks somebody waits, in the order in which they are to be looked at,
    but for those of which that is done until something changes (disclaim). claimed: blocks that all are below it, together.
    lowered: accounts that have more than their limit since it was lowered, for whoever sees to it.
    """

    def __init__(self, quotas: Mapping[str, Quota], names_of: NamesOf) -> None:
        """names_of: of a domain, the names of its own account and of those above it, its own first."""
        self.by_name = {name: Account(name, quota.guarantee, quota.limit) for name, quota in quotas.items()}
        self.claimants: dict[Account, None] = {}
        self.claimed = 0
        self.lowered: list[Account] = []
        self.guarantees = any(quota.guarantee for quota in quotas.values())
        self._each_below = {name: quota.each_below for name, quota in quotas.items() if quota.each_below is not None}
        self._names_of = names_of
        self._lineages: dict[str, Lineage] = {}  # of domains that have blocks
        self._templated: dict[str, Account] = {}  # accounts that exist while they have blocks or somebody waits for some
        self._aside: list[Account] = []
        self._woken: list[Account] = []

    def __iter__(self) -> Iterator[Account]:
        yield from self.by_name.values()
        yield from self._templated.values()

    def lineage(self, domain: str) -> Lineage:
        """Its own account, if that has a quota, then those above it that have."""
        found = self._lineages.get(domain)
        return self._work_out(domain) if found is None else found

    def room(self, domain: str) -> int:
        """Blocks that the domain may still get, by every limit above it; UNLIMITED without one."""
        return min((account.room for account in self.lineage(domain)), default=UNLIMITED)

    # -- what changes ----------------------------------------------------------------------------------------------------------

    def add(self, domain: str, count: int) -> None:
        """The domain has so many more blocks in use."""
        lineage = self._lineages.get(domain)
        if lineage is None:
            lineage = self._lineages[domain] = self._work_out(domain)
            self._templated |= {account.name: account for account in lineage if account.name not in self.by_name}
        for account in lineage:
            account.used += count
            if account.guarantee:
                self._note(account, has_less=True)

    def remove(self, domain: str, count: int, *, is_last: bool) -> None:
        """So many fewer; is_last: it has none any more."""
        for account in self._lineages[domain]:
            account.used -= count
            if account.guarantee:
                self._note(account)
            if account.held:
                self._wake(account)
            self._forget_if_idle(account)
        if is_last:
            del self._lineages[domain]

    def wait(self, domain: str, by: int) -> None:
        """So many more sequences wait for blocks of the domain."""
        for account in self.lineage(domain):
            account.waiting += by
            if account.name not in self.by_name:
                self._templated.setdefault(account.name, account)
            if account.guarantee:
                self._note(account)
            if account.held:
                self._wake(account)
            self._forget_if_idle(account)

    def disclaim(self, account: Account) -> None:
        """Whoever waits for its blocks asks for more than its guarantee leaves; that changes as blocks come back, or others
        wait."""
        self.claimants.pop(account, None)

    def found_prefix(self, domain: str) -> bool:
        """Whoever waits for blocks of the domain may need fewer of them: more is cached. Whether somebody claims a guarantee
        there."""
        for account in self.lineage(domain):
            if account.guarantee:
                self._note(account)
        return any(account.claim for account in self.lineage(domain))

    def hold(self, account: Account, domain: str) -> None:
        """It is too full for whoever is next, of this domain. take_woken() names it as soon as it may not be."""
        account.held = True
        lineage = self.lineage(domain)
        for above in lineage[lineage.index(account) + 1 :]:
            if above.guarantee:
                above.holds[account] = None

    def wake_around(self, account: Account) -> None:
        """take_woken() names it and all below and above it, where they are held: its guarantee may cover some of those who wait
        there."""
        for held in (account, *account.holds, *account.above):
            if held.held:
                self._wake(held)
        account.holds.clear()

    def take_woken(self) -> list[Account]:
        """Accounts that were held and of which blocks came back, or for which somebody came or went, since the last call; and
        those that wake_around() found."""
        woken, self._woken = self._woken, []
        return woken

    # -- sequences that are placed as a whole ----------------------------------------------------------------------------------

    def set_aside(self, domains: Iterable[str], each: int) -> None:
        """Counts `each` blocks for each of the domains as good as used, in place of those set aside before."""
        for account in self._aside:
            account.aside = 0
        self._aside = []
        for domain in domains:
            for account in self.lineage(domain):
                if not account.aside:
                    self._aside.append(account)
                account.aside += each

    def exceeds(self) -> bool:
        """Whether what is set aside is more than some account may get."""
        return any(account.room < 0 for account in self._aside)

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _work_out(self, domain: str) -> Lineage:
        names = self._names_of(domain)
        found: list[Account] = []
        for name, above in zip(names, (*names[1:], ""), strict=True):
            account = self.by_name.get(name) or self._templated.get(name)
            if account is None and above in self._each_below:
                account = Account(name, 0, self._each_below[above])
            if account is not None:
                for below in found:
                    below.above[account] = None
                found.append(account)
        return tuple(found)

    def _note(self, account: Account, *, has_less: bool = False) -> None:
        """has_less: of its guarantee is left than before."""
        claim = max(0, account.guarantee - account.used) if account.waiting else 0
        self.claimed += claim - account.claim
        account.claim = claim
        account.enough = 0
        if not claim:
            self.claimants.pop(account, None)
        elif not has_less:
            self.claimants.setdefault(account)

    def _wake(self, account: Account) -> None:
        account.held = False
        self._woken.append(account)

    def _forget_if_idle(self, account: Account) -> None:
        if not account.used and not account.waiting and account.name not in self.by_name:
            self._templated.pop(account.name, None)

    def find_faults(self, counts: Mapping[str, int]) -> list[str]:
        """What disagrees with the used blocks of each domain, in words. Limits are not among it: one may have been lowered."""
        recount: dict[Account, int] = {}
        for domain, count in counts.items():
            for account in self.lineage(domain):
                recount[account] = recount.get(account, 0) + count
        faults = [
            f"account {account.name} counts {account.used} blocks, its domains have {recount.get(account, 0)}"
            for account in self
            if account.used != recount.get(account, 0)
        ]
        faults += [f"account {account.name} counts, and is not known" for account in recount if account not in set(self)]
        claims = {account: account.guarantee - account.used for account in self if account.waiting}
        claims = {account: claim for account, claim in claims.items() if claim > 0}
        if not set(self.claimants) <= claims.keys() or sum(claims.values()) != self.claimed:
            faults.append("others claim their guarantee than are below it and wait")
        return faults
