"""How long a step takes: six terms of what the step does, so that they can be fitted to measured steps.

    fixed + sequence * sequences + linear(tokens) + context * KV read by decodes + attention * scores of chunks

linear is what a model's products take: reading the weights, or the arithmetic where that takes longer. A model has products of
many shapes, and no two change over at the same number of tokens, so near it a step takes longer than either:

    linear(n) = (weights ^ (1 / blend) + (token * n) ^ (1 / blend)) ^ blend        blend 0: the larger of the two; 1: their sum

Defaults: Llama-3.1-8B in bfloat16 on one H100, from published fits (docs/simulator.md). fit.py fits one to measured steps.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from fairlane.scheduler.simulator.errors import SimulationInputError
from fairlane.scheduler.step_work import StepWork


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds.

    fixed_s: any step. sequence_s: each sequence in it. weights_s: reading the weights once, the floor of the linear layers.
    token_s: the linear layers' arithmetic for one token. blend, 0 to 1: how the two add up (see above); not seconds.
    context_s: reading one token's keys and values in a decode.
    attention_s: one (query, key) pair of a chunk. swap_block_s: copying one block to or from host memory, beside the
    step: the step lasts at least as long as its copies.
    """

    fixed_s: float = 1.3e-3
    sequence_s: float = 4e-6
    weights_s: float = 7.0e-3
    token_s: float = 25.4e-6
    context_s: float = 65e-9
    attention_s: float = 1.3e-9
    swap_block_s: float = 60e-6
    blend: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not math.isfinite(value) or value < 0:
                raise SimulationInputError(f"{name}: {value}: a number{' of seconds' * (name != 'blend')}, at least 0, is needed")
        if self.blend > 1:
            raise SimulationInputError(f"blend: {self.blend}: from 0 to 1 is allowed")
        if self.fixed_s + self.weights_s <= 0:
            raise SimulationInputError("fixed_s and weights_s are both 0: a step must take some time")

    def seconds(self, work: StepWork) -> float:
        """A step that does this."""
        computed = (
            self.fixed_s
            + self.sequence_s * work.sequences
            + self.linear_s(work.tokens)
            + self.context_s * work.context
            + self.attention_s * work.scores
        )
        return max(computed, self.swap_block_s * work.copies) if work.copies else computed

    def linear_s(self, tokens: float) -> float:
        """The linear layers of a step of so many tokens."""
        return blended(self.weights_s, self.token_s * tokens, self.blend)

    @classmethod
    def of(cls, values: object) -> StepModel:
        """From what a JSON object with field names has; those it leaves out keep their defaults. Raises SimulationInputError."""
        known = [field.name for field in fields(cls)]
        if not isinstance(values, dict):
            raise SimulationInputError(f"an object with {', '.join(known)} is needed")
        for name, value in values.items():
            if name not in known:
                raise SimulationInputError(f"unknown key {name!r}: one of {', '.join(known)} is allowed")
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise SimulationInputError(f"{name}: {value!r}: a number{' of seconds' * (name != 'blend')} is needed")
        return cls(**values)


def blended(one: float, other: float, blend: float) -> float:
    """Between the larger of two numbers that are not negative (blend 0) and their sum (1)."""
    small, large = sorted((one, other))
    if not blend or not small:
        return large
    both: float = large * (1.0 + (small / large) ** (1.0 / blend)) ** blend
    return both


H100 = StepModel()
# Fitted to this engine's steps on one (benchmarks/results/bench_tenants-h200.json).
H200 = StepModel(
    fixed_s=1.9e-3, sequence_s=0.0, weights_s=2.5e-3, token_s=21.3e-6, context_s=31e-9, attention_s=1.7e-9, swap_block_s=38e-6,
    blend=0.75,
)  # fmt: skip
