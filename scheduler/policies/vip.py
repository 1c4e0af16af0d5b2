"""Priority bands: a higher tier goes first, evicts lower ones when blocks are short, and is protected inside the step.

Two things keep lower tiers alive (bands.py). Patience: a waiting request ranks one band higher after each patience waited,
but never gains the right to evict. Minimum share: while a tier or node with waiting work is owed part of its `min`, its head goes
first. What either let go before a higher tier's holds a lease: no eviction for priority until it has come some tokens further.

What protects a tier inside the step is its `shaping`, and its latency targets say how far that must go: while it streams, lower
tiers' prompts get what fits into a step of its tpot_target; and no step is longer than a third of its ttft_target, whoever is
there, because who arrives waits for the step under way, for the one launched behind it, and for its own.
"""

from __future__ import annotations

from math import inf

from fairlane.scheduler.policies.bands import BandPolicy
from fairlane.scheduler.policies.base import BatchView, StepPlan
from fairlane.scheduler.policies.caps import tier_gate
from fairlane.scheduler.policies.deadlines import step_towards
from fairlane.scheduler.tenancy import PolicySnapshot, Shaping, ShapingRule, Tier

# What the names stand for. A step of few tokens takes as long as reading the weights: prompts spread over steps fill that
# time, and paused decodes leave it empty. So the gentle one caps a little and pauses half as often (docs/simulator.md).
RULES = {
    Shaping.GENTLE: ShapingRule(2 / 3, rests=True),
    Shaping.BALANCED: ShapingRule(0.5),
    Shaping.STRICT: ShapingRule(0.25),
}


class VIPPolicy(BandPolicy):
    """Tiers of equal priority form one band; inside it, by arrival or by fair share (`within_tier`)."""

    name = "vip"

    def __init__(self, snapshot: PolicySnapshot) -> None:
        priorities = sorted({tier.priority for tier in snapshot.tiers})
        super().__init__(snapshot, {tier.name: priorities.index(tier.priority) for tier in snapshot.tiers}, snapshot.within_tier)
        shapings = {tier: tier.shaping for tier in snapshot.tiers if tier.shaping is not Shaping.OFF}
        self._rules = {tier: RULES[s] if isinstance(s, Shaping) else s for tier, s in shapings.items()}
        longest_s = (min(rule.max_step_s or inf, step_towards(tier.ttft_target_s)) for tier, rule in self._rules.items())
        self._deadlines.bound_steps(min(longest_s, default=inf))
        self._deadlines.learns |= any(tier.tpot_target_s is not None for tier in self._rules)

    def plan(self, view: BatchView) -> StepPlan:
        plan = super().plan(view)
        protected = max(filter(lambda tier: self._is_present(tier, view), self._rules), key=lambda t: t.priority, default=None)
        if protected is None:
            return plan
        rule = self._rules[protected]
        plan.protected_priority = protected.priority
        # By the engine's count of steps, so that a shadow that sees only some of them rests in the same ones.
        plan.pause_lower = rule.pause_decodes and not (rule.rests and view.num_steps % 2)
        caps = [rule.prefill_share * plan.token_budget] if rule.prefill_share < 1 else []
        if protected.tpot_target_s is not None and view.running.get(protected.name, 0) > view.prefilling.get(protected.name, 0):
            caps.append(self._deadlines.prompt_tokens(view, protected.tpot_target_s))
        if caps:
            # At least one: the protected one may wait for what a lower one holds.
            plan.lower_prefill_cap = max(1, int(min(*caps, plan.token_budget)))
        return plan

    def _is_present(self, tier: Tier, view: BatchView) -> bool:
        if view.running.get(tier.name):
            return True
        return not self._caps.is_shut(tier_gate(tier.name)) and any(tree.num_queued((tier.name,)) for tree in self._ranked)
