"""The runner's memory of its sequences, by slot, and a step's inputs made from it. It applies the scheduler's diffs and
refuses those that do not fit; it decides nothing about what runs. Sampled tokens are stored here, so that the next step can
use them before the host has seen them.

    token_ids[slot]    prompt and output, as sent, then as sampled        block_table[slot]  block ids, 0 beyond its length
    a step's tokens, sequence after sequence:   query_start_loc  0 ... n_0 ... n_0 + n_1 ... T
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairlane.scheduler.output import BlockAppend, NewSequence, ScheduledSequence, ScheduleOutput
from fairlane.scheduler.request import SamplingParams
from fairlane.worker.upload import to_device

MAX_AHEAD = 4  # positions beyond the length limit that steps in flight may reach before the scheduler drops their tokens


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step as arrays. Tensors live on the device, arrays on the host.

    input_ids, positions, slot_mapping: int64 [T]. query_start_loc [B + 1], seq_lens [B], block_table [B, MB]: int64.
    sample_rows: int64 [S], each sampling sequence's last token row; sample_slots, sample_positions: int64 [S], where its
    next token goes; sample_entries: its index in ScheduleOutput.scheduled, decode_slots counted on after it.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    block_table: Tensor
    sample_rows: Tensor
    sample_slots: np.ndarray
    sample_positions: np.ndarray
    sample_entries: np.ndarray


@dataclass(frozen=True, slots=True)
class StepLayout:
    """A step as int64 arrays on the host. token_places [T]: in token_ids seen as one row; slots [B]; the others as in
    StepInputs."""

    token_places: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    slots: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    sample_rows: np.ndarray
    sample_slots: np.ndarray
    sample_positions: np.ndarray
    sample_entries: np.ndarray

    @property
    def num_decodes(self) -> int:
        """Sequences with one token; they come first."""
        return int((np.diff(self.query_start_loc) == 1).sum())


class InputBatch:
    """State of up to `num_slots` sequences of up to max_model_len tokens."""

    def __init__(
        self, num_slots: int, max_model_len: int, block_size: int, num_blocks: int, vocab_size: int, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.max_tokens = max_model_len + MAX_AHEAD
        self.block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._device = device
        max_blocks = -(-self.max_tokens // block_size)
        self.token_ids = torch.zeros(num_slots, self.max_tokens, dtype=torch.int64, device=device)
        self.block_table = np.zeros((num_slots, max_blocks), dtype=np.int64)
        self.num_table_blocks = np.zeros(num_slots, dtype=np.int64)
        self.num_tokens = np.zeros(num_slots, dtype=np.int64)  # known: as sent, then as sampled
        self.num_prompt_tokens = np.zeros(num_slots, dtype=np.int64)
        self.used = np.zeros(num_slots, dtype=bool)
        self.sampling: list[SamplingParams] = [SamplingParams()] * num_slots

    def apply(self, output: ScheduleOutput) -> None:
        """Released slots, then new sequences, then block appends: all that fit, whatever else does not.

        Raises ValueError for the first that does not fit, once the others are applied. The scheduler sends a diff only once, so
        a release that came with a bad one must not be lost; a slot whose own diff did not fit holds no sequence any more.
        """
        failures: list[str] = []
        for slot in output.released_slots:
            self._attempt(failures, slot, self._release, slot)
        for new in output.new:
            self._attempt(failures, new.slot, self._add, new)
        for append in output.appends:
            self._attempt(failures, append.slot, self._append, append)
        if not self._grow(output.grown_slots, output.grown_blocks):
            for slot, *block_ids in zip(output.grown_slots, *output.grown_blocks, strict=True):
                self._attempt(failures, slot, self._append, BlockAppend(slot, [[block] for block in block_ids]))
        if failures:
            raise ValueError(failures[0])

    def _grow(self, slots: list[int], blocks: list[list[int]]) -> bool:
        """One block more for each of these slots, all at once. False, and nothing is changed, where one of them does not fit."""
        if not slots:
            return True
        places, ids = np.array(slots, dtype=np.int64), np.array(blocks, dtype=np.int64)
        if ids.shape != (1, len(slots)) or not (places.min() >= 0 and places.max() < self.num_slots):
            return False
        begin = self.num_table_blocks[places]
        fits = self.used[places].all() and (begin < self.block_table.shape[1]).all() and len(set(slots)) == len(slots)
        if not fits or not (ids.min() >= 0 and ids.max() < self._num_blocks):
            return False
        self.block_table[places, begin] = ids[0]
        self.num_table_blocks[places] = begin + 1
        self._note_growth(places, begin, ids[0])
        return True

    def _note_growth(self, slots: np.ndarray, begin: np.ndarray, ids: np.ndarray) -> None:
        """Entry begin[i] of slots[i]'s table is ids[i] now."""

    def _attempt(self, failures: list[str], slot: int, change: Callable[[Any], None], argument: Any) -> None:
        try:
            change(argument)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # what numpy, torch and our own checks raise
            failures.append(str(error))
            if 0 <= slot < self.num_slots:
                self._release(slot)

    def prepare(self, scheduled: list[ScheduledSequence], decode_slots: list[int] | None = None) -> StepInputs:
        """The step's inputs. Raises ValueError if a token has no block to be written to, or lies outside its slot."""
        return self.inputs_of(self.layout(scheduled, decode_slots or []))

    def inputs_of(self, layout: StepLayout) -> StepInputs:
        """A step that is laid out already."""
        longest = -(-int(layout.seq_lens.max(initial=1)) // self.block_size)
        return StepInputs(
            input_ids=self.token_ids.view(-1).index_select(0, self.upload(layout.token_places)),
            positions=self.upload(layout.positions),
            slot_mapping=self.upload(layout.slot_mapping),
            query_start_loc=layout.query_start_loc,
            seq_lens=layout.seq_lens,
            block_table=torch.from_numpy(self.block_table[layout.slots, :longest]),
            sample_rows=self.upload(layout.sample_rows),
            sample_slots=layout.sample_slots,
            sample_positions=layout.sample_positions,
            sample_entries=layout.sample_entries,
        )

    def layout(self, scheduled: list[ScheduledSequence], decode_slots: list[int]) -> StepLayout:
        """Where the step's tokens are and go, on the host. Raises ValueError like prepare()."""
        entries = np.array([(s.slot, s.start, s.num_tokens, s.sample) for s in scheduled], dtype=np.int64).reshape(-1, 4)
        rows = np.concatenate([entries, self._decodes(decode_slots)])
        order = np.argsort(rows[:, 2] > 1, kind="stable")  # one-token rows first: backends compute them together
        slots, starts, counts, sampled = rows[order].T
        self._check_scheduled(slots, starts, counts)
        query_start_loc = np.concatenate([[0], np.cumsum(counts)])
        total = int(query_start_loc[-1])
        token_slots = np.repeat(slots, counts)
        positions = np.arange(total) + np.repeat(starts - query_start_loc[:-1], counts)
        blocks = self.block_table[token_slots, positions // self.block_size]
        if (blocks == 0).any():
            raise ValueError("a scheduled token's block is the null block")
        seq_lens = starts + counts
        chosen = np.flatnonzero(sampled)
        return StepLayout(
            token_places=token_slots * self.max_tokens + positions,
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            slots=slots,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            sample_rows=query_start_loc[1:][chosen] - 1,
            sample_slots=slots[chosen],
            sample_positions=seq_lens[chosen],
            sample_entries=order[chosen],
        )

    def upload(self, array: np.ndarray) -> Tensor:
        """An array as a tensor on the device, without waiting for it."""
        return to_device(torch.from_numpy(np.ascontiguousarray(array)), self._device)

    def _decodes(self, slots: list[int]) -> np.ndarray:
        """int64 [n, 4], as entries: the last known token of each slot, and sample the next."""
        rows = np.ones((len(slots), 4), dtype=np.int64)
        rows[:, 0] = slots
        for slot in slots:
            self._check_slot(slot)
        rows[:, 1] = self.num_tokens[rows[:, 0]] - 1
        return rows

    def padding(self, rows: int, zeros: Tensor) -> StepInputs:
        """Inputs that see no key and write nothing: one row each of `rows` empty sequences. zeros: int64 [rows]."""
        none = np.zeros(rows, dtype=np.int64)
        table = torch.zeros(rows, 1, dtype=torch.int64)
        starts = np.arange(rows + 1)
        return StepInputs(zeros, zeros, zeros - 1, starts, none, table, zeros[:1], none[:0], none[:0], none[:0])

    def store(self, slots: np.ndarray, positions: np.ndarray, tokens: Tensor) -> None:
        """Puts sampled tokens int64 [S] at their slots' positions."""
        self.token_ids.view(-1).index_copy_(0, self.upload(slots * self.max_tokens + positions), tokens)
        self.num_tokens[slots] = positions + 1

    def _add(self, new: NewSequence) -> None:
        slot, count = new.slot, len(new.token_ids)
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is outside [0, {self.num_slots})")
        if count > self.max_tokens:
            raise ValueError(f"a sequence of {count} tokens is longer than {self.max_tokens}")
        tokens = np.array(new.token_ids, dtype=np.int64)
        if count and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise ValueError(f"a token id is outside [0, {self._vocab_size})")
        sampling = SamplingParams(**new.sampling)
        self._release(slot)  # sent again (after a preemption): the old state goes, whole
        self.token_ids[slot, :count] = self.upload(tokens)
        self.num_tokens[slot] = count
        self.num_prompt_tokens[slot] = new.num_prompt_tokens
        self.sampling[slot] = sampling
        self.used[slot] = True
        self._extend_table(slot, new.block_tables)

    def _append(self, append: BlockAppend) -> None:
        self._check_slot(append.slot)
        self._extend_table(append.slot, append.block_ids)

    def _release(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is outside [0, {self.num_slots})")
        self.block_table[slot, : self.num_table_blocks[slot]] = 0  # stale ids must never be written through
        self.num_table_blocks[slot] = 0
        self.used[slot] = False

    def _extend_table(self, slot: int, groups: list[list[int]]) -> None:
        if len(groups) != 1:
            raise ValueError(f"this model has one KV-cache group, the step names {len(groups)}")
        ids = groups[0]
        begin = int(self.num_table_blocks[slot])
        if begin + len(ids) > self.block_table.shape[1]:
            raise ValueError(f"slot {slot} would hold {begin + len(ids)} blocks, more than {self.block_table.shape[1]}")
        if ids and not 0 <= min(ids) <= max(ids) < self._num_blocks:
            raise ValueError(f"a block id of slot {slot} is outside [0, {self._num_blocks})")
        self.block_table[slot, begin : begin + len(ids)] = ids
        self.num_table_blocks[slot] = begin + len(ids)

    def _check_slot(self, slot: int) -> None:
        if not (0 <= slot < self.num_slots and self.used[slot]):
            raise ValueError(f"slot {slot} holds no sequence")

    def _check_scheduled(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        for slot in slots.tolist():
            self._check_slot(slot)
        if len(np.unique(slots)) != len(slots):
            raise ValueError("a slot is scheduled twice in one step")
        if (counts < 1).any() or (starts < 0).any():
            raise ValueError("a scheduled sequence needs at least one token, from position 0 on")
        ends = starts + counts
        if (ends >= self.max_tokens).any() or (ends > self.num_table_blocks[slots] * self.block_size).any():
            raise ValueError("a scheduled token lies beyond its sequence's blocks")
