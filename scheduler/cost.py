"""What a piece of work costs, in integer units, so that sums of charges are exact. `TokensCost` is VTC's linear price
(Sheng et al., OSDI 2024) with cached prompt tokens at a tenth: 1 uncached prompt token = 10 units."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokensCost:
    """Prices per token in tenths of one uncached prompt token."""

    prefill: int = 10
    cached: int = 1
    decode: int = 20

    def chunk(self, num_tokens: int, num_cached: int) -> int:
        """A prompt (or recompute) chunk of num_tokens, with num_cached taken from the prefix cache just before it."""
        return self.prefill * num_tokens + self.cached * num_cached

    def decodes(self, num_sequences: int) -> int:
        """One decode token for each of num_sequences."""
        return self.decode * num_sequences
