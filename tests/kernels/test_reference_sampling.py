"""The sampler's randomness against published vectors, its distribution against the softmax, its filters against plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fairlane.kernels.reference import SamplingTensors, gumbel_noise, philox4x32, sample

# Random123 1.14, tests/kat_vectors: philox4x32, 10 rounds (counter, key, result).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def params(rows: int, **values: float) -> SamplingTensors:
    """The same parameters in every row, positions 0, 1, 2 ..."""
    floats = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0} | {k: v for k, v in values.items() if k not in ("top_k", "seed")}
    return SamplingTensors(
        **{name: torch.full((rows,), value, dtype=torch.float32) for name, value in floats.items()},
        top_k=torch.full((rows,), int(values.get("top_k", 0))),
        seed=torch.full((rows,), int(values.get("seed", 7))),
        position=torch.arange(rows),
        sibling=torch.zeros(rows, dtype=torch.int64),
    )


def random_logits(vocab: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_philox_gives_the_published_words(counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]) -> None:
    words = philox4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in words) == result


def test_noise_is_the_documented_function_of_the_words() -> None:
    seed, sibling, position, group = 0x1122334455667788, 3, 1000, 12287
    words = philox4x32(*[tuple(map(torch.tensor, w)) for w in ((group, position, sibling, 0), (0x55667788, 0x11223344))])
    expected = [-math.log(-math.log(((int(word) >> 9) + 0.5) / 2**23)) for word in words]
    noise = gumbel_noise(*[torch.tensor([value]) for value in (seed, sibling, position, group)])[0]
    assert noise.tolist() == pytest.approx(expected, abs=2e-6)


def test_draws_follow_the_softmax() -> None:
    # 40 000 draws; the standard error of a share p is sqrt(p (1 - p) / 40 000) <= 0.0025, allowed are four of them
    logits, rows = random_logits(10), 40_000
    drawn = sample(logits.expand(rows, -1), params(rows, temperature=0.7))
    shares = torch.bincount(drawn, minlength=10) / rows
    assert float((shares - torch.softmax(logits / 0.7, dim=0)).abs().max()) < 0.01


def test_noise_spared_for_hopeless_tokens_changes_no_draw() -> None:
    logits, rows = random_logits(4099, scale=6.0).repeat(200, 1), 200
    groups = torch.arange(4100 // 4)
    full = []
    for position in range(rows):
        like = torch.ones_like(groups)
        noise = gumbel_noise(7 * like, 0 * like, position * like, groups).flatten()[:4099]
        full.append(int((logits[position] + noise).argmax()))
    assert sample(logits, params(rows)).tolist() == full


def test_a_draw_depends_on_seed_sibling_and_position_only() -> None:
    logits = random_logits(1000).repeat(6, 1)
    rows = params(6)
    together = sample(logits, rows).tolist()
    shuffled = torch.tensor([4, 2, 0, 5, 1, 3])
    mixed = SamplingTensors(*(getattr(rows, name)[shuffled] for name in SamplingTensors.__slots__))
    assert sample(logits[shuffled], mixed).tolist() == [together[i] for i in shuffled.tolist()]


def test_another_seed_draws_other_tokens() -> None:
    logits = random_logits(1000).repeat(50, 1)
    assert sample(logits, params(50, seed=1)).tolist() != sample(logits, params(50, seed=1 << 32)).tolist()


def test_temperature_zero_is_the_argmax_next_to_rows_that_draw() -> None:
    logits = random_logits(1000).repeat(2, 1)
    rows = params(2)
    rows.temperature[0] = 0.0
    assert int(sample(logits, rows)[0]) == int(logits[0].argmax())


def kept_tokens(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """What may be drawn: the filters one after the other in plain Python; ties with the last one kept stay."""
    weight = {token: math.exp(value) for token, value in enumerate(logits)}
    if 0 < top_k < len(weight):
        floor = sorted(weight.values(), reverse=True)[top_k - 1]
        weight = {token: w for token, w in weight.items() if w >= floor}
    total, reached, floor = sum(weight.values()), 0.0, 0.0
    for floor in sorted(weight.values(), reverse=True):
        reached += floor / total
        if reached >= top_p:
            break
    weight = {token: w for token, w in weight.items() if w >= floor or top_p >= 1}
    return {token for token, w in weight.items() if w >= min_p * max(weight.values())}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    # multiples of 1/4, so that ties are exact; top_p and min_p away from any sum or ratio of such weights
    logits=st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=2, max_size=12),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([1.0, 0.9137, 0.5119, 0.1013]),
    min_p=st.sampled_from([0.0, 0.0531, 0.3017]),
)
def test_filters_keep_what_plain_python_keeps(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    rows = 400
    drawn = sample(torch.tensor(logits).repeat(rows, 1), params(rows, temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p))
    allowed = kept_tokens(logits, top_k, top_p, min_p)
    share = {token: math.exp(logits[token]) for token in allowed}
    likely = {token for token in allowed if share[token] / sum(share.values()) > 0.05}  # 400 draws miss it once in 10^9
    assert likely <= set(drawn.tolist()) <= allowed


def test_a_flat_distribution_is_cut_as_exactly_as_a_peaked_one() -> None:
    # 3000 tokens of equal weight in two tiers: 1000 at 2x, 2000 at 1x. top_p 0.3 needs 600 of the first tier, which tie: all 1000
    # stay. top_p 0.9 reaches into the second tier.
    logits = torch.cat([torch.full((1000,), 2.0), torch.full((2000,), 1.0)]).log().repeat(2000, 1)
    first = sample(logits, params(2000, top_p=0.3))
    both = sample(logits, params(2000, top_p=0.9))
    assert (int(first.max()) < 1000, int(both.max()) >= 1000) == (True, True)
