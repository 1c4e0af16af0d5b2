"""What the block manager can refuse. None of these reaches a user as it is: the scheduler turns a shortage into waiting or
preemption, and an integrity fault into a worker that reports itself unhealthy."""

from __future__ import annotations

from collections.abc import Sequence


class NoFreeBlocks(Exception):
    """An operation needs `needed` blocks and only `free` are there. Whoever raises it has changed nothing."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} free")
        self.needed = needed
        self.free = free


class StaleHit(ValueError):
    """A prefix hit names a block that no longer holds what it held at lookup; look up again. Nothing was changed."""


class IntegrityError(Exception):
    """The block manager's own books disagree: a bug here, never the caller's. `faults` holds every disagreement found."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)
