"""What a request will have been charged in the end, guessed from what its owner's past requests generated. It serves order alone:
a policy may count it from admission on instead of learning it token by token, which is VTC's predictive variant (Sheng et al.,
OSDI 2024). Nobody is charged by it, and nothing reserved.
"""

from __future__ import annotations

from fairlane.scheduler.cost import Cost, Ledger
from fairlane.scheduler.policies.base import Policy
from fairlane.scheduler.request import Payer, Sequence

# Of the newest request in an owner's mean; the last handful decide.
_SMOOTHING = 0.3
# Owners remembered; whoever ended something longest ago is forgotten first.
_MAX_OWNERS = 10_000


class OutputPredictor:
    """Output tokens of requests that ended after they had started, as a moving mean by owner; of an unknown owner that of all."""

    def __init__(self) -> None:
        self._means: dict[Payer, float] = {}
        self._of_all: float | None = None

    def ended(self, sequence: Sequence) -> None:
        """It has all the tokens it will have, whatever ended it."""
        if not sequence.started:
            return
        tokens, payer = sequence.num_output_tokens, sequence.payer
        self._of_all = _moved(self._of_all, tokens)
        self._means[payer] = _moved(self._means.pop(payer, None), tokens)  # popped, so that it is the newest
        if len(self._means) > _MAX_OWNERS:
            del self._means[next(iter(self._means))]

    def expect(self, sequence: Sequence, policy: Policy, cost: Cost, num_cached_tokens: int) -> None:
        """It is about to be admitted, or to run under this policy: what its own account will have been charged for it, as WORK,
        if the policy asks for that. What others pay to have computed again is not in it. num_cached_tokens: that it finds in the
        prefix cache."""
        if not policy.predicts:
            return
        start = sequence.num_computed_tokens
        if sequence.evicted_by not in (None, sequence.payer):
            start = max(start, sequence.recompute_until)
        expected = cost.cached(num_cached_tokens) + cost.chunk(start, max(0, sequence.num_tokens - start))
        mean = self._means.get(sequence.payer, self._of_all)
        if mean is not None:
            left = min(round(mean), sequence.request.max_tokens) - sequence.num_output_tokens
            # The first token comes with the prompt's last; the others' contexts grow one by one.
            decodes = max(0, left - 1)
            expected += decodes * cost.decode().of(sequence.num_tokens + decodes // 2)
        sequence.expected_charge = sequence.charged[Ledger.WORK] + expected


def _moved(mean: float | None, value: int) -> float:
    return float(value) if mean is None else mean + _SMOOTHING * (value - mean)
