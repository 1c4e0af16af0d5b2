"""From logits to token ids in Triton: the draws of reference_sampling's `sample`, token for token. It decides how a row is cut up
and how filtered rows find their token without a sort; which rows need what, and penalties, are the worker's business.

    pass 1   program (row, tile): per subtile of the vocabulary its best score (scaled logit + Gumbel noise) and that token
    pass 2   program (row): the best subtile's token. Of a filtered row that is a candidate only: it stands if top_k, top_p and
             min_p keep it, and else the best token among the more likely ones is the next candidate.

Filters keep whatever is at least as likely as some token, so that a candidate they drop takes all less likely ones with it, and
the first candidate they keep is the best of all they keep: the reference's token. Both passes cut a row by the vocabulary's size
alone and add in a fixed order: a row's token depends on nothing but the row.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from fairlane.kernels.reference_sampling import SamplingTensors
from fairlane.kernels.sample_filter import filtered_token
from fairlane.kernels.sample_noise import LOG2E, divide, first_of, gumbel_noise, mass_of


@dataclass(frozen=True, slots=True)
class SampleConfig:
    """How rows are cut; powers of two. No choice changes a token but through the rounding of top_p's sums.

    subtile: tokens whose best is kept between the passes, a multiple of 4. rows: subtiles per program of pass 1.
    gather: subtiles that pass 2 reads at once where it adds up or draws again; search: where it looks for the k-th.
    """

    subtile: int = 128  # a warp's width of 16-byte vectors in float32: reductions stay inside a warp
    rows: int = 16
    num_warps: int = 4
    gather: int = 64
    search: int = 8
    choose_warps: int = 8


DEFAULT = SampleConfig()
CANDIDATES = (  # the last two differ in the second pass alone
    DEFAULT,
    SampleConfig(rows=32),
    SampleConfig(subtile=256, rows=8),
    SampleConfig(gather=32, search=16, choose_warps=16),
    SampleConfig(gather=32, search=4),
)


class SampleMode(enum.Enum):
    """What the batch needs, known to the host: greedy rows alone, draws, or draws some of which are filtered."""

    GREEDY = "greedy"
    PLAIN = "plain"
    FILTERED = "filtered"


def mode_for(rows: Iterable[tuple[float, int, float, float]]) -> SampleMode:
    """The cheapest mode that serves rows of (temperature, top_k, top_p, min_p)."""
    mode = SampleMode.GREEDY
    for temperature, top_k, top_p, min_p in rows:
        if temperature > 0 and (top_k > 0 or top_p < 1 or min_p > 0):
            return SampleMode.FILTERED
        if temperature > 0:
            mode = SampleMode.PLAIN
    return mode


@dataclass(frozen=True, slots=True)
class SampleWorkspace:
    """What the passes hand on, float32 or int32 [max_rows, subtiles]; the content between calls is nobody's.

    best, token: the subtile's best score (+inf: a logit is not finite) and whose it is. peak, mass: its largest scaled logit, and
    the sum of exp(scaled - peak). raw_peak, raw_mass: the same of the logits themselves. listed: subtiles pass 2 reads again.
    """

    best: Tensor
    token: Tensor
    peak: Tensor
    mass: Tensor
    raw_peak: Tensor
    raw_mass: Tensor
    listed: Tensor
    config: SampleConfig

    @classmethod
    def allocate(
        cls, max_rows: int, vocab_size: int, device: torch.device | str, config: SampleConfig = DEFAULT
    ) -> SampleWorkspace:
        shape = (max_rows, triton.cdiv(vocab_size, config.subtile))
        floats = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(5)]
        token, listed = (torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2))
        best, peak, mass, raw_peak, raw_mass = floats
        return cls(best, token, peak, mass, raw_peak, raw_mass, listed, config)


_INF_BITS = tl.constexpr(0x7F800000)
_BY_ROW = ["temperature", "top_k", "top_p", "min_p", "seed", "position", "sibling"]  # a slice of these needs no other code


@triton.jit(do_not_specialize_on_alignment=_BY_ROW)  # type: ignore[untyped-decorator]
def _score_kernel(  # type: ignore[no-untyped-def]
    logits, stride_row, temperature, seed, position, sibling,
    best_out, token_out, peak_out, mass_out, raw_peak_out, raw_mass_out,
    VOCAB: tl.constexpr, SUB: tl.constexpr, ROWS: tl.constexpr,
    DRAWS: tl.constexpr, FILTERS: tl.constexpr, LOGPROBS: tl.constexpr,
):  # fmt: skip
    num_subs: tl.constexpr = (VOCAB + SUB - 1) // SUB
    tiles: tl.constexpr = (num_subs + ROWS - 1) // ROWS
    row = (tl.program_id(0) // tiles).to(tl.int64)
    subs = (tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)
    ids = subs[:, None] * SUB + tl.arange(0, SUB)[None, :]
    inside = ids < VOCAB
    x = tl.load(logits + row * stride_row + ids, mask=inside, other=0.0).to(tl.float32)
    scaled = x
    if DRAWS:
        heat = tl.load(temperature + row)
        if (heat > 0) & (heat != 1):
            scaled = divide(x, heat, tl.div_rn(1.0, heat))
    largest = tl.max(scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # as integers, NaN > inf > all others
    scaled = tl.where(inside, scaled, float("-inf"))
    score = scaled
    if DRAWS:  # noqa: SIM102  (this branch is the compiler's, the next one the row's)
        if heat > 0:
            score = scaled + gumbel_noise(subs, (seed + row, position + row, sibling + row), ROWS, SUB)
    best = tl.max(score, axis=1)
    out = row * num_subs + subs
    real = subs < num_subs
    tl.store(best_out + out, tl.where(largest < _INF_BITS, best, float("inf")), mask=real)
    tl.store(token_out + out, subs * SUB + first_of(score, best, SUB), mask=real)
    if FILTERS:
        peak = tl.max(scaled, axis=1)
        tl.store(peak_out + out, peak, mask=real)
        tl.store(mass_out + out, mass_of(scaled, peak), mask=real)
    if LOGPROBS:
        raw = tl.where(inside, x, float("-inf"))
        raw_peak = tl.max(raw, axis=1)
        tl.store(raw_peak_out + out, raw_peak, mask=real)
        tl.store(raw_mass_out + out, mass_of(raw, raw_peak), mask=real)


@triton.jit(do_not_specialize_on_alignment=[*_BY_ROW, "out_ids", "out_ok", "out_logprobs"])  # type: ignore[untyped-decorator]
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits, stride_row, temperature, top_k, top_p, min_p, seed, position, sibling,
    best_in, token_in, peak_in, mass_in, raw_peak_in, raw_mass_in, listed, out_ids, out_ok, out_logprobs,
    VOCAB: tl.constexpr, SUB: tl.constexpr, PADDED: tl.constexpr, GATHER: tl.constexpr, SEARCH: tl.constexpr,
    FILTERS: tl.constexpr, LOGPROBS: tl.constexpr,
):  # fmt: skip
    num_subs: tl.constexpr = (VOCAB + SUB - 1) // SUB
    row = tl.program_id(0).to(tl.int64)
    subs = tl.arange(0, PADDED)
    real = subs < num_subs
    first = row * num_subs
    x = logits + row * stride_row
    best = tl.load(best_in + first + subs, mask=real, other=float("-inf"))
    top, at = tl.max(best, axis=0, return_indices=True)
    token = tl.load(token_in + first + at)
    ok = top < float("inf")
    if FILTERS:
        heat = tl.load(temperature + row)
        k = tl.load(top_k + row)
        k = tl.where(k < VOCAB, k, 0).to(tl.int32)
        share = tl.load(top_p + row)
        least = tl.load(min_p + row)
        if ok & (heat > 0) & ((k > 0) | (share < 1) | (least > 0)):
            token = filtered_token(
                token, (x, heat, tl.div_rn(1.0, heat), listed + first), (seed + row, position + row, sibling + row),
                (k, share, least), best, token_in + first, peak_in + first, mass_in + first, VOCAB, SUB, PADDED, GATHER, SEARCH,
            )  # fmt: skip
    tl.store(out_ids + row, token)
    tl.store(out_ok + row, ok.to(tl.int8))
    if LOGPROBS:
        peaks = tl.load(raw_peak_in + first + subs, mask=real, other=float("-inf"))
        peak = tl.max(peaks, axis=0)
        mass = tl.load(raw_mass_in + first + subs, mask=real, other=0.0)
        logprob = tl.load(x + token).to(tl.float32) - peak - tl.log(tl.sum(mass * tl.exp2((peaks - peak) * LOG2E), axis=0))
        tl.store(out_logprobs + row, tl.where(ok, logprob, float("nan")))


def sample(
    logits: Tensor,
    params: SamplingTensors,
    *,
    workspace: SampleWorkspace,
    out_ids: Tensor,
    out_ok: Tensor,
    out_logprobs: Tensor | None = None,
    mode: SampleMode,
) -> None:
    """Samples a token for every row of logits [B, V] (float32, float16 or bfloat16; not changed); allocates nothing.

    params: by row, as the reference takes them; position, sibling and top_k may be int32 too. A temperature is 0 (greedy) or at
    least 1e-30. mode: `mode_for` of the rows; a cheaper one ignores what it does not know.
    out_ids [B], int32 or int64: the token, below V in every row. out_ok [B], bool or int8: False if a logit is not finite, or is
    not once it is divided by the temperature. out_logprobs, float32 [B]: log softmax of the logits as they came (before the
    temperature) at that token; NaN where not ok.
    Padding rows may hold anything. Raises ValueError for what does not fit.
    """
    rows, vocab = logits.shape
    _check(logits, params, workspace, out_ids, out_ok, out_logprobs)
    if rows == 0:
        return
    w, config = workspace, workspace.config
    subs = w.best.shape[1]
    filters, logprobs = mode is SampleMode.FILTERED, out_logprobs is not None
    between = (w.best, w.token, w.peak, w.mass, w.raw_peak, w.raw_mass)
    keyed = (params.seed, params.position, params.sibling)
    _score_kernel[(rows * triton.cdiv(subs, config.rows),)](
        logits, logits.stride(0), params.temperature, *keyed, *between,
        VOCAB=vocab, SUB=config.subtile, ROWS=config.rows, DRAWS=mode is not SampleMode.GREEDY,
        FILTERS=filters, LOGPROBS=logprobs, num_warps=config.num_warps,
    )  # fmt: skip
    _choose_kernel[(rows,)](
        logits, logits.stride(0), params.temperature, params.top_k, params.top_p, params.min_p, *keyed, *between, w.listed,
        out_ids, out_ok.view(torch.int8), out_logprobs if out_logprobs is not None else w.raw_mass,
        VOCAB=vocab, SUB=config.subtile, PADDED=triton.next_power_of_2(subs), GATHER=config.gather, SEARCH=config.search,
        FILTERS=filters, LOGPROBS=logprobs, num_warps=config.choose_warps,
    )  # fmt: skip


def _check(
    logits: Tensor, params: SamplingTensors, workspace: SampleWorkspace, ids: Tensor, ok: Tensor, logprobs: Tensor | None
) -> None:
    rows, vocab = logits.shape
    if logits.stride(1) != 1 or vocab == 0 or logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"logits must be floats with contiguous rows; they are {list(logits.shape)} of {logits.dtype}")
    subs = triton.cdiv(vocab, workspace.config.subtile)
    if workspace.best.shape[0] < rows or workspace.best.shape[1] != subs:
        raise ValueError(f"the workspace is for {list(workspace.best.shape)} rows and subtiles, not {[rows, subs]}")
    vectors = {name: getattr(params, name) for name in SamplingTensors.__slots__} | {"out_ids": ids, "out_ok": ok}
    if logprobs is not None:
        vectors["out_logprobs"] = logprobs
    for name, vector in vectors.items():
        if vector.shape != (rows,) or not vector.is_contiguous():
            raise ValueError(f"{name} must be contiguous and have {rows} entries; its shape is {list(vector.shape)}")
    if ids.dtype not in (torch.int32, torch.int64) or ok.dtype not in (torch.bool, torch.int8):
        raise ValueError(f"out_ids must be int32 or int64 and out_ok bool or int8; they are {ids.dtype} and {ok.dtype}")
    if logprobs is not None and logprobs.dtype != torch.float32:
        raise ValueError(f"out_logprobs must be float32; it is {logprobs.dtype}")
