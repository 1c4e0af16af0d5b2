"""The DecodeLane: running sequences that decode one token in every step, with nothing else to decide about them. A step places
all of them at once and takes their tokens in as one column, so that its cost does not grow with what each sequence has to be
told. Who may be here, and whether a step may place them all, is the step's pass's to decide (step_pass.py).

    per sequence, written back by settle()     members   a  b  c  d        placed   steps that placed all of them
                                               column 1  7  3  9  4        retired  columns that came back
                                               column 2  2  8  1  6
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import compress

from fairlane.blockmgr.lockstep import Lockstep
from fairlane.blockmgr.manager import BlockManager
from fairlane.scheduler.cost import Ledger, Rate
from fairlane.scheduler.events import Delta
from fairlane.scheduler.policies.base import Policy, Rank
from fairlane.scheduler.request import Payer, RequestId, Sequence, SequenceStatus


class DecodeLane:
    """`members`, `slots` and `request_ids` are aligned, and new lists whenever somebody comes or goes: a step in flight keeps
    the ones it was launched with. `joining`: who was placed in the last step, and comes in before the next one if it may.
    `stop_ids`: every token that ends a member. `worst_rank`: nobody's rank in it is worse; None where ranks change.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.members: list[Sequence] = []
        self.slots: list[int] = []
        self.request_ids: list[RequestId] = []
        self.joining: list[Sequence] = []
        self.stop_ids: frozenset[int] = frozenset()
        self.worst_rank: Rank | None = None
        self._growth = Lockstep(blocks)
        self._step = 0
        self._ends: dict[int, list[Sequence]] = {}
        self._done: list[Sequence] = []
        self._placed = 0
        self._each = [0, 0]  # charged so far, by ledger: every member, and per token of its offset
        self._per_token = [0, 0]
        self._since: dict[RequestId, tuple[list[int], list[int]]] = {}  # what that was when it joined
        self._offsets = 0  # of members' contexts against the number of the step, which grows with them; together
        self._columns: list[list[int]] = []
        self._stop_sets: Counter[frozenset[int]] = Counter()

    def __len__(self) -> int:
        return len(self.members)

    @property
    def has_done(self) -> bool:
        """Whether the last step was somebody's last."""
        return bool(self._done)

    # -- who is in it --------------------------------------------------------------------------------------------------

    def change(self, policy: Policy) -> None:
        """Before a step: who is done leaves, who will only decode from now on joins. Not sooner, so that the results of the
        last step find the lane as it was."""
        self.let_go(policy)
        if not self.joining:
            return
        steady = [sequence for sequence in self.joining if self.may_join(sequence)]
        self.joining = []
        if steady:
            self._bound_rank(steady, policy)
            self._join(steady)
            offsets: dict[Payer, list[int]] = defaultdict(list)
            for sequence in steady:
                offset = sequence.num_computed_tokens - self._step
                self._offsets += offset
                self._since[sequence.request_id] = (self._each.copy(), self._per_token.copy())
                offsets[sequence.payer].append(offset)
            for payer, of_payer in offsets.items():
                policy.on_decoding(payer, len(of_payer), sum(of_payer))

    def let_go(self, policy: Policy) -> None:
        """Takes out those that need no further step."""
        if self._done:
            done, self._done = self._done, []
            self.leave(done, policy)

    def may_join(self, sequence: Sequence) -> bool:
        """Whether it will decode one token in every step until it ends or somebody takes it out."""
        return (
            sequence.status is SequenceStatus.RUNNING
            and not sequence.steady_until
            and sequence.num_pending_tokens == 1
            and sequence.num_output_tokens + sequence.num_in_flight < sequence.request.max_tokens
            and self._growth.can_join(sequence.request_id, sequence.num_computed_tokens)
        )

    def _join(self, sequences: list[Sequence]) -> None:
        self.settle()
        for sequence in sequences:
            left = sequence.request.max_tokens - sequence.num_output_tokens - sequence.num_in_flight
            sequence.steady_until = self._step + left
            self._ends.setdefault(sequence.steady_until, []).append(sequence)
            self._growth.join(sequence.request_id, sequence.held_slot, sequence.num_computed_tokens)
            self._stop_sets[sequence.request.stop_token_ids] += 1
        self.members = [*self.members, *sequences]
        self.slots = [*self.slots, *(sequence.held_slot for sequence in sequences)]
        self.request_ids = [*self.request_ids, *(sequence.request_id for sequence in sequences)]
        self.stop_ids = frozenset().union(*self._stop_sets)

    def leave(self, sequences: list[Sequence], policy: Policy) -> None:
        """Those among them that are in it are placed one by one again; their tokens and counts are their own."""
        leaving = [sequence for sequence in sequences if sequence.steady_until]
        if not leaving:
            return
        self.settle()
        offsets: dict[Payer, list[int]] = defaultdict(list)
        for sequence in leaving:
            ends = self._ends.get(sequence.steady_until)
            if ends is not None:  # None: it has been placed for the last time
                ends.remove(sequence)
                if not ends:
                    del self._ends[sequence.steady_until]
            sequence.steady_until = 0
            self._growth.leave(sequence.request_id)
            self._stop_sets[sequence.request.stop_token_ids] -= 1
            offset = sequence.num_computed_tokens - self._step
            self._offsets -= offset
            sequence.charged = self.charged(sequence)
            del self._since[sequence.request_id]
            offsets[sequence.payer].append(offset)
        for payer, of_payer in offsets.items():
            policy.on_decoding(payer, -len(of_payer), -sum(of_payer))
        stays = [sequence.steady_until > 0 for sequence in self.members]
        self.members = list(compress(self.members, stays))
        self.slots = list(compress(self.slots, stays))
        self.request_ids = list(compress(self.request_ids, stays))
        self._stop_sets = +self._stop_sets
        self.stop_ids = frozenset().union(*self._stop_sets)

    def charged(self, sequence: Sequence) -> list[int]:
        """What a member has been charged until now, by ledger. After settle()."""
        each, per_token = self._since[sequence.request_id]
        offset = sequence.num_computed_tokens - self._step
        return [
            sequence.charged[ledger] + self._each[ledger] - each[ledger] + offset * (self._per_token[ledger] - per_token[ledger])
            for ledger in Ledger
        ]

    def tell_decoding(self, told: Callable[[Payer, int, int], None]) -> None:
        """All members, as policies are told of those that join (Policy.on_decoding). After settle()."""
        offsets: dict[Payer, list[int]] = defaultdict(list)
        for sequence in self.members:
            offsets[sequence.payer].append(sequence.num_computed_tokens - self._step)
        for payer, of_payer in offsets.items():
            told(payer, len(of_payer), sum(of_payer))

    def _bound_rank(self, joining: list[Sequence], policy: Policy) -> None:
        if policy.ranks_change:
            self.worst_rank = None
            return
        worst = max(policy.rank(sequence) for sequence in joining)
        known = self.worst_rank if self.members else None
        self.worst_rank = worst if known is None else max(worst, known)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def num_new_blocks(self) -> int:
        """Free blocks that place() would use up now."""
        return self._growth.num_new_blocks()

    def fits(self) -> bool:
        """Whether place() could be called now: blocks suffice, and every KV limit leaves room for them."""
        return self._growth.fits()

    def set_aside(self) -> None:
        """Accounts with KV limits count what place() would use up as good as used, until it is, or members have left."""
        self._growth.set_aside()

    def charge(self, policy: Policy, rate: Rate, ledger: Ledger) -> int:
        """Charges every member by the tokens it has computed. Returns the sum."""
        base = Rate(rate.of(self._step), rate.per_token) if rate.per_token else rate
        policy.on_steady_step(base, ledger)
        self._each[ledger] += base.per_sequence
        self._per_token[ledger] += base.per_token
        return base.per_sequence * len(self.members) + base.per_token * self._offsets

    def place(self) -> tuple[list[int], list[list[int]]]:
        """Every member computes its one token. Returns the slots that grew and their new blocks by group, as Lockstep.advance.
        NoFreeBlocks if blocks are short."""
        grown = self._growth.advance()
        self._step += 1
        self._placed += 1
        self._done = self._ends.pop(self._step, self._done)
        return grown

    def has_no_part_in(self, deltas: Mapping[RequestId, Delta]) -> bool:
        """Whether none of them tells of a member."""
        return not deltas or deltas.keys().isdisjoint(self.request_ids)

    def retire(self, token_ids: list[int]) -> None:
        """The tokens of a step that placed the members of today, in their order; none of them in stop_ids."""
        self._columns.append(token_ids)

    def settle(self) -> None:
        """Writes back what members are owed: tokens, and how far they have come."""
        placed, retired = self._placed, len(self._columns)
        if not placed and not retired:
            return
        if retired == 1:
            for sequence, token in zip(self.members, self._columns[0], strict=True):
                sequence.token_ids.append(token)
        elif retired:
            for sequence, tokens in zip(self.members, zip(*self._columns, strict=True), strict=True):
                sequence.token_ids.extend(tokens)
        in_flight = placed - retired
        for sequence in self.members:
            sequence.num_computed_tokens += placed
            sequence.num_retired_tokens += retired
        for sequence in self.members if in_flight else ():
            sequence.num_in_flight += in_flight
            sequence.steps_in_flight += in_flight
        self._placed = 0
        self._columns = []

    def update_tables(self) -> None:
        """Brings the block tables' lengths up to date, for reports and checks."""
        self._growth.update_tables()

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises RuntimeError when its lists, its calendar and what it is told of running sequences disagree. After settle()."""
        steady = {sequence for sequence in running if sequence.steady_until}
        if steady != set(self.members) or len(steady) != len(self.members):
            raise RuntimeError("the decode lane's members are not the running sequences that say so")
        if self.slots != [s.held_slot for s in self.members] or self.request_ids != [s.request_id for s in self.members]:
            raise RuntimeError("the decode lane's lists are not aligned")
        if any(sequence.request_id not in self._growth for sequence in self.members) or len(self._growth) != len(self.members):
            raise RuntimeError("others grow in lockstep than the decode lane's members")
        due = {sequence: step for step, ending in self._ends.items() for sequence in ending}
        if due != {sequence: sequence.steady_until for sequence in self.members if sequence.steady_until > self._step}:
            raise RuntimeError("the decode lane's calendar is not its members'")
        if self._offsets != sum(sequence.num_computed_tokens - self._step for sequence in self.members):
            raise RuntimeError("the decode lane charges for other contexts than its members have")
        for sequence in self.members:
            left = sequence.request.max_tokens - sequence.num_output_tokens - sequence.num_in_flight
            if sequence.num_pending_tokens != 1 or left != sequence.steady_until - self._step:
                raise RuntimeError(f"{sequence!r} is in the decode lane with {left} tokens left and other counts than it has")
