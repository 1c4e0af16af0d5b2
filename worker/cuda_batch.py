"""The runner's memory of its sequences on a GPU: an InputBatch whose tokens, counts and block tables lie on the device too, so
that decode steps are made there without the host (kernels/step_prep.py). Diffs reach it in one transfer a step; a step without
any costs nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from fairlane.kernels.reference_sampling import SamplingTensors
from fairlane.kernels.reference_step import SlotState
from fairlane.scheduler.output import NewSequence, ScheduleOutput
from fairlane.scheduler.request import SamplingParams
from fairlane.worker.input_batch import InputBatch
from fairlane.worker.sampler import signed_seed

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
        self.table_versions = np.zeros(num_slots, dtype=np.int64)  # another number, another sequence
        self._params = np.tile(np.array(_SAMPLING_DEFAULTS, dtype=object), (num_slots, 1))
        # What the device has not been told yet. A slot's entries go with it: old ones must not come after its next owner's.
        self._counts: dict[int, tuple[int, int]] = {}  # slot -> how many tokens, the last one
        self._entries: dict[int, list[tuple[int, list[int]]]] = {}  # slot -> first place in the tables, block ids from there on
        self._grown: tuple[np.ndarray, np.ndarray] | None = None  # places in the tables, their block ids

    def apply(self, output: ScheduleOutput) -> None:
        """As InputBatch.apply, and the same on the device."""
        try:
            super().apply(output)
        finally:
            self._write_changes()

    def _write_changes(self) -> None:
        if not self._counts and not self._entries and self._grown is None:
            return
        grown = self._grown or (np.zeros(0, np.int64), np.zeros(0, np.int64))
        counts = np.array([(slot, *known) for slot, known in self._counts.items()], dtype=np.int64).reshape(-1, 3)
        runs = [run for runs in self._entries.values() for run in runs]
        places = np.concatenate([grown[0], *(np.arange(first, first + len(ids)) for first, ids in runs)])
        blocks = np.concatenate([grown[1], np.array([block for _, ids in runs for block in ids], dtype=np.int64)])
        changes = self.upload(np.concatenate([counts.T.ravel(), places, blocks]))
        slots, tokens, last, at, ids = torch.split(changes, [len(counts)] * 3 + [len(places)] * 2)
        if len(counts):
            self.state.num_tokens.index_copy_(0, slots, tokens.to(torch.int32))
            self.state.last_token.index_copy_(0, slots, last.to(torch.int32))
        if len(places):
            self.state.block_table.view(-1).index_copy_(0, at, ids.to(torch.int32))
        self._counts.clear()
        self._entries.clear()
        self._grown = None

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
        self.table_versions[slot] += 1
        self._counts[slot] = (0, 0)
        self._entries.pop(slot, None)

    def _add(self, new: NewSequence) -> None:
        super()._add(new)
        slot = new.slot
        self._counts[slot] = (len(new.token_ids), new.token_ids[-1] if new.token_ids else 0)
        self._params[slot] = _values(self.sampling[slot])

    def _note_growth(self, slots: np.ndarray, begin: np.ndarray, ids: np.ndarray) -> None:
        self._grown = (slots * self.block_table.shape[1] + begin, ids)  # the last of a step's diffs: nothing comes after it

    def _extend_table(self, slot: int, groups: list[list[int]]) -> None:
        begin = int(self.num_table_blocks[slot])
        super()._extend_table(slot, groups)
        if groups[0]:
            self._entries.setdefault(slot, []).append((slot * self.block_table.shape[1] + begin, groups[0]))


def _values(params: SamplingParams) -> tuple[float, int, float, float, int]:
    return (params.temperature, params.top_k, params.top_p, params.min_p, signed_seed(params))
