"""What the policy itself charged whom, written down beside it: the bound of FAIR with a gap is about charges, and what is
computed again is charged to whoever evicted, not to whom it serves."""

from __future__ import annotations

from typing import Any

from fairlane.scheduler.request import Payer
from fairlane.scheduler.simulator.meter import Account, Meter
from fairlane.scheduler.simulator.simulation import SimResult, Simulation

UNITS = 10  # cost units in one prompt token


class Ledger(Meter):
    """Stands in for a simulation's meter where samples are taken. One worker."""

    def __init__(self, meter: Meter, policy: Any) -> None:
        super().__init__(meter.counts)
        self.charged: dict[Payer, int] = {}
        self._decoding: dict[Payer, int] = {}
        charge, decoding, steady = policy.on_charge, policy.on_decoding, policy.on_steady_step

        def on_charge(payer: Payer, cost: int) -> None:
            self.charged[payer] = self.charged.get(payer, 0) + cost
            charge(payer, cost)

        def on_decoding(payer: Payer, change: int) -> None:
            self._decoding[payer] = self._decoding.get(payer, 0) + change
            decoding(payer, change)

        def on_steady_step(cost: int) -> None:
            for payer, count in self._decoding.items():
                self.charged[payer] = self.charged.get(payer, 0) + cost * count
            steady(cost)

        policy.on_charge, policy.on_decoding, policy.on_steady_step = on_charge, on_decoding, on_steady_step

    def service(self) -> dict[Account, int]:
        return {Account(payer.tenant, payer.tier): cost // UNITS for payer, cost in self.charged.items()}


def run_with_ledger(simulation: Simulation) -> SimResult:
    """Its samples are of charges, in prompt tokens."""
    worker = simulation.workers[0]
    worker.turn()  # puts the policy in force
    simulation.meter = Ledger(simulation.meter, worker.scheduler.policy)
    return simulation.run()
