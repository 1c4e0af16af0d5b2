"""A node of a WaitTree, and its virtual counter. Work that is charged step after step (sequences that decode) is a rate: the
counter is brought up to date when it is read, so that a step does not touch every node it charges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fairlane.scheduler.cost import Ledger, Rate
from fairlane.scheduler.request import Payer

if TYPE_CHECKING:
    from fairlane.scheduler.policies.line import Line


class SteadyCost:
    """What every decoding sequence of a tree has been charged so far, in cost units and by ledger: so much each, and so much per
    token of its own; all the tree's nodes share one. `steps` tells whether anything was charged since."""

    __slots__ = ("per_sequence", "per_token", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.per_sequence = [0, 0]
        self.per_token = [0, 0]

    def charge(self, rate: Rate, ledger: Ledger) -> None:
        """By `rate`, for tokens as they were named to Node.decode()."""
        self.steps += 1
        self.per_sequence[ledger] += rate.per_sequence
        self.per_token[ledger] += rate.per_token


class Node:
    """Its counter is of what it was charged (WORK and HELD, the larger), and with prediction of what its running sequences are
    still to be charged as well: what is expected of them together, less what they were charged since.

    `queued`: waiting sequences below it; `running`: running ones; `decoding`: those of them charged by rate, with `tokens`
    between them; `entered`: the key of its live entry in the parent's heap, None when it has none; `peak`: the largest counter
    that a child had when it was charged, but for those charged by rate, which are in `steady`."""

    __slots__ = (
        "_came",
        "_expected",
        "_lifted",
        "_settled",
        "_settled_steps",
        "_steady",
        "_used",
        "_v",
        "children",
        "closed",
        "decoding",
        "entered",
        "heap",
        "idle",
        "key",
        "line",
        "name",
        "parent",
        "path",
        "peak",
        "queued",
        "running",
        "steady",
        "tokens",
        "uid",
        "weight",
    )

    def __init__(self, name: str, path: str, parent: Node | None, weight: float, uid: int, steady: SteadyCost) -> None:
        self.name = name
        self.path = path  # of the ownership tree; "" for the root and tiers
        self.parent = parent
        self.weight = weight
        self.uid = uid
        self._used = [0, 0]  # by ledger
        self._expected = 0  # of running sequences, when they were admitted
        self._came = 0  # of that, or more, if they outgrew it
        self._lifted = 0.0
        self._v = 0.0
        self._steady = steady
        self._settled_steps = steady.steps
        self._settled = (steady.per_sequence.copy(), steady.per_token.copy())
        self.decoding = 0
        self.tokens = 0
        self.peak = 0.0
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
        """Its counter, in cost units: the larger ledger over weight, and what it was lifted by."""
        if self._settled_steps != self._steady.steps:
            self._settle()
        return self._v

    @property
    def charged_v(self) -> float:
        """The same without what is only expected."""
        if self._settled_steps != self._steady.steps:
            self._settle()
        return self._lifted + max(self._used) / self.weight

    def charge(self, cost: int, ledger: Ledger, came: int) -> None:
        """came: how much of it was expected of a running sequence, or would have been."""
        if self._settled_steps != self._steady.steps:
            self._settle()
        self._used[ledger] += cost
        self._came += came
        self._v = self._lifted + self._claim()
        self._raise_peak()

    def expect(self, cost: int, came: int) -> None:
        """One more running sequence, of which `cost` is expected; or one less (negative), and what it was charged meanwhile."""
        if self._settled_steps != self._steady.steps:
            self._settle()
        self._expected += cost
        self._came += came
        self._v = self._lifted + self._claim()

    def lift(self, v: float) -> None:
        """To at least v, whatever it was charged."""
        if v > self.v:
            self._lifted = v - self._claim()
            self._v = v
            self._raise_peak()

    def _raise_peak(self) -> None:
        parent = self.parent
        if parent is not None and self._v > parent.peak:
            parent.peak = self._v

    def _claim(self) -> float:
        work, held = self._used
        ahead = self._expected - self._came
        if ahead > 0:
            work += ahead
        return (work if work > held else held) / self.weight

    def _settle(self) -> None:
        steady = self._steady
        if self.decoding:
            sequences, tokens = self._settled
            for ledger in Ledger:
                each = steady.per_sequence[ledger] - sequences[ledger]
                owed = self.decoding * each + self.tokens * (steady.per_token[ledger] - tokens[ledger])
                self._used[ledger] += owed
                if ledger is Ledger.WORK:
                    self._came += owed
            self._v = self._lifted + self._claim()
        self._settled_steps = steady.steps
        self._settled = (steady.per_sequence.copy(), steady.per_token.copy())

    @property
    def highest_v(self) -> float:
        """The largest counter of any child, forgotten ones included; 0 before any was charged. Who comes while nobody waits
        starts there: beside somebody who got less, it would go before whoever got more while that was nobody's loss."""
        return max([self.peak, *(child.v for child in self.steady)])

    def decode(self, change: int, tokens: int) -> None:
        """So many more sequences below it, with so many tokens more, are charged by rate."""
        self._settle()  # what was owed at the old rate
        self.decoding += change
        self.tokens += tokens
        if self.parent is not None:
            self._raise_peak()
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
