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
_SORTED_FIRST = 512


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
    scaled = logits.index_select(0, drawn).to(torch.float32) / rows.temperature.unsqueeze(1)
    scaled = _keep_top(scaled, rows)
    picked = _gumbel_argmax(scaled, greedy.index_select(0, drawn), rows)
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
    uniform = ((words >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _keep_top(scaled: Tensor, rows: SamplingTensors) -> Tensor:
    """Sets what top_k, top_p and min_p drop to -inf."""
    vocab = scaled.shape[1]
    limited = torch.nonzero((rows.top_k > 0) & (rows.top_k < vocab) | (rows.top_p < 1)).flatten()
    if limited.numel():
        whole = limited.numel() == scaled.shape[0]
        part = scaled if whole else scaled.index_select(0, limited)
        part = _top_k_top_p(part, rows.top_k.index_select(0, limited), rows.top_p.index_select(0, limited))
        scaled = part if whole else scaled.index_copy(0, limited, part)
    if bool((rows.min_p > 0).any()):
        floor = scaled.amax(dim=-1) + torch.log(rows.min_p)  # log 0 = -inf keeps all
        scaled = scaled.masked_fill(scaled < floor.unsqueeze(1), float("-inf"))
    return scaled


def _top_k_top_p(scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Filters [R, V]. top_p keeps the smallest set of the most likely tokens whose probability reaches top_p, after top_k.

    Sorting a whole vocabulary costs more than a decode step's attention, so only its top is sorted, and all of it only where
    that top does not reach top_p.
    """
    vocab = scaled.shape[1]
    unlimited = (top_k <= 0) | (top_k >= vocab)
    depth = int(torch.where(unlimited, min(_SORTED_FIRST, vocab), top_k).max())
    places = torch.where(unlimited, depth, top_k).unsqueeze(1) - 1
    wanted = top_p.unsqueeze(1)
    while True:
        ordered = torch.topk(scaled, depth, dim=-1).values
        floor = ordered.gather(1, places).masked_fill_(unlimited.unsqueeze(1), float("-inf"))
        kept = scaled.masked_fill(scaled < floor, float("-inf"))
        # normalised over everything kept, ties at the k-th place included
        shares = torch.exp(ordered.masked_fill(ordered < floor, float("-inf")) - torch.logsumexp(kept, dim=-1, keepdim=True))
        reached = torch.cumsum(shares, dim=-1)
        short = unlimited.unsqueeze(1) & (wanted < 1) & (reached[:, -1:] < wanted)
        if depth == vocab or not bool(short.any()):
            break
        depth = vocab
    last = (reached - shares < wanted).sum(dim=-1, keepdim=True).clamp_(min=1) - 1
    return kept.masked_fill_((kept < ordered.gather(1, last)) & (wanted < 1), float("-inf"))


def _gumbel_argmax(scaled: Tensor, best: Tensor, rows: SamplingTensors) -> Tensor:
    """argmax(scaled + noise) by row. `best`: a token whose score bounds the winner's from below; noise is bounded above, so
    tokens too far below it cannot win and get no noise (exact, and it spares most of the vocabulary)."""
    count, vocab = scaled.shape
    if vocab % 4:
        scaled = torch.nn.functional.pad(scaled, (0, 4 - vocab % 4), value=float("-inf"))
    bar = scaled.gather(1, best.unsqueeze(1)).squeeze(1) + _noise_of(best, rows) - _MAX_NOISE
    by_group = scaled.view(count, -1, 4)
    row, group = torch.nonzero((by_group >= bar.view(-1, 1, 1)).any(dim=-1), as_tuple=True)
    noise = gumbel_noise(rows.seed[row], rows.sibling[row], rows.position[row], group)
    scores = torch.full_like(scaled, float("-inf"))
    scores.view(count, -1, 4)[row, group] = by_group[row, group] + noise
    return scores.argmax(dim=-1).clamp_(max=vocab - 1)


def _noise_of(token: Tensor, rows: SamplingTensors) -> Tensor:
    return gumbel_noise(rows.seed, rows.sibling, rows.position, token // 4).gather(1, (token % 4).unsqueeze(1)).squeeze(1)
