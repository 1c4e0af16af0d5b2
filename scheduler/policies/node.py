"""A node of a WaitTree, and its virtual counter. Work that is charged step after step (sequences that decode) is a rate: the
counter is brought up to date when it is read, so that a step does not touch every node it charges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fairlane.scheduler.request import Payer

if TYPE_CHECKING:
    from fairlane.scheduler.policies.line import Line


class SteadyCost:
    """What every decoding sequence of a tree has been charged so far, in cost units; all its nodes share one."""

    __slots__ = ("units",)

    def __init__(self) -> None:
        self.units = 0


class Node:
    """`queued`: waiting sequences below it; `running`: running ones; `decoding`: those of them charged by rate;
    `entered`: the key of its live entry in the parent's heap, None when it has none; `last`: the child charged last, but for
    those charged by rate, which are in `steady`."""

    __slots__ = (
        "_since",
        "_steady",
        "_v",
        "children",
        "closed",
        "decoding",
        "entered",
        "heap",
        "idle",
        "key",
        "last",
        "line",
        "name",
        "parent",
        "path",
        "queued",
        "running",
        "steady",
        "uid",
        "weight",
    )

    def __init__(self, name: str, path: str, parent: Node | None, weight: float, uid: int, steady: SteadyCost) -> None:
        self.name = name
        self.path = path  # of the ownership tree; "" for the root and tiers
        self.parent = parent
        self.weight = weight
        self.uid = uid
        self._v = 0.0
        self._steady = steady
        self._since = steady.units
        self.decoding = 0
        self.last: Node | None = None
        self.steady: set[Node] = set()
        self.entered: float | None = None
        self.closed = False
        self.queued = 0
        self.running = 0
        self.children: dict[str, Node] = {}
        self.heap: list[tuple[float, int, Node]] = []
        self.idle: list[tuple[float, int, Node]] = []
        self.line: Line | None = None
        self.key: Payer | str | None = None  # a leaf's, in the tree's index

    @property
    def v(self) -> float:
        """Its counter: cost over weight, in cost units."""
        units = self._steady.units
        if units != self._since:
            if self.decoding:
                self._v += self.decoding * (units - self._since) / self.weight
            self._since = units
        return self._v

    @v.setter
    def v(self, value: float) -> None:
        self._v, self._since = value, self._steady.units

    @property
    def last_v(self) -> float:
        """The counter of the child charged last (of several in one step the one furthest ahead); 0 before any was."""
        if self.steady:
            return max(child.v for child in self.steady)
        return 0.0 if self.last is None else self.last.v

    def decode(self, change: int) -> None:
        """So many more sequences below it are charged by rate."""
        self.v = self.v  # what was owed at the old rate
        self.decoding += change
        if self.parent is not None:
            self.parent.last = self
            if self.decoding:
                self.parent.steady.add(self)
            else:
                self.parent.steady.discard(self)


def up(node: Node) -> Iterator[Node]:
    """The node and its ancestors, the root last."""
    current: Node | None = node
    while current is not None:
        yield current
        current = current.parent
