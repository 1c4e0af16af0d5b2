"""What a step's plan (policies/base.py) means for single sequences: who is protected, whose prompts get less, who may have to
pause, and when that has come to be."""

from __future__ import annotations

from collections.abc import Iterable

from fairlane.scheduler.policies.base import Policy, StepPlan
from fairlane.scheduler.request import Sequence


def may_decode(sequence: Sequence) -> bool:
    """Whether it has just one token to compute next."""
    known = len(sequence.token_ids)
    if known + sequence.num_in_flight - sequence.num_computed_tokens != 1:
        return False
    return not sequence.num_in_flight or sequence.is_due


class DecodesAhead:
    """Running sequences still to come in a step that decode one token each, so that a token each can be kept for them."""

    def __init__(self, order: Iterable[Sequence], shaping: StepShaping) -> None:
        decodes = [sequence for sequence in order if may_decode(sequence)]
        self._shaping = shaping
        self._pausable = sum(1 for sequence in decodes if shaping.may_pause(sequence))
        self._others = len(decodes) - self._pausable

    def pass_by(self, sequence: Sequence) -> None:
        """One of them comes no more."""
        if self._shaping.may_pause(sequence):
            self._pausable -= 1
        else:
            self._others -= 1

    def num_before(self, sequence: Sequence) -> int:
        """How many a token is kept for when it gets a chunk; pausable ones only while no protected chunk makes them pause."""
        pause = self._shaping.protected_chunk or self._shaping.is_protected(sequence)
        return self._others + (0 if pause else self._pausable)


class StepShaping:
    """protected_chunk: a chunk of a protected sequence was placed. lower_cap: most prefill tokens that the others still get."""

    def __init__(self, plan: StepPlan, policy: Policy) -> None:
        self.protected_chunk = False
        self.lower_cap = plan.lower_prefill_cap
        self._protected = plan.protected_priority
        self._pause_lower = plan.pause_lower
        self._policy = policy
        self._may_pause: dict[Sequence, bool] = {}  # asked several times a step; the answer is the same

    def is_protected(self, sequence: Sequence) -> bool:
        return self._protected is not None and self._policy.priority(sequence) >= self._protected

    def may_pause(self, sequence: Sequence) -> bool:
        """Whether its decodes skip a step with a protected chunk."""
        if not self._pause_lower or self._protected is None:
            return False
        known = self._may_pause.get(sequence)
        if known is None:
            known = self._policy.priority(sequence) < self._protected and not self._policy.is_owed(sequence)
            self._may_pause[sequence] = known
        return known

    def cap(self, sequence: Sequence, num_tokens: int) -> int:
        """Of so many prefill tokens, those that it may take."""
        if self.lower_cap is None or self._protected is None or self.is_protected(sequence):
            return num_tokens
        return min(num_tokens, self.lower_cap)

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        """A chunk was placed."""
        if self.is_protected(sequence):
            self.protected_chunk = True
        if self.lower_cap is not None:
            self.lower_cap = max(0, self.lower_cap - num_tokens)
