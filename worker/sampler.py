"""Which token each sequence gets: logit bias and penalties (they need a sequence's own tokens), then the draw. It decides the
fast path, and which rows failed; filters and randomness are the op `sample`'s."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fairlane.kernels.reference import SamplingTensors, sample
from fairlane.scheduler.request import SamplingParams
from fairlane.worker.input_batch import InputBatch

_SIBLING = 0  # a request is one sequence today; siblings get numbers of their own
_SIGN = 1 << 63


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens int64 [S] on the device; ok bool [S] on the host: False where the logits were not finite."""

    tokens: Tensor
    ok: np.ndarray


def sample_tokens(logits: Tensor, slots: np.ndarray, positions: np.ndarray, batch: InputBatch) -> Sampled:
    """logits float32 [S, V] (may be changed), slots and positions [S]: whose next token goes where."""
    params = [batch.sampling[slot] for slot in slots.tolist()]
    adjust_logits(logits, params, slots, positions, batch)
    greedy = all(row_params.temperature == 0 for row_params in params)
    ok = _finite(logits, None if greedy else [row_params.temperature for row_params in params])
    if greedy:
        return Sampled(logits.argmax(dim=-1), ok)
    if not ok.all():
        logits = logits.masked_fill(torch.from_numpy(~ok).to(logits.device).unsqueeze(1), 0.0)
    return Sampled(sample(logits, _tensors(params, positions, logits.device)), ok)


def _finite(logits: Tensor, temperatures: list[float] | None) -> np.ndarray:
    """bool [S]: rows whose logits are finite, and stay so when they are divided by the temperature.

    Asked after bias and penalties, which overflow for extreme parameters: a penalty of 1e-40 makes 1 an infinity.
    """
    largest = torch.maximum(-logits.amin(dim=-1), logits.amax(dim=-1))  # a NaN comes through; aminmax is 20 times slower
    if temperatures is not None:
        divisor = torch.tensor(temperatures, dtype=torch.float32, device=logits.device)
        largest = largest / divisor.masked_fill(divisor == 0, 1.0)
    finite: np.ndarray = torch.isfinite(largest).cpu().numpy()
    return finite


def adjust_logits(
    logits: Tensor, params: list[SamplingParams], slots: np.ndarray, positions: np.ndarray, batch: InputBatch
) -> None:
    """Bias and penalties, in place, of the rows that have any. logits float32 [S, V], slots and positions [S] as above."""
    for row, (slot, row_params) in enumerate(zip(slots.tolist(), params, strict=True)):
        if changes_logits(row_params):
            if row_params.logit_bias:
                _add_bias(logits[row], row_params, batch)
            _penalise(logits[row], row_params, batch.token_ids[slot, : positions[row]], int(batch.num_prompt_tokens[slot]))


def changes_logits(params: SamplingParams) -> bool:
    """True if the logits must be adjusted before the draw."""
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    return bool(penalised or params.logit_bias)


def _add_bias(logits: Tensor, params: SamplingParams, batch: InputBatch) -> None:
    ids = np.array(list(params.logit_bias), dtype=np.int64)
    values = np.array(list(params.logit_bias.values()), dtype=np.float32)
    logits.index_add_(0, batch.upload(ids), batch.upload(values).to(logits.dtype))


def _penalise(logits: Tensor, params: SamplingParams, token_ids: Tensor, num_prompt_tokens: int) -> None:
    """One row [V], in place. Presence and frequency count output tokens; repetition looks at the prompt's too.

    Nothing here asks the device for a number, which would stop the steps launched ahead.
    """
    if params.repetition_penalty != 1.0:
        values = logits.index_select(0, token_ids)
        penalised = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        logits.scatter_(0, token_ids, penalised)  # a token that is there twice gets the same value twice
    if params.presence_penalty or params.frequency_penalty:
        output = token_ids[num_prompt_tokens:]
        counts = torch.zeros_like(logits).index_add_(0, output, torch.ones_like(output, dtype=logits.dtype))
        logits.sub_(torch.where(counts > 0, counts * params.frequency_penalty + params.presence_penalty, 0.0))


def signed_seed(params: SamplingParams) -> int:
    """The seed's 64 bits as a signed number: tensors have no unsigned ones."""
    return (params.seed + _SIGN) % (2 * _SIGN) - _SIGN


def _tensors(params: list[SamplingParams], positions: np.ndarray, device: torch.device) -> SamplingTensors:
    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    def integers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return SamplingTensors(
        temperature=floats([p.temperature for p in params]),
        top_k=integers([p.top_k for p in params]),
        top_p=floats([p.top_p for p in params]),
        min_p=floats([p.min_p for p in params]),
        seed=integers([signed_seed(p) for p in params]),
        position=torch.from_numpy(np.ascontiguousarray(positions)).to(device),
        sibling=integers([_SIBLING] * len(params)),
    )
