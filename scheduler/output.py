"""ScheduleOutput: the whole contract between the scheduler and whoever runs a step. Known sequences travel as diffs, new
ones in full; only plain values, so that it can be sent to other ranks as msgpack.

Most of a busy step is sequences that decode one token, as they did in the step before. They are one column of slots, the same
list object for as long as it stays the same, and their tokens come back as one column; an entry each is kept for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class NewSequence:
    """A sequence the runner does not know (or knows no longer): its whole state.

    token_ids: prompt and known output tokens. block_tables: one list of block ids per KV-cache group.
    sampling: keyword arguments of SamplingParams.
    """

    slot: int
    token_ids: list[int]
    num_prompt_tokens: int
    block_tables: list[list[int]]
    sampling: dict[str, Any]


@dataclass(slots=True)
class BlockAppend:
    """Block ids that go to the end of a known sequence's block tables, one list per KV-cache group."""

    slot: int
    block_ids: list[list[int]]


@dataclass(slots=True)
class ScheduledSequence:
    """Compute tokens [start, start + num_tokens) of a slot's sequence; `sample` the next one after them.

    The runner holds the token ids: those it was sent, then those it sampled itself.
    """

    slot: int
    start: int
    num_tokens: int
    sample: bool


@dataclass(slots=True)
class ScheduleOutput:
    """One step. The runner applies it in this order: released slots, new, appends, growth, swap_out, copies, swap_in, then it
    computes `scheduled` and `decode_slots`, which name a slot once between them. Lists may be shared with other steps: read-only.

    copies: (source, destination) block ids, to be copied in every layer before anything is written.
    swap_out: (device block, host block), read as all steps before left it and before anything of this one is written: the device
    block may be another's already. swap_in: (host block, device block), in place before the step reads it; a host block that an
    earlier step swaps out has what that step gave it. No host block is in both.
    decode_slots: compute the last token the runner knows of each of these and sample the next one.
    grown_slots, grown_blocks: as appends, in columns: grown_blocks[g][i] goes to the end of grown_slots[i]'s table of group g.
    """

    step_id: int
    released_slots: list[int] = field(default_factory=list)
    new: list[NewSequence] = field(default_factory=list)
    appends: list[BlockAppend] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    decode_slots: list[int] = field(default_factory=list)
    grown_slots: list[int] = field(default_factory=list)
    grown_blocks: list[list[int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_scheduled_tokens(self) -> int:
        placed = sum(entry.num_tokens for entry in self.scheduled) if self.scheduled else 0
        return placed + len(self.decode_slots)

    def to_plain(self) -> dict[str, Any]:
        """Only dicts, lists, strings and numbers (msgpack- and JSON-safe)."""
        return {
            "step_id": self.step_id,
            "released_slots": list(self.released_slots),
            "new": [[n.slot, n.token_ids, n.num_prompt_tokens, n.block_tables, _plain_sampling(n.sampling)] for n in self.new],
            "appends": [[a.slot, a.block_ids] for a in self.appends],
            "copies": [list(pair) for pair in self.copies],
            "scheduled": [[s.slot, s.start, s.num_tokens, s.sample] for s in self.scheduled],
            "decode_slots": list(self.decode_slots),
            "grown_slots": list(self.grown_slots),
            "grown_blocks": [list(blocks) for blocks in self.grown_blocks],
            "swap_out": [list(pair) for pair in self.swap_out],
            "swap_in": [list(pair) for pair in self.swap_in],
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> ScheduleOutput:
        """The inverse of to_plain."""
        return cls(
            step_id=plain["step_id"],
            released_slots=list(plain["released_slots"]),
            new=[
                NewSequence(slot, ids, num_prompt, tables, _sampling_from_plain(sampling))
                for slot, ids, num_prompt, tables, sampling in plain["new"]
            ],
            appends=[BlockAppend(*row) for row in plain["appends"]],
            copies=[(source, destination) for source, destination in plain["copies"]],
            scheduled=[ScheduledSequence(*row) for row in plain["scheduled"]],
            decode_slots=list(plain["decode_slots"]),
            grown_slots=list(plain["grown_slots"]),
            grown_blocks=[list(blocks) for blocks in plain["grown_blocks"]],
            swap_out=[(device, host) for device, host in plain["swap_out"]],
            swap_in=[(host, device) for host, device in plain["swap_in"]],
        )


def _plain_sampling(sampling: dict[str, Any]) -> dict[str, Any]:
    return {**sampling, "logit_bias": [[token, bias] for token, bias in sampling["logit_bias"].items()]}


def _sampling_from_plain(plain: dict[str, Any]) -> dict[str, Any]:
    return {**plain, "logit_bias": dict(plain["logit_bias"])}


@dataclass(slots=True)
class StepResult:
    """What a step produced, aligned with ScheduleOutput.scheduled and decode_slots.

    tokens[i]: the 0..k token ids sampled for entry i (empty where `sample` was False). decode_tokens[i]: the one token of
    decode_slots[i]; the scheduler keeps the list. errors: what went wrong for one sequence alone (say, logits that are not
    finite), by entry index, decode_slots counted on after `scheduled`; its token is to be ignored.
    elapsed_s: how long the step took on the device.
    """

    step_id: int
    tokens: list[list[int]]
    decode_tokens: list[int] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    elapsed_s: float = 0.0
