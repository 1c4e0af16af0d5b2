"""The waiting sequences of one band as a tree: [tier] -> organisation -> tenant -> member, with a Line at each leaf. It answers
who goes next, by arrival or by fair share, in O(depth log fan-out), and never walks what waits.

FAIR: each node has a virtual counter v = cost / weight, of two ledgers the larger; the child with the smallest goes next, level
by level. This is VTC (Sheng et al., OSDI 2024), made hierarchical as in H-SFQ. A node that goes from no queued work to queued
work is lifted to the smallest counter of those beside it that can go (else to the largest there is, as SFQ begins a busy period),
so that idle time earns no claim.

Heaps are repaired lazily: an entry holds the key its node had when it was pushed, and a node has one live entry. Keys mostly
grow (a charge, a head that went), so a stale entry is too small, surfaces early and is pushed again; a key that shrinks (a
sequence comes back) pushes a new entry at once, and the old one is dropped when it surfaces.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace

from fairlane.scheduler.cost import Ledger
from fairlane.scheduler.policies.base import Rank
from fairlane.scheduler.policies.caps import RunningCaps, tier_gate
from fairlane.scheduler.policies.line import Line
from fairlane.scheduler.policies.node import Node, SteadyCost, branch, named, standing, up
from fairlane.scheduler.request import Payer, RequestId, Sequence
from fairlane.scheduler.tenancy import NodeShare, Tier, WithinTier

# Levels below the tier: organisation, tenant, member ("" for requests of the tenant itself).
_LEVELS = 3


class WaitTree:
    """Waiting sequences of one band, and the counters of everything that was served from it."""

    def __init__(
        self,
        within: WithinTier,
        tiers: dict[str, Tier],
        shares: dict[str, NodeShare],
        caps: RunningCaps,
        *,
        by_tier: bool,
        predicts: bool = False,
        steady: SteadyCost | None = None,
    ) -> None:
        """predicts: counters go by what is expected of running sequences, too. steady: other trees', charged with it."""
        self._fair = within is WithinTier.FAIR
        self._tiers = tiers
        self._shares = shares
        self._caps = caps
        self._by_tier = by_tier
        self._predicts = predicts and self._fair
        self._foreseen: dict[RequestId, tuple[int, int]] = {}  # of running ones: what is expected, and charged before that
        self._uids = 0
        self._leaves: dict[Payer | str, Node] = {}
        self._touched: list[Node] = []
        self._carried: set[Node] = set()  # had waiting sequences under the policy before, and have none here yet
        self._closed = False
        self._moves = 0  # of counters
        self._steady = steady or SteadyCost()
        self._charged = self._steady.totals
        self.root = Node("", "", None, 1.0, 0, self._steady)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def push(self, sequence: Sequence) -> None:
        leaf = self._leaf(sequence)
        if leaf.line is None:
            leaf.line = Line()
        leaf.line.push(sequence)
        if not leaf.queued:
            self._lift(leaf)
        for node in up(leaf):
            node.queued += 1
        self._offer(leaf)

    def remove(self, sequence: Sequence) -> None:
        """KeyError if it does not wait here."""
        leaf = self._leaf(sequence)
        if leaf.line is None:
            raise KeyError(sequence.request_id)
        leaf.line.remove(sequence)
        for node in up(leaf):
            node.queued -= 1
        self._retire(leaf)

    def peek(self, names: tuple[str, ...] = ()) -> Sequence | None:
        """The next sequence; below the node with these names only, if given."""
        node = None if self._closed or not self.root.queued else self._find(names)
        leaf = None if node is None or (names and self._is_closed(names[0])) else self._best_leaf(node)
        return leaf.line.head() if leaf is not None and leaf.line is not None else None

    def _is_closed(self, name: str) -> bool:
        """A child of the root, which stands for a tier where the tree is by tier."""
        node = self.root.children[name]
        return node.closed or (self._by_tier and self._caps.is_shut(node.gate))

    def lines_within(self, lead: float, most: int) -> list[Line]:
        """FAIR: of leaves that are ahead, at every level, of the one whose turn it is there by at most `lead`, in cost of that
        one's weight; at most so many, and at each level only those that are first found of very many."""
        found: list[Line] = []
        nodes = [self.root]
        while nodes and len(found) < most:
            node = nodes.pop()
            if node.line is not None:
                found.append(node.line)
                continue
            best = self._best_child(node)
            if best is not None:
                nodes += self._children_to(node, best.v + lead / best.weight, most)
        return found

    def num_queued(self, names: tuple[str, ...] = ()) -> int:
        """Waiting sequences below the node with these names."""
        node = self._find(names)
        return 0 if node is None else node.queued

    def take_place(self, sequence: Sequence) -> None:
        """The sequence is about to leave as the head: it takes its line's earliest place."""
        line = self._leaf(sequence).line
        if line is not None:
            line.take_first_place(sequence)

    def place_of(self, sequence: Sequence) -> int:
        """The place its line would take next."""
        line = self._leaf(sequence).line
        return sequence.place if line is None or line.head() is None else line.place()

    def line_beside(self, sequence: Sequence) -> Line | None:
        """Those that wait at the leaf of a running sequence; None if nobody does."""
        line = self._leaf(sequence).line
        return None if line is None or line.head() is None else line

    def exchange_place(self, sequence: Sequence) -> None:
        """A running sequence takes the earliest place of those that wait at its leaf, and gives its own for it."""
        leaf = self._leaf(sequence)
        if leaf.line is not None:
            leaf.line.exchange_first_place(sequence)
            self._offer(leaf)

    def skip(self, sequence: Sequence) -> None:
        """Sets it aside until restore()."""
        leaf = self._leaf(sequence)
        if leaf.line is None:
            raise LookupError("nothing to skip")
        leaf.line.skip(sequence)
        self._touched.append(leaf)

    def close(self, tiers: frozenset[str] | None) -> None:
        """Until restore(), these tiers have no head; None: nobody has (a tree that is not by tier closes whole)."""
        if tiers is None or not self._by_tier:
            self._closed = True
        else:
            for node in [self.root.children[name] for name in tiers if name in self.root.children]:
                node.closed = True
                self._touched.append(node)

    def restore(self) -> None:
        self._closed = False
        for node in self._touched:
            node.closed = False
            if node.line is not None:
                node.line.restore()
            self._offer(node)
        self._touched.clear()

    def rank(self, sequence: Sequence, *, waiting: bool) -> Rank:
        """By arrival: its place. FAIR: counter and id at each level, then the place; peek() returns the smallest."""
        place = self.place_of(sequence) if waiting else sequence.place
        if not self._fair:
            return (place,)
        return (*self._standing(sequence.payer), place)

    def _standing(self, payer: Payer) -> tuple[float, ...]:
        """Remembered until a counter moves: those that run are sorted by it, and many are of one leaf."""
        if self._charged is not self._steady.totals:
            self._charged = self._steady.totals
            self._moves += 1
        leaf = self._leaf_of(payer)
        if leaf.stood_at != self._moves:
            leaf.stood_at, leaf.stood = self._moves, standing(leaf)
        return leaf.stood

    def position(self, sequence: Sequence) -> int:
        """Estimated number of waiting sequences before it."""
        if not self._fair:
            return self.root.queued - 1
        line = self._leaf(sequence).line
        ahead = 0 if line is None else len(line) - 1
        busy = max(1, sum(1 for child in self.root.children.values() if child.queued))
        return min(self.root.queued - 1, ahead * busy)

    # -- counters ------------------------------------------------------------------------------------------------------

    def lift(self, names: tuple[str, ...]) -> None:
        """To be called while its own `ceil` still keeps the node from its turns: that earns no more of a claim than idle time."""
        node = self._find(names)
        if self._fair and node is not None and node.parent is not None and node.queued:
            self._moves += 1
            node.lift(self._floor(node.parent))

    def charge(self, payer: Payer, cost: int, ledger: Ledger) -> None:
        if not self._fair:
            return
        self._moves += 1
        leaf = self._leaf_of(payer)
        came = cost if ledger is Ledger.WORK and cost > 0 else 0  # a refund is of a sequence that has left
        for node in up(leaf):
            if node.parent is not None:
                node.charge(cost, ledger, came)
        if cost < 0:
            self._offer(leaf)
        if not leaf.queued and not leaf.running:  # who evicted pays for the recompute, here or not
            self._retire(leaf)

    def unexpect(self, payer: Payer, cost: int) -> None:
        """So much of what the payer is charged next is for none of its own sequences."""
        if self._predicts:
            self._expect(self._leaf_of(payer), 0, -cost)

    def decode(self, payer: Payer, change: int, tokens: int) -> None:
        """So many more of the payer's sequences, with so many tokens more, are charged by `steady`."""
        if not self._fair:
            return
        for node in up(self._leaf_of(payer)):
            node.decode(change, tokens)

    def adopt(self, sequence: Sequence) -> None:
        """It runs: its nodes stay known."""
        leaf = self._leaf(sequence)
        for node in up(leaf):
            node.running += 1
        if self._predicts:
            charged = sequence.charged[Ledger.WORK]
            expected = max(0, sequence.expected_charge - charged)
            self._foreseen[sequence.request_id] = (expected, charged)
            self._expect(leaf, expected, 0)

    def release(self, sequence: Sequence) -> None:
        leaf = self._leaf(sequence)
        for node in up(leaf):
            node.running -= 1
        if self._predicts:
            expected, charged = self._foreseen.pop(sequence.request_id)
            self._expect(leaf, -expected, charged - sequence.charged[Ledger.WORK])
            self._offer(leaf)
        self._retire(leaf)

    def _expect(self, leaf: Node, cost: int, came: int) -> None:
        self._moves += 1
        for node in up(leaf):
            if node.parent is not None:
                node.expect(cost, came)

    def gap(self, candidate: Sequence, victim: Sequence) -> float:
        """How far the victim's side is ahead of the candidate's where their paths part, in cost of the one with the smaller
        weight (so that the unit of weights does not matter); 0 within one leaf and where it is behind. By what they were
        charged: what is expected of a victim ends with it, and by that the candidate would be the next one's victim."""
        for ahead, behind in zip(self._path_of(victim), self._path_of(candidate), strict=True):
            if ahead is not behind:
                return max(0.0, ahead.charged_v - behind.charged_v) * min(ahead.weight, behind.weight)
        return 0.0

    def lead(self, sequence: Sequence) -> tuple[float, ...]:
        """Whoever is furthest ahead has the largest. With ids: counters below two nodes that are level are of different units."""
        return self._standing(sequence.payer)

    def counters(self) -> dict[tuple[str, ...], float]:
        """Every node's counter by its names from the root, for a policy that takes over."""
        return {names: node.charged_v for names, node in named(self.root)}

    def take_over(self, counters: dict[tuple[str, ...], float], backlogged: set[tuple[str, ...]]) -> None:
        """Starts with another tree's counters, before anything is pushed. backlogged: nodes that have not been idle since."""
        self._moves += 1
        for names, v in sorted(counters.items(), key=lambda item: len(item[0])):
            node = self.root
            for name in names:
                node = self._child(node, name)
            node.lift(v)
            if names in backlogged:
                self._carried.add(node)

    def leaf_key(self, payer: Payer) -> Payer | str:
        """Whose requests share a leaf: a tenant's of one tier, of all tiers where the tree is not by tier."""
        return payer if self._by_tier else payer.tenant

    # -- inside --------------------------------------------------------------------------------------------------------

    def _find(self, names: tuple[str, ...]) -> Node | None:
        node: Node | None = self.root
        for name in names:
            node = None if node is None else node.children.get(name)
        return node

    def _leaf_of(self, payer: Payer) -> Node:
        key = payer if self._by_tier else payer.tenant  # leaf_key(), without the call
        leaf = self._leaves.get(key)
        if leaf is not None:
            return leaf
        parts = payer.tenant.split("/", _LEVELS - 1)
        parts += [""] * (_LEVELS - len(parts))
        node = self.root
        for name in (payer.tier, *parts) if self._by_tier else parts:
            node = node.children.get(name) or self._child(node, name)
        node.key = key
        self._leaves[key] = node
        return node

    def _leaf(self, sequence: Sequence) -> Node:
        return self._leaf_of(sequence.payer)

    def _path_of(self, sequence: Sequence) -> list[Node]:
        return [node for node in up(self._leaf(sequence)) if node.parent is not None][::-1]

    def _child(self, parent: Node, name: str) -> Node:
        child = parent.children.get(name)
        if child is not None:
            return child
        self._uids += 1
        if self._by_tier and parent is self.root:
            tier = self._tiers.get(name)
            child = Node(name, "", parent, 1.0 if tier is None else tier.weight, self._uids, self._steady)
            if tier is not None and tier.ceil is not None:
                child.gate = tier_gate(name)
        else:
            path = f"{parent.path}/{name}" if parent.path and name else name or parent.path
            child = Node(name, path, parent, self._weight(path, parent.path) if name else 1.0, self._uids, self._steady)
        parent.children[name] = child
        return child

    def _weight(self, path: str, parent_path: str) -> float:
        share = self._shares.get(path)
        if share is not None:
            return share.weight
        parent = self._shares.get(parent_path)
        return 1.0 if parent is None else parent.member_weight

    def _lift(self, leaf: Node) -> None:
        if not self._fair:
            return
        self._moves += 1
        for node in up(leaf):
            if node.parent is not None and not node.queued:
                if node in self._carried:
                    self._carried.discard(node)
                else:
                    node.lift(self._floor(node.parent))

    def _floor(self, parent: Node) -> float:
        """The smallest counter of those that can go, what this step set aside included, else the largest there is. Heads are
        looked for, not taken from the heap's top, so that no claim depends on whether somebody has asked for them before."""
        aside = (node if node.line is not None else self._best_leaf(node) for node in self._touched)
        leaves = [self._best_leaf(parent), *aside]
        branches = [branch(parent, leaf, self._caps.is_full) for leaf in leaves if leaf is not None and leaf.queued]
        return min((child.v for child in branches if child is not None), default=parent.highest_v)

    def _offer(self, leaf: Node) -> None:
        """Enters the node and its ancestors into their parents' heaps, where they are not in under as small a key."""
        node, parent = leaf, leaf.parent
        while parent is not None:
            key = self._key(node)
            if key is not None and (node.entered is None or key < node.entered):
                node.entered = key
                heappush(parent.heap, (key, node.uid, node))
            node, parent = parent, parent.parent

    def _key(self, node: Node) -> float | None:
        """None: nothing below it can go now."""
        if not node.queued or node.closed:
            return None
        if self._fair:
            return node.v
        if node.line is not None:
            return node.line.place() if node.line.head() is not None else None
        best = self._best_child(node)
        return None if best is None else self._key(best)

    def _best_child(self, parent: Node) -> Node | None:
        heap = parent.heap
        while heap:
            key, _, node = heap[0]
            if key != node.entered or parent.children.get(node.name) is not node:
                heappop(heap)
                continue
            current = self._key(node)
            if current is None:
                self._leave_heap(parent)
            elif node.gate and self._caps.is_full(node.gate):
                self._leave_heap(parent)
                self._caps.park(node.gate, node, self._offer)
            elif key == current:
                return node
            else:
                node.entered = current
                heapreplace(heap, (current, node.uid, node))
        return None

    def _children_to(self, parent: Node, v: float, most: int) -> list[Node]:
        """Children with a head and a counter of v at most, the nearest last, of the first entries of the heap. An entry's key may
        be too small, never too large, so what is beyond v, and below that in the heap, need not be looked at."""
        heap, found = parent.heap, dict[int, Node]()
        places = [0]
        for place in places:
            if place >= len(heap) or heap[place][0] > v:
                continue
            key, uid, node = heap[place]
            if key == node.entered and parent.children.get(node.name) is node:
                current = self._key(node)
                if current is not None and current <= v and not (node.gate and self._caps.is_full(node.gate)):
                    found[uid] = node
            if len(places) < 2 * most:
                places += (2 * place + 1, 2 * place + 2)
        return sorted(found.values(), key=lambda node: (-node.v, -node.uid))

    def _leave_heap(self, parent: Node) -> None:
        heappop(parent.heap)[2].entered = None

    def _best_leaf(self, node: Node) -> Node | None:
        """Down to a leaf with a head; a branch whose heads are all set aside or full is left out until one comes back."""
        while node.line is None:
            best = self._best_child(node)
            if best is None:
                return None
            leaf = best if best.line is not None else self._best_leaf(best)
            if leaf is not None and leaf.line is not None and leaf.line.head() is not None:
                return leaf
            self._leave_heap(node)
        return node

    def _retire(self, leaf: Node) -> None:
        """Forgets nodes that neither wait nor run, once their counters could not matter: at or below what a newcomer would
        be lifted to. Those ahead are kept until the others have caught up."""
        node: Node | None = leaf
        while node is not None and node.parent is not None and not node.queued and not node.running:
            heappush(node.parent.idle, (node.v, node.uid, node))
            self._sweep(node.parent)
            node = node.parent

    def _sweep(self, parent: Node) -> None:
        floor = self._floor(parent) if self._fair else 0.0
        while parent.idle and (not self._fair or parent.idle[0][0] <= floor):
            _, _, node = heappop(parent.idle)
            current = parent.children.get(node.name) is node
            if current and not node.queued and not node.running and (not self._fair or node.v <= floor):
                del parent.children[node.name]
                self._forget_leaves(node)

    def _forget_leaves(self, node: Node) -> None:
        if node.key is not None:
            self._leaves.pop(node.key, None)
        for child in node.children.values():
            self._forget_leaves(child)
