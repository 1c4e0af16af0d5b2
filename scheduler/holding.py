"""What running sequences are charged for the KV cache they hold, from one step to the next (cost.py's ledger HELD). Whoever runs
when it is charged pays for the time since it was charged last, whoever leaves pays on leaving; so all of it is charged once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairlane.scheduler.cost import Cost, Ledger, Rate
from fairlane.scheduler.request import Payer, Sequence

if TYPE_CHECKING:
    from fairlane.scheduler.lane import DecodeLane
    from fairlane.scheduler.policies.base import Policy
    from fairlane.scheduler.running import RunningSet


class Holding:
    """charged: of the last accrue(), in cost units."""

    def __init__(self, now_s: float) -> None:
        self.charged = 0
        self._since_s = now_s

    def accrue(self, running: RunningSet, lane: DecodeLane, policy: Policy, cost: Cost, now_s: float) -> None:
        """Charges everybody who runs for the time since the last call."""
        price = cost.holding(self._since_s, now_s)
        self._since_s = now_s
        self.charged = 0
        if not price:
            return
        if len(lane):
            self.charged += lane.charge(policy, Rate(0, price), Ledger.HELD)
        if len(lane) < len(running):
            for sequence in running:
                if not sequence.steady_until:
                    self.charged += self._charge(sequence, policy, price)

    def leave(self, sequence: Sequence, policy: Policy, cost: Cost, now_s: float) -> None:
        """It runs until now, and is not in the lane."""
        price = cost.holding(self._since_s, now_s)
        if price:
            self._charge(sequence, policy, price)

    def _charge(self, sequence: Sequence, policy: Policy, price: int) -> int:
        charge = price * tokens_held(sequence)
        holder = _holder(sequence)
        if holder == sequence.payer:
            sequence.charged[Ledger.HELD] += charge
        policy.on_charge(holder, charge, Ledger.HELD)
        return charge


def tokens_held(sequence: Sequence) -> int:
    """Tokens of KV cache that a running sequence has room for: all it came with, as long as more than one of them is to be
    computed; then those it has computed."""
    return sequence.num_tokens if sequence.num_pending_tokens > 1 else sequence.num_computed_tokens


def _holder(sequence: Sequence) -> Payer:
    """While it computes again what an eviction cost it, whoever gained by that."""
    recomputes = sequence.num_computed_tokens < sequence.recompute_until
    return sequence.evicted_by if recomputes and sequence.evicted_by is not None else sequence.payer
