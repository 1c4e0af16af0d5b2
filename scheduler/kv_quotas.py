"""KV quotas of the policy in force, over one worker's blocks: which accounts there are, whom a guarantee covers, and who may
lose blocks to whom. Counting is the block manager's (accounts.py); what a step does about a shortage is step_pass.py's and
reclaim.py's.

A guarantee covers what an account asks for as long as it stays within it, at the account's own level or at one above. Whoever
is in an account that is within its guarantee loses nothing to those outside of it, whatever their tier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from fairlane.blockmgr.accounts import UNLIMITED, Account, Accounts, Quota
from fairlane.scheduler.cache_domain import account_names
from fairlane.scheduler.policies.base import Policy
from fairlane.scheduler.request import Sequence
from fairlane.scheduler.tenancy import GroupShare, KVAmount, NodeShare, PolicySnapshot

PUBLIC = "public"


class QuotaError(ValueError):
    """Quotas that this worker's pool cannot hold, in one line that names them."""


class KVQuotas:
    """sources: of an account, the nodes of the ownership tree whose requests count for it. is_pressed: the last step that asked
    passed somebody over for want of blocks. alarm: fewer free blocks than this, and somebody who is covered by a guarantee and
    was left to wait for its turn comes to lack them."""

    def __init__(self, accounts: Accounts, sources: Mapping[str, tuple[str, ...]], watermark: Callable[[int, int], int]) -> None:
        """watermark: as SchedulerLimits.watermark_blocks."""
        self.accounts = accounts
        self.sources = sources
        self._watermark = watermark
        self.is_pressed = False
        self.alarm = 0
        # A limit may be short while the pool is not: then free blocks say nothing about claims.
        self.limits_bind_claims = accounts.guarantees and any(account.limit < UNLIMITED for account in accounts)

    def room(self, sequence: Sequence) -> int:
        """Blocks that the sequence may get by the limits above it."""
        return self.accounts.room(sequence.request.cache_domain)

    def lineage(self, sequence: Sequence) -> tuple[Account, ...]:
        """The accounts with a quota that the sequence's blocks count for, its own first."""
        return self.accounts.lineage(sequence.request.cache_domain)

    def full_for(self, sequence: Sequence, blocks: int) -> Account | None:
        """The innermost account whose limit does not leave so many blocks for a waiting sequence, and the margin."""
        margins = self.margins(sequence, blocks)
        return next((account for account, margin in margins.items() if account.room < blocks + margin), None)

    def margins(self, sequence: Sequence, blocks: int) -> dict[Account, int]:
        """What its admission with so many blocks leaves of each limit, so that others of the account can grow; nothing, if a
        guarantee covers it."""
        covered = self.covers(sequence, blocks) is not None
        return {account: 0 if covered else self._margin(account) for account in self.lineage(sequence)}

    def _margin(self, account: Account) -> int:
        return 0 if account.limit == UNLIMITED else self._watermark(account.limit, account.used)

    def never_fits(self, domain: str, blocks: int) -> Account | None:
        """The innermost account whose whole limit is less."""
        return next((account for account in self.accounts.lineage(domain) if account.limit < blocks), None)

    def covers(self, sequence: Sequence, blocks: int) -> Account | None:
        """The account within whose guarantee the sequence gets so many more blocks. None: there is none, or a limit below it is
        reached, which no guarantee overrides."""
        for account in self.lineage(sequence):
            if account.used + account.aside + blocks <= account.guarantee:
                return account
            if account.room < blocks:
                return None
        return None

    def may_claim(self, sequence: Sequence) -> bool:
        """Whether some account above it is below its guarantee, and waits."""
        claimants = self.accounts.claimants
        return any(account in claimants for account in self.lineage(sequence))

    def may_lose(self, victim: Sequence, gainer: Sequence) -> bool:
        """Whether no guarantee keeps the victim's blocks from the gainer."""
        own = self.lineage(gainer)
        return all(not account.guarantee or account.is_borrowing or account in own for account in self.lineage(victim))

    def hold_if_full(self, head: Sequence, blocks: int, policy: Policy) -> bool:
        """A waiting head whose own limit is in its way is nobody else's concern: it is set aside, and nobody of the full
        account is asked for until something of that has changed. False if it is not a limit that keeps it."""
        full = self.full_for(head, blocks)
        if full is None:
            return False
        policy.skip(head)
        self.accounts.hold(full, head.request.cache_domain)
        for path in self._sources(full):
            policy.hold(path)
        return True

    def let_go_around(self, account: Account, policy: Policy) -> None:
        """Whoever waits for the account's blocks is shown by head(), whatever limit, its own, one below it or above, keeps others
        of the same node from going first."""
        if account.held or account.holds or any(above.held for above in account.above):
            self.accounts.wake_around(account)
            self.let_go(policy)

    def let_go(self, policy: Policy) -> None:
        """Accounts that were held may have room again."""
        for account in self.accounts.take_woken():
            for path in self._sources(account):
                policy.let_go(path)

    def head(self, account: Account, policy: Policy) -> Sequence | None:
        """Whoever of the account goes next. None: nobody may go now."""
        heads = (policy.peek_below(path) for path in self._sources(account))
        found = [head for head in heads if head is not None and self._counts_for(head, account)]
        return min(found, key=policy.rank, default=None)

    def _sources(self, account: Account) -> tuple[str, ...]:
        return self.sources.get(account.name, (account.name,))

    def _counts_for(self, sequence: Sequence, account: Account) -> bool:
        """Not if its domain was another when it arrived."""
        return account in self.lineage(sequence)


class Losses:
    """What accounts would have less if some sequences were evicted for the gainer, who needs so many blocks."""

    def __init__(
        self, quotas: KVQuotas, gainer: Sequence, blocks: int, *, with_margin: bool = False, guarantees_hold: bool = True
    ) -> None:
        self._guarantees_hold = guarantees_hold
        self._accounts = quotas.accounts
        self._own = quotas.accounts.lineage(gainer.request.cache_domain)
        self._margins = quotas.margins(gainer, blocks) if with_margin else dict.fromkeys(self._own, 0)
        short = {account: blocks + self._margins[account] - account.room for account in self._own}
        self._needed = {account: count for account, count in short.items() if count > 0}
        self._short = dict(self._needed)
        self._lost: defaultdict[Account, int] = defaultdict(int)

    @property
    def suffice(self) -> bool:
        """Whether every limit leaves the gainer what it needs."""
        return not self._short

    def helps(self, victim: Sequence) -> bool:
        """Whether its blocks count for an account that is too full."""
        return self.short(victim) > 0

    def short(self, victim: Sequence) -> int:
        """Blocks that the one of its accounts lacks that is most too full; 0: none is."""
        if not self._short:
            return 0
        return max((self._short.get(account, 0) for account in self._lineage(victim)), default=0)

    def allows(self, victim: Sequence) -> bool:
        """Whether no account that the gainer is not in has only what it was guaranteed."""
        return not self._guarantees_hold or all(
            account.used - self._lost[account] > account.guarantee or not account.guarantee
            for account in self._lineage(victim)
            if account not in self._own
        )

    def surplus(self, victim: Sequence) -> tuple[int, ...]:
        """By how much its accounts exceed their guarantees, from the outermost in which the gainer is not; of a node without a
        quota there is nothing."""
        return tuple(
            account.used - self._lost[account] - account.guarantee
            for account in reversed(self._lineage(victim))
            if account not in self._own
        )

    def retake(self, victims: Iterable[tuple[Sequence, int]]) -> None:
        """These go, and nobody else of whom take() was told."""
        self._lost.clear()
        self._short = dict(self._needed)
        for victim, freed in victims:
            self.take(victim, freed)

    def take(self, victim: Sequence, freed: int) -> None:
        """It goes, and with it so many blocks."""
        for account in self._lineage(victim):
            self._lost[account] += freed
            if account in self._short:
                self._short[account] -= freed
                # With everybody else gone, nobody would be left to grow.
                margin = self._margins[account] if self._lost[account] >= account.used else 0
                if self._short[account] <= margin:
                    del self._short[account]

    def _lineage(self, victim: Sequence) -> tuple[Account, ...]:
        return self._accounts.lineage(victim.request.cache_domain)


def above_limit(needed: int, account: Account) -> str:
    """Why a request fails."""
    return f"needs {needed} KV blocks, the kv_limit of {account.name} is {account.limit}"


def make_quotas(
    snapshot: PolicySnapshot, num_blocks: int, block_size: int, watermark: Callable[[int, int], int]
) -> KVQuotas | None:
    """The snapshot's quotas over a pool of num_blocks usable blocks; None if it has none. Raises QuotaError if more is promised
    than there is."""

    def blocks(amount: KVAmount | None, default: int) -> int:
        return default if amount is None else amount.blocks(num_blocks, block_size)

    entries: list[NodeShare | GroupShare] = [*snapshot.nodes, *snapshot.groups]
    quotas = {
        _account_of(entry): Quota(
            blocks(entry.kv_guarantee, 0),
            blocks(entry.kv_limit, UNLIMITED),
            blocks(entry.member_kv_limit, 0) if isinstance(entry, NodeShare) and entry.member_kv_limit is not None else None,
        )
        for entry in entries
        if _has_quota(entry)
    }
    if not quotas:
        return None
    _check_promises(quotas, num_blocks)
    return KVQuotas(Accounts(quotas, account_names), _sources(snapshot, quotas), watermark)


def _has_quota(entry: NodeShare | GroupShare) -> bool:
    if isinstance(entry, NodeShare):
        if entry.shared_domain:  # its blocks count there
            return False
        if entry.member_kv_limit is not None:
            return True
    return entry.kv_guarantee is not None or entry.kv_limit is not None


def _account_of(entry: NodeShare | GroupShare) -> str:
    return entry.path if isinstance(entry, NodeShare) else f"group:{entry.name}"


def _sources(snapshot: PolicySnapshot, quotas: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Where they are other nodes than the one that has the account's name."""
    found: dict[str, tuple[str, ...]] = {}
    for name in quotas:
        if name.startswith("group:"):
            found[name] = tuple(node.path for node in snapshot.nodes if node.shared_domain == name)
            continue
        below = [node for node in snapshot.nodes if node.path.startswith(f"{name}/")]
        if any(node.shared_domain for node in below):
            found[name] = tuple(node.path for node in below if not node.shared_domain)
    return found


def _check_promises(quotas: Mapping[str, Quota], num_blocks: int) -> None:
    """What the policy file's own check cannot know: amounts in tokens against shares, and both against the pool."""
    promised: dict[str, int] = {}
    for name, quota in quotas.items():
        below = {child: other.guarantee for child, other in quotas.items() if child.startswith(f"{name}/") and other.guarantee}
        total = sum(below.values())
        own = {name: quota.guarantee} if quota.guarantee else {}
        if quota.guarantee and total > quota.guarantee:
            _refuse(f"below {name}", below, quota.guarantee, f"the kv_guarantee of {name}")
        most = max(total, quota.guarantee)
        if most > quota.limit:
            _refuse(f"to {name} and below", below or own, quota.limit, f"the kv_limit of {name}")
        organisation, is_tenant, _ = name.partition("/")
        if not is_tenant:
            promised |= own or below
        elif organisation not in quotas:
            promised |= own
    if sum(promised.values()) > num_blocks:
        _refuse("in all", promised, num_blocks, "this worker's KV cache")


def _refuse(where: str, promised: Mapping[str, int], most: int, limit: str) -> None:
    places = ", ".join(f"{name} {count}" for name, count in promised.items())
    total = sum(promised.values())
    raise QuotaError(f"kv_guarantee: {total} blocks are promised {where} ({places}): more than the {most} of {limit}")
