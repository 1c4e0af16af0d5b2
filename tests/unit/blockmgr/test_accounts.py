"""Accounts with quotas: what counts for whom, what room is left, who claims; and which cached blocks go last."""

from __future__ import annotations

import pytest

from fairlane.blockmgr.accounts import UNLIMITED, Accounts, Quota
from fairlane.blockmgr.errors import IntegrityError
from fairlane.blockmgr.hashing import HashChain
from fairlane.blockmgr.manager import BlockManager

SIZE = 4


def names_of(domain: str) -> tuple[str, ...]:
    """ "a/x" counts for a/x and a."""
    parts = domain.split("/")
    return tuple("/".join(parts[:end]) for end in range(len(parts), 0, -1))


def manager(num_blocks: int, **quotas: Quota) -> tuple[BlockManager, Accounts]:
    """quotas: of accounts whose names have _ for /."""
    blocks = BlockManager(num_blocks + 1, SIZE)
    accounts = Accounts({name.replace("_", "/"): quota for name, quota in quotas.items()}, names_of)
    blocks.pool.keep_accounts(accounts)
    return blocks, accounts


def used(accounts: Accounts) -> dict[str, int]:
    return {account.name: account.used for account in accounts}


def cached(blocks: BlockManager, seq_id: int, domain: str, tokens: list[int]) -> HashChain:
    """A request that came and went; its full blocks can be found."""
    chain = HashChain(domain, SIZE)
    chain.extend(tokens)
    blocks.allocate(seq_id, domain, len(tokens))
    blocks.commit(seq_id, chain, len(tokens))
    blocks.free(seq_id)
    return chain


def test_a_block_counts_for_its_account_and_all_above_that_have_a_quota() -> None:
    blocks, accounts = manager(20, a=Quota(limit=9), a_x=Quota(guarantee=2))
    blocks.allocate(1, "a/x", 3 * SIZE)
    blocks.allocate(2, "a/y", 2 * SIZE)
    blocks.allocate(3, "b/z", 5 * SIZE)
    before = used(accounts)
    blocks.free(1)
    blocks.check_integrity()
    assert (before, used(accounts), accounts.room("a/x"), accounts.room("b/z")) == (
        {"a": 5, "a/x": 3},
        {"a": 2, "a/x": 0},
        7,
        UNLIMITED,
    )


def test_a_shared_prefix_counts_once_and_a_cached_one_for_nobody() -> None:
    blocks, accounts = manager(20, a=Quota(limit=9))
    chain = cached(blocks, 1, "a", list(range(3 * SIZE)))
    free = used(accounts)
    for seq_id in (2, 3):
        blocks.allocate(seq_id, "a", 3 * SIZE + 1, blocks.lookup(chain, 3 * SIZE + 1))
    assert (free, used(accounts)) == ({"a": 0}, {"a": 5})  # 3 shared, 1 each


def test_what_is_in_use_is_taken_over_when_quotas_come_and_a_lowered_limit_is_named() -> None:
    blocks, _ = manager(20)
    blocks.allocate(1, "a/x", 4 * SIZE)
    accounts = Accounts({"a": Quota(limit=3), "b": Quota(limit=3)}, names_of)
    blocks.pool.keep_accounts(accounts)
    blocks.check_integrity()
    assert (used(accounts), [account.name for account in accounts.lowered]) == ({"a": 4, "b": 0}, ["a"])


def test_blocks_set_aside_are_as_good_as_used_until_they_are_set_aside_anew() -> None:
    _, accounts = manager(20, a=Quota(limit=3))
    accounts.set_aside(["a/x", "a/y"], 1)
    rooms = [accounts.room("a/x")]
    accounts.set_aside(["a/x"] * 4, 1)
    rooms.append(accounts.room("a/x"))
    exceeds = accounts.exceeds()
    accounts.set_aside((), 0)
    assert (rooms, exceeds, accounts.exceeds(), accounts.room("a/x")) == ([1, -1], True, False, 3)


def test_who_waits_below_a_guarantee_claims_it_until_it_is_reached_or_was_looked_at() -> None:
    blocks, accounts = manager(20, a=Quota(guarantee=4), b=Quota(guarantee=2))
    (a, b) = accounts
    accounts.wait("a", 1)
    accounts.wait("b", 1)
    accounts.disclaim(b)
    claims = [(set(accounts.claimants), accounts.claimed)]
    blocks.allocate(1, "a", 4 * SIZE)
    blocks.allocate(2, "b", SIZE)  # has less left than before: no reason to look again
    claims.append((set(accounts.claimants), accounts.claimed))
    blocks.free(1)
    blocks.free(2)
    claims.append((set(accounts.claimants), accounts.claimed))
    assert claims == [({a}, 6), (set(), 1), ({a, b}, 6)]


def test_accounts_of_a_template_exist_while_they_have_blocks_or_somebody_waits() -> None:
    blocks, accounts = manager(20, a=Quota(each_below=3))
    blocks.allocate(1, "a/m", 2 * SIZE)
    accounts.wait("a/n", 1)
    known = {account.name: account.room for account in accounts if account.name != "a"}
    blocks.free(1)
    accounts.wait("a/n", -1)
    assert (known, [account.name for account in accounts]) == ({"a/m": 1, "a/n": 3}, ["a"])


def test_a_held_account_is_woken_by_blocks_that_come_back_and_by_who_comes_and_goes() -> None:
    blocks, accounts = manager(20, a=Quota(limit=3))
    (account,) = accounts
    blocks.allocate(1, "a", 2 * SIZE)
    accounts.hold(account, "a")
    nobody = accounts.take_woken()
    blocks.free(1)
    freed = accounts.take_woken()
    accounts.hold(account, "a")
    accounts.wait("a", 1)
    assert (nobody, freed, accounts.take_woken(), accounts.take_woken()) == ([], [account], [account], [])


def test_what_is_held_below_a_guarantee_is_woken_when_that_is_looked_at() -> None:
    _, accounts = manager(20, a=Quota(guarantee=9), a_x=Quota(limit=3))
    held = accounts.by_name["a/x"]
    accounts.hold(held, "a/x")
    accounts.wake_around(accounts.by_name["a"])
    accounts.wake_around(accounts.by_name["a"])
    assert (accounts.take_woken(), held.held) == ([held], False)


@pytest.mark.parametrize("full", ["a", "a/x"])
def test_what_is_held_above_a_guarantee_or_has_it_is_woken_when_that_is_looked_at(full: str) -> None:
    """It is too full for whoever is next, and not for all whom the tenant's guarantee covers."""
    _, accounts = manager(20, a=Quota(limit=12), a_x=Quota(guarantee=6, limit=9), b=Quota(limit=3))
    above, other = accounts.by_name[full], accounts.by_name["b"]
    for domain in ("a/x", "b"):
        accounts.wait(domain, 1)
    accounts.hold(above, "a/x")
    accounts.hold(other, "b")
    for _ in range(2):
        accounts.wake_around(accounts.by_name["a/x"])
    assert (accounts.take_woken(), above.held, other.held) == ([above], False, True)


def flooded(guarantee: int) -> int:
    """Tokens of a's cached prompt of 4 blocks that are still found after b has computed and cached ten times the pool."""
    blocks, _ = manager(12, **({"a": Quota(guarantee=guarantee)} if guarantee else {}))
    chain = cached(blocks, 0, "a", list(range(4 * SIZE)))
    for number in range(1, 41):
        cached(blocks, number, "b", [1000 * number + i for i in range(3 * SIZE)])
        blocks.check_integrity()
    return blocks.lookup(chain, 4 * SIZE + 1).num_tokens


def test_cached_blocks_within_a_guarantee_outlast_a_neighbours_flood() -> None:
    assert [flooded(guarantee) for guarantee in (0, 4, 9)] == [0, 4 * SIZE, 4 * SIZE]


def test_a_guarantee_shields_as_many_blocks_as_are_left_of_it_and_gives_them_up_last() -> None:
    blocks, _ = manager(12, a=Quota(guarantee=5))
    chain = cached(blocks, 0, "a", list(range(4 * SIZE)))
    blocks.allocate(1, "a", 3 * SIZE)  # 3 of 5 in use: 2 are shielded, the last ones that were freed
    shielded = blocks.pool.free.num_last
    blocks.allocate(2, "b", 7 * SIZE)  # 12 - 3 = 9 free: 7 go, and the 2 are left
    left = blocks.lookup(chain, 4 * SIZE + 1).num_tokens
    blocks.allocate(3, "b", 2 * SIZE)  # nothing else is free
    blocks.check_integrity()
    assert (shielded, left, blocks.num_free_blocks, blocks.lookup(chain, 4 * SIZE + 1).num_tokens) == (2, 2 * SIZE, 0, 0)


def test_what_a_tenant_uses_leaves_less_of_its_organisations_guarantee_to_shield() -> None:
    blocks, _ = manager(20, a=Quota(guarantee=6), a_y=Quota(guarantee=2))
    cached(blocks, 0, "a/x", list(range(4 * SIZE)))
    before = blocks.pool.free.num_last
    blocks.allocate(1, "a/y", 5 * SIZE)
    blocks.check_integrity()
    assert (before, blocks.pool.free.num_last) == (4, 1)


def test_integrity_finds_an_account_that_counts_wrong_and_a_shield_that_is_lost() -> None:
    blocks, accounts = manager(12, a=Quota(guarantee=5))
    cached(blocks, 0, "a", list(range(4 * SIZE)))
    (account,) = accounts
    account.used += 1
    account.shield.popitem()
    with pytest.raises(IntegrityError) as error:
        blocks.check_integrity()
    found = str(error.value)
    assert ("account a counts 1 blocks" in found, "are shielded on the free list" in found) == (True, True)
