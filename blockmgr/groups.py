"""KV-cache groups: layers that keep their keys and values in one block table because they see the same part of the past.
Here is the one definition of what a sliding window sees; the kernels' masks must agree with it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class GroupKind(Enum):
    """How far back the layers of a group look."""

    FULL = "full"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One block table per sequence. window: tokens a query sees, itself included (WINDOW only).

    Key j is visible to query i iff  i - window < j <= i  (FULL: 0 <= j <= i).
    """

    kind: GroupKind
    window: int | None = None

    def __post_init__(self) -> None:
        if self.kind is GroupKind.FULL and self.window is not None:
            raise ValueError("a full-attention group has no window")
        if self.kind is GroupKind.WINDOW and (self.window is None or self.window < 1):
            raise ValueError(f"a window group needs a window of at least 1 token, not {self.window}")

    @classmethod
    def full(cls) -> KVGroup:
        return cls(GroupKind.FULL)

    @classmethod
    def sliding(cls, window: int) -> KVGroup:
        return cls(GroupKind.WINDOW, window)

    def num_dead_blocks(self, position: int, block_size: int) -> int:
        """How many leading blocks no query at `position` or later can see.

        The oldest visible key is position - window + 1; a block is dead when its last slot lies before that.
        """
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // block_size

    def position_of_death(self, index: int, block_size: int) -> int | None:
        """The first query position from which block `index` is dead; None: it always stays visible."""
        if self.window is None:
            return None
        return (index + 1) * block_size + self.window - 1
