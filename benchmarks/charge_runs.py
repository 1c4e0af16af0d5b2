"""F9 behind bench_policies.py: charges against work. That every unit is useful or waste, step by step and for any history, is a
property of tests/properties, which prices steps and what is held from outside; here are whole runs with evictions, under every
cost that charges work."""

from __future__ import annotations

from policy_ledger import ChargeLedger
from policy_runs import GAP_MS, TIGHT, Numbers, made

from fairlane.scheduler.cost import PS_PER_S
from fairlane.scheduler.simulator.simulation import Simulation
from fairlane.scheduler.tenancy import CostName, PolicySnapshot, Tier, TiersPolicy

CHARGES_WORK = (CostName.TOKENS, CostName.ROOFLINE, CostName.DRF)  # kv_time charges what is held alone


def f9(seed: int) -> Numbers:
    """By cost: what all payers were charged for work, less what all steps cost (an integer); and worker time charged over the
    time that the worker was busy, less 1."""
    found: Numbers = {}
    for cost in CHARGES_WORK:
        workload = made("W9", seed, 20.0, TIGHT)
        tiers = tuple(Tier(name, 100 - place) for place, name in enumerate(workload.tiers))
        snapshot = PolicySnapshot(1, "", TiersPolicy.FAIR, tiers, preempt_gap_ms=GAP_MS, cost=cost)
        simulation = Simulation(workload, snapshot, TIGHT)
        worker = simulation.workers[0]
        worker.turn()  # puts the policy in force
        ledger = ChargeLedger(simulation.meter, worker.scheduler.policy)
        steps, observe = 0, worker.scheduler.update

        def update(result, scheduler=worker.scheduler, observe=observe):  # type: ignore[no-untyped-def]
            nonlocal steps
            steps += scheduler.launched[0].work_cost
            observe(result)

        worker.scheduler.update = update  # type: ignore[method-assign]
        busy_s = simulation.run().busy_s
        steps += sum(step.work_cost for step in worker.scheduler.launched)
        charged = sum(ledger.charged.values())
        found[f"off {cost.value}"] = abs(charged - steps)
        if cost is CostName.ROOFLINE:
            found["busy"] = abs(charged / (busy_s * PS_PER_S) - 1)
    return found
