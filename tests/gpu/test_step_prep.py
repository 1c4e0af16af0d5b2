"""The step kernels on the device against the torch reference on the host: whole buffers at full size, and a chain of decode steps
replayed from one CUDA graph, which the host only watches."""

from __future__ import annotations

from device import cuda

# isort: split
import torch
from torch import Tensor

from fairlane.kernels import reference_step as reference
from fairlane.kernels.reference_step import DecodeInputs, SlotState
from fairlane.kernels.step_prep import step_prep, store_sampled

SLOTS, ROWS, MAX_BLOCKS, BLOCK_SIZE = 300, 256, 2500, 16  # three tiles of the table, the last one not whole
MAX_TOKENS = MAX_BLOCKS * BLOCK_SIZE
FIELDS = ("input_ids", "positions", "slot_mapping", "seq_lens", "block_table")
UNREAD, STALE = 2**31 - 1, 123456  # in tables where nothing may look; in outputs, from an earlier batch


def state_of(seed: int) -> SlotState:
    """Shuffled blocks up to each sequence's end, and beyond it what must never be read."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, MAX_TOKENS - 8, (SLOTS,), generator=generator, dtype=torch.int32)
    lengths[::7] = torch.randint(0, 40, lengths[::7].shape, generator=generator, dtype=torch.int32)
    table = (torch.randperm(SLOTS * MAX_BLOCKS, generator=generator).to(torch.int32) + 1).view(SLOTS, MAX_BLOCKS)
    room = (lengths + 8 + BLOCK_SIZE - 1) // BLOCK_SIZE  # blocks for the eight steps to come
    table[torch.arange(MAX_BLOCKS)[None, :] >= room[:, None]] = UNREAD
    return SlotState(torch.randint(0, 1000, (SLOTS,), generator=generator, dtype=torch.int32), lengths, table)


def on(device: torch.device | str, state: SlotState) -> SlotState:
    return SlotState(*(getattr(state, name).to(device, copy=True) for name in SlotState.__slots__))


def stale(device: torch.device | str) -> DecodeInputs:
    """Outputs as an earlier batch left them."""
    out = DecodeInputs.allocate(ROWS, MAX_BLOCKS, device)
    for name in FIELDS:
        getattr(out, name).fill_(STALE)
    return out


def some_slots(seed: int) -> Tensor:
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:ROWS].to(torch.int32)
    slots[200:] = -1
    slots[17] = SLOTS
    return slots


def differing(one: DecodeInputs, other: DecodeInputs) -> list[str]:
    return [name for name in FIELDS if not torch.equal(getattr(one, name).cpu(), getattr(other, name).cpu())]


def test_inputs_are_the_references_at_full_size() -> None:
    found = []
    for seed in range(3):
        state, slots, out, expected = state_of(seed), some_slots(seed), stale(cuda), stale("cpu")
        step_prep(slots.to(cuda), on(cuda, state), BLOCK_SIZE, out=out)
        reference.step_prep(slots, state, BLOCK_SIZE, out=expected)
        found += differing(out, expected)
    assert found == []


def test_a_graph_of_steps_replays_what_the_reference_does_step_by_step() -> None:
    host, slots, expected, tokens = state_of(9), some_slots(9), stale("cpu"), torch.zeros(SLOTS, MAX_TOKENS, dtype=torch.int64)
    state, device_slots, out, device_tokens = on(cuda, host), slots.to(cuda), stale(cuda), tokens.to(cuda)
    sampled = torch.zeros(ROWS, dtype=torch.int64, device=cuda)

    def step() -> None:
        step_prep(device_slots, state, BLOCK_SIZE, out=out)
        torch.add(out.input_ids, out.positions, out=sampled)
        store_sampled(device_slots, sampled, device_tokens, state.num_tokens, state.last_token)

    nobody = torch.full_like(device_slots, -1)
    step_prep(nobody, state, BLOCK_SIZE, out=out)  # compiled outside the capture; changes no sequence
    store_sampled(nobody, sampled, device_tokens, state.num_tokens, state.last_token)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found = []
    for _ in range(6):
        for name in FIELDS:
            getattr(out, name).fill_(STALE)
            getattr(expected, name).fill_(STALE)
        graph.replay()
        reference.step_prep(slots, host, BLOCK_SIZE, out=expected)
        reference.store_sampled(slots, expected.input_ids + expected.positions, tokens, host.num_tokens, host.last_token)
        found += differing(out, expected)
    kept = [torch.equal(getattr(state, name).cpu(), getattr(host, name)) for name in SlotState.__slots__]
    assert (found, kept, torch.equal(device_tokens.cpu(), tokens)) == ([], [True] * 3, True)
