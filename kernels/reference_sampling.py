"""From logits to token ids in torch. It decides the order of the filters, how ties are kept and where the randomness comes from;
which rows need what, and penalties over their tokens, are the worker's business.

The draw is Gumbel-max with stateless noise, so that a sequence's tokens depend on (seed, sibling, position) alone: not on its
batch, its row, or how often it was preempted.

    Philox4x32-10   key     (seed bits 0..31, seed bits 32..63)
                    counter (token_id // 4, position, sibling, 0)  ->  4 words, one each for tokens 4c, 4c+1, 4c+2, 4c+3
    u = ((word >> 9) + 0.5) * 2^-23        exact in float32, never 0 or 1
    noise = -log(-log(u))                  in [-2.82, 16.64]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_MAX_NOISE = 16.65  # above -log(-log(1 - 2^-24))
_SORTED_FIRST = 64  # enough for most rows of real text at top_p 0.95; torch.topk of 512 takes four times as long
_DEEPER = 8


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Parameters by row, on the logits' device. temperature, top_p, min_p float32 [B]; top_k, seed, position, sibling int64 [B].

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep everything. seed: its 64 bits count, the sign does not.
    position: index in the sequence of the token being drawn.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    sibling: Tensor


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Token ids int64 [B] for logits [B, V]; the logits are not changed. Order: temperature, top_k, top_p, min_p, draw.

    Filters keep every token that ties with the last one kept, so that the result needs no sort order. A row with logits that
    are not finite gives an arbitrary id below V.
    """
    greedy = logits.argmax(dim=-1)
    drawn = torch.nonzero(params.temperature > 0).flatten()
    if drawn.numel() == 0:
        return greedy
    rows = SamplingTensors(*(getattr(params, name).index_select(0, drawn) for name in SamplingTensors.__slots__))
    best = greedy.index_select(0, drawn)
    scaled = _rows_of(logits, drawn).to(torch.float32) / rows.temperature.unsqueeze(1)
    picked = _gumbel_argmax(scaled, best, _floor(scaled, best, rows), rows)
    return greedy.index_copy(0, drawn, picked)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32 (Salmon et al., SC 2011). Words are int64 tensors with values in [0, 2^32), broadcast together."""
    c0, c1, c2, c3, k0, k1 = torch.broadcast_tensors(*counter, *key)  # type: ignore[no-untyped-call]
    for _ in range(10):
        a, b = c0 * _ROUND_A, c2 * _ROUND_B  # wraps like an unsigned product; the shifts read its bits
        c0 = (b >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK)
        c2 = (a >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK)
        c1, c3 = b, a  # their high bits, and the keys', are cut off by the next round's mask
        k0, k1 = k0 + _KEY_A, k1 + _KEY_B
    return c0, c1 & _MASK, c2, c3 & _MASK


def gumbel_noise(seed: Tensor, sibling: Tensor, position: Tensor, group: Tensor) -> Tensor:
    """Noise float32 [N, 4] of tokens 4 * group .. 4 * group + 3; all arguments int64 [N]."""
    counter = (group, position & _MASK, sibling & _MASK, torch.zeros_like(group))
    words = torch.stack(philox4x32(counter, (seed & _MASK, (seed >> 32) & _MASK)), dim=-1)
    uniform = (words >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def _floor(scaled: Tensor, best: Tensor, rows: SamplingTensors) -> Tensor:
    """[R]: the smallest score that top_k, top_p and min_p leave in each row; -inf where they leave everything.

    Each of them keeps what is at least as large as some score, so one floor says it all.
    """
    vocab = scaled.shape[1]
    floor = torch.full_like(scaled[:, 0], float("-inf"))
    by_count = torch.nonzero((rows.top_k > 0) & (rows.top_k < vocab)).flatten()
    if by_count.numel():
        top_k = rows.top_k.index_select(0, by_count)
        ordered = torch.topk(_rows_of(scaled, by_count), int(top_k.max()), dim=-1).values
        floor.index_copy_(0, by_count, ordered.gather(1, top_k.unsqueeze(1) - 1).squeeze(1))
    by_share = torch.nonzero(rows.top_p < 1).flatten()
    if by_share.numel():
        part, least = _rows_of(scaled, by_share), floor.index_select(0, by_share).unsqueeze(1)
        # normalised over everything that top_k kept, ties at the k-th place included
        kept = part.masked_fill(part < least, float("-inf")) if by_count.numel() else part
        total = torch.logsumexp(kept, dim=-1, keepdim=True)
        top_p = rows.top_p.index_select(0, by_share).unsqueeze(1)
        floor.index_copy_(0, by_share, _top_p_floor(part, least, total, top_p, _SORTED_FIRST).squeeze(1))
    if bool((rows.min_p > 0).any()):
        peak = scaled.gather(1, best.unsqueeze(1)).squeeze(1)
        floor = torch.maximum(floor, peak + torch.log(rows.min_p))  # log 0 = -inf keeps all
    return floor


def _top_p_floor(scaled: Tensor, least: Tensor, total: Tensor, top_p: Tensor, depth: int) -> Tensor:
    """Floors [R, 1]: the smallest set of the most likely tokens, of those not below `least`, whose probability reaches top_p.

    Sorting a whole vocabulary costs more than a decode step's attention, so only its top `depth` is sorted, and more only of
    rows where that does not reach top_p. least, total (log of the sum over what is kept) and top_p are [R, 1].
    """
    depth = min(depth, scaled.shape[1])
    ordered = torch.topk(scaled, depth, dim=-1).values
    shares = torch.exp(ordered.masked_fill(ordered < least, float("-inf")) - total)
    reached = torch.cumsum(shares, dim=-1)
    last = (reached - shares < top_p).sum(dim=-1, keepdim=True).clamp_(min=1) - 1
    floor = torch.maximum(ordered.gather(1, last), least)
    if depth < scaled.shape[1]:
        short = torch.nonzero(((reached < top_p) & (ordered >= least))[:, -1]).flatten()
        if short.numel():
            scaled, least, total, top_p = (t.index_select(0, short) for t in (scaled, least, total, top_p))
            floor.index_copy_(0, short, _top_p_floor(scaled, least, total, top_p, depth * _DEEPER))
    return floor


def _rows_of(scaled: Tensor, indices: Tensor) -> Tensor:
    return scaled if len(indices) == len(scaled) else scaled.index_select(0, indices)


def _gumbel_argmax(scaled: Tensor, best: Tensor, floor: Tensor, rows: SamplingTensors) -> Tensor:
    """argmax(scaled + noise) by row, over the tokens not below `floor` [R]; the first of equals.

    `best`: a token whose score bounds the winner's from below. Noise is bounded above, so tokens too far below it cannot win
    and get no noise (exact, and it spares most of the vocabulary).
    """
    count, vocab = scaled.shape
    if vocab % 4:
        scaled = torch.nn.functional.pad(scaled, (0, 4 - vocab % 4), value=float("-inf"))
    bar = scaled.gather(1, best.unsqueeze(1)).squeeze(1) + _noise_of(best, rows) - _MAX_NOISE
    candidate = scaled >= torch.maximum(bar, floor).unsqueeze(1)
    row, group = torch.nonzero(candidate.view(torch.int32), as_tuple=True)  # four tokens' bools are one word
    noise = gumbel_noise(rows.seed[row], rows.sibling[row], rows.position[row], group)
    if not len(group):  # nothing compares with a NaN
        return best
    scores = scaled.view(-1, 4).index_select(0, row * (scaled.shape[1] // 4) + group)
    scores = scores.masked_fill_(scores < floor[row].unsqueeze(1), float("-inf")).add_(noise)
    sizes = torch.bincount(row, minlength=count)
    parts = torch.split(scores.view(-1), (sizes * 4).tolist())  # a row's candidates lie together
    winners = torch.stack([part.argmax() if len(part) else best.new_zeros(()) for part in parts])
    place = (winners + 4 * (torch.cumsum(sizes, 0) - sizes)).clamp_(max=scores.numel() - 1)
    return (group[place // 4] * 4 + place % 4).clamp_(max=vocab - 1)


def _noise_of(token: Tensor, rows: SamplingTensors) -> Tensor:
    return gumbel_noise(rows.seed, rows.sibling, rows.position, token // 4).gather(1, (token % 4).unsqueeze(1)).squeeze(1)
