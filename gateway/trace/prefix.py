"""Which requests begin alike, without saying how: keyed hashes of a prompt's leading blocks, each over everything before it. The
key is random and never leaves the process, so that nobody can try texts against a recording."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BLOCK_TOKENS = 128
# 64 Ki tokens; what two longer prompts share beyond that is not seen.
MAX_BLOCKS = 512
# JSON's numbers are exact up to 2^53.
_ID_BYTES = 6


def prefix_ids(prompt: Sequence[int], domain: str, key: bytes) -> list[int]:
    """An id for each full block of BLOCK_TOKENS: equal for equal tokens up to there in one cache domain; "" has no ids."""
    if not domain:
        return []
    chain = hashlib.blake2b(domain.encode(), key=key, digest_size=32)
    tokens = array("I", prompt[: MAX_BLOCKS * BLOCK_TOKENS])
    ids = []
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        chain.update(tokens[end - BLOCK_TOKENS : end].tobytes())
        ids.append(int.from_bytes(chain.copy().digest()[:_ID_BYTES], "big"))
    return ids
