"""Which token top_k, top_p and min_p leave of a row, as Triton functions over what the sampler's first pass found. No sort: a
candidate is tried, and where it falls the next one is looked for in the few parts of the row that can hold it.

Floats are compared as keys: int32 in the floats' order. "Above a bound" means key > bound; a row's tuple is
(logits, temperature, 1 / temperature, list), where list is room for the numbers of the subtiles that a step reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fairlane.kernels.sample_noise import LOG2E, divide, first_of, gumbel_noise

LOWEST = tl.constexpr(-(2**31))  # below the key of every float


@triton.jit  # type: ignore[untyped-decorator]
def filtered_token(  # type: ignore[no-untyped-def]
    token, row, key, limits, best, tokens, peaks, masses,
    VOCAB: tl.constexpr, SUB: tl.constexpr, PADDED: tl.constexpr, GATHER: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """The token with the best score of those that the filters keep, where `token` has the best of all.

    limits: (top_k, 0 for none; top_p; min_p). best [PADDED]: the subtiles' best scores; tokens, peaks, masses: pointers to whose
    they are, the subtiles' largest scaled logits, and the sums of exp(scaled - peak).
    """
    top_k, top_p, min_p = limits
    num_subs: tl.constexpr = (VOCAB + SUB - 1) // SUB
    subs = tl.arange(0, PADDED)
    real = subs < num_subs
    best_keys = tl.where(real, _key_of(row, tl.load(tokens + subs, mask=real, other=0)), LOWEST)
    subtile_peaks = tl.load(peaks + subs, mask=real, other=float("-inf"))
    peak_keys = tl.where(real, _key(subtile_peaks), LOWEST)
    peak = tl.max(subtile_peaks, axis=0)
    mass = tl.load(masses + subs, mask=real, other=0.0)
    total = tl.sum(mass * tl.exp2((subtile_peaks - peak) * LOG2E), axis=0)
    bound = tl.full((), LOWEST, tl.int32)  # top_k and min_p keep what is above it
    if top_k > 0:
        # At least k tokens reach the k-th largest of the subtiles' peaks, so that nothing below it is kept.
        bar = tl.full((), LOWEST, tl.int32)
        if top_k <= num_subs:
            bar = _kth_of(peak_keys, top_k)
        count = _list(row, real & (peak_keys >= bar), PADDED)
        bound = _kth_listed(top_k, row, count, VOCAB, SUB, SEARCH) - 1
        if top_p < 1:
            total = _mass_above(bound, peak, row, count, VOCAB, SUB, GATHER)
    if min_p > 0:
        bound = tl.maximum(bound, _key(peak + tl.log(min_p)) - 1)
        bound = tl.minimum(bound, _key(peak) - 1)
    settled = False
    while not settled:
        if _key_of(row, token) <= bound:
            token = _best_above(bound, row, key, best, best_keys, peak_keys, tokens, VOCAB, SUB, PADDED, GATHER)
        settled = top_p >= 1
        if top_p < 1:
            bound = _key_of(row, token)
            count = _list(row, peak_keys > bound, PADDED)
            above = _mass_above(bound, peak, row, count, VOCAB, SUB, GATHER)
            settled = (count == 0) | (above < top_p * total)  # the most likely token always stays
    return token


@triton.jit
def _key(x):  # type: ignore[no-untyped-def]
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 + 0 = 0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key_of(row, token):  # type: ignore[no-untyped-def]
    """The keys of tokens' scaled logits."""
    logits, temperature, inverse, _ = row
    return _key(divide(tl.load(logits + token).to(tl.float32), temperature, inverse))


@triton.jit  # type: ignore[untyped-decorator]
def _list(row, chosen, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lists the subtiles where chosen [PADDED], ascending; returns how many."""
    _, _, _, listed = row
    tl.debug_barrier()  # every warp has read the last list
    tl.store(listed + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, tl.arange(0, PADDED), mask=chosen)
    tl.debug_barrier()  # and sees this one
    return tl.sum(chosen.to(tl.int32), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _gather(row, begin, count, VOCAB: tl.constexpr, SUB: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Subtiles begin ... of the list's count: numbers [ROWS], scaled logits and keys [ROWS, SUB], LOWEST where there is none."""
    logits, temperature, inverse, listed = row
    at = begin + tl.arange(0, ROWS)
    subs = tl.load(listed + at, mask=at < count, other=0)
    ids = subs[:, None] * SUB + tl.arange(0, SUB)[None, :]
    inside = (at < count)[:, None] & (ids < VOCAB)
    scaled = divide(tl.load(logits + ids, mask=inside, other=0.0).to(tl.float32), temperature, inverse)
    return subs, scaled, tl.where(inside, _key(scaled), LOWEST)


@triton.jit  # type: ignore[untyped-decorator]
def _mass_above(  # type: ignore[no-untyped-def]
    bound, peak, row, count, VOCAB: tl.constexpr, SUB: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Sum of exp(scaled - peak) over the listed subtiles' tokens above the bound."""
    total = tl.zeros((ROWS, SUB), dtype=tl.float32)
    for begin in range(0, count, ROWS):
        _, scaled, keys = _gather(row, begin, count, VOCAB, SUB, ROWS)
        total += tl.where(keys > bound, tl.exp2((scaled - peak) * LOG2E), 0.0)
    return tl.sum(tl.sum(total, axis=1), axis=0)


@triton.jit
def _kth_of(keys, k):  # type: ignore[no-untyped-def]
    """The k-th largest of keys [N], duplicates counted: the largest value that k of them reach, found four bits at a time."""
    found = tl.full((), LOWEST, tl.int32)
    for step in range(8):
        shift = 28 - 4 * step
        values = found + (tl.arange(0, 16) << shift)  # wraps into the positive half
        reached = tl.sum((keys[None, :] >= values[:, None]).to(tl.int32), axis=1) >= k
        found += (tl.sum(reached.to(tl.int32), axis=0) - 1) << shift
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _kth_listed(  # type: ignore[no-untyped-def]
    k, row, count, VOCAB: tl.constexpr, SUB: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """The same over the tokens of the listed subtiles."""
    found = tl.full((), LOWEST, tl.int32)
    for step in range(8):
        shift = 28 - 4 * step
        values = found + (tl.arange(0, 16) << shift)
        counts = tl.zeros((16, ROWS * SUB), dtype=tl.int32)
        for begin in range(0, count, ROWS):
            _, _, keys = _gather(row, begin, count, VOCAB, SUB, ROWS)
            counts += (tl.reshape(keys, (1, ROWS * SUB)) >= values[:, None]).to(tl.int32)
        reached = tl.sum(counts, axis=1) >= k
        found += (tl.sum(reached.to(tl.int32), axis=0) - 1) << shift
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _best_above(  # type: ignore[no-untyped-def]
    bound, row, key, best, best_keys, peak_keys, tokens,
    VOCAB: tl.constexpr, SUB: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The token with the best score among those above the bound; there must be one.

    A subtile whose best token is above the bound needs no second look, and none does whose best of all is no match for those.
    """
    stands = best_keys > bound
    top, at = tl.max(tl.where(stands, best, float("-inf")), axis=0, return_indices=True)
    token = tl.load(tokens + at)
    count = _list(row, (peak_keys > bound) & (best_keys <= bound) & (best >= top), PADDED)
    for begin in range(0, count, ROWS):
        subs, scaled, keys = _gather(row, begin, count, VOCAB, SUB, ROWS)
        score = tl.where(keys > bound, scaled + gumbel_noise(subs, key, ROWS, SUB), float("-inf"))
        bests = tl.max(score, axis=1)
        winners = subs * SUB + first_of(score, bests, SUB)
        here, place = tl.max(bests, axis=0, return_indices=True)
        winner = tl.sum(tl.where(tl.arange(0, ROWS) == place, winners, 0), axis=0)
        better = (here > top) | ((here == top) & (winner < token))
        token = tl.where(better, winner, token)
        top = tl.where(better, here, top)
    return token
