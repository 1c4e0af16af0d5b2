"""How long steps take by their tokens, learned from recent ones: a fixed part and a part per token, by least squares. What
deadlines are reckoned with; no one is charged by it."""

from __future__ import annotations

from math import inf

# How much older steps count, per step.
_DECAY = 0.98
# Token counts must differ this much (variance over mean squared), or the two parts cannot be told apart.
_SPREAD = 0.01
# A step that takes so many times what was expected is a stall (say, a compilation) and counts as no longer than that; one that
# takes so small a part shows that a stall was learned from, which is then forgotten.
_STALL = 8


class Pace:
    """Before it has seen steps of different sizes, a token costs no time; only a bound on steps then takes a longer step for one
    whose time is all its tokens'."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._tokens = self._seconds = self._tokens2 = self._both = 0.0
        self.fixed_s = 0.0
        self.token_s = 0.0
        self._mean = 0.0

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        """One step of so many tokens took so long."""
        if elapsed_s <= 0 or num_tokens <= 0:
            return
        expected_s = self.fixed_s + self.token_s * num_tokens
        if elapsed_s * _STALL < expected_s:
            self._weight = self._tokens = self._seconds = self._tokens2 = self._both = self.token_s = 0.0
        elif self.token_s:  # else it may just be the first long prompt
            elapsed_s = min(elapsed_s, expected_s * _STALL)
        self._weight = self._weight * _DECAY + 1
        self._tokens = self._tokens * _DECAY + num_tokens
        self._seconds = self._seconds * _DECAY + elapsed_s
        self._tokens2 = self._tokens2 * _DECAY + num_tokens * num_tokens
        self._both = self._both * _DECAY + num_tokens * elapsed_s
        mean, mean_s = self._tokens / self._weight, self._seconds / self._weight
        self._mean = mean
        variance = self._tokens2 / self._weight - mean * mean
        if variance > _SPREAD * mean * mean:
            self.token_s = max(0.0, (self._both / self._weight - mean * mean_s) / variance)
        self.fixed_s = max(0.0, mean_s - self.token_s * mean)

    def prefill_s(self, num_tokens: int, budget: int) -> float:
        """The least it takes to compute so many tokens in steps of at most `budget`."""
        return -(-num_tokens // budget) * self.fixed_s + num_tokens * self.token_s

    def tokens_within(self, seconds: float) -> float:
        """The most tokens of a step that takes no longer; inf while no step is known to have taken longer."""
        if self.token_s:
            return (seconds - self.fixed_s) / self.token_s
        return self._mean * seconds / self.fixed_s if self.fixed_s > seconds else inf
