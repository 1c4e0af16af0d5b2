"""Hash chains: the exact bytes, the salt's framing against adversarial pairs, and growing step by step."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.blockmgr.hashing import HashChain


def chain_of(tokens: list[int], domain: str = "acme", block_size: int = 2, extra_keys: tuple[bytes, ...] = ()) -> HashChain:
    chain = HashChain(domain, block_size, extra_keys)
    chain.extend(tokens)
    return chain


def test_hashes_are_chained_sha256_over_the_framed_salt_and_little_endian_tokens() -> None:
    salt = b"\x04\0\0\0\0\0\0\0acme" + b"\x02\0\0\0\0\0\0\0l1"
    first = hashlib.sha256(hashlib.sha256(salt).digest() + b"\x01\0\0\0\x02\x01\0\0").digest()
    second = hashlib.sha256(first + b"\xff\xff\xff\xff\0\0\0\0").digest()
    assert chain_of([1, 258, 2**32 - 1, 0], extra_keys=(b"l1",)).hashes == [first, second]


# Each line would collide under some careless way of joining domain and extra keys.
ADVERSARIAL = [
    ("org_1", (b"2345",)),
    ("org_12", (b"345",)),
    ("org_12345", (b"",)),
    ("org_12345", ()),
    ("org_12345", (b"", b"")),
    ("org_1", (b"2", b"345")),
    ("org_1", (b"23", b"45")),
    ("org_1", (b"2345", b"")),
    ("org_1", (b"", b"2345")),
    ("", (b"org_1", b"2345")),
    ("", (b"org_12345",)),
    ("", ()),
    ("", (b"",)),
    ("org_1\0", (b"2345",)),
    ("org_1", (b"\x002345",)),
    ("org_1/2345", ()),
    ("org_1", (b"/2345",)),
    ("org_1\x04\0\0\0\0\0\0\x002345", ()),  # a domain that contains another salt's frame
    ("\x05\0\0\0\0\0\0\0org_1", (b"2345",)),
    ("Org_1", (b"2345",)),
    ("org_1 ", (b"2345",)),
    ("org_é", ()),
    ("org_e\u0301", ()),  # the same letter to a reader, another name
]


def test_no_two_salts_give_the_same_first_block() -> None:
    first = [chain_of([7, 7], domain, extra_keys=keys).hashes[0] for domain, keys in ADVERSARIAL]
    assert len(set(first)) == len(ADVERSARIAL)


@given(st.lists(st.tuples(st.text("a\0\x01", max_size=3), st.lists(st.binary(max_size=2), max_size=3).map(tuple)), unique=True))
def test_salts_differ_unless_domain_and_keys_are_equal(salts: list[tuple[str, tuple[bytes, ...]]]) -> None:
    assert len({chain_of([1, 2], domain, extra_keys=keys).hashes[0] for domain, keys in salts}) == len(salts)


def test_tokens_cannot_move_over_a_block_border() -> None:
    # 1, 256 and 256, 1 and 0x01000001 ... : four bytes each, so no digits run together; blocks of 2 and 4 differ too
    sequences = [[1, 256, 0, 0], [256, 1, 0, 0], [0x0100_0001, 0, 0, 0], [1, 0, 256, 0], [0, 1, 256, 0]]
    last = {chain_of(tokens).hashes[-1] for tokens in sequences} | {chain_of(sequences[0], block_size=4).hashes[-1]}
    assert len(last) == len(sequences) + 1


def test_a_hash_names_the_whole_prefix() -> None:
    same_second_block = [chain_of([first, 0, 5, 5]).hashes[1] for first in range(4)]
    assert len(set(same_second_block)) == 4


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(1, 5), st.data())
def test_extending_in_pieces_gives_the_same_hashes(tokens: list[int], block_size: int, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    chain = HashChain("acme", block_size)
    for cut in [*cuts, len(tokens), len(tokens)]:
        chain.extend(tokens[:cut])
        assert len(chain.hashes) == cut // block_size
    assert chain.hashes == chain_of(tokens, block_size=block_size).hashes


def test_a_copy_goes_its_own_way() -> None:
    parent = chain_of([1, 2, 3, 4], extra_keys=(b"k",))
    child = parent.copy()
    child.extend([1, 2, 3, 4, 5, 6])
    parent.extend([1, 2, 3, 4, 9, 9])
    assert (child.hashes, parent.hashes) == (
        chain_of([1, 2, 3, 4, 5, 6], extra_keys=(b"k",)).hashes,
        chain_of([1, 2, 3, 4, 9, 9], extra_keys=(b"k",)).hashes,
    )


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_an_impossible_token_id_is_refused_and_leaves_the_chain_usable(bad: int) -> None:
    chain = HashChain("acme", 2)
    with pytest.raises(ValueError, match="tokens 2 to 3"):
        chain.extend([1, 2, 3, bad])
    chain.extend([1, 2, 3, 4])
    assert chain.hashes == chain_of([1, 2, 3, 4]).hashes


def test_a_block_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="block_size"):
        HashChain("acme", 0)


def test_all_short_sequences_have_different_hashes() -> None:
    every = [
        chain_of(list(tokens), block_size=1).hashes[-1] for n in (1, 2, 3) for tokens in itertools.product(range(3), repeat=n)
    ]
    assert len(set(every)) == 3 + 9 + 27
