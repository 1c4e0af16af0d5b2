"""The runner's memory of its sequences on a GPU: an InputBatch whose tokens, counts and block tables lie on the device too, so
that decode steps are made there without the host (kernels/step_prep.py). Diffs reach it in one transfer a step; a step without
any costs nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fairlane.kernels.reference_sampling import SamplingTensors
from fairlane.kernels.reference_step import SlotState
from fairlane.scheduler.output import NewSequence, ScheduleOutput
from fairlane.scheduler.request import SamplingParams
from fairlane.worker.input_batch import InputBatch

_SIGN = 1 << 63
_SAMPLING_DEFAULTS = (0.0, 0, 1.0, 0.0, 0)


class CudaBatch(InputBatch):
    """`state` is what step_prep reads and store_sampled writes. num_tokens on the host counts what launched steps sample, too."""

    def __init__(
        self, num_slots: int, max_model_len: int, block_size: int, num_blocks: int, vocab_size: int, device: torch.device
    ) -> None:
        super().__init__(num_slots, max_model_len, block_size, num_blocks, vocab_size, device)
        self.state = SlotState(
            last_token=torch.zeros(num_slots, dtype=torch.int32, device=device),
            num_tokens=torch.zeros(num_slots, dtype=torch.int32, device=device),
            block_table=torch.zeros(self.block_table.shape, dtype=torch.int32, device=device),
        )
        self._params = np.tile(np.array(_SAMPLING_DEFAULTS, dtype=object), (num_slots, 1))
        self._counts: dict[int, int] = {}
        self._entries: list[tuple[int, int]] = []

    def apply(self, output: ScheduleOutput) -> None:
        """As InputBatch.apply, and the same on the device."""
        try:
            super().apply(output)
        finally:
            self._write_changes()

    def _write_changes(self) -> None:
        if not self._counts and not self._entries:
            return
        counts = np.array(list(self._counts.items()), dtype=np.int64).reshape(-1, 2)
        entries = np.array(self._entries, dtype=np.int64).reshape(-1, 2)
        self._counts.clear()
        self._entries.clear()
        changes = self.upload(np.concatenate([counts.T.ravel(), entries.T.ravel()]))
        slots, tokens, places, blocks = torch.split(changes, [len(counts)] * 2 + [len(entries)] * 2)
        if len(counts):
            self.state.num_tokens.index_copy_(0, slots, tokens.to(torch.int32))
        if len(entries):
            self.state.block_table.view(-1).index_copy_(0, places, blocks.to(torch.int32))

    def upload(self, array: np.ndarray) -> Tensor:
        """Without waiting for the device, which a copy from pageable memory would."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def sampling_tensors(self, slots: np.ndarray, positions: np.ndarray, rows: int) -> SamplingTensors:
        """Of `rows` batch rows, those beyond the slots greedy."""
        values = np.tile(np.array(_SAMPLING_DEFAULTS, dtype=object), (rows, 1))
        values[: len(slots)] = self._params[slots]
        at = np.zeros(rows, dtype=np.int64)
        at[: len(positions)] = positions
        floats = self.upload(np.stack([values[:, column].astype(np.float32) for column in (0, 2, 3)]))
        integers = self.upload(np.stack([values[:, 1].astype(np.int64), values[:, 4].astype(np.int64), at, np.zeros_like(at)]))
        temperature, top_p, min_p = floats
        top_k, seed, position, sibling = integers
        return SamplingTensors(temperature, top_k, top_p, min_p, seed, position, sibling)

    def advance(self, slots: np.ndarray) -> None:
        """A launched step samples one token for each of these slots."""
        self.num_tokens[slots] += 1

    def check_decodes(self, slots: np.ndarray) -> None:
        """Raises ValueError if one of them holds no sequence, or has no block for the token it is about to write."""
        tokens = self.num_tokens[slots]
        if not self.used[slots].all() or (tokens > self.num_table_blocks[slots] * self.block_size).any():
            raise ValueError("a slot holds no sequence, or no block for its next token")

    def _release(self, slot: int) -> None:
        super()._release(slot)
        self._counts[slot] = 0
        # What was written to the row before it was let go must not come after what its next owner writes.
        self._entries = [entry for entry in self._entries if entry[0] // self.block_table.shape[1] != slot]

    def _add(self, new: NewSequence) -> None:
        super()._add(new)
        slot = new.slot
        self._counts[slot] = int(self.num_tokens[slot])
        self._params[slot] = _values(self.sampling[slot])

    def _extend_table(self, slot: int, groups: list[list[int]]) -> None:
        begin = int(self.num_table_blocks[slot])
        super()._extend_table(slot, groups)
        width = self.block_table.shape[1]
        self._entries += [(slot * width + begin + index, block) for index, block in enumerate(groups[0])]


def _values(params: SamplingParams) -> tuple[float, int, float, float, int]:
    seed = (params.seed + _SIGN) % (2 * _SIGN) - _SIGN  # the same 64 bits, signed
    return (params.temperature, params.top_k, params.top_p, params.min_p, seed)
