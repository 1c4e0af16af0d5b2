"""A scheduling policy of your own: the shortest prompt of the highest tier goes first. docs/policies.md says how to install it;
run this file to see whether it keeps the engine's rules."""

from __future__ import annotations

from fairlane.scheduler.policies.conformance import check_policy
from fairlane.scheduler.policies.ordered import OrderedPolicy
from fairlane.scheduler.request import Sequence


class ShortestPromptFirst(OrderedPolicy):
    name = "shortest-prompt"

    def key(self, sequence: Sequence) -> tuple[float, ...]:
        return (-self.priority(sequence), sequence.num_prompt_tokens)

    def may_preempt(self, candidate: Sequence, victim: Sequence) -> bool:
        return self.priority(candidate) > self.priority(victim)


if __name__ == "__main__":
    check_policy(ShortestPromptFirst)
    print("ShortestPromptFirst keeps the engine's rules")
