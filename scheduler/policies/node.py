"""A node of a WaitTree, and its virtual counter. Work that is charged step after step (sequences that decode) is a rate: the
counter is brought up to date when it is read, so that a step does not touch every node it charges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from fairlane.scheduler.cost import Ledger, Rate
from fairlane.scheduler.request import Payer

if TYPE_CHECKING:
    from fairlane.scheduler.policies.line import Line


class SteadyCost:
    """What every decoding sequence of a policy's trees has been charged so far, in cost units: `totals`, as WORK so much each and
    so much per token of its own, then the same as HELD. All nodes share one; it is another tuple after every charge."""

    __slots__ = ("totals",)

    def __init__(self) -> None:
        self.totals = (0, 0, 0, 0)

    def charge(self, rate: Rate, ledger: Ledger) -> None:
        """By `rate`, for tokens as they were named to Node.decode()."""
        work, work_per_token, held, held_per_token = self.totals
        if ledger is Ledger.WORK:
            self.totals = (work + rate.per_sequence, work_per_token + rate.per_token, held, held_per_token)
        else:
            self.totals = (work, work_per_token, held + rate.per_sequence, held_per_token + rate.per_token)


class Node:
    """Its counter is of what it was charged (WORK and HELD, the larger), and with prediction of what its running sequences are
    still to be charged as well: what is expected of them together, less what they were charged since.

    `queued`: waiting sequences below it; `running`: running ones; `decoding`: those of them charged by rate, with `tokens`
    between them; `entered`: the key of its live entry in the parent's heap, None when it has none; `peak`: the largest counter
    that a child had when it was charged, but for those charged by rate, which are in `steady`; `stood`: standing() of a leaf,
    when the tree had counted so many moves as `stood_at` says."""

    __slots__ = (
        "_came",
        "_expected",
        "_lifted",
        "_settled",
        "_steady",
        "_used",
        "_v",
        "children",
        "closed",
        "decoding",
        "entered",
        "gate",
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
        "stood",
        "stood_at",
        "tokens",
        "uid",
        "weight",
    )

    def __init__(self, name: str, path: str, parent: Node | None, weight: float, uid: int, steady: SteadyCost) -> None:
        self.name = name
        self.path = path  # of the ownership tree; "" for the root and tiers
        self.gate = path  # what may be full or shut (caps.py); "" for nothing
        self.parent = parent
        self.weight = weight
        self.uid = uid
        self._used = [0, 0]  # by ledger
        self._expected = 0  # of running sequences, when they were admitted
        self._came = 0  # of that, or more, if they outgrew it
        self._lifted = 0.0
        self._v = 0.0
        self._steady = steady
        self._settled = steady.totals
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
        self.stood: tuple[float, ...] = ()
        self.stood_at = -1
        self.key: Payer | str | None = None  # a leaf's, in the tree's index

    @property
    def v(self) -> float:
        """Its counter, in cost units: the larger ledger over weight, and what it was lifted by."""
        if self._settled is not self._steady.totals:
            self._settle()
        return self._v

    @property
    def charged_v(self) -> float:
        """The same without what is only expected."""
        if self._settled is not self._steady.totals:
            self._settle()
        return self._lifted + max(self._used) / self.weight

    def charge(self, cost: int, ledger: Ledger, came: int) -> None:
        """came: how much of it was expected of a running sequence, or would have been."""
        if self._settled is not self._steady.totals:
            self._settle()
        self._used[ledger] += cost
        self._came += came
        self._v = self._lifted + self._claim()
        self._raise_peak()

    def expect(self, cost: int, came: int) -> None:
        """One more running sequence, of which `cost` is expected; or one less (negative), and what it was charged meanwhile."""
        if self._settled is not self._steady.totals:
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
        before, totals = self._settled, self._steady.totals
        if self.decoding:
            owed = self.decoding * (totals[0] - before[0]) + self.tokens * (totals[1] - before[1])
            self._came += owed
            self._used[Ledger.WORK] += owed
            self._used[Ledger.HELD] += self.decoding * (totals[2] - before[2]) + self.tokens * (totals[3] - before[3])
            self._v = self._lifted + self._claim()
        self._settled = totals

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


def standing(node: Node) -> tuple[float, ...]:
    """Counter and id of the node and of those above it, the root left out, from the top level down."""
    parts: list[float] = []
    totals = node._steady.totals
    while node.parent is not None:
        if node._settled is not totals:  # as in `v`, without the call
            node._settle()
        parts.append(node.uid)
        parts.append(node._v)
        node = node.parent
    parts.reverse()
    return tuple(parts)


def up(node: Node) -> Iterator[Node]:
    """The node and its ancestors, the root last."""
    current: Node | None = node
    while current is not None:
        yield current
        current = current.parent


def branch(parent: Node, node: Node, is_full: Callable[[str], bool]) -> Node | None:
    """The child of `parent` that the node is or is below; None if there is none, or a cap keeps it from its turn there."""
    for above in up(node):
        if above.gate and is_full(above.gate):
            return None
        if above.parent is parent:
            return above
    return None


def named(root: Node) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Every node below, with its names from the root."""
    stack: list[tuple[tuple[str, ...], Node]] = [((), root)]
    while stack:
        names, node = stack.pop()
        below = [((*names, name), child) for name, child in node.children.items()]
        yield from below
        stack += below
