"""What the policy is told to charge, written down beside it: every charge by payer and ledger, whichever way it came, one by one
or as a rate of the decode lane."""

from __future__ import annotations

from collections import Counter
from unittest.mock import patch

from fairlane.scheduler.cost import Ledger, Rate
from fairlane.scheduler.driver import EngineDriver
from fairlane.scheduler.request import Payer


class Books:
    """charged: by payer and ledger; step_costs: what steps say they cost, while `watch` is entered."""

    def __init__(self, driver: EngineDriver) -> None:
        if not driver.scheduler.policy_generation:
            driver.turn()  # the policy is applied
        self.charged: Counter[tuple[Payer, Ledger]] = Counter()
        self.step_costs = 0
        self._decoding: Counter[Payer] = Counter()
        self._tokens: Counter[Payer] = Counter()
        self._policy = driver.scheduler.policy
        self._hooks = self._policy.on_charge, self._policy.on_decoding, self._policy.on_steady_step
        for name in ("on_charge", "on_decoding", "on_steady_step"):
            setattr(self._policy, name, getattr(self, name))
        observe = driver.scheduler.cost.observe

        def observed(charged: int, elapsed_s: float) -> None:
            self.step_costs += charged
            observe(charged, elapsed_s)

        self.watch = patch.object(type(driver.scheduler.cost), "observe", lambda cost, *step: observed(*step))

    def on_charge(self, payer: Payer, cost: int, ledger: Ledger = Ledger.WORK) -> None:
        self.charged[payer, ledger] += cost
        self._hooks[0](payer, cost, ledger)

    def on_decoding(self, payer: Payer, change: int, tokens: int) -> None:
        self._decoding[payer] += change
        self._tokens[payer] += tokens
        self._hooks[1](payer, change, tokens)

    def on_steady_step(self, rate: Rate, ledger: Ledger) -> None:
        for payer, count in self._decoding.items():
            self.charged[payer, ledger] += count * rate.per_sequence + self._tokens[payer] * rate.per_token
        self._hooks[2](rate, ledger)

    def sum(self, ledger: Ledger) -> int:
        return sum(cost for (_, of), cost in self.charged.items() if of is ledger)
