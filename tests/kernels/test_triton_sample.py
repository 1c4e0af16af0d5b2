"""The sampling kernels, run by Triton's interpreter, against the torch reference: the same token in every row, whatever its
filters, ties and company. Workspace and outputs are poisoned before each call, and so is what lies between the rows of logits."""

from __future__ import annotations

import interpreted  # noqa: F401  (before Triton: it selects the interpreter)

# isort: split
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from draws import Ask, misdrawn, tensors
from fairlane.kernels import reference_sampling as reference
from fairlane.kernels.sample import CANDIDATES, SampleConfig, SampleMode, SampleWorkspace, mode_for, sample
from fairlane.kernels.sample_noise import divide, gumbel_noise, minus_log, philox

SMALL = SampleConfig(subtile=8, rows=8, num_warps=1, gather=4, search=2, choose_warps=1)
COPY_BACK = "triton.runtime.interpreter.GridExecutor._restore_args_dev"  # of whole arguments: too much for huge ones
VOCAB = 203  # 26 subtiles of 8, the last of 3 tokens: no multiple of 4, of a subtile or of a tile


def rows_of(count: int, vocab: int = VOCAB, *, scale: float = 2.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits whose rows lie apart, with NaN between them."""
    apart = torch.full((count, vocab + 13), float("nan"), dtype=dtype)
    apart[:, :vocab] = torch.randn(count, vocab, generator=torch.Generator().manual_seed(count)).mul_(scale).to(dtype)
    return apart[:, :vocab]


def run(
    logits: Tensor, asks: list[Ask], *, config: SampleConfig = SMALL, mode: SampleMode | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, ok and logprobs of one call."""
    count, vocab = logits.shape
    workspace = SampleWorkspace.allocate(count + 1, vocab, "cpu", config)
    for name in ("best", "peak", "mass", "raw_peak", "raw_mass"):
        getattr(workspace, name).fill_(float("nan"))
    workspace.token.fill_(2**31 - 1)
    workspace.listed.fill_(2**31 - 1)
    ids, ok, logprobs = torch.full((count,), -7), torch.zeros(count, dtype=torch.bool), torch.full((count,), float("inf"))
    mode = mode or mode_for((ask.temperature, ask.top_k, ask.top_p, ask.min_p) for ask in asks)
    before = logits.clone()
    sample(logits, tensors(asks), workspace=workspace, out_ids=ids, out_ok=ok, out_logprobs=logprobs, mode=mode)
    assert torch.equal(before.nan_to_num(9.0), logits.nan_to_num(9.0))
    return ids, ok, logprobs


@triton.jit
def _noise_probe(seed, position, sibling, subs, numbers, words, noise, ROWS: tl.constexpr, SUB: tl.constexpr):  # type: ignore[no-untyped-def]
    subtiles = tl.load(subs + tl.arange(0, ROWS))
    at = tl.arange(0, ROWS)[:, None] * SUB + tl.arange(0, SUB)[None, :]
    tl.store(noise + at, gumbel_noise(subtiles, (seed, position, sibling), ROWS, SUB))
    group = tl.load(numbers + tl.arange(0, ROWS))
    w0, w1, w2, w3 = philox(group, tl.load(seed), tl.load(position), tl.load(sibling))
    out = words + 4 * tl.arange(0, ROWS)
    tl.store(out, w0.to(tl.int64))
    tl.store(out + 1, w1.to(tl.int64))
    tl.store(out + 2, w2.to(tl.int64))
    tl.store(out + 3, w3.to(tl.int64))


@pytest.mark.parametrize(("seed", "position", "sibling"), [(0x1122334455667788, 1000, 3), (-2, 2**31 + 5, 0), (7, 0, 2**32 - 1)])
def test_words_are_the_references_and_noise_is_to_the_last_bits(seed: int, position: int, sibling: int) -> None:
    subs, numbers = torch.tensor([0, 3, 25, 16031], dtype=torch.int32), torch.tensor([0, 1, 50, 32063], dtype=torch.int32)
    key = [torch.tensor([value]) for value in (seed, position, sibling)]
    words, noise = torch.full((4, 4), -1, dtype=torch.int64), torch.full((4, 8), float("nan"))
    _noise_probe[(1,)](*key, subs, numbers, words, noise, ROWS=4, SUB=8)
    group = (subs.long()[:, None] * 2 + torch.arange(2)).flatten()
    like = [torch.full_like(group, value) for value in (seed, sibling, position)]
    expected = reference.gumbel_noise(*like, group).view(4, 8)
    exact = reference.philox4x32(
        (numbers.long(), torch.tensor(position), torch.tensor(sibling), torch.tensor(0)),
        (torch.tensor(seed & 0xFFFFFFFF), torch.tensor((seed >> 32) & 0xFFFFFFFF)),
    )
    assert (torch.equal(words, torch.stack(exact, dim=1)), float((noise - expected).abs().max()) <= 2e-6) == (True, True)


@triton.jit
def _log_probe(x, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, N), minus_log(tl.load(x + tl.arange(0, N))))


UP_TO_1 = torch.linspace(2.0**-24, 1 - 2.0**-24, 2**15)


@pytest.mark.parametrize("x", [UP_TO_1, 17 * UP_TO_1, 1 - torch.logspace(-7, 0, 2**15) / 2])
def test_logarithms_are_right_to_the_last_bit(x: Tensor) -> None:
    out = torch.full_like(x, float("nan"))
    _log_probe[(1,)](x, out, N=2**15)
    exact = -torch.log(x.double())
    ulp = torch.exp2(torch.floor(torch.log2(exact.abs().clamp(min=2.0**-60))) - 23)
    assert float(((out - exact).abs() / ulp).max()) < 1.0


@triton.jit
def _divide_probe(x, divisor, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
    d = tl.load(divisor)
    tl.store(out + tl.arange(0, N), divide(tl.load(x + tl.arange(0, N)), d, tl.div_rn(1.0, d)))


@pytest.mark.parametrize("divisor", [0.7, 0.01, 1e-5, 1.3, 2.0, 0.333])
def test_division_by_the_temperature_is_rounded_correctly(divisor: float) -> None:
    x = torch.randn(2**16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 2**16)
    out = torch.full_like(x, float("nan"))
    _divide_probe[(1,)](x, torch.tensor([divisor]), out, N=2**16)
    assert torch.equal(out, x / torch.tensor(divisor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_greedy_rows_get_the_first_of_their_largest_logits(dtype: torch.dtype) -> None:
    logits = rows_of(3, dtype=dtype)
    logits[0, [40, 41, 202]] = 50.0
    logits[1, [202, 77]] = 50.0
    logits[2, 202] = 50.0
    ids, ok, _ = run(logits, [Ask(temperature=0, top_k=3, top_p=0.5)] * 3)
    assert (ids.tolist(), ok.tolist()) == ([40, 77, 202], [True] * 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_draws_are_the_references(dtype: torch.dtype) -> None:
    asks = [Ask(position=p, seed=(p - 3) << 31, sibling=p % 3, temperature=(1.0, 0.7, 1.9, 0.05)[p % 4]) for p in range(10)]
    asks += [Ask(temperature=0.0), Ask(position=2**31 + 9), Ask(seed=-(2**63)), Ask(seed=2**63 - 1)]
    logits = rows_of(len(asks), dtype=dtype)
    ids, ok, _ = run(logits, asks)
    assert (misdrawn(logits, asks, ids), ok.all().item()) == ([], True)


def test_equal_logits_leave_it_to_the_noise_of_every_column() -> None:
    # 14 rows of 203 equal logits: a column that got another one's noise would win or lose in some row
    asks = [Ask(position=p, seed=11) for p in range(14)]
    logits = torch.zeros(14, VOCAB)
    ids, _, _ = run(logits, asks)
    assert ids.tolist() == reference.sample(logits, tensors(asks)).tolist()


FILTERS = [
    Ask(top_k=1), Ask(top_k=5), Ask(top_k=26), Ask(top_k=27), Ask(top_k=120), Ask(top_k=VOCAB - 1), Ask(top_k=VOCAB),
    Ask(top_k=10**6), Ask(top_p=0.0), Ask(top_p=0.05), Ask(top_p=0.5), Ask(top_p=0.97), Ask(min_p=0.1), Ask(min_p=1.0),
    Ask(top_k=20, top_p=0.4), Ask(top_k=50, top_p=0.9, min_p=0.05), Ask(temperature=0.0, top_k=1, top_p=0.1), Ask(),
]  # fmt: skip


@pytest.mark.parametrize(("scale", "start"), [(0.1, 100), (3.0, 200)])
def test_filtered_draws_are_the_references(scale: float, start: int) -> None:
    # Almost flat rows: the first candidate nearly always falls, and the next ones too. Peaked rows: it mostly stands.
    asks = [
        Ask(**{**vars(ask), "position": start + row, "temperature": ask.temperature * 0.8}) for row, ask in enumerate(FILTERS)
    ]
    logits = rows_of(len(asks), scale=scale)
    ids, ok, _ = run(logits, asks)
    assert (misdrawn(logits, asks, ids), ok.all().item()) == ([], True)


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    # Quarters, so that ties are exact; the k-th place and top_p's edge fall into ties in most rows. -0 ties with 0.
    steps = torch.randint(-6, 7, (14, 60), generator=torch.Generator().manual_seed(3))
    logits = steps / 4
    logits[:, ::7] = logits[:, ::7].abs() * -1.0
    asks = [Ask(top_k=k, top_p=p, position=31 * k) for k in (2, 7, 15, 33, 52) for p in (1.0, 0.61)] + [
        Ask(top_p=p, position=n) for n, p in enumerate((0.11, 0.37, 0.73, 0.91))
    ]
    ids, _, _ = run(logits, asks)
    assert ids.tolist() == reference.sample(logits, tensors(asks)).tolist()


def test_every_token_of_a_tie_at_the_edge_can_be_drawn_and_none_below_it() -> None:
    # one token of weight 4, three of weight 2, twelve of weight 1: top_k 2 keeps four, by the tie
    logits = torch.tensor([1.0] * 6 + [2.0] * 2 + [4.0] + [1.0] * 6 + [2.0]).log().repeat(40, 1)
    ids, _, _ = run(logits, [Ask(top_k=2, position=p) for p in range(40)])
    assert set(ids.tolist()) == {6, 7, 8, 15}


TINY = SampleConfig(subtile=4, rows=8, num_warps=1, gather=8, search=8, choose_warps=1)


@pytest.mark.parametrize("min_p", [0.0, 0.9])
def test_the_first_of_equal_scores_wins(min_p: float) -> None:
    # 1e7 + noise is a whole number: most rows have several best scores, in several subtiles. min_p drops the odd half of the
    # tokens, whose scaled logits are one less, but whose scores are often equal.
    asks = [Ask(temperature=1e-5, min_p=min_p, position=p) for p in range(70)]
    logits = torch.full((70, 32), 100.0)
    logits[:, 1::2] -= 1e-5
    ids, _, _ = run(logits, asks, config=TINY)
    assert ids.tolist() == reference.sample(logits, tensors(asks)).tolist()


def test_where_the_first_candidate_falls_the_best_of_the_rest_is_found() -> None:
    # min_p keeps about half of the tokens: half of the subtiles' winners fall, and what is left of those must be looked at
    asks = [Ask(min_p=0.4, position=p) for p in range(60)]
    logits = rows_of(60, 32, scale=0.4)
    ids, _, _ = run(logits, asks, config=TINY)
    assert ids.tolist() == reference.sample(logits, tensors(asks)).tolist()


def test_top_p_counts_shares_of_what_top_k_kept() -> None:
    # of 32 nearly equal tokens top_k keeps 8 and top_p half of those; a share of all 32 would keep all 8
    asks = [Ask(top_k=8, top_p=0.5, position=p) for p in range(12)]
    logits = rows_of(12, 32, scale=0.05)
    ids, _, _ = run(logits, asks, config=TINY)
    largest = [logits[row].topk(4).indices.tolist() for row in range(12)]
    assert [token in kept for token, kept in zip(ids.tolist(), largest, strict=True)] == [True] * 12


def test_top_k_tells_apart_what_differs_in_the_last_bit_alone() -> None:
    steps = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(row)) for row in range(10)])
    logits = 1.0 + steps * 2.0**-23
    ids, _, _ = run(logits, [Ask(top_k=5, position=p) for p in range(10)], config=TINY)
    assert (steps.gather(1, ids[:, None]) >= 27).all()


def test_zero_and_minus_zero_are_equal_logits() -> None:
    # all subtiles but one have -0 for their largest; top_k 1 keeps the zeros of either sign
    logits = torch.tensor([-0.0, -0.01, -0.01, -0.01] * 7 + [0.0, -0.01, -0.01, -0.01]).repeat(24, 1)
    asks = [Ask(top_k=1, position=p) for p in range(24)]
    ids, _, _ = run(logits, asks, config=TINY)
    assert ids.tolist() == reference.sample(logits, tensors(asks)).tolist()


def test_a_row_that_is_not_finite_is_reported_and_harms_no_other() -> None:
    asks = [Ask(top_k=9, top_p=0.8, position=p) for p in range(6)]
    asks[4] = Ask(temperature=1e-5)
    logits = rows_of(6)
    alone = run(logits[3:4].clone(), asks[3:4])[0]
    logits[0, 5], logits[1, 200], logits[2, 9], logits[4, 17] = float("nan"), float("inf"), float("-inf"), 1e37
    logits[5] = float("nan")
    ids, ok, logprobs = run(logits, asks)
    inside = ((ids >= 0) & (ids < VOCAB)).all().item()
    assert (ok.tolist(), ids[3].item(), inside, logprobs.isnan().tolist()) == (
        [False, False, False, True, False, False], alone.item(), True, [True, True, True, False, True, True],
    )  # fmt: skip


@pytest.mark.parametrize("mode", list(SampleMode))
def test_logprobs_are_the_raw_logits(mode: SampleMode) -> None:
    asks = [Ask(temperature=0.3, top_p=0.6), Ask(temperature=0.0), Ask(temperature=1.7, top_k=3)]
    logits = rows_of(3, scale=4.0)
    ids, _, logprobs = run(logits, asks, mode=mode)
    expected = torch.log_softmax(logits.double(), dim=-1).gather(1, ids[:, None]).squeeze(1)
    assert float((logprobs - expected).abs().max()) < 2e-6


def test_a_token_depends_on_its_row_alone() -> None:
    # other company, another place, another way of cutting rows up, outputs without logprobs: the same tokens
    asks = [Ask(top_p=0.7, position=1), Ask(top_k=40, position=2), Ask(position=3), Ask(temperature=0.0), Ask(min_p=0.2)]
    logits = rows_of(5, scale=1.0)
    together = run(logits, asks)[0].tolist()
    order = [3, 0, 4, 2, 1]
    mixed = run(logits[order], [asks[i] for i in order])[0].tolist()
    recut = run(logits, asks, config=SampleConfig(subtile=16, rows=4, num_warps=1, gather=2, search=4, choose_warps=1))[
        0
    ].tolist()
    alone = [run(logits[i : i + 1], asks[i : i + 1], mode=SampleMode.FILTERED)[0].item() for i in range(5)]
    assert ([mixed[order.index(i)] for i in range(5)], recut, alone) == (together, together, together)


def test_ids_and_flags_come_in_any_of_their_types() -> None:
    logits, asks = rows_of(2), [Ask(position=1), Ask(temperature=0.0)]
    ids, ok = torch.full((2,), -7, dtype=torch.int32), torch.zeros(2, dtype=torch.int8)
    workspace = SampleWorkspace.allocate(2, VOCAB, "cpu", SMALL)
    sample(logits, tensors(asks), workspace=workspace, out_ids=ids, out_ok=ok, mode=SampleMode.PLAIN)
    assert (ids.tolist(), ok.tolist()) == (reference.sample(logits, tensors(asks)).tolist(), [1, 1])


def test_rows_beyond_an_int32_of_elements_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COPY_BACK, lambda *_: None)
    stride = 2**30 + 8
    logits = torch.empty(2 * stride + 40, dtype=torch.float16).as_strided(
        (3, 40), (stride, 1)
    )  # only its pages in use cost memory
    logits.copy_(rows_of(3, 40))
    asks = [Ask(top_p=0.4, position=p) for p in range(3)]
    assert run(logits, asks)[0].tolist() == reference.sample(logits.clone(), tensors(asks)).tolist()


def test_the_mode_is_the_cheapest_that_serves_all_rows() -> None:
    greedy, plain, filtered = (0.0, 5, 0.5, 0.1), (0.7, 0, 1.0, 0.0), (0.7, 0, 0.9, 0.0)
    modes = [mode_for(rows) for rows in ([], [greedy], [greedy, plain], [plain, filtered, greedy], [(1.0, 1, 1.0, 0.0)])]
    modes.append(mode_for([(1.0, 0, 1.0, 0.01)]))
    assert [mode.value for mode in modes] == ["greedy", "greedy", "plain", "filtered", "filtered", "filtered"]


def test_what_does_not_fit_is_refused() -> None:
    ids, ok = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
    good = {"workspace": SampleWorkspace.allocate(2, VOCAB, "cpu", SMALL), "out_ids": ids, "out_ok": ok}
    two, three = tensors([Ask()] * 2), tensors([Ask()] * 3)
    bad = [
        (rows_of(3), three, {"out_ids": ids.new_zeros(3), "out_ok": ok.new_zeros(3)}, "workspace"),
        (rows_of(2, 100), two, {}, "workspace"),
        (rows_of(2).double(), two, {}, "logits"),
        (rows_of(2), three, {}, "temperature"),
        (rows_of(2), two, {"out_ids": ids.float()}, "out_ids"),
        (rows_of(2), two, {"out_logprobs": torch.zeros(2, dtype=torch.float16)}, "out_logprobs"),
    ]
    for logits, params, change, name in bad:
        with pytest.raises(ValueError, match=name):
            sample(logits, params, mode=SampleMode.PLAIN, **{**good, **change})


def test_no_rows_are_no_work() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    workspace = SampleWorkspace.allocate(2, VOCAB, "cpu", SMALL)
    sample(rows_of(1)[:0], tensors([]), mode=SampleMode.PLAIN, workspace=workspace, out_ids=none, out_ok=none.bool())
    assert none.numel() == 0


def test_every_candidate_configuration_can_be_compiled() -> None:
    powers = [(c.subtile, c.rows, c.gather, c.search, c.num_warps, c.choose_warps) for c in CANDIDATES]
    assert all(value & (value - 1) == 0 for values in powers for value in values) and all(c.subtile % 4 == 0 for c in CANDIDATES)
