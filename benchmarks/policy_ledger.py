"""What the policy itself charged whom, written down beside it: the bound of FAIR with a gap is about charges, and what is
computed again is charged to whoever evicted, not to whom it serves."""

from __future__ import annotations

from typing import Any

from fairlane.scheduler.cost import Ledger, Rate
from fairlane.scheduler.request import Payer
from fairlane.scheduler.simulator.meter import Account, Meter
from fairlane.scheduler.simulator.simulation import SimResult, Simulation

UNITS = 10  # cost units in one prompt token


class ChargeLedger(Meter):
    """Stands in for a simulation's meter where samples are taken. One worker, and charges of work alone."""

    def __init__(self, meter: Meter, policy: Any) -> None:
        super().__init__(meter.counts)
        self.charged: dict[Payer, int] = {}
        self._decoding: dict[Payer, tuple[int, int]] = {}  # sequences and tokens between them, as the policy was told
        charge, decoding, steady = policy.on_charge, policy.on_decoding, policy.on_steady_step

        def on_charge(payer: Payer, cost: int, ledger: Ledger = Ledger.WORK) -> None:
            if ledger is Ledger.WORK:
                self.charged[payer] = self.charged.get(payer, 0) + cost
            charge(payer, cost, ledger)

        def on_decoding(payer: Payer, change: int, tokens: int) -> None:
            count, before = self._decoding.get(payer, (0, 0))
            self._decoding[payer] = count + change, before + tokens
            decoding(payer, change, tokens)

        def on_steady_step(rate: Rate, ledger: Ledger) -> None:
            if ledger is Ledger.WORK:
                for payer, (count, tokens) in self._decoding.items():
                    due = rate.per_sequence * count + rate.per_token * tokens
                    self.charged[payer] = self.charged.get(payer, 0) + due
            steady(rate, ledger)

        policy.on_charge, policy.on_decoding, policy.on_steady_step = on_charge, on_decoding, on_steady_step

    def service(self) -> dict[Account, int]:
        return {Account(payer.tenant, payer.tier): cost // UNITS for payer, cost in self.charged.items()}


def run_with_ledger(simulation: Simulation) -> SimResult:
    """Its samples are of charges, in prompt tokens."""
    worker = simulation.workers[0]
    worker.turn()  # puts the policy in force
    simulation.meter = ChargeLedger(simulation.meter, worker.scheduler.policy)
    return simulation.run()
