"""A second CUDA stream for copies between host and device, and the waits that order it with the one that computes. All copies run
one after the other, in the order they were given. Nothing here makes the host wait."""

from __future__ import annotations

import torch
from torch import Tensor


class SideStream:
    """Copies beside the current stream. A mark is a place in one of the two streams; one never recorded is behind everybody."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        """A new mark."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def copy(self, runs: list[tuple[Tensor, Tensor]]) -> None:
        """(destination, source) of the same dtype, each contiguous, one of each pair in pinned memory."""
        with torch.cuda.stream(self._stream):
            for destination, source in runs:
                destination.copy_(source, non_blocking=True)

    def record(self, mark: torch.cuda.Event) -> None:
        """The mark is after the copies so far."""
        mark.record(self._stream)

    def wait(self, mark: torch.cuda.Event) -> None:
        """Later copies come after the mark."""
        self._stream.wait_event(mark)

    def record_compute(self, mark: torch.cuda.Event) -> None:
        """The mark is after all that the current stream was given so far."""
        mark.record()

    def hold_compute(self, mark: torch.cuda.Event) -> None:
        """What the current stream is given from now on comes after the mark."""
        torch.cuda.current_stream().wait_event(mark)
