"""Content hashes of full blocks, chained so that a hash names the whole prefix up to its block, and salted with the cache
domain so that two domains never meet. Which blocks hold which hash is the pool's business."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache


class HashChain:
    """The chained SHA-256 hashes of one token stream's full blocks.

        h[-1] = SHA256( frame(domain) | frame(extra_keys[0]) | frame(extra_keys[1]) ... )     frame(x) = u64le(len(x)) | x
        h[i]  = SHA256( h[i-1] | u32le(token) of the block_size tokens of block i )

    Every field of the salt is length-framed, so no two (domain, extra_keys) give the same bytes: ("org_1", b"2345") and
    ("org_12", b"345") differ. SHA-256 and not a fast hash, because prompts are chosen by tenants: a collision that can be
    constructed hands one prompt's keys and values to another.
    """

    __slots__ = ("_pack", "_parent", "block_size", "domain", "hashes")

    def __init__(self, domain: str, block_size: int, extra_keys: tuple[bytes, ...] = ()) -> None:
        """extra_keys: whatever else changes the keys and values of the same tokens, or narrows who shares them (an adapter,
        media, a partition of the domain). Raises ValueError for a block size below 1."""
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.domain = domain
        self.block_size = block_size
        self.hashes: list[bytes] = []
        self._pack = _packer(block_size)
        self._parent = _salt(domain, extra_keys)

    def copy(self) -> HashChain:
        """A chain of its own with the same past, for a forked stream: nothing is hashed twice."""
        twin = HashChain(self.domain, self.block_size)
        twin.hashes = list(self.hashes)
        twin._parent = self._parent
        return twin

    def extend(self, token_ids: Sequence[int]) -> None:
        """Hashes the full blocks of `token_ids` that are not hashed yet.

        token_ids: the whole stream so far, append-only: what was passed before must be its prefix. Costs O(new blocks).
        Raises ValueError for an id that is no unsigned 32-bit integer; the blocks before it stay hashed.
        """
        size, hashes, pack, sha256 = self.block_size, self.hashes, self._pack, hashlib.sha256
        for start in range(len(hashes) * size, len(token_ids) - size + 1, size):
            try:
                tokens = pack(*token_ids[start : start + size])
            except struct.error as error:
                raise ValueError(f"tokens {start} to {start + size - 1}: a token id must be in [0, 2**32)") from error
            self._parent = sha256(self._parent + tokens).digest()
            hashes.append(self._parent)


@lru_cache(maxsize=64)
def _packer(block_size: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{block_size}I").pack


@lru_cache(maxsize=4096)
def _salt(domain: str, extra_keys: tuple[bytes, ...]) -> bytes:
    """The same for all streams of a domain."""
    return hashlib.sha256(b"".join(_frame(key) for key in (domain.encode(), *extra_keys))).digest()


def _frame(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value
