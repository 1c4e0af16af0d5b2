"""What the sampler computes with, as Triton functions: Gumbel noise keyed as the reference keys it, and float arithmetic that
rounds as torch's does in fewer instructions. Which tokens get noise, and what wins, is the sampler's business.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def fma(a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c, rounded once. The interpreter's own fma rounds twice."""
    if INTERPRETED:
        result = (a.to(tl.float64) * b + c).to(tl.float32)
    else:
        result = tl.fma(a, b, c)
    return result


@triton.jit
def divide(x, divisor, inverse):  # type: ignore[no-untyped-def]
    """x / divisor, correctly rounded, where inverse = 1 / divisor is: five instructions for the division's ten and a branch.

    An x that is not finite, or not any more once divided, gives a result that is not.
    """
    quotient = x * inverse
    quotient = fma(fma(quotient, -divisor, x), inverse, quotient)
    return fma(fma(quotient, -divisor, x), inverse, quotient)


@triton.jit
def minus_log(x):  # type: ignore[no-untyped-def]
    """-log(x) for normal x > 0: bit for bit what CUDA's logf gives, without what it does for all other x."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F2AAAAB) & -0x800000  # x = 2^n * m with m in [2/3, 4/3); this is n << 23
    g = 1.0 - (bits - exponent).to(tl.float32, bitcast=True)  # -log(1 - g) = g + g^2 / 2 + g^3 / 3 ...
    p = fma(g, 0.13018856942653656, 0.1408461034297943)
    p = fma(p, g, 0.12148627638816833)
    p = fma(p, g, 0.1398061066865921)
    p = fma(p, g, 0.16684235632419586)
    p = fma(p, g, 0.20012299716472626)
    p = fma(p, g, 0.24999669194221497)
    p = fma(p, g, 0.333331823348999)
    p = fma(p, g, 0.5)
    return fma(exponent.to(tl.float32), -8.262958317573066e-08, fma(g * p, g, g))  # float32(log 2) * 2^-23


@triton.jit
def philox(group, seed, position, sibling):  # type: ignore[no-untyped-def]
    """The four words uint32 of counter (group, position, sibling, 0); seed int64, the rest any integers."""
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = group.to(tl.uint32)
    c1 = position.to(tl.uint32)
    c2 = sibling.to(tl.uint32)
    c3 = c2 * 0
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53  # one wide multiplication for both halves
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = b.to(tl.uint32)
        c3 = a.to(tl.uint32)
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit  # type: ignore[untyped-decorator]
def gumbel_noise(subs, key, ROWS: tl.constexpr, SUB: tl.constexpr):  # type: ignore[no-untyped-def]
    """Noise float32 [ROWS, SUB] of tokens SUB * subs ..., subs [ROWS]. key: pointers to the row's seed, position and sibling."""
    seed, position, sibling = key
    group = subs[:, None] * (SUB // 4) + tl.arange(0, SUB // 4)[None, :]
    w0, w1, w2, w3 = philox(group, tl.load(seed), tl.load(position), tl.load(sibling))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, SUB))
    # word >> 9 as the fraction of a float in [1, 2), less 1 - 2^-24: exactly ((word >> 9) + 0.5) * 2^-23
    uniform = ((words >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.9999999403953552
    return minus_log(minus_log(uniform))


@triton.jit  # type: ignore[untyped-decorator]
def first_of(score, best, SUB: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS]: the first column of score [ROWS, SUB] that holds its row's best; 0 where none does (the row holds a NaN).

    With the plain maximum before it half the instructions of a reduction over pairs.
    """
    at = tl.min(tl.where(score == best[:, None], tl.arange(0, SUB)[None, :], SUB), axis=1)
    return tl.where(at < SUB, at, 0)


@triton.jit
def mass_of(values, peak):  # type: ignore[no-untyped-def]
    """[ROWS]: sum of exp(values [ROWS, SUB] - peak [ROWS])."""
    return tl.sum(tl.exp2((values - peak[:, None]) * LOG2E), axis=1)
